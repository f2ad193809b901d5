// The state of one backward call: what it works on, and where everything lies
// in the workspace. The algorithm is in backward.cc.
#ifndef FA2_SRC_ATTENTION_BACKWARD_BACKWARD_RUN_H_
#define FA2_SRC_ATTENTION_BACKWARD_BACKWARD_RUN_H_

#include <cstdint>

#include "fa2/attention.h"
#include "src/attention/call/problem.h"
#include "src/attention/schedule/backward_plan.h"
#include "src/attention/scores/alibi_reach.h"
#include "src/attention/scores/bias_gradient.h"
#include "src/attention/scores/bias_tiles.h"
#include "src/attention/scores/block_scores.h"
#include "src/attention/tensors/row_buffers.h"
#include "src/simd/engine.h"
#include "src/simd/rowwise/rows.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/wavefront.h"

namespace fa2::attention {

class BackwardRun {
 public:
  // Lays the workspace out by `carver`, which may only be adding up bytes.
  BackwardRun(const AttentionBackwardArgs& args, const Problem& problem,
              const BackwardPlan& plan, const simd::Engine& engine,
              int64_t targets, Carver* carver);

  void Execute(threading::Team& team);

 private:
  // Packed operands and statistics of one block.
  struct QueryOperand {
    std::byte *q_score, *q_grad, *dout_score, *dout_grad;
    std::byte *lse, *delta;
  };
  // Packed keys and values of a block, and the partials of their gradients.
  struct KeyOperand {
    std::byte *k_score, *k_grad, *v_score;
    std::byte *dk, *dv;  // of one slot of the head
  };
  // What the workers at a wave share. Operands, statistics and accumulators are
  // [head of the wave][rows of its sequences].
  struct WavePlace {
    WavePlace(const BackwardRun& run, Carver* carver);
    const Wave* wave = nullptr;  // under way
    std::byte *q_score, *q_grad, *dout_score, *dout_grad;
    std::byte *lse, *delta;
    std::byte* dq;
    KeyOperand keys;  // of all blocks, if shared; [head][slot] of dk and dv
    threading::Wavefront::Chain* chains;
    threading::Wavefront::Counter* counters;
  };
  // Buffers that one worker alone uses.
  struct Worker {
    Worker(const BackwardRun& run, Carver* carver);
    WavePlace* place = nullptr;
    BlockScores scores;
    RowBuffers rows;
    BiasGradient bias;
    std::byte* engine_scratch;
    KeyOperand keys;         // of one block, unless the wave's are shared;
                             // [slot] of dk and dv
    std::byte* key_sums_ds;  // dS of a block, for sums over its keys
    std::byte* k_finite;     // K of one key block without NaN and inf
  };

  // A block of keys and one of queries of one query head.
  struct Cell {
    int64_t head, slot, sequence, query_block, key_block;
  };

  // An item's turn at a block of queries: while it adds to what items of other
  // keys add to as well, that is dQ and sums over keys. The rest of the block's
  // work, some four fifths, waits for nobody.
  struct CellTurn {
    threading::Wavefront::Turn* turn;  // nullptr: nobody else adds
    int64_t cell;
    uint8_t* dq_touched = nullptr;
    bool ends_with_dq = true;
    bool finished = false;

    void Await() {
      if (turn != nullptr) turn->Await(cell);
    }
    void Finish() {
      if (finished || turn == nullptr) return;
      Await();
      turn->Finish(cell);
      finished = true;
    }
    // As simd::BackwardBlock::DqSemaphore has them.
    static bool WaitDq(void* state) {
      CellTurn& self = *static_cast<CellTurn*>(state);
      self.Await();
      const bool add = *self.dq_touched != 0;
      *self.dq_touched = 1;
      return add;
    }
    static void ReleaseDq(void* state) {
      CellTurn& self = *static_cast<CellTurn*>(state);
      if (self.ends_with_dq) self.Finish();
    }
  };

