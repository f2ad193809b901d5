// Waves: how the heads and sequences of a problem go through the workspace.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_WAVES_H_
#define FA2_SRC_ATTENTION_SCHEDULE_WAVES_H_

#include <cstdint>
#include <vector>

#include "src/attention/call/problem.h"

namespace fa2::attention {

// Heads of some sequences that are worked through together: by all workers, one
// wave after the other, or, where there are waves enough, by one worker each,
// who then finds in its caches what it packed, and waits for nobody.
struct Wave {
  // Ranges of kv heads and of sequences.
  int64_t head_begin = 0, head_end = 0;
  int64_t sequence_begin = 0, sequence_end = 0;
  int64_t begin = 0, end = 0;  // of the plan's chains or items
  double cost = 0.0;           // visible pairs
  int64_t heads() const { return head_end - head_begin; }
};

struct Waves {
  std::vector<Wave> list;
  bool alone = false;  // a worker each, longest first
  // Of `all` threads those that work at one wave.
  int threads(int all) const { return alone ? 1 : all; }
  // Parts of the workspace that waves take.
  int places(int workers) const { return alone ? workers : 1; }
};

// Items that a wave is to have for each thread. The forward, which gains less
// by waves, wants more.
inline constexpr double kBackwardWaveItems = 4.0;
inline constexpr double kForwardWaveItems = 16.0;

// The least that a wave of `threads` threads is to have of a call that has so
// many operations and, in each of `parts` parts of a head, so many items,
// `wanted_items` of which each thread is to get: in kv heads with all of their
// sequences, so that less than 1 is a part of the sequences.
double LeastWave(const Problem& problem, double operations, int threads,
                 double wanted_items, int64_t items, int64_t parts);

// Whether `threads` threads are to take a head of a sequence each, and then the
// next: where that leaves none of them idle for long. `pairs`: visible ones of
// all sequences.
bool TakeHeadsAlone(const Problem& problem, double pairs, int threads);

// Adds the waves of a problem of so many visible pairs to an empty list, of at
// least `least` each, see LeastWave, and as equal as may be.
void CutWaves(const Problem& problem, double pairs, double least,
              std::vector<Wave>* waves);

// The longest first, where they are for one worker each. Their chains or items
// have been listed.
void SortAlone(Waves* waves);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_WAVES_H_
