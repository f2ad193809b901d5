// SPDX-License-Identifier: Apache-2.0

// Runs a suite with the instruction set and engine of the environment
// (FA2_MAX_TARGET, FA2_ENGINE), or says that the build or the CPU lacks them
// and exits with the code that CTest takes for "skipped". So it does with
// FA2_TEST_OTHER_ENGINE where the engine is that of a run without FA2_ENGINE.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

#include "fa2/context.h"

namespace {

// The engine of a context that FA2_ENGINE does not cap.
std::string UncappedEngine() {
  const char* const given = std::getenv("FA2_ENGINE");
  const std::string cap = given == nullptr ? "" : given;
  unsetenv("FA2_ENGINE");
  std::unique_ptr<fa2::Context> context;
  const fa2::Status status =
      fa2::Context::Create(fa2::ContextOptions(), &context);
  if (given != nullptr) setenv("FA2_ENGINE", cap.c_str(), 1);
  return status.ok() ? context->Info().engine : status.message();
}

}  // namespace

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
  if (std::getenv("FA2_TEST_OTHER_ENGINE") != nullptr &&
      info.engine == UncappedEngine()) {
    std::cout << "skipped: the suite without @ has engine " << info.engine
              << '\n';
    return kSkipped;
  }
  std::cout << "target " << info.target << ", engine " << info.engine << '\n';
  return RUN_ALL_TESTS();
}
