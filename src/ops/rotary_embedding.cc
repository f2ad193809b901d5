// SPDX-License-Identifier: Apache-2.0

// Rotary position embedding: pairs of a row's elements turn by an angle of the
// row's position. The backward turns by the negative angle.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "fa2/training_ops.h"
#include "src/ops/arguments.h"
#include "src/ops/call.h"
#include "src/ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/rotary_embedding.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "src/ops/load-inl.h"

#ifndef FA2_SRC_OPS_ROTARY_EMBEDDING_ONCE_
#define FA2_SRC_OPS_ROTARY_EMBEDDING_ONCE_
namespace fa2::ops {

struct RotaryJob {
  // All with one row for every row of x.
  RowArray x, y, cos, sin;
  size_t dim = 0;
  size_t pairs = 0;
  bool interleaved = false;
  bool back = false;  // by the negative angle
  DType dtype = DType::kF32;
  DType angle_dtype = DType::kF32;  // dtype or f32
};

}  // namespace fa2::ops
#endif  // FA2_SRC_OPS_ROTARY_EMBEDDING_ONCE_

HWY_BEFORE_NAMESPACE();
namespace fa2::ops::HWY_NAMESPACE {

// Pairs (i, i + pairs).
template <typename T, typename W>
HWY_INLINE void TurnHalves(const T* HWY_RESTRICT x, const W* HWY_RESTRICT cos,
                           const W* HWY_RESTRICT sin, size_t pairs, bool back,
                           T* HWY_RESTRICT y) {
  const hn::ScalableTag<Computed<T>> d;
  for (size_t i = 0; i < pairs; i += hn::Lanes(d)) {
    const size_t left = pairs - i;
    const auto a = LoadUpTo(d, x + i, left);
    const auto b = LoadUpTo(d, x + pairs + i, left);
    const auto c = LoadUpTo(d, cos + i, left);
    auto s = LoadUpTo(d, sin + i, left);
    if (back) s = hn::Neg(s);
    StoreUpTo(d, hn::NegMulAdd(b, s, hn::Mul(a, c)), y + i, left);
    StoreUpTo(d, hn::MulAdd(a, s, hn::Mul(b, c)), y + pairs + i, left);
  }
}

// Pairs (2i, 2i + 1): taken apart and put together again by way of a buffer,
// since 16-bit elements are widened first.
template <typename T, typename W>
HWY_INLINE void TurnNeighbours(const T* HWY_RESTRICT x,
                               const W* HWY_RESTRICT cos,
                               const W* HWY_RESTRICT sin, size_t pairs,
                               bool back, T* HWY_RESTRICT y) {
  using A = Computed<T>;
  const hn::ScalableTag<A> d;
  const size_t lanes = hn::Lanes(d);
  HWY_ALIGN A buffer[2 * hn::MaxLanes(d)];
  for (size_t i = 0; i < pairs; i += lanes) {
    const size_t left = pairs - i;
    // Elements of x left to each of the two vectors.
    const size_t first = 2 * left;
    const size_t second = first > lanes ? first - lanes : 0;
    const T* const from = x + 2 * i;
    T* const to = y + 2 * i;
    hn::Store(LoadUpTo(d, from, first), d, buffer);
    hn::Store(second == 0 ? hn::Zero(d) : LoadUpTo(d, from + lanes, second), d,
              buffer + lanes);
    hn::Vec<decltype(d)> a;
    hn::Vec<decltype(d)> b;
    hn::LoadInterleaved2(d, buffer, a, b);
    const auto c = LoadUpTo(d, cos + i, left);
    auto s = LoadUpTo(d, sin + i, left);
    if (back) s = hn::Neg(s);
    hn::StoreInterleaved2(hn::NegMulAdd(b, s, hn::Mul(a, c)),
                          hn::MulAdd(a, s, hn::Mul(b, c)), d, buffer);
    StoreUpTo(d, hn::Load(d, buffer), to, first);
    if (second != 0) {
      StoreUpTo(d, hn::Load(d, buffer + lanes), to + lanes, second);
    }
  }
}

template <typename T, typename W>
void RotaryRowsOf(const RotaryJob& job, RowRange rows) {
  const size_t turned = 2 * job.pairs;
  const auto step = [](auto* p, const RowArray& of) {
    return reinterpret_cast<decltype(p)>(
        reinterpret_cast<uintptr_t>(p) +
        static_cast<uintptr_t>(of.RowStride()));
  };
  int64_t row = rows.begin;
  while (row < rows.end) {
    const int64_t run = job.x.RunLength();
    const int64_t end = std::min(rows.end, (row / run + 1) * run);
    const T* x = job.x.In<T>(row);
    const W* cos = job.cos.In<W>(row);
    const W* sin = job.sin.In<W>(row);
    T* y = job.y.Out<T>(row);
    for (; row < end; ++row) {
      if (job.interleaved) {
        TurnNeighbours(x, cos, sin, job.pairs, job.back, y);
      } else {
        TurnHalves(x, cos, sin, job.pairs, job.back, y);
      }
      std::copy(x + turned, x + job.dim, y + turned);
      x = step(x, job.x);
      cos = step(cos, job.cos);
      sin = step(sin, job.sin);
      y = step(y, job.y);
    }
  }
}

void RotaryRows(const RotaryJob& job, RowRange rows) {
  WithElements(job.dtype, job.angle_dtype, [&](auto x, auto angle) {
    RotaryRowsOf<decltype(x), decltype(angle)>(job, rows);
  });
}

}  // namespace fa2::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/simd/target.h"

