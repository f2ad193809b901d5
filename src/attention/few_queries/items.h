// SPDX-License-Identifier: Apache-2.0

// The items of few queries and how both passes go through them: each part of
// the keys of a kv head, its runs of keys, and the merge of the parts.
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_ITEMS_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_ITEMS_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "src/attention/call/problem.h"
#include "src/attention/few_queries/plan.h"
#include "src/simd/direct/direct.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/team.h"
#include "src/threading/workspace.h"

namespace fa2::attention {

// A part of the keys of a kv head, with the rows of queries that share it: row
// g * Nq + i is query i of the group's query head g.
struct FewQueriesItem {
  const KeyPart* part = nullptr;
  int64_t kv_head = 0;

  // Whether the part is all that its rows see: nothing is to be merged.
  bool whole() const { return part->partial < 0; }
};

// How many rows of queries an item has.
inline int64_t RowsOf(const Problem& problem, const FewQueriesItem& item) {
  return problem.sequences[item.part->sequence].nq() * problem.group();
}

// Rows of queries of an item, in the sequence's tensors: of each query head of
// the group Nq rows. Calls take(rows in the tensor, first row of the item).
template <class Take>
void ForQueryRows(const Problem& problem, const FewQueriesItem& item,
                  const Take& take) {
  const Sequence& s = problem.sequences[item.part->sequence];
  for (int64_t g = 0; g < problem.group(); ++g) {
    take(TensorRows{s.batch, item.kv_head * problem.group() + g, s.q_begin,
                    s.nq()},
         g * s.nq());
  }
}

// Rows of the item's keys in K or V.
inline TensorRows KeyRowsOf(const Problem& problem, const FewQueriesItem& item,
                            Interval keys) {
  const Sequence& s = problem.sequences[item.part->sequence];
  return {s.batch, item.kv_head, s.k_begin + keys.begin, keys.size()};
}

// Keys of the item behind a run.
inline int64_t KeysAfter(const FewQueriesItem& item, Interval keys) {
  return item.part->keys.end - keys.end;
}

// Calls run(keys) for runs of at most `most` of an item's keys.
template <class Run>
void ForKeyRuns(const FewQueriesItem& item, int64_t most, const Run& run) {
  const Interval& keys = item.part->keys;
  for (int64_t k = keys.begin; k < keys.end; k += most) {
    run(Interval{k, std::min(k + most, keys.end)});
  }
}

// How many parts are done of each head of the sequences that have several.
class DoneParts {
 public:
  DoneParts(const FewQueriesPlan& plan, int64_t kv_heads,
            threading::ScratchLayout* layout)
      : kv_heads_(kv_heads),
        count_(static_cast<int64_t>(plan.merged.size()) * kv_heads),
        done_(layout->Take<Counter>(static_cast<size_t>(count_))) {}

  // Before the items.
  void Clear() const {
    for (int64_t i = 0; i < count_; ++i) new (done_ + i) Counter();
  }

  // Whether an item that is now done is the last one of its head's.
  bool IsLast(const FewQueriesItem& item, int64_t parts) const {
    Counter& counter = done_[item.part->merge * kv_heads_ + item.kv_head];
    return counter.value.fetch_add(1) + 1 == parts;
  }

 private:
  // Of different workers: on cache lines of their own.
  struct alignas(threading::kWorkspaceAlignment) Counter {
    std::atomic<int64_t> value{0};
  };
  int64_t kv_heads_;
  int64_t count_;
  Counter* done_;
};

// Calls process(item, worker) for all items. For each head whose sequence has
// several parts, whoever does the last of them goes on with join(first, part,
// worker), in order for all parts but the first, and finish(first, worker).
template <class Process, class Join, class Finish>
void ForItems(const FewQueriesPlan& plan, int64_t kv_heads,
              const DoneParts& done, threading::Team& team,
              const Process& process, const Join& join, const Finish& finish) {
  done.Clear();
  team.For(
      static_cast<int64_t>(plan.parts.size()) * kv_heads,
      [&](int64_t index, int worker) {
        const FewQueriesItem item = {&plan.parts[index / kv_heads],
                                     index % kv_heads};
        process(item, worker);
        if (item.whole()) return;
        const Interval parts = plan.merged[item.part->merge];
        if (!done.IsLast(item, parts.size())) return;
        const FewQueriesItem first = {&plan.parts[parts.begin], item.kv_head};
        for (int64_t p = parts.begin + 1; p < parts.end; ++p) {
          join(first, FewQueriesItem{&plan.parts[p], item.kv_head}, worker);
        }
        finish(first, worker);
      },
      plan.even ? threading::Team::Share::kRun
                : threading::Team::Share::kEveryNth);
}

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_ITEMS_H_
