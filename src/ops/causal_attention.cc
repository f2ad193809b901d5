// Backward of causal self-attention from q, k, v and dout alone: runs the
// forward for its output and logsumexp, then the backward.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "fa2/training_ops.h"
#include "src/context/context_impl.h"
#include "src/ops/arguments.h"
#include "src/threading/workspace.h"

namespace fa2 {
namespace ops {
namespace {

Status CheckHeads(const CausalAttentionBackwardArgs& args) {
  for (const auto& [name, heads] :
       {std::pair<const char*, int64_t>{"num_heads", args.num_heads},
        {"num_kv_heads", args.num_kv_heads}}) {
    if (heads < 1) {
      return Status::InvalidArgument(std::string(name) + " is " +
                                     std::to_string(heads) +
                                     "; it must be 1 or more");
    }
  }
  if (args.num_heads % args.num_kv_heads != 0) {
    return Status::InvalidArgument("num_heads is " +
                                   std::to_string(args.num_heads) +
                                   "; it must be a multiple of num_kv_heads, " +
                                   std::to_string(args.num_kv_heads));
  }
  return Status::Ok();
}

Status CheckQ(const ConstTensorView& q, int64_t num_heads) {
  Status status = CheckRows({"q", q}, kFloats);
  if (status.ok() && (q.sizes[0] != 1 || q.sizes[3] % num_heads != 0)) {
    status = Status::InvalidArgument(
        "q is " + ShapeText(q.sizes) +
        "; it must be [1, B, seq, num_heads * head_dim] with num_heads = " +
        std::to_string(num_heads));
  }
  return status;
}

Status CheckArguments(const CausalAttentionBackwardArgs& args) {
  const ConstTensorView& q = args.q;
  const ConstTensorView dq = args.dq;
  const ConstTensorView dk = args.dk;
  const ConstTensorView dv = args.dv;
  Status status = CheckHeads(args);
  if (status.ok()) status = CheckQ(q, args.num_heads);
  if (!status.ok()) return status;
  const int64_t head_dim = q.sizes[3] / args.num_heads;
  const std::array<int64_t, 4> kv_sizes = {1, q.sizes[1], q.sizes[2],
                                           args.num_kv_heads * head_dim};
  const struct {
    NamedView view;
    bool is_output;
    bool is_kv;
  } others[] = {{{"dout", args.dout}, false, false},
                {{"k", args.k}, false, true},
                {{"v", args.v}, false, true},
                {{"dq", dq}, true, false},
                {{"dk", dk}, true, true},
                {{"dv", dv}, true, true}};
  const DType wide = q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (const auto& [x, is_output, is_kv] : others) {
    if (is_output && !x.view.given()) continue;
    if (is_output && wide != q.dtype) {
      status = CheckRows(x, {q.dtype, wide});
    } else {
      status = CheckRows(x, {q.dtype});
    }
    if (status.ok()) {
      status = CheckShape(x, is_kv ? kv_sizes : q.sizes,
                          is_kv ? "num_kv_heads heads of q's batch, length and "
                                  "head_dim"
                                : "the shape of q");
    }
    if (!status.ok()) return status;
  }
  return CheckOverlap(
      {{"dq", dq}, {"dk", dk}, {"dv", dv}},
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

}  // namespace
}  // namespace ops

Status CausalAttentionBackward(const CausalAttentionBackwardArgs& args,
                               Context* context) {
  using namespace ops;
  Status status = ResolveContext(context, &context);
  if (status.ok()) status = CheckArguments(args);
  if (!status.ok() || Elements(args.q) == 0) return status;

  AttentionForwardArgs forward;
  forward.q = Heads(args.q, args.num_heads);
  forward.k = Heads(args.k, args.num_kv_heads);
  forward.v = Heads(args.v, args.num_kv_heads);
  forward.options.causal = Causal::kTopLeft;
  forward.options.precision = args.precision;

  const std::array<int64_t, 4>& sizes = forward.q.sizes;
  const DType lse_type =
      args.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const size_t out_bytes = threading::AlignUp(
      static_cast<size_t>(Elements(args.q)) * SizeOf(args.q.dtype));
  const size_t lse_bytes =
      static_cast<size_t>(sizes[0] * sizes[1] * sizes[2]) * SizeOf(lse_type);
  threading::Workspace workspace;
  status =
      context->impl().workspaces().Acquire(out_bytes + lse_bytes, &workspace);
  if (!status.ok()) return status;
  forward.out = Dense(workspace.data(), args.q.dtype, sizes[0], sizes[1],
                      sizes[2], sizes[3]);
  forward.lse = Dense(workspace.data() + out_bytes, lse_type, sizes[0],
                      sizes[1], sizes[2], 1);
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

}  // namespace fa2
