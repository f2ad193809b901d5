// SPDX-License-Identifier: Apache-2.0

// Batches of many heads and sequences, which go through the workspace in head
// batches: of all threads, or of one thread each, who must agree bit for bit.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

// Few cases: the types whose kernels differ most.
std::vector<DType> Types() {
  if (CasesOfSixteen() < 16) return {DType::kBF16, DType::kF32};
  return {DType::kBF16, DType::kF32, DType::kF16, DType::kF64};
}

// 24 kv heads of sequences: 12, 8, 4 and 1 or 2 for a thread of each context.
AttentionCase Batch(DType dtype) {
  AttentionCase c;
  c.dtype = dtype;
  c.batch = 6;
  c.heads = 8;
  c.kv_heads = 4;
  c.nq = 67;
  c.nk = 90;
  c.head_dim = c.value_dim = 40;
  return c;
}

class AttentionHeadBatches : public testing::Test {
 protected:
  void Expect(const AttentionCase& c) { ExpectAttention(c, contexts_.list()); }

 private:
  const Contexts contexts_{{1, 2, 3, 6, 16}};
};

TEST_F(AttentionHeadBatches, Dense) {
  for (const DType dtype : Types()) {
    AttentionCase c = Batch(dtype);
    Expect(c);
    c.causal = Causal::kBottomRight;
    c.layout = c.grad_layout = Layout::kBshd;
    Expect(c);
  }
}

TEST_F(AttentionHeadBatches, Packed) {
  for (const DType dtype : Types()) {
    AttentionCase c = Batch(dtype);
    c.batch = 1;
    c.causal = Causal::kTopLeft;
    // Lengths of all kinds; as many of one kind that each thread takes several
    // of them; and one that is longer than all others.
    std::vector<int64_t> mixed, alike, one_long;
    for (int64_t i = 0; i < 20; ++i) {
      mixed.push_back(i % 5 == 0 ? 0 : 7 * i + 1);
      alike.push_back(33);
      one_long.push_back(i == 3 ? 300 : 5);
    }
    for (const auto& lengths : {mixed, alike, one_long}) {
      c.lengths_q = c.lengths_k = lengths;
      c.lengths_k.back() += 40;
      Expect(c);
    }
  }
}

// One block of keys, or of queries: those of the other side are packed in turn.
TEST_F(AttentionHeadBatches, BlocksInTurn) {
  for (const DType dtype : Types()) {
    for (const bool few_keys : {false, true}) {
      AttentionCase c = Batch(dtype);
      c.batch = 2;
      c.kv_heads = few_keys ? 4 : 8;
      c.nq = few_keys ? 300 : 29;
      c.nk = few_keys ? 29 : 500;
      Expect(c);
      c.causal = Causal::kBottomRight;  // hides all keys from some queries
      c.sinks = c.want_dsinks = true;
      c.dropout_p = 0.2;
      c.bias = dtype;
      c.want_dbias = true;
      c.accumulate_dq = c.accumulate_dv = true;
      Expect(c);
    }
  }
}

// A bias of each head that sequences share, staged once by a worker.
TEST_F(AttentionHeadBatches, SharedBias) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c = Batch(dtype);
    c.nq = c.nk = 137;
    c.bias = dtype;
    c.bias_broadcast = {true, false, false, false};
    Expect(c);
    c.bias_masked = 0.95;
    c.bias_broadcast = {true, true, true, false};
    Expect(c);
  }
}

// What is summed over heads, sequences and keys, and what is read by them.
TEST_F(AttentionHeadBatches, Options) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c = Batch(dtype);
    c.dlse = true;
    c.sinks = c.want_dsinks = true;
    c.alibi = c.want_dalibi = c.alibi_per_batch = true;
    Expect(c);
    c = Batch(dtype);
    c.dropout_p = 0.2;
    c.philox_seed = 5;
    c.accumulate_dq = c.accumulate_dk = c.accumulate_dv = true;
    Expect(c);
  }
}

