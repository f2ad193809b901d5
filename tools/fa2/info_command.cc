// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "bench/peak/peak.h"
#include "fa2/context.h"
#include "src/verify/cases/error.h"
#include "tools/fa2/command.h"
#include "tools/fa2/machine.h"

namespace fa2::tool {
namespace {

using Json = nlohmann::ordered_json;

std::string Reason(const ContextInfo& info) {
  if (std::getenv("FA2_ENGINE") != nullptr) return "FA2_ENGINE says so";
  if (info.engine == "amx") return "the CPU has bf16 matrix tiles";
  if (info.engine == "bf16dot")
    return "the CPU has bf16 dot products, no tiles";
  return "the CPU has neither bf16 tiles nor bf16 dot products";
}

int Run(const std::string& json_path, int threads) {
  ContextOptions options;
  options.num_threads = threads;
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  if (!status.ok()) throw verify::Error(status.message());
  const ContextInfo info = context->Info();
  // 0 where this build has no loop for the engine's unit.
  const double peak = peak::MeasurePeak(peak::UnitOfEngine(info.engine),
                                        info.num_threads, info.target);
  const bool measured = peak > 0.0;
  Json json;
  json["version"] = FA2_VERSION;
  json["cpu"] = CpuName();
  json["target"] = info.target;
  json["targets"] = info.targets;
  json["engine"] = info.engine;
  json["engine_because"] = Reason(info);
  json["engines"] = info.engines;
  json["threads"] = info.num_threads;
  json["cores"] = std::thread::hardware_concurrency();
  json["pool"] = "onetbb";
  json["cache_bytes"] = {
      {"l1", CacheBytes(1)}, {"l2", CacheBytes(2)}, {"l3", CacheBytes(3)}};
  json["peak_gflops"] = measured ? Json(peak * 1e-9) : Json(nullptr);
  if (!json_path.empty()) WriteText(json_path, json.dump(1) + "\n");
  const auto join = [](const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) {
      text += (text.empty() ? "" : " ") + word;
    }
    return text;
  };
  fmt::print("fa2 {}\n", FA2_VERSION);
  fmt::print("cpu      {}\n", CpuName());
  fmt::print("target   {} (of {})\n", info.target, join(info.targets));
  fmt::print("engine   {} for bf16, since {} (of {})\n", info.engine,
             Reason(info), join(info.engines));
  fmt::print("threads  {} of {} cores, on oneTBB\n", info.num_threads,
             std::thread::hardware_concurrency());
  fmt::print("caches   {} KiB L1, {} KiB L2, {} KiB L3\n", CacheBytes(1) >> 10,
             CacheBytes(2) >> 10, CacheBytes(3) >> 10);
  if (measured)
    fmt::print("peak     {:.1f} GFLOP/s of {}\n", peak * 1e-9, info.engine);
  return kGood;
}

}  // namespace

Command AddInfo(CLI::App* app) {
  auto json = std::make_shared<std::string>();
  auto threads = std::make_shared<int>(0);
  app->add_option("--json", *json, "Write it here as JSON");
  app->add_option("--threads", *threads, "0: FA2_NUM_THREADS, or all cores")
      ->check(CLI::NonNegativeNumber);
  return [json, threads] { return Run(*json, *threads); };
}

}  // namespace fa2::tool
