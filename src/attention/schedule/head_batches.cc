// SPDX-License-Identifier: Apache-2.0
#include "src/attention/schedule/head_batches.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace fa2::attention {
namespace {

// A head batch ends with all workers waiting a few times; each of them gets at
// least this much of it before (some 1 ms on AMX).
constexpr double kLeastBatchOperations = 1e9;
// Heads of the longest sequence that there must be for each thread before they
// take them alone, and how much longer than an equal share the last may take.
// With fewer the slowest thread of a shared machine has too much left (AMX, 16
// threads, 32 heads each 1.1 to 1.25 times as fast, 4 heads 0.88 to 1.08).
constexpr double kLeastAlone = 8.0;
constexpr double kMostOfAlone = 1.1;
// On lanes two short heads are enough: what the slowest thread has too much is
// little beside the waiting at the end of each step.
constexpr double kLeastAloneShort = 2.0;
// On AMX, where they take less, one is: what one worker packs comes
// to another by way of caches (16 threads, bf16: 16 heads of 64 tokens with D
// 160 forward 56 -> 49 us, 96 of 128 tokens with D 64 backward 380 -> 343).
constexpr double kLeastAloneOfInvariant = 1.0;

// What of Q, K, V and O a worker finds in its L2 once it has been there: most
// of 2 MiB. On AMX a prefetch of what is there costs more than it gives (one
// thread, 16 heads of 64 tokens, D 160: 1.15 of the time; of what is not, 768
// of 64 tokens, D 64: 0.92, 3,072 of 32: 0.84 to 0.94).
constexpr double kFoundInL2 = 1.5 * (1 << 20);

// In double: a tensor that is broadcast may have any number of elements.
double BytesOf(const ConstTensorView& tensor) {
  return std::accumulate(std::begin(tensor.sizes), std::end(tensor.sizes),
                         static_cast<double>(SizeOf(tensor.dtype)),
                         [](double bytes, int64_t size) {
                           return bytes * static_cast<double>(size);
                         });
}

}  // namespace

// As few as keep the threads busy: what they share of the workspace stays in
// caches. But if possible a head, or sequence or part of one, for each thread,
// whose dQ then stays in the caches of one core (AMX, 16 threads, H 16, N 4096,
// against two threads to a head: D 128 and 256 25-40% faster, D 64 the same).
double LeastHeadBatch(const Problem& problem, double operations, int threads,
                      double wanted_items, int64_t items, int64_t splits) {
  if (threads == 1) return 0.0;
  const auto per_thread = [threads](double wanted, int64_t have) {
    return wanted * threads / static_cast<double>(std::max<int64_t>(have, 1));
  };
  return std::max(
      {per_thread(wanted_items, items * splits),
       per_thread(1.0, static_cast<int64_t>(problem.sequences.size()) * splits),
       kLeastBatchOperations * threads * static_cast<double>(problem.kv_heads) /
           std::max(operations, 1.0)});
}

bool TakeHeadsAlone(const Problem& problem, const simd::Engine& engine,
                    double pairs, double operations, double short_head,
                    bool whole, int threads) {
  double longest = 0.0;
  for (const Sequence& s : problem.sequences) {
    longest = std::max(longest, s.pairs);
  }
  const double each = pairs * static_cast<double>(problem.kv_heads) /
                      static_cast<double>(threads);
  const double of_head =
      operations / static_cast<double>(problem.kv_heads) * longest / pairs;
  double least = kLeastAlone;
  if (of_head <= short_head) {
    least = engine.bitwise_block_invariant ? kLeastAloneOfInvariant
                                           : kLeastAloneShort;
  }
  if (whole) least = 1.0;  // on lanes
  return longest > 0.0 && each >= least * longest &&
         std::ceil(each / longest) * longest <= kMostOfAlone * each;
}

bool ReadsAhead(const Problem& problem, const simd::Engine& engine,
                const HeadBatches& batches, int workers) {
  if (batches.threads(workers) > 1) return false;
  if (!engine.bitwise_block_invariant) return true;
  // O is as large as Q, or nearly.
  return 2 * BytesOf(problem.q) + BytesOf(problem.k) + BytesOf(problem.v) >=
         workers * kFoundInL2;
}

void CutHeadBatches(const Problem& problem, double pairs, double least,
                    std::vector<HeadBatch>* batches) {
  const int64_t sequences = static_cast<int64_t>(problem.sequences.size());
  const double heads = static_cast<double>(problem.kv_heads);
  const auto parts = [](double whole, double part) {
    return std::max<int64_t>(1, static_cast<int64_t>(whole / part));
  };
  int64_t batch_heads = 1;
  int64_t groups = sequences;  // of sequences
  if (least >= 1.0) {
    batch_heads = CeilDiv(problem.kv_heads, parts(heads, least));
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
  HeadBatch batch;
  while (batch.sequences.begin < sequences) {
    const int64_t group = group_of_next();
    batch.sequences.end = batch.sequences.begin;
    double cost = 0.0;
    do {
      const Sequence& s = problem.sequences[batch.sequences.end++];
      const double of_head = s.pairs;
      before += of_head;
      cost += of_head;
    } while (batch.sequences.end < sequences && groups < sequences &&
             group_of_next() == group);
    for (batch.kv_heads.begin = 0; batch.kv_heads.begin < problem.kv_heads;
         batch.kv_heads.begin = batch.kv_heads.end) {
      batch.kv_heads.end =
          std::min(problem.kv_heads, batch.kv_heads.begin + batch_heads);
      batch.cost = cost * static_cast<double>(batch.kv_heads.size());
      batches->push_back(batch);
    }
    batch.sequences.begin = batch.sequences.end;
  }
}

// std::sort, unlike stable_sort, needs no memory; positions in the plan make it
// stable.
void SortAlone(HeadBatches* batches) {
  if (!batches->alone) return;
  std::sort(batches->list.begin(), batches->list.end(),
            [](const HeadBatch& a, const HeadBatch& b) {
              return a.cost != b.cost ? a.cost > b.cost
                                      : a.items.begin < b.items.begin;
            });
}

}  // namespace fa2::attention
