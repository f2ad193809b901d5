// SPDX-License-Identifier: Apache-2.0
#include "src/threading/own_threads.h"

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace fa2::threading {

int RunOnOwnThreads(int threads, int workers,
                    void (*worker)(void* argument, int index), void* argument) {
  std::vector<std::thread> others;
  // They end after the last one has begun, so as to have been there at once.
  std::atomic<bool> complete{false};
  try {
    others.reserve(static_cast<size_t>(threads));
    for (int index = 1; index < threads; ++index) {
      others.emplace_back([=, &complete] {
        if (index < workers) worker(argument, index);
        while (!complete.load()) std::this_thread::yield();
      });
    }
  } catch (const std::exception&) {
    // No more threads, or no memory for them: those that came will do.
  }
  const int running = static_cast<int>(others.size()) + 1;
  complete.store(true);
  worker(argument, 0);
  for (std::thread& thread : others) thread.join();
  return running;
}

}  // namespace fa2::threading
