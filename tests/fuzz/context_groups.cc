// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <utility>

#include "tests/fuzz/fuzz.h"

namespace fa2::test {
namespace {

void OnThreads(void* /*opaque*/, int workers,
               void (*worker)(void* argument, int index), void* argument) {
  std::vector<std::thread> threads;
  for (int index = 1; index < workers; ++index) {
    threads.emplace_back(worker, argument, index);
  }
  worker(argument, 0);
  for (std::thread& thread : threads) thread.join();
}

Context* Make(const std::string& target, const std::string& engine, int threads,
              bool own_threads) {
  ContextOptions options;
  options.max_target = target;
  options.engine = engine;
  options.num_threads = threads;
  if (own_threads) options.thread_pool.run = OnThreads;
  static std::vector<std::unique_ptr<Context>> all;
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  if (!status.ok()) Fail(status.message());
  all.push_back(std::move(context));
  return all.back().get();
}

ContextGroup MakeGroup(const std::string& target, const std::string& engine) {
  const bool vectors = target != "scalar" && target != "emu128";
  return {target + " " + engine,
          vectors,
          Make(target, engine, 1, false),
          {Make(target, engine, 3, false), Make(target, engine, 16, false),
           Make(target, engine, 3, true)}};
}

}  // namespace

const std::vector<ContextGroup>& ContextGroups() {
  static const std::vector<ContextGroup> groups = [] {
    const ContextInfo info = Make("", "", 1, false)->Info();
    std::vector<ContextGroup> made;
    for (const std::string& target : info.targets) {
      made.push_back(MakeGroup(target, ""));
    }
    for (const std::string& engine : info.engines) {
      if (engine != info.engine) {
        made.push_back(MakeGroup(info.targets[0], engine));
      }
    }
    return made;
  }();
  return groups;
}

}  // namespace fa2::test
