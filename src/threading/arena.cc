// SPDX-License-Identifier: Apache-2.0
#include "src/threading/arena.h"

#include <algorithm>
#include <cstddef>
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
// threads. What has been idle for this many pools more is wanted no longer.
constexpr size_t kMostIdle = 8;

struct IdleArenas {
  IdleArenas() { arenas.reserve(kMostIdle); }
  platform::ForkMutex mutex;
  std::vector<std::shared_ptr<Arena>> arenas;  // given back last: at the end
};

// As long as the process: contexts may be destroyed when it ends.
IdleArenas& Idle() {
  static IdleArenas* const idle = new IdleArenas;
  return *idle;
}

}  // namespace

std::atomic<int> Arena::wanted_{0};

std::shared_ptr<Arena> TakeArena(int num_threads) {
  IdleArenas& idle = Idle();
  {
    const std::lock_guard<platform::ForkMutex> lock(idle.mutex);
    const auto found =
        std::find_if(idle.arenas.rbegin(), idle.arenas.rend(),
                     [num_threads](const std::shared_ptr<Arena>& arena) {
                       return arena->num_threads() == num_threads;
                     });
    if (found != idle.arenas.rend()) {
      std::shared_ptr<Arena> arena = std::move(*found);
      idle.arenas.erase(std::next(found).base());
      return arena;
    }
  }
  return std::make_shared<Arena>(num_threads);
}

void GiveBackArena(std::shared_ptr<Arena> arena) {
  IdleArenas& idle = Idle();
  std::shared_ptr<Arena> oldest;  // destroyed when the mutex is free
  const std::lock_guard<platform::ForkMutex> lock(idle.mutex);
  if (idle.arenas.size() == kMostIdle) {
    oldest = std::move(idle.arenas.front());
    idle.arenas.erase(idle.arenas.begin());
  }
  idle.arenas.push_back(std::move(arena));
}

}  // namespace fa2::threading
