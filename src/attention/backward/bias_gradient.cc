// SPDX-License-Identifier: Apache-2.0
#include "src/attention/backward/bias_gradient.h"

#include <array>
#include <cstring>

#include "src/attention/scores/bias_tiles.h"
#include "src/attention/scores/block_scores.h"

namespace fa2::attention {
namespace {

bool SharesBatch(const TensorView& dbias) {
  return dbias.given() && dbias.sizes[0] == 1;
}
bool SharesHeads(const TensorView& dbias) {
  return dbias.given() && dbias.sizes[1] == 1;
}
bool SharesQueries(const TensorView& dbias, const Problem& problem) {
  return dbias.given() && dbias.sizes[2] == 1 && problem.q.sizes[2] != 1;
}
bool SharesKeys(const TensorView& dbias, const Problem& problem) {
  return dbias.given() && dbias.sizes[3] == 1 && problem.k.sizes[2] != 1;
}

// Of a staged block.
size_t BlockBytes(const BackwardInputs& in) {
  return static_cast<size_t>(in.plan.blocks.queries) *
         static_cast<size_t>(in.plan.blocks.keys) * in.element();
}

}  // namespace

BiasGradientUse UseOfBiasGradient(const TensorView& dbias,
                                  const Problem& problem,
                                  const simd::Engine& engine) {
  BiasGradientUse use;
  if (!dbias.given()) return use;
  // Sums over keys have an array for each batch and head.
  const bool shares_keys = SharesKeys(dbias, problem);
  use.shares_batch =
      !shares_keys && SharesBatch(dbias) && problem.sequences.size() > 1;
  use.shares_heads = !shares_keys && SharesHeads(dbias) && problem.q_heads > 1;
  const bool streams = !shares_keys && engine.streams_scores &&
                       !use.shares_batch && !use.shares_heads &&
                       !SharesQueries(dbias, problem);
  use.has_elements = !shares_keys && !SharesQueries(dbias, problem);
  use.sums_blocks = !streams;
  return use;
}

BiasGradientSums::BiasGradientSums(const BackwardInputs& inputs,
                                   threading::ScratchLayout* layout)
    : in_(inputs) {
  const TensorView& dbias = in_.args.dbias;
  if (!dbias.given()) return;
  if (SharesKeys(dbias, in_.problem)) {
    route_ = Route::kKeySums;
    bytes_ = static_cast<size_t>(kMaxKeySplits * in_.plan.q_rows *
                                 in_.problem.q_heads) *
             in_.element();
  } else if (SharesQueries(dbias, in_.problem)) {
    route_ = Route::kQuerySums;
    bytes_ =
        static_cast<size_t>(dbias.sizes[0] * dbias.sizes[1] * dbias.sizes[3]) *
        in_.element();
  } else if (in_.plan.bias_groups > 0) {
    route_ = Route::kGroupSums;
    bytes_ = in_.plan.head_batches.list.size() * BlockBytes(in_);
  } else {
    route_ = Route::kElements;
  }
  sums_ = layout->Take(bytes_);
}

void BiasGradientSums::Clear() const {
  // The first of a group's terms clears its sum.
  if (bytes_ != 0 && route_ != Route::kGroupSums) memset(sums_, 0, bytes_);
}

std::byte* BiasGradientSums::GroupSum(int64_t group) const {
  return sums_ + static_cast<size_t>(group) * BlockBytes(in_);
}

std::byte* BiasGradientSums::QuerySums(int64_t batch, int64_t head,
                                       int64_t key) const {
  const TensorView& dbias = in_.args.dbias;
  const int64_t plane = (dbias.sizes[0] == 1 ? 0 : batch) * dbias.sizes[1] +
                        (dbias.sizes[1] == 1 ? 0 : head);
  return sums_ +
         static_cast<size_t>(plane * dbias.sizes[3] + key) * in_.element();
}

std::byte* BiasGradientSums::KeySums(const BlockRows& queries,
                                     int64_t key_split) const {
  const int64_t row =
      (key_split * in_.problem.q_heads + queries.head) * in_.plan.q_rows +
      in_.plan.sequences[queries.sequence].q_row + queries.begin();
  return sums_ + static_cast<size_t>(row) * in_.element();
}

// Groups of a head lie as many blocks apart as there are heads.
void BiasGradientSums::StoreGroupSums(threading::Team& team) const {
  const TensorView& dbias = in_.args.dbias;
  const int64_t heads = in_.problem.kv_heads;
  const int64_t groups = in_.plan.bias_groups;
  const int64_t shared_heads = dbias.sizes[1] == 1 ? heads : 1;
  team.For(dbias.sizes[1], [&](int64_t plane, int /*worker*/) {
    const PairRows rows = in_.plan.Rows({{0, plane, 0}, {0, plane, 0}});
    const simd::StagedShape shape = StagedShapeOf(rows, in_.engine);
    std::byte* const sum = GroupSum(plane);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t h = 0; h < shared_heads; ++h) {
        if (g + h == 0) continue;
        in_.row_kernels.add(sum, GroupSum(g * heads + plane + h),
                            shape.elements());
      }
    }
    in_.staging.unstage(sum, shape, in_.args.accumulate_dbias,
                        MatrixOf(dbias, 0, plane, 0, 0));
  });
}

