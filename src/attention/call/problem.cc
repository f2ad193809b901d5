// SPDX-License-Identifier: Apache-2.0
#include "src/attention/call/problem.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

namespace fa2::attention {

int64_t Problem::most_keys() const {
  int64_t most = 0;
  for (const Sequence& sequence : sequences) {
    most = std::max(most, sequence.mask.MostKeys());
  }
  return blocks.given() ? std::min(most, blocks.most_keys()) : most;
}

int64_t Problem::most_queries() const {
  int64_t most = 0;
  for (const Sequence& sequence : sequences) {
    most = std::max(most, sequence.nq());
  }
  return most * group();
}

double Problem::pairs() const {
  double pairs = 0.0;
  for (const Sequence& sequence : sequences) pairs += sequence.pairs;
  return pairs;
}

bool Problem::AnyListed(const Sequence& sequence, int64_t head,
                        const Interval& queries, const Interval& keys) const {
  return !blocks.given() ||
         blocks.Any(
             sequence.batch, head,
             {queries.begin + sequence.q_begin, queries.end + sequence.q_begin},
             {keys.begin + sequence.k_begin, keys.end + sequence.k_begin});
}

bool Problem::AnyListed(const Sequence& sequence, int64_t kv_head,
                        const Interval& keys) const {
  if (!blocks.given()) return true;
  const int64_t heads = heads_differ() ? group() : 1;
  for (int64_t head = kv_head * group(); head < kv_head * group() + heads;
       ++head) {
    if (blocks.AnyQuerySees(
            sequence.batch, head,
            {keys.begin + sequence.k_begin, keys.end + sequence.k_begin})) {
      return true;
    }
  }
  return false;
}

double Problem::Pairs(const Sequence& sequence, const Interval& heads,
                      const Interval& queries, const Interval& keys) const {
  const Mask& mask = sequence.mask;
  if (!blocks.given()) return mask.Pairs(queries, keys);
  const int64_t q_begin = sequence.q_begin, k_begin = sequence.k_begin;
  const int64_t count = heads_differ() ? heads.size() : 1;
  double pairs = 0.0;
  for (int64_t head = heads.begin; head < heads.begin + count; ++head) {
    blocks.ForParts(
        sequence.batch, head, {queries.begin + q_begin, queries.end + q_begin},
        {keys.begin + k_begin, keys.end + k_begin},
        [&](const BlockLists::Part& part) {
          pairs += mask.Pairs(
              {part.queries.begin - q_begin, part.queries.end - q_begin},
              {part.keys.begin - k_begin, part.keys.end - k_begin});
        });
  }
  return pairs / static_cast<double>(std::max<int64_t>(count, 1));
}

std::string ShapeOf(const Problem& problem) {
  const std::pair<const char*, int64_t> extents[] = {
      {"B", static_cast<int64_t>(problem.sequences.size())},
      {" Hq", problem.q_heads},
      {" Hkv", problem.kv_heads},
      {" Nq", problem.q.sizes[2]},
      {" Nk", problem.k.sizes[2]},
      {" D", problem.head_dim},
      {" Dv", problem.value_dim}};
  std::string shape;
  for (const auto& [name, extent] : extents) {
    shape += name + std::to_string(extent);
  }
  return shape;
}

simd::Rows RowsOf(const ConstTensorView& view, const TensorRows& at) {
  simd::Rows rows;
  rows.data = At(view, at.batch, at.head, at.first);
  rows.dtype = view.dtype;
  // What nothing is reached by may be any number: the stride of a dimension of
  // one element, or of an empty tensor.
  rows.stride =
      view.sizes[2] > 1 && view.sizes[3] > 0 ? view.strides[2] : view.sizes[3];
  rows.rows = at.count;
  rows.depth = view.sizes[3];
  return rows;
}

double AlibiSlope(const Problem& problem, int64_t sequence, int64_t head) {
  const ConstTensorView& slopes = problem.options.alibi_slopes;
  float slope;
  memcpy(&slope, At(slopes, slopes.sizes[0] == 1 ? 0 : sequence, head, 0),
         sizeof(slope));
  return static_cast<double>(slope);
}

RowStart StatisticsStart(const Problem& problem, const ConstTensorView& view,
                         int64_t sequence) {
  const Sequence& s = problem.sequences[static_cast<size_t>(sequence)];
  const bool padded =
      problem.variable_length &&
      view.sizes !=
          std::array<int64_t, 4>{1, problem.q_heads, problem.q.sizes[2], 1};
  if (padded) return {sequence, 0};
  return {s.batch, s.q_begin};
}

}  // namespace fa2::attention
