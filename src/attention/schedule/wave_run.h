// Who works through the waves of a plan.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_WAVE_RUN_H_
#define FA2_SRC_ATTENTION_SCHEDULE_WAVE_RUN_H_

#include <cstdint>

#include "src/attention/schedule/waves.h"
#include "src/threading/team.h"

namespace fa2::attention {

// Tells each of `count` workers its part of the workspace: one of `places`,
// Waves::places() of them, or nothing while workers is null.
template <class Place, class Worker>
void ShareOutPlaces(const Waves& waves, Place* places, int count,
                    Worker* workers) {
  for (int i = 0; workers != nullptr && i < count; ++i) {
    workers[i].place = places + (waves.alone ? i : 0);
  }
}

// Calls run(team, place) for every wave, after place.wave has been set to it:
// the team is the whole one or, where waves are for one worker, that worker
// alone. `places` as above.
template <class Place, class Run>
void RunWaves(const Waves& waves, threading::Team& team, Place* places,
              const Run& run) {
  if (waves.alone) {
    team.For(static_cast<int64_t>(waves.list.size()),
             [&](int64_t wave, int worker) {
               threading::Team alone(1, worker, nullptr);
               places[worker].wave = &waves.list[wave];
               run(alone, places[worker]);
             });
    return;
  }
  for (const Wave& wave : waves.list) {
    places[0].wave = &wave;
    run(team, places[0]);
  }
}

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_WAVE_RUN_H_
