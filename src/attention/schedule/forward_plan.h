// How the forward is cut into work. What is added to what, and in which order,
// is a pure function of the problem and the engine, never of the number of
// threads, so results are the same bits on any.
#ifndef FA2_SRC_ATTENTION_SCHEDULE_FORWARD_PLAN_H_
#define FA2_SRC_ATTENTION_SCHEDULE_FORWARD_PLAN_H_

#include <cstdint>
#include <vector>

#include "src/attention/call/problem.h"
#include "src/attention/schedule/blocks.h"
#include "src/attention/schedule/waves.h"
#include "src/simd/engine.h"

namespace fa2::attention {

struct ForwardItem {
  int32_t sequence = 0;
  int32_t head = 0;  // query head
  int32_t block = 0;
  int32_t rank = 0;  // position before sorting
  double cost = 0.0;
};

struct ForwardSequence {
  Blocks queries;
  Blocks keys;
  int64_t wave_k_row = 0;  // of packed keys, in arrays of one head of a wave
  int64_t k_block = 0;     // of all sequences
};

struct ForwardPlan {
  simd::BlockSizes blocks;
  std::vector<ForwardSequence> sequences;
  std::vector<BlockIndex> key_blocks;  // of all sequences
  Waves waves;
  std::vector<ForwardItem> items;  // by wave, then longest first
  int workers = 1;          // of the threads, as many as the call keeps busy
  int64_t wave_heads = 0;   // kv heads of a wave, at most
  int64_t wave_k_rows = 0;  // and rows of one head
  int64_t k_blocks = 0;     // of all sequences

  // Those of key_blocks that are of a wave's sequences.
  Interval KeyBlocks(const Wave& wave) const {
    const ForwardSequence& last = sequences[wave.sequence_end - 1];
    return {sequences[wave.sequence_begin].k_block,
            last.k_block + last.keys.count()};
  }
};

// For one thread blocks of queries are as large as the engine likes if these
// join.
void PlanForward(const Problem& problem, const simd::Engine& engine,
                 int threads, ForwardPlan* plan);

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_SCHEDULE_FORWARD_PLAN_H_
