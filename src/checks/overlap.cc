// SPDX-License-Identifier: Apache-2.0

// Which bytes the tensors of a call share.
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>

#include "src/checks/views.h"

namespace fa2::checks {
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
  // Rows of one packed buffer repeat with a common pitch: a step of either, or
  // what divides a step of both.
  for (const Footprint* f : {&a, &b}) {
    for (int i = 0; i < f->count; ++i) {
      const uint64_t step = f->steps[i].bytes;
      if (step != 0 && DisjointModulo(a, b, step)) return false;
    }
  }
  for (int i = 0; i < a.count; ++i) {
    for (int j = 0; j < b.count; ++j) {
      const uint64_t step = std::gcd(a.steps[i].bytes, b.steps[j].bytes);
      if (step != 0 && DisjointModulo(a, b, step)) return false;
    }
  }
  return true;
}

}  // namespace

Status CheckOverlap(const NamedViews& outputs, const NamedViews& inputs) {
  for (const NamedView& output : outputs) {
    const Footprint f = FootprintOf(output.view);
    if (f.end != f.base && OverlapsItself(f)) {
      return Status::InvalidArgument(
          std::string(output.name) + " has shape " +
          ShapeText(output.view.sizes) + " and strides " +
          ShapeText(output.view.strides) +
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

}  // namespace fa2::checks
