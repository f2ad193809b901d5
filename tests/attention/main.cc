// SPDX-License-Identifier: Apache-2.0

// Runs a suite with the instruction set and engine of the environment
// (FA2_MAX_TARGET, FA2_ENGINE), or says that the build or the CPU lacks them
// and exits with the code that CTest takes for "skipped".
#include <gtest/gtest.h>

#include <iostream>

#include "fa2/context.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  testing::InitGoogleTest(&argc, argv);
  fa2::Context* context = nullptr;
  const fa2::Status status = fa2::Context::Default(&context);
  if (status.code() == fa2::StatusCode::kUnsupported) {
    std::cout << "skipped: " << status.message() << '\n';
    return kSkipped;
  }
  if (!status.ok()) {
    std::cerr << status.message() << '\n';
    return 1;
  }
  const fa2::ContextInfo info = context->Info();
  std::cout << "target " << info.target << ", engine " << info.engine << '\n';
  return RUN_ALL_TESTS();
}
