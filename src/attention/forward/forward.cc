// FlashAttention-2 forward (Dao 2023, algorithm 1). For each wave of heads and
// sequences:
//
//   pre-pass  pack K and V once a kv head
//   items     for each block of queries of each head, in parallel:
//               for each key block that it sees
//                 S^T = K Q^T, running maximum m and sum l, P = exp(S - m),
//                 O^T = O^T exp(m_old - m) + V^T P^T
//               O / l, lse = m + log l, stored
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/attention/call/pass_call.h"
#include "src/attention/call/problem.h"
#include "src/attention/schedule/forward_plan.h"
#include "src/attention/schedule/wave_run.h"
#include "src/attention/scores/alibi_reach.h"
#include "src/attention/scores/bias_tiles.h"
#include "src/attention/scores/block_scores.h"
#include "src/attention/scores/non_finite.h"
#include "src/attention/tensors/row_buffers.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/rows.h"
#include "src/simd/rowwise/staging.h"

namespace fa2 {
namespace attention {
namespace {

class ForwardRun {
 public:
  ForwardRun(const AttentionForwardArgs& args, const Problem& problem,
             const ForwardPlan& plan, const simd::Engine& engine,
             int64_t targets, Carver* carver);

  void Execute(threading::Team& team);

 private:
  // What the workers at a wave share: packed K and V.
  struct WavePlace {
    WavePlace(const ForwardRun& run, Carver* carver);
    const Wave* wave = nullptr;  // under way
    std::byte *k_score, *v_grad;
  };
  struct Worker {
    Worker(const ForwardRun& run, Carver* carver);
    WavePlace* place = nullptr;
    BlockScores scores;
    RowBuffers rows;
    std::byte *q_score, *engine_scratch, *out;
    std::byte *row_max, *row_sum, *row_factor;
    std::byte* row_weight;  // row_sum unless the engine keeps one of its own
  };

  void RunWave(threading::Team& team, const WavePlace& place) const;
  // Rows of a block of K or V, and their number padded to panels.
  simd::Rows ReadKeys(Worker* worker, const ConstTensorView& view,
                      int64_t sequence, int64_t head, int64_t block,
                      int64_t* padded) const;
  void PackK(Worker* worker, int64_t sequence, int64_t head,
             int64_t block) const;
  void PackV(Worker* worker, int64_t sequence, int64_t head,
             int64_t block) const;
  void RunItem(Worker* worker, const ForwardItem& item) const;
  template <typename T>
  void Finish(Worker* worker, const ForwardItem& item, const Interval& queries,
              int64_t padded, bool any) const;

  // First row of a key block among the packed rows of the wave.
  int64_t KeyRow(const Wave& wave, int64_t sequence, int64_t head,
                 int64_t block) const {
    const ForwardSequence& s = plan_.sequences[sequence];
    return (head - wave.head_begin) * plan_.wave_k_rows + s.wave_k_row +
           block * s.keys.size;
  }
  std::byte* PackedK(const WavePlace& place, int64_t sequence, int64_t head,
                     int64_t block) const {
    return place.k_score +
           engine_.packed_bytes(simd::Role::kScoreLeft,
                                KeyRow(*place.wave, sequence, head, block),
                                problem_.head_dim);
  }
  std::byte* PackedV(const WavePlace& place, int64_t sequence, int64_t head,
                     int64_t block) const {
    return place.v_grad +
           engine_.packed_bytes(simd::Role::kGradLeft,
                                KeyRow(*place.wave, sequence, head, block),
                                problem_.value_dim);
  }

