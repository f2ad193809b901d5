#include "src/attention/call/check.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace fa2::attention {
namespace {

// Steps of a view in bytes, all positive, by rising size; `base` is the lowest
// byte. Dimensions of one element do not count.
struct Footprint {
  struct Step {
    uint64_t bytes;
    uint64_t count;
  };
  Step steps[4];
  int count = 0;  // of steps
  uint64_t base = 0;
  uint64_t end = 0;  // one past the highest byte; == base when empty
  uint64_t element = 0;
};

// The first byte of a view and one past its last.
struct Bytes {
  uint64_t begin = 0;
  uint64_t end = 0;
};

Bytes BytesOf(const ConstTensorView& view) {
  Bytes bytes;
  bytes.begin = bytes.end = reinterpret_cast<uintptr_t>(view.data);
  uint64_t below = 0;
  uint64_t above = SizeOf(view.dtype);
  for (int i = 0; i < 4; ++i) {
    if (view.sizes[i] == 0) return bytes;
    const int64_t reach = (view.sizes[i] - 1) * view.strides[i] *
                          static_cast<int64_t>(SizeOf(view.dtype));
    (reach < 0 ? below : above) += static_cast<uint64_t>(std::abs(reach));
  }
  bytes.begin -= below;
  bytes.end += above;
  return bytes;
}

Footprint FootprintOf(const ConstTensorView& view) {
  Footprint f;
  f.element = SizeOf(view.dtype);
  f.base = reinterpret_cast<uintptr_t>(view.data);
  f.end = f.base;
  for (int64_t size : view.sizes) {
    if (size == 0) return f;
  }
  uint64_t span = f.element;
  for (int i = 0; i < 4; ++i) {
    if (view.sizes[i] == 1) continue;
    const int64_t stride = view.strides[i];
    const uint64_t step =
        static_cast<uint64_t>(stride < 0 ? -stride : stride) * f.element;
    const uint64_t reach = step * static_cast<uint64_t>(view.sizes[i] - 1);
    if (stride < 0) f.base -= reach;
    span += reach;
    // Insertion sort.
    int at = f.count++;
    for (; at > 0 && f.steps[at - 1].bytes > step; --at) {
      f.steps[at] = f.steps[at - 1];
    }
    f.steps[at] = {step, static_cast<uint64_t>(view.sizes[i])};
  }
  f.end = f.base + span;
  return f;
}

// Every step is larger than what the smaller ones cover.
bool OverlapsItself(const Footprint& f) {
  uint64_t covered = f.element;
  for (int i = 0; i < f.count; ++i) {
    const Footprint::Step& step = f.steps[i];
    if (step.bytes < covered) return true;
    covered += step.bytes * (step.count - 1);
  }
  return false;
}

// Bytes of a view modulo `pitch`, when the larger steps are multiples of it and
// the smaller ones stay within it.
bool Residue(const Footprint& f, uint64_t pitch, uint64_t* begin,
             uint64_t* length) {
  *length = f.element;
  for (int i = 0; i < f.count; ++i) {
    const Footprint::Step& step = f.steps[i];
    if (step.bytes % pitch == 0) continue;
    *length += step.bytes * (step.count - 1);
  }
  *begin = f.base % pitch;
  return *length <= pitch;
}

bool DisjointModulo(const Footprint& a, const Footprint& b, uint64_t pitch) {
  uint64_t a_begin, a_length, b_begin, b_length;
  if (!Residue(a, pitch, &a_begin, &a_length) ||
      !Residue(b, pitch, &b_begin, &b_length)) {
    return false;
  }
  const uint64_t from_a_to_b = (b_begin + pitch - a_begin) % pitch;
  return from_a_to_b >= a_length && from_a_to_b + b_length <= pitch;
}

bool Overlap(const ConstTensorView& view_a, const ConstTensorView& view_b) {
  // Most tensors have memory of their own, which is soon seen: a call of a few
  // microseconds compares dozens of pairs.
  const Bytes bytes_a = BytesOf(view_a);
  const Bytes bytes_b = BytesOf(view_b);
  if (bytes_a.begin == bytes_a.end || bytes_b.begin == bytes_b.end) {
    return false;
  }
  if (bytes_a.end <= bytes_b.begin || bytes_b.end <= bytes_a.begin) {
    return false;
  }
  const Footprint a = FootprintOf(view_a);
  const Footprint b = FootprintOf(view_b);
  for (const Footprint* f : {&a, &b}) {
    for (int i = 0; i < f->count; ++i) {
      const uint64_t step = f->steps[i].bytes;
      if (step != 0 && DisjointModulo(a, b, step)) return false;
    }
  }
  return true;
}

std::string StridesText(const ConstTensorView& view) {
  return "strides " + ShapeText(view.strides);
}

}  // namespace

