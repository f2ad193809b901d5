// SPDX-License-Identifier: Apache-2.0

// The same calls again and again, under load: on every engine, every pool and
// from 1 to 32 threads, all options. The bits must be those of the first time,
// on one thread without load.
//   soak [--repeats=500] [--threads=32] [--seconds=0] [--no-load]
// --seconds ends it sooner; --no-load is for a machine that has its load.
// Prints a line for each engine and returns 1 where a result differed.
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/soak/load.h"
#include "tests/support/attention_case.h"
#include "tests/support/case_generator.h"
#include "tests/support/output_hash.h"

namespace fa2::test {
namespace {

struct Arguments {
  int repeats = 500;
  int threads = 32;
  double seconds = 0.0;
  bool load = true;
};

struct Work {
  AttentionCase c;
  AttentionInputs inputs;
};

// Each kind of case that the generator knows.
std::vector<Work> Cases() {
  std::vector<AttentionCase> cases;
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    CaseOptions options;
    options.large = seed % 4 == 0;
    options.short_heads = seed % 4 == 1;
    options.few_queries = seed % 8 == 2;
    cases.push_back(RandomCase(seed, options));
  }
  std::vector<Work> all;
  for (const AttentionCase& c : cases) all.push_back({c, MakeInputs(c)});
  return all;
}

void OnThreads(void* /*opaque*/, int workers,
               void (*worker)(void* argument, int index), void* argument) {
  std::vector<std::thread> threads;
  for (int i = 1; i < workers; ++i) threads.emplace_back(worker, argument, i);
  worker(argument, 0);
  for (std::thread& thread : threads) thread.join();
}

std::unique_ptr<Context> Make(const std::string& engine,
                              const std::string& pool, int threads) {
  ContextOptions options;
  options.engine = engine;
  options.num_threads = threads;
  if (pool == "caller") {
    options.thread_pool.run = OnThreads;
  } else {
    options.pool = pool;
  }
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return context;
}

// 0 where the call failed.
uint64_t HashOn(Context* context, const Work& work) {
  uint64_t hash;
  const Status status = HashOfCall(work.c, work.inputs, context, &hash);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return hash;
}

struct Engine {
  std::string name;
  std::vector<uint64_t> hashes;  // of the cases
  int64_t calls = 0, different = 0;
};

int Run(const Arguments& a) {
  std::vector<std::string> pools = {"tbb", "caller"};
  if (dlopen("libgomp.so.1", RTLD_NOW) != nullptr) pools.push_back("openmp");
  const std::vector<Work> work = Cases();
  const std::unique_ptr<Context> any = Make("", "", 1);
  if (any == nullptr) return 1;
  std::vector<Engine> engines;
  for (const std::string& name : any->Info().engines) {
    const std::unique_ptr<Context> context = Make(name, "", 1);
    if (context == nullptr) return 1;
    Engine engine{name, {}, 0, 0};
    for (const Work& w : work) {
      engine.hashes.push_back(HashOn(context.get(), w));
    }
    engines.push_back(std::move(engine));
  }
  const std::unique_ptr<Load> load =
      a.load ? std::make_unique<Load>() : nullptr;
  const size_t processes = load == nullptr ? 0 : load->processes();
  const auto begin = std::chrono::steady_clock::now();
  int repeats = 0;
  for (; repeats < a.repeats; ++repeats) {
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - begin;
    if (a.seconds > 0.0 && elapsed.count() > a.seconds) break;
    // Every pool meets every number of threads.
    const auto turn = static_cast<size_t>(repeats);
    const std::string& pool = pools[turn % pools.size()];
    const int threads = 1 + static_cast<int>(turn / pools.size()) % a.threads;
    for (Engine& engine : engines) {
      const auto context = Make(engine.name, pool, threads);
      if (context == nullptr) return 1;
      for (size_t n = 0; n < work.size(); ++n) {
        ++engine.calls;
        const uint64_t hash = HashOn(context.get(), work[n]);
        if (hash != 0 && hash == engine.hashes[n]) continue;
        ++engine.different;
        std::fprintf(stderr, "%s, %s, %d threads: other bits in %s\n",
                     engine.name.c_str(), pool.c_str(), threads,
                     Describe(work[n].c).c_str());
      }
    }
  }
  bool good = repeats > 0;
  for (const Engine& engine : engines) {
    std::printf(
        "%s: %d repeats of %zu cases on %zu pools, 1 to %d threads, "
        "beside %zu processes: %lld calls, %lld with other bits\n",
        engine.name.c_str(), repeats, work.size(), pools.size(), a.threads,
        processes, static_cast<long long>(engine.calls),
        static_cast<long long>(engine.different));
    good &= engine.different == 0;
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace fa2::test

int main(int argc, char** argv) {
  fa2::test::Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::string value = word.substr(word.find('=') + 1);
    if (word.rfind("--repeats=", 0) == 0) {
      arguments.repeats = std::stoi(value);
    } else if (word.rfind("--threads=", 0) == 0) {
      arguments.threads = std::stoi(value);
    } else if (word.rfind("--seconds=", 0) == 0) {
      arguments.seconds = std::stod(value);
    } else if (word == "--no-load") {
      arguments.load = false;
    } else {
      std::fprintf(stderr,
                   "soak [--repeats=N] [--threads=N] [--seconds=N] "
                   "[--no-load]\n");
      return 2;
    }
  }
  return fa2::test::Run(arguments);
}
