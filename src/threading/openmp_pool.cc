// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <utility>

#include "src/platform/fork_count.h"
#include "src/platform/loaded_library.h"
#include "src/threading/own_threads.h"
#include "src/threading/pools.h"

namespace fa2::threading {
namespace {

// What GCC compiles a parallel region to, which the runtimes of LLVM and Intel
// offer too, and functions of the OpenMP specification (section 3.2).
struct Runtime {
  void (*parallel)(void (*body)(void*), void* argument, unsigned num_threads,
                   unsigned flags) = nullptr;
  int (*get_thread_num)() = nullptr;
  int (*get_max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;

  bool found() const {
    return parallel != nullptr && get_thread_num != nullptr &&
           get_max_threads != nullptr && in_parallel != nullptr;
  }
};

Runtime FindRuntime() {
  // A process may hold several. Where PyTorch is, it is the one that PyTorch
  // links to.
  const platform::LoadedLibrary library = platform::LoadedLibrary::With(
      "GOMP_parallel", {"libtorch_cpu.", "libgomp", "libiomp5", "libomp"});
  Runtime runtime;
  library.Find("GOMP_parallel", &runtime.parallel);
  library.Find("omp_get_thread_num", &runtime.get_thread_num);
  library.Find("omp_get_max_threads", &runtime.get_max_threads);
  library.Find("omp_in_parallel", &runtime.in_parallel);
  return runtime;
}

// Threads that the system is known to give for the regions of this thread: each
// thread that opens regions has others of its own for them.
thread_local int t_granted = 1;

// A parallel region. Its threads beyond the workers of the call leave it at
// once.
struct Region {
  const Runtime& runtime;
  int workers;
  void (*worker)(void* argument, int index);
  void* argument;
};

class OpenMpPool : public Pool {
 public:
  OpenMpPool(int num_threads, const Runtime& runtime)
      : Pool(num_threads),
        runtime_(runtime),
        of_child_(MakeTbbPool(num_threads)) {}

  const char* name() const override { return "openmp"; }

  void RunWorkers(int workers, Worker worker, void* argument) const override {
    // libgomp waits for ever for threads that a fork has left behind, and does
    // not tell whether there were any.
    if (platform::ForkCount() > 0) {
      return of_child_->RunWorkers(workers, worker, argument);
    }
    // The cores are at work on the region: its caller works alone.
    if (runtime_.in_parallel() != 0) return;
    // libgomp ends threads that a smaller region leaves over and starts new
    // ones for the next larger one; so this one is as large as the host's.
    const int threads = std::max(workers, runtime_.get_max_threads());
    // Runtimes end the process when they are refused a thread.
    if (t_granted < threads) {
      t_granted = RunOnOwnThreads(threads, workers, worker, argument);
      return;
    }
    Region region{runtime_, workers, worker, argument};
    runtime_.parallel(
        [](void* r) {
          const Region& entered = *static_cast<Region*>(r);
          const int thread = entered.runtime.get_thread_num();
          if (thread < entered.workers)
            entered.worker(entered.argument, thread);
        },
        &region, static_cast<unsigned>(threads), 0);
  }

 private:
  const Runtime runtime_;
  const std::unique_ptr<Pool> of_child_;
};

}  // namespace

std::unique_ptr<Pool> MakeOpenMpPool(int num_threads) {
  const Runtime runtime = FindRuntime();
  if (!runtime.found()) return nullptr;
  return std::make_unique<OpenMpPool>(num_threads, runtime);
}

}  // namespace fa2::threading