std::string ShapeText(const std::array<int64_t, 4>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

Status CheckView(const NamedView& tensor) {
  const ConstTensorView& view = tensor.view;
  const uint64_t element = SizeOf(view.dtype);
  if (element == 0) {
    return Status::InvalidArgument(
        std::string(tensor.name) + " has dtype number " +
        std::to_string(static_cast<int>(view.dtype)) +
        "; it must be one of fa2::DType");
  }
  bool has_elements = true;
  for (int64_t size : view.sizes) {
    if (size < 0) {
      return Status::InvalidArgument(std::string(tensor.name) + " has shape " +
                                     ShapeText(view.sizes) +
                                     "; sizes must be 0 or more");
    }
    has_elements &= size > 0;
  }
  if (!has_elements) return Status::Ok();
  // 2^62 bytes leave room for sums of two such spans.
  const uint64_t limit = (uint64_t{1} << 62) / element;
  uint64_t reach = 1;
  uint64_t count = 1;
  for (int i = 0; i < 4; ++i) {
    const uint64_t size = static_cast<uint64_t>(view.sizes[i]);
    const uint64_t stride = static_cast<uint64_t>(view.strides[i]);
    uint64_t step;
    bool overflows = __builtin_mul_overflow(
        view.strides[i] < 0 ? 0 - stride : stride, size - 1, &step);
    overflows |= __builtin_add_overflow(reach, step, &reach);
    overflows |= __builtin_mul_overflow(count, size, &count);
    if (overflows || reach > limit || count > limit) {
      return Status::InvalidArgument(
          std::string(tensor.name) + " has shape " + ShapeText(view.sizes) +
          " and " + StridesText(view) +
          "; its elements must lie within 2^62 bytes");
    }
  }
  if (view.data == nullptr) {
    return Status::InvalidArgument(std::string(tensor.name) +
                                   " is null; it must point to " +
                                   ShapeText(view.sizes) + " elements");
  }
  if (reinterpret_cast<uintptr_t>(view.data) % element != 0) {
    return Status::InvalidArgument(
        std::string(tensor.name) + " is not aligned; " + NameOf(view.dtype) +
        " data must be aligned to " + std::to_string(element) + " bytes");
  }
  return Status::Ok();
}

Status CheckDType(const NamedView& tensor, std::initializer_list<DType> allowed,
                  const char* why) {
  if (std::find(allowed.begin(), allowed.end(), tensor.view.dtype) !=
      allowed.end()) {
    return Status::Ok();
  }
  std::string names;
  for (DType dtype : allowed) {
    names += (names.empty() ? "" : " or ") + std::string(NameOf(dtype));
  }
  return Status::InvalidArgument(std::string(tensor.name) + " has dtype " +
                                 NameOf(tensor.view.dtype) + "; it must be " +
                                 names + (*why == '\0' ? "" : ", ") + why);
}

Status CheckShape(const NamedView& tensor,
                  const std::array<int64_t, 4>& expected, const char* meaning) {
  if (tensor.view.sizes == expected) return Status::Ok();
  return Status::InvalidArgument(
      std::string(tensor.name) + " has shape " + ShapeText(tensor.view.sizes) +
      "; it must be " + ShapeText(expected) + ", " + meaning);
}

Status CheckOverlap(const NamedViews& outputs, const NamedViews& inputs) {
  for (const NamedView& output : outputs) {
    const Footprint f = FootprintOf(output.view);
    if (f.end != f.base && OverlapsItself(f)) {
      return Status::InvalidArgument(
          std::string(output.name) + " has shape " +
          ShapeText(output.view.sizes) + " and " + StridesText(output.view) +
          "; the elements of an output must not share memory");
    }
    for (const NamedView& earlier : outputs) {
      if (&earlier == &output) break;
      if (Overlap(output.view, earlier.view)) {
        return Status::InvalidArgument(std::string(output.name) + " overlaps " +
                                       earlier.name +
                                       "; outputs must not share memory");
      }
    }
    for (const NamedView& input : inputs) {
      if (input.view.data != nullptr && Overlap(output.view, input.view)) {
        return Status::InvalidArgument(std::string(output.name) +
                                       " overlaps the input " + input.name +
                                       "; inputs are never written");
      }
    }
  }
  return Status::Ok();
}

}  // namespace fa2::attention
