// SPDX-License-Identifier: Apache-2.0

// fa2_demo: what fa2 computes, held against a GPU's kernel and float64, and how
// fast it does so here. Exit code 0: good; 1: an error above the GPU's, or a
// call failed; 2: usage.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include "fa2/context.h"
#include "tools/demo/golden_table.h"
#include "tools/demo/speed_table.h"

namespace {

constexpr int kGood = 0;
constexpr int kMismatch = 1;
constexpr int kUsage = 2;

int Run(const std::string& goldens, const fa2::demo::SpeedOptions& speed,
        const fa2::ContextOptions& options, bool with_speed) {
  std::unique_ptr<fa2::Context> context;
  const fa2::Status status = fa2::Context::Create(options, &context);
  if (!status.ok()) {
    fmt::print(stderr, "fa2_demo: {}\n", status.message());
    return kUsage;
  }
  const fa2::ContextInfo info = context->Info();
  fmt::print("fa2 on target {}, engine {} for bf16\n\n", info.target,
             info.engine);
  fmt::print("== 1. The same numbers as a GPU's attention kernel\n");
  const bool good = fa2::demo::PrintGoldenTable(goldens, context.get());
  if (with_speed) {
    fmt::print("\n== 2. Speed\n");
    fa2::demo::PrintSpeedTable(speed, context.get());
  }
  return good ? kGood : kMismatch;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Shows what fa2 computes, and how fast", "fa2_demo");
  std::string goldens = FA2_TEST_DATA "/memeff_goldens.safetensors";
  fa2::demo::SpeedOptions speed;
  fa2::ContextOptions options;
  bool no_speed = false;
  app.add_option("--goldens", goldens, "File with the GPU's outputs");
  app.add_option("--threads", options.num_threads,
                 "0: FA2_NUM_THREADS, or all cores")
      ->capture_default_str();
  app.add_option("--sequence", speed.sequence, "Queries and keys to time")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--heads", speed.heads, "Heads to time")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seconds", speed.seconds, "Spent on each number")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--no-speed", no_speed, "Check only");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kGood : kUsage;
  }
  try {
    return Run(goldens, speed, options, !no_speed);
  } catch (const std::exception& error) {
    fmt::print(stderr, "fa2_demo: {}\n", error.what());
    return kMismatch;
  }
}