  // Index of a query head in a wave.
  int64_t WaveQueryHead(const Wave& wave, int64_t head) const {
    return head - wave.head_begin * problem_.group();
  }
  QueryOperand Queries(const WavePlace& place, int64_t sequence, int64_t head,
                       int64_t block) const;
  KeyOperand Keys(const Worker& worker, int64_t sequence, int64_t head,
                  int64_t slot, int64_t block) const;
  // Keys of `rows` rows of some heads.
  KeyOperand TakeKeys(int64_t rows, int64_t heads, Carver* carver) const;
  // Terms of dsinks: by panels, whatever the sizes of blocks, so that a sum has
  // one order.
  int64_t SinkTerms() const {
    return PanelsBefore(plan_.q_rows,
                        static_cast<int64_t>(plan_.sequences.size()),
                        simd::kTileQueries);
  }
  int64_t SinkTerm(int64_t sequence, int64_t head, int64_t query) const {
    return head * SinkTerms() +
           PanelsBefore(plan_.sequences[sequence].q_row, sequence,
                        simd::kTileQueries) +
           query / simd::kTileQueries;
  }
  // Index of a block among the flags of all blocks of all heads.
  int64_t QueryFlag(int64_t sequence, int64_t head, int64_t block) const;
  int64_t KeyFlag(int64_t sequence, int64_t head, int64_t block) const;
  // Whether a slot of dK and dV of a block holds anything yet.
  uint8_t& KeysTouched(int64_t sequence, int64_t head, int64_t slot,
                       int64_t block) const;
  // The dQ partial of a split, and the flag that says whether it holds
  // anything yet.
  std::byte* QueryGradient(const WavePlace& place, int64_t sequence,
                           int64_t head, int64_t split, int64_t block,
                           uint8_t** touched) const;

  void RunWave(threading::Team& team, const WavePlace& place) const;

  // Packing.
  // Packs rows for a score role and, if wanted, for a gradient role, which gets
  // zeros for NaN and infinity. Returns whether there are none.
  bool Pack(simd::Role score, const simd::Rows& rows, int64_t padded,
            std::byte* packed_score, simd::Role grad, bool want_grad,
            std::byte* packed_grad) const;
  void PackQueries(Worker* worker, int64_t sequence, int64_t head,
                   int64_t block) const;
  void PackKeys(Worker* worker, int64_t sequence, int64_t head,
                int64_t block) const;
  void FindStatistics(Worker* worker, int64_t sequence, int64_t head,
                      int64_t block, const QueryOperand& operand) const;
  template <typename T>
  void FindStatisticsAs(Worker* worker, int64_t sequence, int64_t head,
                        int64_t block, const QueryOperand& operand) const;

  // Work items.
  void RunChains(threading::Team& team, const WavePlace& place) const;
  void RunKeys(Worker* worker, const BackwardChain& chain, int64_t key_block,
               threading::Wavefront::Turn* turn) const;
  // The same for one worker alone, by_queries: every sum has the order that
  // items give it.
  void RunByQueries(Worker* worker, const WavePlace& place) const;
  class Cells;
  // `next`: the cell after `cell`, or nullptr.
  void RunBlock(Worker* worker, const BackwardChain& chain, const Cell& cell,
                const Cell* next, CellTurn turn) const;

  // Adds the second slot of dK and dV to the first, and leaves it empty.
  void JoinKeyGradients(Worker* worker, int64_t sequence, int64_t head,
                        int64_t block) const;
  // When nothing more is added to them.
  void StoreQueryGradient(Worker* worker, int64_t sequence, int64_t head,
                          int64_t block) const;
  void StoreKeyGradients(Worker* worker, int64_t sequence, int64_t head,
                         int64_t block) const;
  void StoreSmallGradients() const;
  template <typename T>
  void StoreBiasRowSums() const;
  void SpreadNonFinite(threading::Team& team) const;

  // First row of a sequence among the sums of a split, when dbias broadcasts
  // its keys.
  int64_t BiasRow(int64_t split, int64_t head, int64_t sequence) const {
    return (split * problem_.q_heads + head) * plan_.q_rows +
           plan_.sequences[sequence].q_row;
  }
  TensorView block_dbias() const {
    return BlockBiasGradient(args_.dbias, problem_);
  }
  bool want_dq() const { return args_.dq.given(); }
  bool want_dk() const { return args_.dk.given(); }
  bool want_dv() const { return args_.dv.given(); }
  size_t element() const { return SizeOf(engine_.accumulator); }

  const AttentionBackwardArgs& args_;
  const Problem& problem_;
  const BackwardPlan& plan_;
  const simd::Engine& engine_;
  const simd::RowKernels& row_kernels_;
  const simd::StagingKernels& staging_;
  // In the workspace; what is not of a wave is [head][blocks of all sequences].
  BiasTiles bias_tiles_;
  AlibiReach alibi_reach_;
  uint8_t* dq_touched_;
  uint8_t* dkv_touched_;
  // Flags of blocks that hold a NaN or an infinity.
  uint8_t *q_non_finite_, *dout_non_finite_, *k_non_finite_;
  double* dsink_terms_;       // [query head][panel of kTileQueries]
  double* dalibi_terms_;      // [query head][key block]
  std::byte* bias_row_sums_;  // sums of dS over keys [split][head][row]
  BiasGradientRows bias_rows_;
  WavePlace* places_;
  Worker* workers_;
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_BACKWARD_BACKWARD_RUN_H_