void BiasGradientSums::StoreQuerySums() const {
  const TensorView& dbias = in_.args.dbias;
  const int64_t keys = dbias.sizes[3];
  if (keys == 0) return;
  for (int64_t b = 0; b < dbias.sizes[0]; ++b) {
    for (int64_t h = 0; h < dbias.sizes[1]; ++h) {
      // A row a key: the keys of dbias may lie at any stride.
      in_.row_kernels.store(
          QuerySums(b, h, 0), 1, keys, 1, 1.0, nullptr,
          in_.args.accumulate_dbias,
          {At(dbias, b, h, 0), dbias.dtype, dbias.strides[3]});
    }
  }
}

// A bias that broadcasts its keys: [B or 1, Hq or 1, Nq or 1, 1].
template <typename T>
void BiasGradientSums::StoreKeySums() const {
  const TensorView& dbias = in_.args.dbias;
  const Problem& problem = in_.problem;
  const std::array<int64_t, 3> sizes = {problem.q.sizes[0], problem.q_heads,
                                        problem.q.sizes[2]};
  // Elements of the gradient that one element of dbias sums.
  std::array<int64_t, 3> shared;
  for (size_t i = 0; i < 3; ++i) {
    shared[i] = dbias.sizes[i] == 1 ? sizes[i] : 1;
  }
  const auto term = [&](int64_t b, int64_t h, int64_t i) {
    double sum = 0.0;
    for (int64_t split = 0; split < in_.plan.sequences[b].key_splits; ++split) {
      T value;
      memcpy(&value, KeySums({b, h, {i, i + 1}, 1}, split), sizeof(value));
      sum += static_cast<double>(value);
    }
    return sum;
  };
  for (int64_t b = 0; b < dbias.sizes[0]; ++b) {
    for (int64_t h = 0; h < dbias.sizes[1]; ++h) {
      for (int64_t i = 0; i < dbias.sizes[2]; ++i) {
        double sum = 0.0;
        for (int64_t sb = 0; sb < shared[0]; ++sb) {
          for (int64_t sh = 0; sh < shared[1]; ++sh) {
            for (int64_t si = 0; si < shared[2]; ++si) {
              sum += term(b + sb, h + sh, i + si);
            }
          }
        }
        const T value = static_cast<T>(sum);
        in_.row_kernels.store(&value, 1, 1, 1, 1.0, nullptr,
                              in_.args.accumulate_dbias,
                              {At(dbias, b, h, i), dbias.dtype, 1});
      }
    }
  }
}

void BiasGradientSums::Store(threading::Team& team) const {
  if (route_ == Route::kGroupSums) {
    StoreGroupSums(team);
  } else if (route_ == Route::kQuerySums) {
    StoreQuerySums();
  } else if (route_ == Route::kKeySums) {
    if (in_.engine.accumulator == DType::kF64) {
      StoreKeySums<double>();
    } else {
      StoreKeySums<float>();
    }
  }
}

