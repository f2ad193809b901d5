// SPDX-License-Identifier: Apache-2.0
#include "src/threading/pools.h"

namespace fa2::threading {
namespace {

class CallerPool : public Pool {
 public:
  CallerPool(int num_threads, const ThreadPool& threads)
      : Pool(num_threads), threads_(threads) {}

  const char* name() const override { return "caller"; }

  void RunWorkers(int workers, Worker worker, void* argument) const override {
    threads_.run(threads_.opaque, workers, worker, argument);
  }

 private:
  const ThreadPool threads_;
};

}  // namespace

std::unique_ptr<Pool> MakeCallerPool(int num_threads,
                                     const ThreadPool& threads) {
  return std::make_unique<CallerPool>(num_threads, threads);
}

}  // namespace fa2::threading
