#include "src/ops/arguments.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <utility>

namespace fa2::ops {
namespace {

// Bytes that a view touches, [begin, end) as addresses. False when they cannot
// be addressed.
bool Extent(const ConstTensorView& x, uintptr_t* begin, uintptr_t* end) {
  const auto size = static_cast<int64_t>(SizeOf(x.dtype));
  int64_t low = 0;
  int64_t high = size;
  int64_t elements = size;
  for (int d = 0; d < 4; ++d) {
    int64_t span = 0;
    if (__builtin_mul_overflow(elements, std::max<int64_t>(1, x.sizes[d]),
                               &elements) ||
        __builtin_mul_overflow(std::max<int64_t>(0, x.sizes[d] - 1),
                               x.strides[d], &span) ||
        __builtin_mul_overflow(span, size, &span) ||
        __builtin_add_overflow(span < 0 ? low : high, span,
                               span < 0 ? &low : &high)) {
      return false;
    }
  }
  const auto base = reinterpret_cast<uintptr_t>(x.data);
  *begin = base + static_cast<uintptr_t>(low);
  *end = base + static_cast<uintptr_t>(high);
  return true;
}

bool Empty(const ConstTensorView& x) {
  return !x.given() || x.sizes[0] == 0 || x.sizes[1] == 0 || x.sizes[2] == 0 ||
         x.sizes[3] == 0;
}

// Whether two elements of the view share an address: not when the dimensions,
// sorted by stride, each step past everything inside them.
bool OverlapsItself(const ConstTensorView& x) {
  std::array<std::pair<int64_t, int64_t>, 4> dims;  // |stride|, size
  for (int d = 0; d < 4; ++d) dims[d] = {std::abs(x.strides[d]), x.sizes[d]};
  std::sort(dims.begin(), dims.end());
  int64_t inside = 0;  // greatest offset of an element so far
  for (const auto& [stride, size] : dims) {
    if (size <= 1) continue;
    if (stride <= inside) return true;
    inside += (size - 1) * stride;
  }
  return false;
}

// Whether the two may share a byte. Interleaved views of one buffer (columns of
// a packed array) do not: with g the greatest common divisor of all strides
// above the rows, every row of a view lies at one place modulo g.
bool Overlap(const ConstTensorView& a, const ConstTensorView& b) {
  uintptr_t a_begin = 0;
  uintptr_t a_end = 0;
  uintptr_t b_begin = 0;
  uintptr_t b_end = 0;
  if (!Extent(a, &a_begin, &a_end) || !Extent(b, &b_begin, &b_end)) return true;
  if (a_end <= b_begin || b_end <= a_begin) return false;
  int64_t g = 0;
  int64_t bytes[2];
  int i = 0;
  for (const ConstTensorView* x : {&a, &b}) {
    const auto size = static_cast<int64_t>(SizeOf(x->dtype));
    bytes[i++] = ((x->sizes[3] - 1) * std::abs(x->strides[3]) + 1) * size;
    for (int d = 0; d < 3; ++d) {
      if (x->sizes[d] > 1) g = std::gcd(g, x->strides[d] * size);
    }
  }
  if (g == 0 || (a.sizes[3] > 1 && a.strides[3] < 0) ||
      (b.sizes[3] > 1 && b.strides[3] < 0)) {
    return true;
  }
  // Place of b's row behind a's, modulo g.
  const auto distance =
      static_cast<int64_t>((reinterpret_cast<uintptr_t>(b.data) -
                            reinterpret_cast<uintptr_t>(a.data)));
  const int64_t place = ((distance % g) + g) % g;
  return place < bytes[0] || place + bytes[1] > g;
}

}  // namespace

std::string ShapeText(const std::array<int64_t, 4>& sizes) {
  std::string text = "[";
  for (int d = 0; d < 4; ++d)
    text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  return text + "]";
}

Status CheckView(const NamedView& x, std::initializer_list<DType> types) {
  const std::string name = x.name;
  const ConstTensorView& view = x.view;
  if (std::find(types.begin(), types.end(), view.dtype) == types.end()) {
    std::string list;
    for (const DType type : types) {
      list += (list.empty() ? "" : " or ") + std::string(NameOf(type));
    }
    return Status::InvalidArgument(name + " has type " + NameOf(view.dtype) +
                                   "; it must be " + list);
  }
  for (int d = 0; d < 4; ++d) {
    if (view.sizes[d] < 0) {
      return Status::InvalidArgument(name + " has sizes " +
                                     ShapeText(view.sizes) +
                                     "; they must be 0 or more");
    }
  }
  uintptr_t begin = 0;
  uintptr_t end = 0;
  if (!Extent(view, &begin, &end)) {
    return Status::InvalidArgument(
        name + " has sizes " + ShapeText(view.sizes) + " and strides " +
        ShapeText(view.strides) + "; its bytes must fit in 63 bits");
  }
  if (!view.given() && Elements(view) > 0) {
    return Status::InvalidArgument(name + " has no data; it must be given");
  }
  if (view.given() &&
      reinterpret_cast<uintptr_t>(view.data) % SizeOf(view.dtype) != 0) {
    return Status::InvalidArgument(
        name + " is not aligned; its address must be a multiple of " +
        std::to_string(SizeOf(view.dtype)));
  }
  return Status::Ok();
}

Status CheckRows(const NamedView& x, std::initializer_list<DType> types) {
  Status status = CheckView(x, types);
  if (status.ok() && x.view.sizes[3] > 1 && x.view.strides[3] != 1) {
    status = Status::InvalidArgument(
        std::string(x.name) + " has stride " +
        std::to_string(x.view.strides[3]) +
        " in its last dimension; the elements of a row must be contiguous");
  }
  return status;
}

Status CheckVector(const NamedView& x, std::initializer_list<DType> types,
                   int64_t n) {
  Status status = CheckView(x, types);
  if (status.ok() && x.view.sizes != std::array<int64_t, 4>{1, 1, 1, n}) {
    status = Status::InvalidArgument(std::string(x.name) + " is " +
                                     ShapeText(x.view.sizes) + "; it must be " +
                                     ShapeText({1, 1, 1, n}));
  }
  return status;
}

Status CheckShape(const NamedView& x, const std::array<int64_t, 4>& sizes,
                  const char* shape_of) {
  if (x.view.sizes == sizes) return Status::Ok();
  return Status::InvalidArgument(std::string(x.name) + " is " +
                                 ShapeText(x.view.sizes) + "; it must be " +
                                 ShapeText(sizes) + ", " + shape_of);
}

Status CheckType(const NamedView& x, const NamedView& like) {
  if (x.view.dtype == like.view.dtype) return Status::Ok();
  return Status::InvalidArgument(
      std::string(x.name) + " has type " + NameOf(x.view.dtype) +
      "; it must be " + NameOf(like.view.dtype) + ", the type of " + like.name);
}

Status CheckOverlap(std::initializer_list<NamedView> outputs,
                    std::initializer_list<NamedView> inputs) {
  for (const NamedView* out = outputs.begin(); out != outputs.end(); ++out) {
    if (Empty(out->view)) continue;
    if (OverlapsItself(out->view)) {
      return Status::InvalidArgument(
          std::string(out->name) + " has sizes " + ShapeText(out->view.sizes) +
          " and strides " + ShapeText(out->view.strides) +
          "; no two of its elements may share an address");
    }
    const auto shares = [out](const NamedView& other) {
      return !Empty(other.view) && Overlap(out->view, other.view);
    };
    for (const NamedView& in : inputs) {
      if (shares(in)) {
        return Status::InvalidArgument(std::string(out->name) + " overlaps " +
                                       in.name +
                                       "; an output must not share memory "
                                       "with an input");
      }
    }
    for (const NamedView* other = outputs.begin(); other != out; ++other) {
      if (shares(*other)) {
        return Status::InvalidArgument(std::string(out->name) + " overlaps " +
                                       other->name +
                                       "; outputs must not share memory");
      }
    }
  }
  return Status::Ok();
}

Status CheckIndices(const NamedView& x, int64_t limit, const char* limit_name,
                    std::optional<int64_t> ignored, int64_t* counted) {
  *counted = 0;
  for (int64_t i = 0; i < x.view.sizes[3]; ++i) {
    const int64_t index = IndexAt(x.view, i);
    if (ignored.has_value() && index == *ignored) continue;
    if (index < 0 || index >= limit) {
      std::string sentence = std::string(x.name) + "[" + std::to_string(i) +
                             "] is " + std::to_string(index) +
                             "; it must be in [0, " + std::to_string(limit) +
                             "), the range of " + limit_name;
      if (ignored.has_value()) {
        sentence += ", or the ignored index " + std::to_string(*ignored);
      }
      return Status::InvalidArgument(sentence);
    }
    ++*counted;
  }
  return Status::Ok();
}

}  // namespace fa2::ops
