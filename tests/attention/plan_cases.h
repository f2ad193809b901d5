// SPDX-License-Identifier: Apache-2.0

// Problems and an engine for tests of plans.
#ifndef FA2_TESTS_ATTENTION_PLAN_CASES_H_
#define FA2_TESTS_ATTENTION_PLAN_CASES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fa2/attention.h"
#include "src/attention/call/problem.h"
#include "src/simd/engine.h"

namespace fa2::attention {

inline simd::Engine EngineOf(bool invariant) {
  simd::Engine engine;
  engine.query_panel = engine.query_grain = 32;
  engine.key_panel = engine.key_step = 32;
  engine.bitwise_block_invariant = invariant;
  engine.backward_blocks = [](int64_t head_dim, int64_t) {
    return head_dim <= 64 ? simd::BlockSizes{1024, 512}
                          : simd::BlockSizes{256, 256};
  };
  engine.forward_blocks = [](int64_t, int64_t) {
    return simd::BlockSizes{1024, 1024};
  };
  engine.packed_bytes = [](simd::Role, int64_t rows, int64_t depth) {
    return static_cast<size_t>(2 * rows * depth);
  };
  return engine;
}

struct Shape {
  int64_t heads, nq, nk, head_dim;
  bool causal;
  int64_t group = 1;
};

inline Problem ProblemOf(const Shape& shape) {
  Problem problem;
  problem.kv_heads = shape.heads;
  problem.q_heads = shape.heads * shape.group;
  problem.head_dim = problem.value_dim = shape.head_dim;
  if (shape.causal) problem.options.causal = Causal::kBottomRight;
  Sequence sequence;
  sequence.mask = Mask(problem.options, shape.nq, shape.nk);
  sequence.pairs = sequence.mask.Pairs();
  problem.sequences.push_back(sequence);
  return problem;
}

// Heads of self-attention over sequences of the given lengths.
inline Problem ProblemOf(int64_t heads, const std::vector<int64_t>& lengths,
                         bool causal) {
  Problem problem = ProblemOf({heads, 0, 0, 64, causal});
  problem.sequences.clear();
  for (const int64_t rows : lengths) {
    Sequence sequence;
    sequence.mask = Mask(problem.options, rows, rows);
    sequence.pairs = sequence.mask.Pairs();
    problem.sequences.push_back(sequence);
  }
  return problem;
}

}  // namespace fa2::attention

#endif  // FA2_TESTS_ATTENTION_PLAN_CASES_H_
