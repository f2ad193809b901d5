// SPDX-License-Identifier: Apache-2.0
#include "tests/limits/part.h"

#include <algorithm>

#include "tests/support/attention_check.h"

namespace fa2::test {
namespace {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Rows of heads [head, head + heads) of one batch element.
Tensor Slice(const Tensor& t, int64_t b, int64_t head, int64_t heads,
             Range rows) {
  if (!t.given()) return Tensor();
  Tensor part = t;
  TensorView& v = part.view;
  const int64_t offset =
      b * v.strides[0] + head * v.strides[1] + rows.begin * v.strides[2];
  v.data = static_cast<uint8_t*>(v.data) +
           offset * static_cast<int64_t>(SizeOf(v.dtype));
  v.sizes = {1, heads, rows.size(), v.sizes[3]};
  return part;
}

// The call of these queries and keys alone; its mask is that of `causal` and
// the whole's window.
struct Part {
  AttentionCase c;
  AttentionInputs inputs;
  AttentionOutputs actual;
};

Part PartOf(const WholeCall& whole, int64_t b, int64_t g, Range queries,
            Range keys, Causal causal, bool window) {
  const AttentionCase& all = whole.c;
  const int64_t group = all.heads / all.kv_heads;
  Part p;
  p.c = all;
  p.c.batch = p.c.kv_heads = 1;
  p.c.heads = group;
  p.c.nq = queries.size();
  p.c.nk = keys.size();
  p.c.causal = causal;
  if (!window) p.c.window_left = -1;

  const auto of_q = [&](const Tensor& t) {
    return Slice(t, b, g * group, group, queries);
  };
  const auto of_k = [&](const Tensor& t) { return Slice(t, b, g, 1, keys); };
  p.inputs.q = of_q(whole.inputs.q);
  p.inputs.dout = of_q(whole.inputs.dout);
  p.inputs.out = of_q(whole.inputs.out);
  p.inputs.lse = of_q(whole.inputs.lse);
  p.inputs.k = of_k(whole.inputs.k);
  p.inputs.v = of_k(whole.inputs.v);
  AttentionOptions& o = p.inputs.options;
  o = whole.inputs.options;
  o.causal = causal;
  o.window_left = p.c.window_left;
  // Dropout's mask is the whole's: its extents, from this part's first element.
  o.max_seqlen_q = all.nq;
  o.max_seqlen_k = all.nk;
  o.philox_offset +=
      static_cast<uint64_t>(b * all.heads + g * group) *
          static_cast<uint64_t>(all.nq) * static_cast<uint64_t>(all.nk) +
      static_cast<uint64_t>(queries.begin) * static_cast<uint64_t>(all.nk) +
      static_cast<uint64_t>(keys.begin);
  p.actual.out = of_q(whole.outputs.out);
  p.actual.lse = of_q(whole.outputs.lse);
  p.actual.dq = of_q(whole.outputs.dq);
  p.actual.dk = of_k(whole.outputs.dk);
  p.actual.dv = of_k(whole.outputs.dv);
  return p;
}

}  // namespace

std::vector<std::string> CheckQueries(const WholeCall& whole, int64_t b,
                                      int64_t g, int64_t first, int64_t rows) {
  const AttentionCase& c = whole.c;
  const int64_t shift = c.nk - c.nq;
  const bool causal = c.causal != Causal::kNone;
  const bool window = c.window_left >= 0;
  // Aligned at the bottom right, the whole's last row is the last one here.
  const Range keys = {
      window ? std::max<int64_t>(0, first + shift - c.window_left) : 0,
      causal ? first + rows + shift : c.nk};
  Part p = PartOf(whole, b, g, {first, first + rows}, keys, c.causal, window);
  const ExpectedOutputs expected = ComputeExpected(p.c, p.inputs);
  std::vector<std::string> wrong = CompareForward(p.c, p.actual, expected);
  p.actual.dk = p.actual.dv = Tensor();
  for (auto& w : CompareBackward(p.c, p.actual, expected, AttentionOutputs())) {
    wrong.push_back(w);
  }
  return wrong;
}

std::vector<std::string> CheckKeys(const WholeCall& whole, int64_t b, int64_t g,
                                   int64_t first, int64_t rows) {
  const AttentionCase& c = whole.c;
  const int64_t shift = c.nk - c.nq;
  Range queries = {0, c.nq};
  Causal causal = Causal::kNone;
  bool window = false;
  if (c.causal != Causal::kNone && first >= shift) {
    // The first key and the query that sees it last are first here.
    queries.begin = first - shift;
    causal = Causal::kTopLeft;
    window = c.window_left >= 0;
    if (window) {
      queries.end = std::min(c.nq, first + rows - shift + c.window_left);
    }
  }
  Part p = PartOf(whole, b, g, queries, {first, first + rows}, causal, window);
  const ExpectedOutputs expected = ComputeExpected(p.c, p.inputs);
  p.actual.dq = Tensor();
  return CompareBackward(p.c, p.actual, expected, AttentionOutputs());
}

}  // namespace fa2::test