namespace fa2 {
namespace ops {
namespace {

HWY_EXPORT(RotaryRows);

// cos or sin, [1 or B, 1, N, R / 2].
Status CheckAngles(const NamedView& angles, const NamedView& x) {
  Status status = CheckRows(angles, kFloats);
  if (status.ok() && angles.view.dtype != DType::kF32) {
    status = CheckType(angles, x);
  }
  const auto& sizes = angles.view.sizes;
  if (status.ok() &&
      ((sizes[0] != 1 && sizes[0] != x.view.sizes[0]) || sizes[1] != 1 ||
       sizes[2] != x.view.sizes[2] || sizes[3] > x.view.sizes[3] / 2)) {
    status = Status::InvalidArgument(
        std::string(angles.name) + " is " + ShapeText(sizes) +
        "; it must be [1 or B, 1, N, R / 2] with R <= dim, where " + x.name +
        " is " + ShapeText(x.view.sizes));
  }
  return status;
}

// A row of angles for every row of x.
ConstTensorView ForAllHeads(ConstTensorView angles, const ConstTensorView& x) {
  if (angles.sizes[0] == 1) angles.strides[0] = 0;
  angles.strides[1] = 0;
  for (int d = 0; d < 3; ++d) angles.sizes[d] = x.sizes[d];
  return angles;
}

template <class View>
View HeadsInside(View x) {
  std::swap(x.sizes[1], x.sizes[2]);
  std::swap(x.strides[1], x.strides[2]);
  return x;
}

Status Turn(const NamedView& in, ConstTensorView cos, ConstTensorView sin,
            bool interleaved, bool back, const char* out_name,
            const TensorView& out, const Context& context) {
  const NamedView y{out_name, out};
  FA2_RETURN_IF_ERROR(CheckRows(in, kFloats));
  FA2_RETURN_IF_ERROR(CheckRowsLike(y, in));
  FA2_RETURN_IF_ERROR(CheckAngles({"cos", cos}, in));
  FA2_RETURN_IF_ERROR(CheckAngles({"sin", sin}, in));
  FA2_RETURN_IF_ERROR(CheckRowsLike({"sin", sin}, {"cos", cos}));
  FA2_RETURN_IF_ERROR(CheckOverlap({y}, {in, {"cos", cos}, {"sin", sin}}));
  if (Elements(in.view) == 0) return Status::Ok();

  ConstTensorView from = in.view;
  TensorView to = out;
  cos = ForAllHeads(cos, from);
  sin = ForAllHeads(sin, from);
  // In the order of memory: the heads of a position often lie side by side.
  if (std::abs(from.strides[1]) < std::abs(from.strides[2])) {
    from = HeadsInside(from);
    to = HeadsInside(to);
    cos = HeadsInside(cos);
    sin = HeadsInside(sin);
  }
  RotaryJob job;
  job.x = RowArray(from);
  job.y = RowArray(to);
  job.pairs = static_cast<size_t>(cos.sizes[3]);
  job.cos = RowArray(cos);
  job.sin = RowArray(sin);
  job.dim = static_cast<size_t>(from.sizes[3]);
  job.interleaved = interleaved;
  job.back = back;
  job.dtype = from.dtype;
  job.angle_dtype = cos.dtype;
  const auto kernel = FA2_TARGET_FUNCTION(RotaryRows, context.impl().targets());
  ForRows(context, RowCount(from), RowsPerItem(from.sizes[3], from.dtype),
          [kernel, &job](RowRange range, int64_t /*item*/, int /*worker*/) {
            kernel(job, range);
          });
  return Status::Ok();
}

}  // namespace
}  // namespace ops

Status RotaryEmbedding(const RotaryEmbeddingArgs& args, Context* given) {
  return ops::Call("rotary_embedding", args.x, given, [&](Context& context) {
    return ops::Turn({"x", args.x}, args.cos, args.sin, args.interleaved,
                     /*back=*/false, "y", args.y, context);
  });
}

Status RotaryEmbeddingBackward(const RotaryEmbeddingBackwardArgs& args,
                               Context* given) {
  return ops::Call(
      "rotary_embedding_backward", args.dy, given, [&](Context& context) {
        return ops::Turn({"dy", args.dy}, args.cos, args.sin, args.interleaved,
                         /*back=*/true, "dx", args.dx, context);
      });
}

}  // namespace fa2
#endif  // HWY_ONCE
