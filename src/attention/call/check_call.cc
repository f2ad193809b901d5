// SPDX-License-Identifier: Apache-2.0

// What a call must be, tensor by tensor.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "src/attention/call/problem.h"
#include "src/attention/call/sequences.h"
#include "src/checks/views.h"

namespace fa2::attention {
namespace {

using checks::CheckDType;
using checks::CheckOverlap;
using checks::CheckShape;
using checks::CheckStatisticsShape;
using checks::CheckView;
using checks::NamedView;
using checks::NamedViews;
using checks::ShapeText;

std::string Text(double value) {
  std::string text = std::to_string(value);
  if (std::isfinite(value)) {
    while (text.size() > 1 && text.back() == '0') text.pop_back();
    if (text.back() == '.') text.pop_back();
  }
  return text;
}

Status CheckNumbers(const AttentionOptions& o) {
  if (o.causal != Causal::kNone && o.causal != Causal::kTopLeft &&
      o.causal != Causal::kBottomRight) {
    return Status::InvalidArgument(
        "causal is " + std::to_string(static_cast<int>(o.causal)) +
        "; it must be one of fa2::Causal (0 none, 1 top-left, 2 bottom-right)");
  }
  if (o.precision != Precision::kFast && o.precision != Precision::kHigh &&
      o.precision != Precision::kExact) {
    return Status::InvalidArgument(
        "precision is " + std::to_string(static_cast<int>(o.precision)) +
        "; it must be one of fa2::Precision (0 fast, 1 high, 2 exact)");
  }
  if (o.scale.has_value() && !std::isfinite(*o.scale)) {
    return Status::InvalidArgument("scale is " + Text(*o.scale) +
                                   "; it must be finite");
  }
  if (!std::isfinite(o.softcap) || o.softcap < 0.0) {
    return Status::InvalidArgument(
        "softcap is " + Text(o.softcap) +
        "; it must be 0 (none) or finite and positive");
  }
  if (!(o.dropout_p >= 0.0 && o.dropout_p <= 1.0)) {
    return Status::InvalidArgument("dropout_p is " + Text(o.dropout_p) +
                                   "; it must lie in [0, 1]");
  }
  for (const auto& [name, value] :
       {std::pair<const char*, int64_t>{"window_left", o.window_left},
        std::pair<const char*, int64_t>{"window_right", o.window_right}}) {
    if (value < -1) {
      return Status::InvalidArgument(std::string(name) + " is " +
                                     std::to_string(value) +
                                     "; it must be -1 (unbounded) or more");
    }
  }
  return Status::Ok();
}

Status CheckBroadcast(const NamedView& tensor,
                      const std::array<int64_t, 4>& full, const char* meaning) {
  for (int i = 0; i < 4; ++i) {
    if (tensor.view.sizes[i] != full[i] && tensor.view.sizes[i] != 1) {
      return Status::InvalidArgument(std::string(tensor.name) + " has shape " +
                                     ShapeText(tensor.view.sizes) +
                                     "; it must broadcast to " +
                                     ShapeText(full) + ", " + meaning);
    }
  }
  return Status::Ok();
}

Status CheckScoreInputs(const Problem& p) {
  const AttentionOptions& o = p.options;
  const int64_t batches = static_cast<int64_t>(p.sequences.size());
  if (o.bias.given()) {
    const NamedView bias{"bias", o.bias};
    FA2_RETURN_IF_ERROR(CheckView(bias));
    FA2_RETURN_IF_ERROR(CheckDType(
        bias,
        {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kBool},
        "additive or a boolean mask"));
    FA2_RETURN_IF_ERROR(CheckBroadcast(
        bias, {p.q.sizes[0], p.q_heads, p.q.sizes[2], p.k.sizes[2]},
        "[B, Hq, Nq, Nk]"));
  }
  if (o.alibi_slopes.given()) {
    const NamedView slopes{"alibi_slopes", o.alibi_slopes};
    FA2_RETURN_IF_ERROR(CheckView(slopes));
    FA2_RETURN_IF_ERROR(CheckDType(slopes, {DType::kF32}, ""));
    const int64_t rows = slopes.view.sizes[0] == 1 ? 1 : batches;
    FA2_RETURN_IF_ERROR(
        CheckShape(slopes, {rows, p.q_heads, 1, 1}, "[B or 1, Hq, 1, 1] of q"));
  }
  if (o.sinks.given()) {
    const NamedView sinks{"sinks", o.sinks};
    FA2_RETURN_IF_ERROR(CheckView(sinks));
    FA2_RETURN_IF_ERROR(CheckDType(sinks, {DType::kF32}, ""));
    FA2_RETURN_IF_ERROR(
        CheckShape(sinks, {1, p.q_heads, 1, 1}, "[1, Hq, 1, 1] of q"));
  }
  return Status::Ok();
}

Status CheckInputs(const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, const AttentionOptions& options,
                   Problem* p) {
  FA2_RETURN_IF_ERROR(CheckView({"q", q}));
  FA2_RETURN_IF_ERROR(CheckView({"k", k}));
  FA2_RETURN_IF_ERROR(CheckView({"v", v}));
  FA2_RETURN_IF_ERROR(CheckDType(
      {"q", q}, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}, ""));
  FA2_RETURN_IF_ERROR(CheckDType({"k", k}, {q.dtype}, "as q has"));
  FA2_RETURN_IF_ERROR(CheckDType({"v", v}, {q.dtype}, "as q has"));
  FA2_RETURN_IF_ERROR(CheckNumbers(options));
  FA2_RETURN_IF_ERROR(
      CheckShape({"k", k}, {q.sizes[0], k.sizes[1], k.sizes[2], q.sizes[3]},
                 "[B, Hkv, Nk, D] with B and D of q"));
  FA2_RETURN_IF_ERROR(
      CheckShape({"v", v}, {k.sizes[0], k.sizes[1], k.sizes[2], v.sizes[3]},
                 "[B, Hkv, Nk, Dv] with B, Hkv and Nk of k"));
  const int64_t hq = q.sizes[1];
  const int64_t hkv = k.sizes[1];
  if (hkv == 0 ? hq != 0 : hq % hkv != 0) {
    return Status::InvalidArgument(
        "q has " + std::to_string(hq) + " heads and k has " +
        std::to_string(hkv) +
        "; the query heads must be a multiple of the kv heads");
  }
  p->q = q;
  p->k = k;
  p->v = v;
  p->options = options;
  p->q_heads = hq;
  p->kv_heads = hkv;
  p->head_dim = q.sizes[3];
  p->value_dim = v.sizes[3];
  p->scale = options.scale.has_value() ? *options.scale
             : p->head_dim == 0
                 ? 1.0
                 : 1.0 / std::sqrt(static_cast<double>(p->head_dim));
  p->dropout_scale =
      options.dropout_p < 1.0 ? 1.0 / (1.0 - options.dropout_p) : 0.0;
  FA2_RETURN_IF_ERROR(FindSequences(p));
  FA2_RETURN_IF_ERROR(CheckScoreInputs(*p));
  FA2_RETURN_IF_ERROR(p->blocks.Set(options.block_mask,
                                    {q.sizes[0], hq, q.sizes[2], k.sizes[2]}));
  const bool alike = !p->variable_length && !p->blocks.given();
  const Sequence* before = nullptr;
  for (Sequence& s : p->sequences) {
    s.pairs = alike && before != nullptr
                  ? before->pairs
                  : p->Pairs(s, {0, hq}, {0, s.nq()}, {0, s.nk()});
    before = &s;
  }
  // What a stride of 0 repeats is shared, as what has one element is.
  ConstTensorView& bias = p->options.bias;
  for (size_t i = 0; i < 4; ++i) {
    if (bias.strides[i] == 0 && bias.sizes[i] > 1) bias.sizes[i] = 1;
  }
  return Status::Ok();
}

// lse, dlse, delta: [B, Hq, Nq], or padded rows where lengths vary.
Status CheckStatistics(const NamedView& tensor, const Problem& p) {
  FA2_RETURN_IF_ERROR(CheckView(tensor));
  FA2_RETURN_IF_ERROR(
      CheckDType(tensor, {p.accumulator()}, "for inputs of this dtype"));
  const std::array<int64_t, 3> dense = {p.q.sizes[0], p.q_heads, p.q.sizes[2]};
  if (!p.variable_length) {
    return CheckStatisticsShape(tensor, dense, "[B, Hq, Nq] of q");
  }
  if (CheckStatisticsShape(tensor, dense, "").ok()) return Status::Ok();
  int64_t longest = 0;
  for (const Sequence& s : p.sequences) longest = std::max(longest, s.nq());
  return CheckStatisticsShape(
      tensor,
      {static_cast<int64_t>(p.sequences.size()), p.q_heads,
       std::max(longest, tensor.view.sizes[2])},
      "[sequences, Hq, longest or more], or [1, Hq, total_q]");
}

// `inputs` [B, H, N, D] of the call: what the outputs must not overlap.
NamedViews CommonInputs(const Problem& p) {
  NamedViews inputs = {{"q", p.q},
                       {"k", p.k},
                       {"v", p.v},
                       {"bias", p.options.bias},
                       {"alibi_slopes", p.options.alibi_slopes},
                       {"sinks", p.options.sinks},
                       {"cu_seqlens_q", p.options.cu_seqlens_q},
                       {"cu_seqlens_k", p.options.cu_seqlens_k}};
  if (const BlockMask* const mask = p.options.block_mask; mask != nullptr) {
    inputs.Add({"block_mask.kv_num_blocks", mask->kv_num_blocks});
    inputs.Add({"block_mask.kv_indices", mask->kv_indices});
    inputs.Add({"block_mask.full_kv_num_blocks", mask->full_kv_num_blocks});
    inputs.Add({"block_mask.full_kv_indices", mask->full_kv_indices});
    inputs.Add({"block_mask.bits", mask->bits});
  }
  return inputs;
}

Status CheckResult(const NamedView& tensor, DType input,
                   const std::array<int64_t, 4>& shape, const char* meaning) {
  FA2_RETURN_IF_ERROR(CheckView(tensor));
  if (input == DType::kF64) {
    FA2_RETURN_IF_ERROR(
        CheckDType(tensor, {DType::kF64}, "for inputs of this dtype"));
  } else {
    FA2_RETURN_IF_ERROR(
        CheckDType(tensor, {input, DType::kF32}, "for inputs of this dtype"));
  }
  return CheckShape(tensor, shape, meaning);
}

}  // namespace