TEST_F(AttentionHeadBatches, BiasGradient) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    AttentionCase c = Batch(dtype);
    c.bias = dtype;
    c.want_dbias = true;
    for (const bool batch : {false, true}) {
      for (const bool heads : {false, true}) {
        c.bias_broadcast = {batch, heads, false, false};
        Expect(c);
      }
    }
    c.bias_broadcast = {false, false, false, true};
    Expect(c);
  }
}

// Groups of heads that AMX cuts into splits, all and some of seven heads, with
// a partial of dK and dV each.
TEST_F(AttentionHeadBatches, GroupSplits) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    AttentionCase c;
    c.dtype = dtype;
    c.kv_heads = 2;
    c.heads = 14;
    c.nq = c.nk = 130;  // 9 items: four splits
    c.head_dim = c.value_dim = 64;
    Expect(c);
    if (CasesOfSixteen() < 16) continue;
    c.causal = Causal::kBottomRight;
    c.grad_dtype = DType::kF32;
    c.accumulate_dk = c.accumulate_dv = true;
    Expect(c);
    c.grad_dtype = {};
    c.nq = 200;
    c.nk = 420;
    // Steep slopes hide keys from some heads alone.
    c.causal = Causal::kNone;
    c.alibi = c.want_dalibi = true;
    c.dropout_p = 0.3;
    c.want_dk = dtype == DType::kBF16;
    Expect(c);
    // Queries see none of the first keys.
    c.alibi = c.want_dalibi = false;
    c.window_left = 70;
    c.want_dk = true;
    c.want_dv = false;
    c.bias = dtype;
    c.want_dbias = true;
    Expect(c);
  }
}

// More packed queries of one kv head than caches hold, 16 MiB (8 MiB but for
// AMX): who has a head batch for itself passes all keys by one superblock of
// them after another.
AttentionCase ManyQueries(DType dtype) {
  AttentionCase c;
  c.dtype = dtype;
  c.heads = 16;
  c.nq = dtype == DType::kF64 ? 140 : dtype == DType::kBF16 ? 520 : 270;
  c.nk = 288;  // two blocks of every engine and more
  c.head_dim = c.value_dim = 256;
  return c;
}

TEST_F(AttentionHeadBatches, ManyQueriesOfAKvHead) {
  for (const DType dtype :
       {DType::kBF16, DType::kF32, DType::kF16, DType::kF64}) {
    // f64 has the fewest rows.
    if (CasesOfSixteen() < 16 && dtype != DType::kF64) continue;
    AttentionCase c = ManyQueries(dtype);
    c.causal = Causal::kBottomRight;
    // Among so many sequences AMX splits no groups.
    AttentionCase packed = c;
    packed.lengths_q.assign(16, 2);
    packed.lengths_k.assign(16, 3);
    packed.lengths_q[5] = c.nq;
    packed.lengths_k[5] = c.nk;
    Expect(packed);
    if (CasesOfSixteen() < 16) continue;
    c.causal = Causal::kNone;
    c.window_left = 60;
    c.window_right = 40;
    c.alibi = c.want_dalibi = true;
    c.bias = dtype;
    c.want_dbias = true;
    Expect(c);
    // Sums over keys, which key splits keep apart.
    c.bias_broadcast = {false, false, false, true};
    c.accumulate_dk = true;
    Expect(c);
  }
}

// The same where each of two threads has head batches of its own.
TEST(AttentionHeadBatchesAlone, ManyQueriesOfAKvHead) {
  if (CasesOfSixteen() < 16) GTEST_SKIP() << "4 million queries' elements";
  AttentionCase c = ManyQueries(DType::kF64);
  c.heads = 8;
  c.batch = 16;
  c.nk = 7;
  const Contexts contexts({1, 2});
  ExpectAttention(c, contexts.list());
}

}  // namespace
}  // namespace fa2::test
