// SPDX-License-Identifier: Apache-2.0
#include "src/threading/arena.h"

#include <tbb/global_control.h>
#include <tbb/info.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "src/platform/fork_mutex.h"

namespace fa2::threading {
namespace {

// TBB goes on wanting workers for an arena that is destroyed until one of them
// has looked into it, and starts others meanwhile: contexts of 2, 3 and 4
// threads, 200 of each in turns with ten calls of 60 us, ended with 1,024
// threads. Mostly workers have looked into an arena by the time that so many
// others were given back after it; where not, there is the limit below.
constexpr size_t kMostIdle = 8;

struct Arenas {
  Arenas() { idle.reserve(kMostIdle); }

  platform::ForkMutex mutex;
  std::vector<std::shared_ptr<Arena>> idle;  // given back last: at the end
  std::atomic<int> wanted{0};
  // By default TBB has as many workers as cores, and says so on stderr when an
  // arena asks for more.
  std::unique_ptr<tbb::global_control> limit;
};

// As long as the process: contexts may be destroyed when it ends.
Arenas& All() {
  static Arenas* const all = new Arenas;
  return *all;
}

}  // namespace

int Arena::Wanted() { return All().wanted.load(); }

void Arena::SetCounted(bool counted) {
  const std::lock_guard<platform::ForkMutex> lock(All().mutex);
  if (counted_ == counted) return;
  counted_ = counted;
  All().wanted.fetch_add(counted ? num_threads_ : -num_threads_);
  try {
    // The smallest of all limits holds: the old one too until it is replaced.
    All().limit = std::make_unique<tbb::global_control>(
        tbb::global_control::max_allowed_parallelism,
        static_cast<size_t>(tbb::info::default_concurrency() + Wanted()));
  } catch (const std::exception&) {
    // No memory: the old one goes on.
  }
}

std::shared_ptr<Arena> TakeArena(int num_threads) {
  std::vector<std::shared_ptr<Arena>>& idle = All().idle;
  {
    const std::lock_guard<platform::ForkMutex> lock(All().mutex);
    const auto found =
        std::find_if(idle.rbegin(), idle.rend(),
                     [num_threads](const std::shared_ptr<Arena>& arena) {
                       return arena->num_threads() == num_threads;
                     });
    if (found != idle.rend()) {
      std::shared_ptr<Arena> arena = std::move(*found);
      idle.erase(std::next(found).base());
      return arena;
    }
  }
  return std::make_shared<Arena>(num_threads);
}

void GiveBackArena(std::shared_ptr<Arena> arena) {
  std::vector<std::shared_ptr<Arena>>& idle = All().idle;
  std::shared_ptr<Arena> oldest;  // destroyed when the mutex is free
  const std::lock_guard<platform::ForkMutex> lock(All().mutex);
  if (idle.size() == kMostIdle) {
    oldest = std::move(idle.front());
    idle.erase(idle.begin());
  }
  idle.push_back(std::move(arena));
}

}  // namespace fa2::threading