Status CheckForward(const AttentionForwardArgs& args, Problem* p) {
  FA2_RETURN_IF_ERROR(CheckInputs(args.q, args.k, args.v, args.options, p));
  FA2_RETURN_IF_ERROR(
      CheckResult({"out", args.out}, p->q.dtype,
                  {p->q.sizes[0], p->q_heads, p->q.sizes[2], p->value_dim},
                  "[B, Hq, Nq, Dv] of q and v"));
  NamedViews outputs = {{"out", args.out}};
  if (args.lse.given()) {
    FA2_RETURN_IF_ERROR(CheckStatistics({"lse", args.lse}, *p));
    outputs.Add({"lse", args.lse});
  }
  return CheckOverlap(outputs, CommonInputs(*p));
}

Status CheckBackward(const AttentionBackwardArgs& args, Problem* p) {
  FA2_RETURN_IF_ERROR(CheckInputs(args.q, args.k, args.v, args.options, p));
  const std::array<int64_t, 4> out_shape = {p->q.sizes[0], p->q_heads,
                                            p->q.sizes[2], p->value_dim};
  NamedViews inputs = CommonInputs(*p);
  FA2_RETURN_IF_ERROR(CheckView({"dout", args.dout}));
  FA2_RETURN_IF_ERROR(
      CheckDType({"dout", args.dout}, {p->q.dtype}, "as q has"));
  FA2_RETURN_IF_ERROR(
      CheckShape({"dout", args.dout}, out_shape, "[B, Hq, Nq, Dv] of q and v"));
  inputs.Add({"dout", args.dout});
  if (args.delta.given()) {
    FA2_RETURN_IF_ERROR(CheckStatistics({"delta", args.delta}, *p));
    inputs.Add({"delta", args.delta});
  } else {
    FA2_RETURN_IF_ERROR(CheckView({"out", args.out}));
    FA2_RETURN_IF_ERROR(
        CheckDType({"out", args.out}, {p->q.dtype}, "as q has"));
    FA2_RETURN_IF_ERROR(
        CheckShape({"out", args.out}, out_shape, "[B, Hq, Nq, Dv] of q and v"));
    inputs.Add({"out", args.out});
  }
  FA2_RETURN_IF_ERROR(CheckStatistics({"lse", args.lse}, *p));
  inputs.Add({"lse", args.lse});
  if (args.dlse.given()) {
    FA2_RETURN_IF_ERROR(CheckStatistics({"dlse", args.dlse}, *p));
    inputs.Add({"dlse", args.dlse});
  }

  NamedViews outputs;
  const auto result = [&](const NamedView& tensor,
                          const std::array<int64_t, 4>& shape,
                          const char* meaning) {
    if (!tensor.view.given()) return Status::Ok();
    outputs.Add(tensor);
    return CheckResult(tensor, p->q.dtype, shape, meaning);
  };
  FA2_RETURN_IF_ERROR(result({"dq", args.dq}, p->q.sizes, "the shape of q"));
  FA2_RETURN_IF_ERROR(result({"dk", args.dk}, p->k.sizes, "the shape of k"));
  FA2_RETURN_IF_ERROR(result({"dv", args.dv}, p->v.sizes, "the shape of v"));
  if (args.dbias.given()) {
    const ConstTensorView& bias = args.options.bias;
    if (!bias.given() || bias.dtype == DType::kBool) {
      return Status::InvalidArgument(
          std::string("dbias is given, but bias is ") +
          (bias.given() ? "a boolean mask" : "not") +
          "; dbias needs an additive bias");
    }
    const NamedView dbias{"dbias", args.dbias};
    outputs.Add(dbias);
    FA2_RETURN_IF_ERROR(CheckView(dbias));
    FA2_RETURN_IF_ERROR(CheckDType(dbias, {bias.dtype, p->accumulator()},
                                   "for a bias of this dtype"));
    FA2_RETURN_IF_ERROR(CheckShape(dbias, bias.sizes, "the shape of bias"));
  }
  const auto small = [&](const NamedView& tensor, const ConstTensorView& input,
                         const char* input_name) {
    if (!tensor.view.given()) return Status::Ok();
    outputs.Add(tensor);
    if (!input.given()) {
      return Status::InvalidArgument(std::string(tensor.name) +
                                     " is given, but " + input_name +
                                     " is not; the gradient needs its input");
    }
    FA2_RETURN_IF_ERROR(CheckView(tensor));
    FA2_RETURN_IF_ERROR(CheckDType(tensor, {DType::kF32}, ""));
    return CheckShape(tensor, input.sizes, "the shape of its input");
  };
  FA2_RETURN_IF_ERROR(small({"dalibi_slopes", args.dalibi_slopes},
                            p->options.alibi_slopes, "alibi_slopes"));
  FA2_RETURN_IF_ERROR(
      small({"dsinks", args.dsinks}, p->options.sinks, "sinks"));
  return CheckOverlap(outputs, inputs);
}

}  // namespace fa2::attention
