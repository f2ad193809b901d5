// SPDX-License-Identifier: Apache-2.0

// Valid calls of every C function that computes, over memory of one arena, with
// pointers to all that a caller fills in.
#ifndef FA2_TESTS_FUZZ_C_CALLS_H_
#define FA2_TESTS_FUZZ_C_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "fa2/fa2_c.h"

namespace fa2::test {

// A tensor of either kind.
struct TensorFields {
  uint8_t** data;
  int32_t* dtype;
  int32_t* reserved;
  int64_t* sizes;
  int64_t* strides;
  bool output;
};

struct CCall {
  const char* name = "";
  std::vector<TensorFields> tensors;
  std::vector<int32_t*> ints;
  std::vector<int64_t*> longs;
  std::vector<double*> doubles;
  std::vector<size_t*> struct_sizes;
  std::function<fa2_status(fa2_context*)> run;
};

// What tensors lie in: a slot each, which they begin in the middle of. All
// bytes are 0x3C, small positive numbers in every float type, but for the ids,
// prefix sums and lists of blocks.
inline constexpr size_t kSlotBytes = 16384;
inline constexpr size_t kSlots = 26;
inline constexpr size_t kArenaBytes = kSlots * kSlotBytes;
uint8_t* Arena();

inline constexpr int64_t kCCalls = 13;

// Resets the arena and makes call `which` in [0, kCCalls). The structs are
// static: one call at a time.
CCall MakeCCall(int64_t which, int32_t dtype, bool packed_sequences);

}  // namespace fa2::test

#endif  // FA2_TESTS_FUZZ_C_CALLS_H_