  const AttentionForwardArgs& args_;
  const Problem& problem_;
  const ForwardPlan& plan_;
  const simd::Engine& engine_;
  const simd::RowKernels& row_kernels_;
  const simd::StagingKernels& staging_;
  BiasTiles bias_tiles_;
  AlibiReach alibi_reach_;
  uint8_t* v_non_finite_;  // [head][key block of all sequences]
  WavePlace* places_;
  Worker* workers_;
};

ForwardRun::ForwardRun(const AttentionForwardArgs& args, const Problem& problem,
                       const ForwardPlan& plan, const simd::Engine& engine,
                       int64_t targets, Carver* carver)
    : args_(args),
      problem_(problem),
      plan_(plan),
      engine_(engine),
      row_kernels_(*simd::RowKernelsFor(engine.accumulator, targets)),
      staging_(*simd::StagingKernelsFor(engine.accumulator, targets)),
      bias_tiles_(problem, /*wants_gradient=*/false, targets, carver),
      alibi_reach_(problem, row_kernels_, carver) {
  v_non_finite_ = carver->Take<uint8_t>(
      static_cast<size_t>(plan.k_blocks * problem.kv_heads));
  places_ =
      carver->Construct<WavePlace>(plan.waves.places(plan.workers), *this);
  workers_ = carver->Construct<Worker>(plan.workers, *this);
  ShareOutPlaces(plan.waves, places_, plan.workers, workers_);
}

ForwardRun::WavePlace::WavePlace(const ForwardRun& run, Carver* carver) {
  const int64_t rows = run.plan_.wave_k_rows * run.plan_.wave_heads;
  k_score = carver->Take(run.engine_.packed_bytes(simd::Role::kScoreLeft, rows,
                                                  run.problem_.head_dim));
  v_grad = carver->Take(run.engine_.packed_bytes(simd::Role::kGradLeft, rows,
                                                 run.problem_.value_dim));
}

ForwardRun::Worker::Worker(const ForwardRun& run, Carver* carver)
    : scores(run.problem_, run.engine_, run.staging_, run.bias_tiles_,
             run.alibi_reach_, run.plan_.blocks, false, carver),
      rows({run.problem_.q, run.problem_.k, run.problem_.v, run.args_.out},
           LeaveCaches({run.args_.out}, run.plan_.workers), run.engine_,
           run.row_kernels_,
           std::max(run.plan_.blocks.keys, run.plan_.blocks.queries), carver) {
  const simd::Engine& engine = run.engine_;
  const int64_t queries = run.plan_.blocks.queries;
  const int64_t d = run.problem_.head_dim;
  const int64_t dv = run.problem_.value_dim;
  q_score =
      carver->Take(engine.packed_bytes(simd::Role::kScoreRight, queries, d));
  engine_scratch =
      carver->Take(engine.forward_scratch_bytes(run.plan_.blocks, d, dv));
  out = carver->Take(engine.query_accumulator_bytes(queries, dv));
  const size_t row = static_cast<size_t>(queries) * SizeOf(engine.accumulator);
  row_max = carver->Take(row);
  row_sum = carver->Take(row);
  row_factor = carver->Take(row);
  row_weight = engine.rounds_probabilities ? carver->Take(row) : row_sum;
}

void ForwardRun::Execute(threading::Team& team) {
  bias_tiles_.Scan(team);
  RunWaves(plan_.waves, team, places_,
           [this](threading::Team& of_wave, const WavePlace& place) {
             RunWave(of_wave, place);
           });
  const int64_t flags = plan_.k_blocks * problem_.kv_heads;
  if (std::any_of(v_non_finite_, v_non_finite_ + flags,
                  [](uint8_t f) { return f != 0; })) {
    SpreadFromKeys(problem_, problem_.v, args_.out, NonFinite::kIsAdded, team);
  }
}

void ForwardRun::RunWave(threading::Team& team, const WavePlace& place) const {
  const Wave& wave = *place.wave;
  // Heads innermost, as in the plan's items: a worker then finds in its caches
  // what it packed for its heads.
  const int64_t heads = wave.heads();
  const Interval blocks = plan_.KeyBlocks(wave);
  const int64_t count = blocks.size() * heads;
  team.For(2 * count, [&](int64_t item, int worker) {
    const BlockIndex& index =
        plan_.key_blocks[blocks.begin + item % count / heads];
    const auto pack = item < count ? &ForwardRun::PackK : &ForwardRun::PackV;
    (this->*pack)(workers_ + worker, index.sequence,
                  wave.head_begin + item % heads, index.block);
  });
  team.For(wave.end - wave.begin, [&](int64_t item, int worker) {
    RunItem(workers_ + worker, plan_.items[wave.begin + item]);
  });
}

simd::Rows ForwardRun::ReadKeys(Worker* worker, const ConstTensorView& view,
                                int64_t sequence, int64_t head, int64_t block,
                                int64_t* padded) const {
  const ForwardSequence& s = plan_.sequences[sequence];
  const Sequence& rows = problem_.sequences[sequence];
  const Interval keys = s.keys.Block(block);
  *padded = s.keys.Padded(keys);
  return worker->rows.Read(view, rows.batch, head, rows.k_begin + keys.begin,
                           keys.size());
}

void ForwardRun::PackK(Worker* worker, int64_t sequence, int64_t head,
                       int64_t block) const {
  int64_t padded;
  const simd::Rows k =
      ReadKeys(worker, problem_.k, sequence, head, block, &padded);
  engine_.pack(simd::Role::kScoreLeft, k, padded, false,
               PackedK(*worker->place, sequence, head, block));
  alibi_reach_.SeeKeys(sequence, head,
                       plan_.sequences[sequence].keys.Block(block), k);
}

void ForwardRun::PackV(Worker* worker, int64_t sequence, int64_t head,
                       int64_t block) const {
  int64_t padded;
  const simd::Rows v =
      ReadKeys(worker, problem_.v, sequence, head, block, &padded);
  std::byte* packed = PackedV(*worker->place, sequence, head, block);
  const bool finite =
      engine_.pack(simd::Role::kGradLeft, v, padded, false, packed);
  if (!finite) engine_.pack(simd::Role::kGradLeft, v, padded, true, packed);
  const int64_t flag =
      head * plan_.k_blocks + plan_.sequences[sequence].k_block + block;
  v_non_finite_[flag] = finite ? 0 : 1;
}

void ForwardRun::RunItem(Worker* worker, const ForwardItem& item) const {
  const ForwardSequence& s = plan_.sequences[item.sequence];
  const Sequence& rows = problem_.sequences[item.sequence];
  const int64_t kv_head = item.head / problem_.group();
  BlockPlace place;
  place.sequence = item.sequence;
  place.head = item.head;
  place.queries = s.queries.Block(item.block);
  place.padded_queries = s.queries.Padded(place.queries);
  const simd::Rows q = worker->rows.Read(problem_.q, rows.batch, item.head,
                                         rows.q_begin + place.queries.begin,
                                         place.queries.size());
  engine_.pack(simd::Role::kScoreRight, q, place.padded_queries, false,
               worker->q_score);
  alibi_reach_.SeeQueries(item.sequence, item.head, place.queries, q);
  const Interval own =
      alibi_reach_.OwnKeys(item.sequence, item.head, place.queries);
  const simd::Rows own_keys =
      own.empty() ? simd::Rows()
                  : worker->rows.Read(problem_.k, rows.batch, kv_head,
                                      rows.k_begin + own.begin, own.size(), 1);
  alibi_reach_.BoundByNearestKey(item.sequence, item.head, place.queries, q,
                                 own_keys);
  simd::ForwardBlock block;
  bool outgrown = false;
  block.outgrown = &outgrown;
  block.first = true;
  const Interval seen = rows.mask.KeysOf(place.queries);
  for (int64_t kb = seen.begin / s.keys.size;
       kb < s.keys.count() && kb * s.keys.size < seen.end; ++kb) {
    place.keys = s.keys.Block(kb);
    place.padded_keys = s.keys.Padded(place.keys);
    place.next_head = item.head;
    place.next_queries = place.queries;
    place.next_keys =
        kb + 1 < s.keys.count() ? s.keys.Block(kb + 1) : Interval();
    if (!worker->scores.Prepare(place, &block)) continue;
    block.scratch = worker->engine_scratch;
    block.q_score = worker->q_score;
    block.k_score = PackedK(*worker->place, item.sequence, kv_head, kb);
    block.v_grad = PackedV(*worker->place, item.sequence, kv_head, kb);
    block.row_max = worker->row_max;
    block.row_sum = worker->row_sum;
    if (engine_.rounds_probabilities) block.row_weight = worker->row_weight;
    block.out = worker->out;
    if (block.first) {
      // An empty row: maximum -inf, sum 0.
      const auto clear = [&](auto zero) {
        using T = decltype(zero);
        std::fill_n(reinterpret_cast<T*>(worker->row_max), place.padded_queries,
                    -std::numeric_limits<T>::infinity());
        for (std::byte* sum : {worker->row_sum, worker->row_weight}) {
          std::fill_n(reinterpret_cast<T*>(sum), place.padded_queries, zero);
        }
      };
      if (engine_.accumulator == DType::kF64) {
        clear(0.0);
      } else {
        clear(0.0f);
      }
    }
    engine_.forward(block);
    block.first = false;
  }
  if (engine_.accumulator == DType::kF64) {
    Finish<double>(worker, item, place.queries, place.padded_queries,
                   !block.first);
  } else {
    Finish<float>(worker, item, place.queries, place.padded_queries,
                  !block.first);
  }
}

template <typename T>
void ForwardRun::Finish(Worker* worker, const ForwardItem& item,
                        const Interval& queries, int64_t padded,
                        bool any) const {
  constexpr T kHidden = -std::numeric_limits<T>::infinity();
  const Sequence& rows = problem_.sequences[item.sequence];
  const T* row_max = reinterpret_cast<const T*>(worker->row_max);
  const T* row_sum = reinterpret_cast<const T*>(worker->row_sum);
  const T* row_weight = reinterpret_cast<const T*>(worker->row_weight);
  T* factor = reinterpret_cast<T*>(worker->row_factor);
  const ConstTensorView& sinks = problem_.options.sinks;
  float sink = 0.0f;
  if (sinks.given()) memcpy(&sink, At(sinks, 0, item.head, 0), sizeof(sink));
  const bool store_lse = args_.lse.given();
  const RowStart start =
      store_lse ? StatisticsStart(problem_, args_.lse, item.sequence)
                : RowStart{0, 0};
  for (int64_t i = 0; i < queries.size(); ++i) {
    T max = any ? row_max[i] : kHidden;
    T sum = any ? row_sum[i] : T(0);
    T weight = any ? row_weight[i] : T(0);
    factor[i] = T(1);
    if (sinks.given()) {
      // exp(sink) joins the sums under the greater of both maxima.
      const T with_sink = std::max(max, static_cast<T>(sink));
      const T shrink = max == kHidden ? T(0) : std::exp(max - with_sink);
      const T of_sink = std::exp(static_cast<T>(sink) - with_sink);
      sum = sum * shrink + of_sink;
      weight = weight * shrink + of_sink;
      factor[i] = shrink;
      max = with_sink;
    }
    const T lse = sum == T(0) ? kHidden : max + std::log(sum);
    factor[i] = sum == T(0) ? T(0) : factor[i] / weight;
    if (store_lse) {
      memcpy(
          At(args_.lse, start.batch, item.head, start.row + queries.begin + i),
          &lse, sizeof(lse));
    }
  }
  worker->rows.Store({{any ? worker->out : nullptr}, any ? 1 : 0},
                     RowBuffers::Kind::kQueries, padded, queries.size(),
                     engine_.dropout_bits ? problem_.dropout_scale : 1.0,
                     factor, false, args_.out, rows.batch, item.head,
                     rows.q_begin + queries.begin);
}

struct ForwardPass {
  using Args = AttentionForwardArgs;
  using Plan = ForwardPlan;
  using Run = ForwardRun;
  static Status Check(const Args& args, Problem* problem) {
    return CheckForward(args, problem);
  }
  static void MakePlan(const Args& /*args*/, const Problem& problem,
                       const simd::Engine& engine, int threads, Plan* plan) {
    PlanForward(problem, engine, threads, plan);
  }
};

}  // namespace
}  // namespace attention

Status AttentionForward(const AttentionForwardArgs& args, Context* context) {
  return attention::PassCall<attention::ForwardPass>::Run(args, context);
}

Status AttentionForwardWorkspace(const AttentionForwardArgs& args,
                                 size_t* bytes, Context* context) {
  return attention::PassCall<attention::ForwardPass>::Workspace(args, bytes,
                                                                context);
}

}  // namespace fa2
