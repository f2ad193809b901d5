// SPDX-License-Identifier: Apache-2.0

// Plans of usual problems, number by number, beside those of plans.txt: blocks,
// splits, orders and workers are what speed follows from, and no other test
// sees them change. After a change on purpose: measure it (docs/bench.md), then
//   FA2_WRITE_PLANS=tests/attention/plans.txt
//   build/tests/attention/attention_plan_table_test
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "src/attention/few_queries/plan.h"
#include "src/attention/schedule/backward_plan.h"
#include "src/attention/schedule/forward_plan.h"
#include "tests/attention/plan_cases.h"

namespace fa2::attention {
namespace {

struct NamedProblem {
  std::string name;
  Problem problem;
};

std::vector<NamedProblem> Problems() {
  std::vector<NamedProblem> all;
  const auto add = [&all](const Shape& shape) {
    all.push_back({std::to_string(shape.heads * shape.group) + "/" +
                       std::to_string(shape.heads) + " heads, " +
                       std::to_string(shape.nq) + " x " +
                       std::to_string(shape.nk) + ", D " +
                       std::to_string(shape.head_dim) +
                       (shape.causal ? ", causal" : ""),
                   ProblemOf(shape)});
  };
  add({1, 8192, 8192, 64, false});
  add({16, 2048, 2048, 128, true});
  add({8, 1024, 1024, 64, true, 4});
  add({1, 512, 512, 256, false, 8});
  add({2, 16384, 16384, 64, true, 16});
  add({96, 197, 197, 64, false});
  add({768, 32, 32, 32, false});
  add({8, 4096, 77, 40, false});
  add({8, 100, 850, 32, true});
  add({16, 16, 4096, 64, false});
  add({8, 1, 8192, 128, false, 4});
  add({8, 4, 300, 128, true, 4});
  add({1, 2, 1000, 64, true, 16});
  add({3, 9, 20, 64, false});
  add({2, 0, 10, 64, false});
  const auto packed = [&all](int64_t heads, const char* name,
                             const std::vector<int64_t>& lengths) {
    all.push_back({std::to_string(heads) + " heads, " + name,
                   ProblemOf(heads, lengths, true)});
  };
  packed(12, "64 sequences of 128", std::vector<int64_t>(64, 128));
  packed(4, "lengths 700, 0, 33, 2000, 64, 64, 900",
         {700, 0, 33, 2000, 64, 64, 900});
  std::vector<int64_t> short_ones;
  for (int64_t i = 0; i < 300; ++i) short_ones.push_back(1 + i * 7 % 20);
  packed(2, "300 sequences of 1 to 20", short_ones);
  std::vector<int64_t> one_long(40, 3000);
  one_long.push_back(16384);
  packed(1, "40 sequences of 3000 and one of 16384", one_long);
  return all;
}

void Write(const HeadBatches& batches, std::ostream& out) {
  out << batches.list.size() << " head batches"
      << (batches.alone ? " alone" : "");
  for (const HeadBatch* batch : {&batches.list.front(), &batches.list.back()}) {
    out << "; heads " << batch->kv_heads.begin << "-" << batch->kv_heads.end
        << " sequences " << batch->sequences.begin << "-"
        << batch->sequences.end << " items " << batch->items.begin << "-"
        << batch->items.end << " cost " << batch->cost;
  }
}

void WriteForward(const NamedProblem& p, const simd::Engine& engine,
                  int threads, std::ostream& out) {
  ForwardPlan plan;
  PlanForward(p.problem, engine, threads, &plan);
  out << "forward: blocks " << plan.blocks.queries << " x " << plan.blocks.keys
      << (plan.keys_in_turn ? " keys in turn" : "") << ", " << plan.items.size()
      << " items, " << plan.k_blocks << " blocks of keys, batch of "
      << plan.largest_batch.heads << " heads and " << plan.largest_batch.k_rows
      << " keys, " << plan.workers << " workers, " << plan.keys_ahead
      << " keys ahead, ";
  Write(plan.head_batches, out);
}

void WriteBackward(const NamedProblem& p, const simd::Engine& engine,
                   const BackwardUse& use, std::ostream& out) {
  BackwardPlan plan;
  PlanBackward(p.problem, engine, use, &plan);
  constexpr const char* kOrders[] = {"key outer", "group split", "query outer"};
  out << (use.share_heads ? "shared heads, " : "")
      << (use.share_batch ? "shared batch, " : "")
      << (use.fixed_blocks ? "fixed, " : "") << "backward: blocks "
      << plan.blocks.queries << " x " << plan.blocks.keys << ", "
      << kOrders[static_cast<int>(plan.order)]
      << (plan.keys_in_batch ? ", keys in batch" : "")
      << (plan.queries_in_turn ? ", queries in turn" : "") << ", group in "
      << plan.group_splits << ", rows " << plan.q_rows << ", blocks "
      << plan.q_blocks << " " << plan.k_blocks << " " << plan.dq_blocks
      << ", batch of " << plan.largest_batch.heads << " heads "
      << plan.largest_batch.tasks << " tasks " << plan.largest_batch.items
      << " items " << plan.largest_batch.q_rows << " "
      << plan.largest_batch.k_rows << " " << plan.largest_batch.dq_rows
      << " rows, " << plan.workers << " workers, ";
  Write(plan.head_batches, out);
  const BackwardSequence& last = plan.sequences.back();
  out << "; last sequence: splits " << last.key_splits << " superblocks "
      << last.queries.superblock << " x " << last.keys.superblock << " blocks "
      << last.queries.size << " x " << last.keys.size << " at " << last.q_row
      << " " << last.batch_q_row << " " << last.batch_k_row << " "
      << last.batch_dq_row << " " << last.q_block << " " << last.k_block << " "
      << last.dq_block;
  if (!plan.tasks.empty()) {
    const KeySplitTask& task = plan.tasks[plan.tasks.size() / 2];
    out << "; task in the middle: split " << task.key_split << " sequences "
        << task.sequences.begin << "-" << task.sequences.end << " heads "
        << task.kv_heads.begin << "-" << task.kv_heads.end << " group splits "
        << task.group_splits.begin << "-" << task.group_splits.end << " rank "
        << task.rank << " cost " << task.cost;
  }
}

void WriteFewQueries(const NamedProblem& p, const simd::Engine& engine,
                     int threads, std::ostream& out) {
  out << "few queries: " << (HasFewQueries(p.problem, engine) ? "yes" : "no");
  for (const bool all_keys : {false, true}) {
    FewQueriesPlan plan;
    PlanFewQueries(p.problem, all_keys, threads, &plan);
    out << (all_keys ? "; all keys: " : "; ") << plan.most_rows << " rows, "
        << plan.parts.size() << " parts, " << plan.partials << " partials, "
        << plan.merged.size() << " merged, " << plan.workers << " workers";
    if (plan.parts.empty()) continue;
    const KeyPart& part = plan.parts.back();
    out << ", last part: " << part.sequence << " " << part.keys.begin << "-"
        << part.keys.end << " " << part.partial;
  }
}

std::vector<std::string> Lines() {
  std::vector<std::string> lines;
  for (const NamedProblem& p : Problems()) {
    for (const bool invariant : {true, false}) {
      simd::Engine engine = EngineOf(invariant);
      engine.direct_queries = 2;
      engine.direct_rows = 16;
      engine.direct_long_rows = invariant ? 16 : 24;
      for (const int threads : {1, 16}) {
        const auto add = [&](const auto& write) {
          std::ostringstream line;
          line.precision(15);
          line << p.name << (invariant ? ", invariant, " : ", lanes, ")
               << threads << " threads: ";
          write(line);
          lines.push_back(line.str());
        };
        add([&](std::ostream& out) { WriteForward(p, engine, threads, out); });
        BackwardUse use;
        use.threads = threads;
        const auto add_backward = [&] {
          add([&](std::ostream& out) { WriteBackward(p, engine, use, out); });
        };
        add_backward();
        // A dbias of each head or of all, and of the batch.
        if (invariant && threads > 1) {
          use.fixed_blocks = true;
          add_backward();
          use.share_heads = true;
          add_backward();
          const auto& sequences = p.problem.sequences;
          use.share_batch = sequences.size() > 1 &&
                            sequences.front().nk() == sequences.back().nk();
          if (use.share_batch) add_backward();
        }
        if (p.problem.most_queries() > 128) continue;
        add([&](std::ostream& out) {
          WriteFewQueries(p, engine, threads, out);
        });
      }
    }
  }
  return lines;
}

TEST(PlanTable, IsAsWritten) {
  const std::vector<std::string> lines = Lines();
  if (const char* const path = std::getenv("FA2_WRITE_PLANS")) {
    std::ofstream file(path);
    for (const std::string& line : lines) file << line << "\n";
    ASSERT_TRUE(file.good()) << path;
    return;
  }
  std::ifstream file(FA2_PLANS);
  ASSERT_TRUE(file.is_open()) << FA2_PLANS;
  std::string written;
  for (const std::string& line : lines) {
    std::getline(file, written);
    EXPECT_EQ(line, written);
  }
  EXPECT_FALSE(std::getline(file, written)) << written;
}

}  // namespace
}  // namespace fa2::attention
