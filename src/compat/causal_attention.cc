// SPDX-License-Identifier: Apache-2.0

// Backward of causal self-attention from q, k, v and dout alone: runs the
// forward for its output and logsumexp, then the backward.
#include "fa2/compat/causal_attention.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "fa2/attention.h"
#include "src/c_api/boundary.h"
#include "src/c_api/convert.h"
#include "src/checks/views.h"
#include "src/compat/checks.h"
#include "src/context/context_impl.h"
#include "src/threading/workspace.h"

namespace fa2::compat {
namespace {

using checks::CheckDType;
using checks::CheckShape;
using checks::CheckView;
using checks::NamedView;
using checks::ShapeText;

// The C struct, converted.
struct Args {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  ConstTensorView dout, q, k, v;
  TensorView dq, dk, dv;
  bool accumulate_dk = false;
  bool accumulate_dv = false;
  Precision precision = Precision::kFast;
};

Status Convert(const fa2_causal_attention_backward_args* given, Args* to) {
  fa2_causal_attention_backward_args from = {};
  FA2_RETURN_IF_ERROR(c_api::ReadArgs(
      given, offsetof(fa2_causal_attention_backward_args, accumulate_dk),
      &from));
  FA2_RETURN_IF_ERROR(c_api::ConvertInputs({{"dout", from.dout, &to->dout},
                                            {"q", from.q, &to->q},
                                            {"k", from.k, &to->k},
                                            {"v", from.v, &to->v}}));
  FA2_RETURN_IF_ERROR(c_api::ConvertOutputs({{"dq", from.dq, &to->dq},
                                             {"dk", from.dk, &to->dk},
                                             {"dv", from.dv, &to->dv}}));
  FA2_RETURN_IF_ERROR(c_api::ConvertPrecision(from.precision, &to->precision));
  to->num_heads = from.num_heads;
  to->num_kv_heads = from.num_kv_heads;
  to->accumulate_dk = from.accumulate_dk != 0;
  to->accumulate_dv = from.accumulate_dv != 0;
  return Status::Ok();
}

// Heads can only be told apart in rows that are contiguous.
Status CheckRows(const NamedView& x) {
  FA2_RETURN_IF_ERROR(CheckView(x));
  if (x.view.sizes[3] <= 1 || x.view.strides[3] == 1) return Status::Ok();
  return Invalid(std::string("the last stride of ") + x.name,
                 std::to_string(x.view.strides[3]), "1: rows are contiguous");
}

Status CheckHeads(const Args& args) {
  if (args.num_heads < 1) {
    return Invalid("num_heads", std::to_string(args.num_heads), "1 or more");
  }
  if (args.num_kv_heads < 1) {
    return Invalid("num_kv_heads", std::to_string(args.num_kv_heads),
                   "1 or more");
  }
  if (args.num_heads % args.num_kv_heads == 0) return Status::Ok();
  return Invalid(
      "num_heads", std::to_string(args.num_heads),
      "a multiple of num_kv_heads, " + std::to_string(args.num_kv_heads));
}

Status Check(const Args& args) {
  FA2_RETURN_IF_ERROR(CheckHeads(args));
  const ConstTensorView& q = args.q;
  FA2_RETURN_IF_ERROR(CheckRows({"q", q}));
  FA2_RETURN_IF_ERROR(CheckDType(
      {"q", q}, {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}, ""));
  const int64_t head_dim = q.sizes[3] / std::max<int64_t>(1, args.num_heads);
  if (q.sizes[0] != 1 || head_dim * args.num_heads != q.sizes[3]) {
    return Invalid("q", ShapeText(q.sizes),
                   "[1, B, seq, num_heads * head_dim] with num_heads = " +
                       std::to_string(args.num_heads));
  }
  const std::array<int64_t, 4> kv_sizes = {1, q.sizes[1], q.sizes[2],
                                           args.num_kv_heads * head_dim};
  const struct {
    NamedView x;
    bool is_output;
    bool is_kv;
  } others[] = {
      {{"dout", args.dout}, false, false}, {{"k", args.k}, false, true},
      {{"v", args.v}, false, true},        {{"dq", args.dq}, true, false},
      {{"dk", args.dk}, true, true},       {{"dv", args.dv}, true, true}};
  const DType wide = q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (const auto& [x, is_output, is_kv] : others) {
    if (is_output && !x.view.given()) continue;
    FA2_RETURN_IF_ERROR(CheckRows(x));
    if (is_output && wide != q.dtype) {
      FA2_RETURN_IF_ERROR(
          CheckDType(x, {q.dtype, wide}, "for inputs of this dtype"));
    } else {
      FA2_RETURN_IF_ERROR(CheckDType(x, {q.dtype}, "as q has"));
    }
    FA2_RETURN_IF_ERROR(
        CheckShape(x, is_kv ? kv_sizes : q.sizes,
                   is_kv ? "num_kv_heads heads of q's batch, length and "
                           "head_dim"
                         : "the shape of q"));
  }
  return checks::CheckOverlap(
      {{"dq", args.dq}, {"dk", args.dk}, {"dv", args.dv}},
      {{"dout", args.dout}, {"q", q}, {"k", args.k}, {"v", args.v}});
}

// [1, B, seq, heads * head_dim] as [B, heads, seq, head_dim].
template <class View>
View Heads(const View& x, int64_t heads) {
  if (!x.given()) return {};
  View view = x;
  const int64_t head_dim = x.sizes[3] / heads;
  view.sizes = {x.sizes[1], heads, x.sizes[2], head_dim};
  view.strides = {x.strides[1], head_dim, x.strides[2], 1};
  return view;
}

Status Backward(const Args& args, Context* context) {
  FA2_RETURN_IF_ERROR(Check(args));
  int64_t elements = 1;
  for (const int64_t size : args.q.sizes) elements *= size;
  if (elements == 0) return Status::Ok();

  AttentionForwardArgs forward;
  forward.q = Heads(args.q, args.num_heads);
  forward.k = Heads(args.k, args.num_kv_heads);
  forward.v = Heads(args.v, args.num_kv_heads);
  forward.options.causal = Causal::kTopLeft;
  forward.options.precision = args.precision;

  const std::array<int64_t, 4>& sizes = forward.q.sizes;
  const DType lse_type =
      args.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const size_t out_bytes =
      threading::AlignUp(static_cast<size_t>(elements) * SizeOf(args.q.dtype));
  const size_t lse_bytes =
      static_cast<size_t>(sizes[0] * sizes[1] * sizes[2]) * SizeOf(lse_type);
  threading::Workspace workspace;
  Status status =
      context->impl().workspaces().Acquire(out_bytes + lse_bytes, &workspace);
  if (!status.ok()) return status;
  forward.out = Dense(workspace.data(), args.q.dtype, sizes[0], sizes[1],
                      sizes[2], sizes[3]);
  forward.lse = Dense(workspace.data() + out_bytes, lse_type, sizes[0],
                      sizes[1], sizes[2]);
  status = AttentionForward(forward, context);
  if (!status.ok()) return status;

  AttentionBackwardArgs backward;
  backward.dout = Heads(args.dout, args.num_heads);
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.options = forward.options;
  backward.dq = Heads(args.dq, args.num_heads);
  backward.dk = Heads(args.dk, args.num_kv_heads);
  backward.dv = Heads(args.dv, args.num_kv_heads);
  backward.accumulate_dk = args.accumulate_dk;
  backward.accumulate_dv = args.accumulate_dv;
  return AttentionBackward(backward, context);
}

}  // namespace
}  // namespace fa2::compat

namespace fa2 {
namespace {

Status CheckAndCall(const fa2_causal_attention_backward_args* given,
                    Context* context) {
  return WithContext(context, [&](Context* resolved) -> Status {
    compat::Args args;
    FA2_RETURN_IF_ERROR(compat::Convert(given, &args));
    return compat::Backward(args, resolved);
  });
}

}  // namespace

Status CausalAttentionBackward(const fa2_causal_attention_backward_args& args,
                               Context* context) {
  return CheckAndCall(&args, context);
}

}  // namespace fa2

extern "C" fa2_status fa2_causal_attention_backward(
    const fa2_causal_attention_backward_args* args, fa2_context* context) {
  return fa2::c_api::Guard("fa2_causal_attention_backward", [&] {
    return fa2::CheckAndCall(args, fa2::c_api::ToContext(context));
  });
}
