// SPDX-License-Identifier: Apache-2.0

// What the fuzz targets share. Each defines
//   extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// for libFuzzer, or for replay_main.cc.
#ifndef FA2_TESTS_FUZZ_FUZZ_H_
#define FA2_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fa2/context.h"
#include "tests/support/random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fa2::test {

// Says what is wrong and ends the process, which keeps the input.
[[noreturn]] inline void Fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

// Bytes of an input as text.
inline std::string TextOf(const uint8_t* data, size_t size) {
  return std::string(reinterpret_cast<const char*>(data), size);
}

// Contexts that must give the same bits, on one target and engine.
struct ContextGroup {
  std::string name;
  bool vectors = true;            // else it takes half of all the time
  Context* one = nullptr;         // thread
  std::vector<Context*> several;  // 3 and 16, and 3 of the program's own

  // The one; and one of the several in one call of eight, since waking and
  // waiting for threads takes many times as long as a small call.
  std::vector<Context*> Some(int64_t which, Random& random) const {
    std::vector<Context*> some = {one};
    if (random.Chance(1.0 / 8.0)) {
      some.push_back(several[static_cast<size_t>(which) % several.size()]);
    }
    return some;
  }
};

// One for every target of this build and CPU, and for every engine of the best
// target. Made on the first call.
const std::vector<ContextGroup>& ContextGroups();

}  // namespace fa2::test

#endif  // FA2_TESTS_FUZZ_FUZZ_H_