BiasGradient::BiasGradient(const BackwardInputs& inputs,
                           const BiasGradientSums& sums,
                           threading::ScratchLayout* layout)
    : in_(inputs), sums_(sums) {
  using Route = BiasGradientSums::Route;
  if (sums.route() == Route::kNone) return;
  if (sums.route() == Route::kElements || sums.route() == Route::kQuerySums) {
    collected_ = layout->Take(BlockBytes(inputs));
  }
  ds_ = layout->Take(BlockBytes(inputs));
}

bool BiasGradient::IsAlone(const KeySplitTask& task) const {
  return task.sequences.size() == 1 &&
         (!SharesHeads(in_.args.dbias) ||
          task.kv_heads.size() * in_.problem.group() == 1);
}

bool BiasGradient::IsLast(const PairRows& pair,
                          const KeySplitTask& task) const {
  return pair.queries.sequence + 1 == task.sequences.end &&
         (!SharesHeads(in_.args.dbias) ||
          pair.queries.head + 1 == task.kv_heads.end * in_.problem.group());
}

simd::ScoreMatrix BiasGradient::Elements(const PairRows& pair) const {
  return MatrixOf(in_.args.dbias,
                  in_.problem.sequences[pair.queries.sequence].batch,
                  pair.queries.head, pair.queries.begin(), pair.keys.begin());
}

void BiasGradient::Begin(const PairRows& pair, const KeySplitTask& task,
                         simd::BackwardBlock* block) {
  using Route = BiasGradientSums::Route;
  switch (sums_.route()) {
    case Route::kNone:
      return;
    case Route::kKeySums:
      block->ds = ds_;
      return;
    case Route::kGroupSums:
      block->ds = empty_ ? sums_.GroupSum(task.bias_group) : ds_;
      return;
    case Route::kElements:
    case Route::kQuerySums:
      streamed_ = sums_.route() == Route::kElements &&
                  in_.engine.streams_scores && IsAlone(task);
      if (streamed_) {
        block->ds_stream = {&in_.staging, Elements(pair), pair.queries.size(),
                            pair.keys.size(), in_.args.accumulate_dbias};
      } else {
        block->ds = empty_ ? collected_ : ds_;
      }
  }
}

void BiasGradient::End(const PairRows& pair, const KeySplitTask& task,
                       int64_t key_split, bool visible,
                       DqSemaphore* semaphore) {
  using Route = BiasGradientSums::Route;
  const simd::StagedShape shape = StagedShapeOf(pair, in_.engine);
  if (visible && sums_.route() == Route::kKeySums) {
    semaphore->Wait();
    in_.staging.sum_keys(ds_, shape, sums_.KeySums(pair.queries, key_split));
  }
  if (visible) {
    semaphore->Release();
  } else {
    semaphore->Skip();
  }
  if (sums_.route() == Route::kNone || sums_.route() == Route::kKeySums ||
      (visible && streamed_)) {
    return;
  }
  const bool groups = sums_.route() == Route::kGroupSums;
  std::byte* const collected =
      groups ? sums_.GroupSum(task.bias_group) : collected_;
  if (visible) {
    if (!empty_) in_.row_kernels.add(collected, ds_, shape.elements());
    empty_ = false;
  }
  if (!groups) {
    if (IsLast(pair, task)) StoreCollected(pair, shape);
  } else if (task.ends_bias_group) {
    if (empty_) memset(collected, 0, BlockBytes(in_));
    empty_ = true;
  }
}

void BiasGradient::StoreCollected(const PairRows& pair,
                                  const simd::StagedShape& shape) {
  const bool empty = empty_;
  empty_ = true;
  if (sums_.route() == BiasGradientSums::Route::kQuerySums) {
    if (empty) return;
    in_.staging.sum_queries(
        collected_, shape,
        sums_.QuerySums(in_.problem.sequences[pair.queries.sequence].batch,
                        pair.queries.head, pair.keys.begin()));
    return;
  }
  if (empty) {
    if (in_.args.accumulate_dbias) return;
    memset(collected_, 0,
           static_cast<size_t>(shape.elements()) * in_.element());
  }
  in_.staging.unstage(collected_, shape, in_.args.accumulate_dbias,
                      Elements(pair));
}

}  // namespace fa2::attention
