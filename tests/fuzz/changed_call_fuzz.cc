// SPDX-License-Identifier: Apache-2.0

// A call of the C interface with some of its fields changed to anything. What
// is no longer valid gets a status and a sentence, and no byte of memory is
// written; what still is writes its outputs and nothing beside them.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "fa2/types.h"
#include "tests/fuzz/c_calls.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/random.h"

namespace fa2::test {
namespace {

int64_t AnyInteger(Random& random) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  if (random.Chance(0.6)) return random.Integer(-4, 20);
  return random.Pick<int64_t>({kMax, kMin, kMax - 1, kMin + 1, int64_t{1} << 62,
                               int64_t{1} << 61, -(int64_t{1} << 62),
                               int64_t{1} << 32, int64_t{1} << 31,
                               -(int64_t{1} << 32), (int64_t{1} << 31) - 1,
                               int64_t{3037000500}, 4096, 1000, -1000});
}

double AnyDouble(Random& random) {
  return random.Pick<double>({0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e308, -1e308,
                              1e-310, INFINITY, -INFINITY, NAN});
}

void ChangeTensor(CCall& call, Random& random) {
  const TensorFields& t = random.Pick(call.tensors);
  switch (random.Integer(0, 7)) {
    case 0:
      *t.data = nullptr;
      break;
    case 1:  // another one's memory, or a part of it
      *t.data = *random.Pick(call.tensors).data;
      if (*t.data != nullptr) *t.data += random.Integer(-64, 64);
      break;
    case 2:
      *t.dtype = static_cast<int32_t>(AnyInteger(random));
      break;
    case 3:
      if (random.Chance(0.2)) *t.reserved = 1;
      break;
    case 4:  // ids and prefix sums are contents that count
      if (*t.data != nullptr && !t.output) {
        const int64_t value = AnyInteger(random);
        std::memcpy(*t.data + 4 * random.Integer(0, 6), &value, 4);
      }
      break;
    case 5:
    case 6:
      t.sizes[random.Integer(0, 3)] = AnyInteger(random);
      break;
    default:
      t.strides[random.Integer(0, 3)] = AnyInteger(random);
  }
}

void ChangeSomething(CCall& call, Random& random) {
  switch (random.Integer(0, 9)) {
    case 0:
      if (!call.ints.empty()) {
        *random.Pick(call.ints) = static_cast<int32_t>(AnyInteger(random));
      }
      break;
    case 1:
      if (!call.longs.empty()) *random.Pick(call.longs) = AnyInteger(random);
      break;
    case 2:
      if (!call.doubles.empty()) *random.Pick(call.doubles) = AnyDouble(random);
      break;
    case 3:
      if (!call.struct_sizes.empty() && random.Chance(0.3)) {
        size_t* const size = random.Pick(call.struct_sizes);
        *size = random.Chance(0.5)
                    ? *size + static_cast<size_t>(8 * random.Integer(-40, 40))
                    : static_cast<size_t>(AnyInteger(random));
      }
      break;
    default:
      ChangeTensor(call, random);
  }
}

struct Reach {
  // Bytes from the arena's begin: exact within the arena, and large enough a
  // type for what 64 bits cannot hold.
  double low = 0, high = 0;
  bool empty = true;
  bool negative = false;  // a size is
};

Reach ReachOf(const TensorFields& t) {
  Reach reach;
  double low = 0, high = 0;  // sums of one sign each
  bool none = false;
  for (int i = 0; i < 4; ++i) {
    reach.negative |= t.sizes[i] < 0;
    none |= t.sizes[i] <= 0;
    const double last = (static_cast<double>(t.sizes[i]) - 1) *
                        static_cast<double>(t.strides[i]);
    (last < 0 ? low : high) += last;
  }
  const auto size = static_cast<double>(SizeOf(static_cast<DType>(*t.dtype)));
  if (*t.data == nullptr || none || size == 0) return reach;
  reach.empty = false;
  const double begin = static_cast<double>(*t.data - Arena());
  reach.low = begin + low * size;
  reach.high = begin + (high + 1) * size;
  return reach;
}

// Whether every tensor lies in the arena, as fa2 may take for granted, or
// cannot be described by 64 bits, which it has to see.
bool IsCallersMemory(const CCall& call) {
  for (const TensorFields& t : call.tensors) {
    const Reach reach = ReachOf(t);
    if (reach.empty || reach.negative) continue;
    if (reach.low < 0 || reach.high > static_cast<double>(kArenaBytes)) {
      return false;
    }
  }
  return true;
}

// What would take minutes is left out: inputs of stride 0 may be of any size.
bool IsLong(const CCall& call) {
  for (const TensorFields& t : call.tensors) {
    double elements = 1;
    for (int i = 0; i < 4; ++i) {
      if (t.sizes[i] <= 0) return false;  // refused, or nothing to do
      elements *= static_cast<double>(t.sizes[i]);
      if (elements > 1 << 20) return true;
    }
  }
  return false;
}

void Judge(const CCall& call, fa2_status status,
           const std::vector<uint8_t>& before) {
  const uint8_t* const after = Arena();
  const std::string sentence = fa2_last_error();
  const std::string where = std::string(call.name) + ": ";
  if (status == FA2_INTERNAL) Fail(where + "internal error: " + sentence);
  if (status != FA2_OK) {
    if (std::memcmp(after, before.data(), kArenaBytes) != 0) {
      Fail(where + "memory was written in spite of: " + sentence);
    }
    if (sentence.size() < 10) Fail(where + "no sentence: '" + sentence + "'");
    for (const char c : sentence) {
      if (c < ' ' || c > '~') Fail(where + "not plain text: " + sentence);
    }
    return;
  }
  if (!sentence.empty()) Fail(where + "ok, and says: " + sentence);
  std::vector<uint8_t> expected = before;
  for (const TensorFields& t : call.tensors) {
    const Reach reach = ReachOf(t);
    if (!t.output || reach.empty) continue;
    std::memcpy(expected.data() + static_cast<int64_t>(reach.low),
                after + static_cast<int64_t>(reach.low),
                static_cast<size_t>(reach.high - reach.low));
  }
  if (std::memcmp(after, expected.data(), kArenaBytes) != 0) {
    Fail(where + "memory beside the outputs was written");
  }
}

}  // namespace
}  // namespace fa2::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fa2::test;
  static fa2_context* const context = [] {
    fa2_context_options options = {};
    options.struct_size = sizeof options;
    options.num_threads = 1;
    options.memory_limit = size_t{64} << 20;
    fa2_context* made = nullptr;
    if (fa2_context_create(&options, &made) != FA2_OK) Fail(fa2_last_error());
    return made;
  }();
  Random random(data, size);
  const int64_t which = random.Integer(0, kCCalls - 1);
  const auto dtype = static_cast<int32_t>(random.Integer(FA2_F32, FA2_F64));
  CCall call = MakeCCall(which, dtype, random.Chance(0.3));
  for (int64_t n = random.Integer(0, 4); n > 0; --n) {
    ChangeSomething(call, random);
  }
  if (!IsCallersMemory(call) || IsLong(call)) return 0;
  const std::vector<uint8_t> before(Arena(), Arena() + kArenaBytes);
  Judge(call, call.run(context), before);
  return 0;
}
