// SPDX-License-Identifier: Apache-2.0

// One call of attention as a small value: sizes, layouts, options, what is
// wanted; and the tensors and arguments made from it.
#ifndef FA2_TESTS_SUPPORT_ATTENTION_CASE_H_
#define FA2_TESTS_SUPPORT_ATTENTION_CASE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fa2/attention.h"
#include "tests/support/tensor.h"

namespace fa2::test {

enum class Packing { kNone, kQkv, kKv };

struct AttentionCase {
  uint64_t seed = 1;  // of all data
  DType dtype = DType::kF32;
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t nq = 1;  // without cu_seqlens
  int64_t nk = 1;
  int64_t head_dim = 8;
  int64_t value_dim = 8;

  Layout layout = Layout::kBhsd;       // of q, k, v, out, dout
  Layout grad_layout = Layout::kBhsd;  // of dq, dk, dv
  // kQkv (needs nq == nk) and kKv (both need head_dim == value_dim): slices of
  // one [B, N, heads, D] array, gradients too.
  Packing packing = Packing::kNone;
  std::array<bool, 4> dout_broadcast = {};  // stride 0 in these dimensions
  bool keys_broadcast = false;  // K and V are one row of each head, stride 0

  std::optional<double> scale;
  Causal causal = Causal::kNone;
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;
  Precision precision = Precision::kFast;

  std::optional<DType> bias;  // kBool: a mask
  std::array<bool, 4> bias_broadcast = {};
  double bias_masked = 0.0;  // share of -inf or false
  // Rows of queries and of keys of a block; 0: no block mask. Of all blocks
  // these shares are partial and full, the rest hidden.
  std::array<int64_t, 2> block_size = {};
  std::array<bool, 2> block_broadcast = {};  // batch, heads
  double blocks_partial = 0.0;
  double blocks_full = 0.0;
  bool block_bits = false;
  bool alibi = false;
  bool alibi_per_batch = false;
  bool sinks = false;
  double dropout_p = 0.0;
  uint64_t philox_seed = 0;
  uint64_t philox_offset = 0;

  // Lengths of packed sequences; both empty: a dense call.
  std::vector<int64_t> lengths_q;
  std::vector<int64_t> lengths_k;
  DType prefix_dtype = DType::kI32;
  bool padded_lse = false;       // [sequences, H, longest + 3, 1]
  int64_t spare_max_seqlen = 0;  // > 0: max_seqlen_* are given, this much over

  bool dlse = false;
  bool delta = false;               // given instead of out
  std::optional<DType> grad_dtype;  // none: the inputs'
  std::optional<DType> out_dtype;
  bool want_dq = true;
  bool want_dk = true;
  bool want_dv = true;
  bool want_dbias = false;
  bool want_dalibi = false;
  bool want_dsinks = false;
  bool accumulate_dq = false;
  bool accumulate_dk = false;
  bool accumulate_dv = false;
  bool accumulate_dbias = false;

  double q_sigma = 1.0;  // of q's elements, to make large scores

  bool varlen() const { return !lengths_q.empty(); }
  // The type that scores and statistics are kept in.
  DType statistics_dtype() const {
    return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  }
};

// The case in one line, enough to find and repeat it.
std::string Describe(const AttentionCase& c);

// The inputs of a case, made from its seed. `out`, `lse` and `delta` are the
// float64 oracle's, rounded to the types that calls take.
struct AttentionInputs {
  Tensor q, k, v, dout;
  Tensor bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k;
  Tensor dlse;
  Tensor out, lse, delta;
  Tensor kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, bits;
  std::shared_ptr<BlockMask> block_mask;  // of these five
  AttentionOptions options;

  // Distinct buffers of everything that is given.
  std::vector<std::shared_ptr<Buffer>> Buffers() const;
};

struct AttentionOutputs {
  Tensor out, lse;                           // forward
  Tensor dq, dk, dv, dbias, dalibi, dsinks;  // backward, where wanted
};

// Throws std::logic_error with the oracle's sentence if it refuses the case.
// `change` is called before out, lse and delta are computed.
AttentionInputs MakeInputs(
    const AttentionCase& c,
    const std::function<void(AttentionInputs*)>& change = nullptr);

// Where a call of fa2 writes: the case's dtypes and layouts. Accumulated
// gradients hold random numbers, all others NaN.
AttentionOutputs MakeOutputs(const AttentionCase& c,
                             const AttentionInputs& inputs);

AttentionForwardArgs ForwardArgs(const AttentionInputs& inputs,
                                 const AttentionOutputs& outputs);
AttentionBackwardArgs BackwardArgs(const AttentionCase& c,
                                   const AttentionInputs& inputs,
                                   const AttentionOutputs& outputs);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_ATTENTION_CASE_H_
