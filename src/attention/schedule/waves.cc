#include "src/attention/schedule/waves.h"

#include <algorithm>
#include <cmath>

namespace fa2::attention {
namespace {

// A wave of heads ends with all workers waiting a few times; each of them gets
// at least this much of it before (some 1 ms on AMX).
constexpr double kLeastWaveOperations = 1e9;
// Heads of the longest sequence that there must be for each thread before they
// take them alone, and how much longer than an equal share the last may take.
// With fewer the slowest thread of a shared machine has too much left (AMX, 16
// threads, 32 heads each 1.1 to 1.25 times as fast, 4 heads 0.88 to 1.08).
constexpr double kLeastAlone = 8.0;
constexpr double kMostOfAlone = 1.1;

}  // namespace

// As few as keep the threads busy: what they share of the workspace stays in
// caches. But if possible a head, or sequence or part of one, for each thread,
// whose dQ then stays in the caches of one core (AMX, 16 threads, H 16, N 4096,
// against two threads to a head: D 128 and 256 25-40% faster, D 64 the same).
double LeastWave(const Problem& problem, double operations, int threads,
                 double wanted_items, int64_t items, int64_t parts) {
  if (threads == 1) return 0.0;
  const auto per_thread = [threads](double wanted, int64_t have) {
    return wanted * threads / static_cast<double>(std::max<int64_t>(have, 1));
  };
  return std::max(
      {per_thread(wanted_items, items * parts),
       per_thread(1.0, static_cast<int64_t>(problem.sequences.size()) * parts),
       kLeastWaveOperations * threads * static_cast<double>(problem.kv_heads) /
           std::max(operations, 1.0)});
}

bool TakeHeadsAlone(const Problem& problem, double pairs, int threads) {
  double longest = 0.0;
  for (const Sequence& s : problem.sequences) {
    longest = std::max(longest, s.mask.Pairs());
  }
  const double each = pairs * static_cast<double>(problem.kv_heads) /
                      static_cast<double>(threads);
  return longest > 0.0 && each >= kLeastAlone * longest &&
         std::ceil(each / longest) * longest <= kMostOfAlone * each;
}

void CutWaves(const Problem& problem, double pairs, double least,
              std::vector<Wave>* waves) {
  const int64_t sequences = static_cast<int64_t>(problem.sequences.size());
  const double heads = static_cast<double>(problem.kv_heads);
  const auto parts = [](double whole, double part) {
    return std::max<int64_t>(1, static_cast<int64_t>(whole / part));
  };
  int64_t wave_heads = 1;
  int64_t groups = sequences;  // of sequences
  if (least >= 1.0) {
    wave_heads = CeilDiv(problem.kv_heads, parts(heads, least));
    groups = 1;
  } else if (least > 0.0) {
    groups = std::min(groups, parts(1.0, least));
  }
  // A sequence is in the group in whose share of the pairs it begins.
  double before = 0.0;
  const auto group_of_next = [&] {
    return std::min(groups - 1,
                    static_cast<int64_t>(before / std::max(pairs, 1.0) *
                                         static_cast<double>(groups)));
  };
  Wave wave;
  while (wave.sequence_begin < sequences) {
    const int64_t group = group_of_next();
    wave.sequence_end = wave.sequence_begin;
    double cost = 0.0;
    do {
      const Sequence& s = problem.sequences[wave.sequence_end++];
      const double of_head = s.mask.Pairs();
      before += of_head;
      cost += of_head;
    } while (wave.sequence_end < sequences && groups < sequences &&
             group_of_next() == group);
    for (wave.head_begin = 0; wave.head_begin < problem.kv_heads;
         wave.head_begin = wave.head_end) {
      wave.head_end = std::min(problem.kv_heads, wave.head_begin + wave_heads);
      wave.cost = cost * static_cast<double>(wave.heads());
      waves->push_back(wave);
    }
    wave.sequence_begin = wave.sequence_end;
  }
}

// std::sort, unlike stable_sort, needs no memory; places in the plan make it
// stable.
void SortAlone(Waves* waves) {
  if (!waves->alone) return;
  std::sort(waves->list.begin(), waves->list.end(),
            [](const Wave& a, const Wave& b) {
              return a.cost != b.cost ? a.cost > b.cost : a.begin < b.begin;
            });
}

}  // namespace fa2::attention
