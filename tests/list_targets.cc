// SPDX-License-Identifier: Apache-2.0

// Prints the instruction sets that this build and this CPU both have, best
// first, a line each; with --engines the matrix engines. scripts/targets.sh
// caps the tests at them.
#include <iostream>
#include <memory>
#include <string>

#include "fa2/context.h"

int main(int argc, char** argv) {
  std::unique_ptr<fa2::Context> context;
  const fa2::Status status = fa2::Context::Create({}, &context);
  if (!status.ok()) {
    std::cerr << status.message() << '\n';
    return 1;
  }
  const fa2::ContextInfo info = context->Info();
  const bool engines = argc == 2 && std::string(argv[1]) == "--engines";
  for (const std::string& name : engines ? info.engines : info.targets) {
    std::cout << name << '\n';
  }
  return 0;
}
