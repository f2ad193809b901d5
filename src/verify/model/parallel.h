// SPDX-License-Identifier: Apache-2.0

// Independent pieces of work on several threads.
#ifndef FA2_SRC_VERIFY_MODEL_PARALLEL_H_
#define FA2_SRC_VERIFY_MODEL_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fa2::verify {

// Calls f(i) for i in [0, count), on up to `threads` threads (0: all cores).
// What f throws first is thrown here.
template <class F>
void ForEach(int64_t count, int threads, const F& f) {
  if (threads <= 0) {
    threads =
        std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    for (;;) {
      const int64_t i = next.fetch_add(1);
      if (i >= count) return;
      try {
        f(i);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count);
      }
    }
  };
  std::vector<std::thread> team;
  const int64_t wanted = std::min<int64_t>(threads, count) - 1;
  for (int64_t t = 0; t < wanted; ++t) {
    try {
      team.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // the system gives no more: fewer threads do it
    }
  }
  work();
  for (std::thread& thread : team) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_PARALLEL_H_
