// SPDX-License-Identifier: Apache-2.0

// Block masks: patterns of models and random lists, what other options meet
// them, the same bits as the mask as an array gives, garbage in what is hidden,
// and what is wrong with lists.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fa2/attention.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_run.h"

namespace fa2::test {
namespace {

using Shows = std::function<bool(int64_t query, int64_t key)>;

// A mask of one plane by a rule for pairs: blocks that it shows as a whole are
// full, others have bits.
struct RuledMask {
  RuledMask(const Shows& shows, int64_t nq, int64_t nk, int64_t block_q,
            int64_t block_k) {
    const int64_t rows = (nq + block_q - 1) / block_q;
    const int64_t columns = (nk + block_k - 1) / block_k;
    counts.resize(static_cast<size_t>(rows));
    full_counts = counts;
    indices.resize(static_cast<size_t>(rows * columns));
    full_indices = indices;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        Add(shows, nq, nk, block_q, block_k, row, column, columns);
      }
    }
    const auto i32 = [&](const std::vector<int32_t>& values, int64_t last) {
      return Dense(static_cast<const void*>(values.data()), DType::kI32, 1, 1,
                   rows, last);
    };
    mask.block_q = block_q;
    mask.block_k = block_k;
    mask.kv_num_blocks = i32(counts, 1);
    mask.kv_indices = i32(indices, columns);
    mask.full_kv_num_blocks = i32(full_counts, 1);
    mask.full_kv_indices = i32(full_indices, columns);
    const int64_t bytes = block_q * block_k / 8;
    if (!bits.empty()) {
      mask.bits = Dense(static_cast<const void*>(bits.data()), DType::kU8, 1, 1,
                        static_cast<int64_t>(bits.size()) / bytes, bytes);
    }
  }
  RuledMask(const RuledMask&) = delete;
  RuledMask& operator=(const RuledMask&) = delete;

  BlockMask mask;
  std::vector<int32_t> counts, indices, full_counts, full_indices;
  std::vector<uint8_t> bits;

 private:
  void Add(const Shows& shows, int64_t nq, int64_t nk, int64_t block_q,
           int64_t block_k, int64_t row, int64_t column, int64_t columns) {
    std::vector<uint8_t> block(static_cast<size_t>(block_q * block_k / 8));
    bool all = true, any = false;
    for (int64_t i = 0; i < block_q && row * block_q + i < nq; ++i) {
      for (int64_t j = 0; j < block_k && column * block_k + j < nk; ++j) {
        const bool shown = shows(row * block_q + i, column * block_k + j);
        all &= shown;
        any |= shown;
        if (!shown) continue;
        block[static_cast<size_t>(i * (block_k / 8) + j / 8)] |=
            static_cast<uint8_t>(1 << j % 8);
      }
    }
    if (!any) return;
    std::vector<int32_t>& list = all ? full_indices : indices;
    int32_t& count = (all ? full_counts : counts)[static_cast<size_t>(row)];
    list[static_cast<size_t>(row * columns + count++)] =
        static_cast<int32_t>(column);
    if (!all) bits.insert(bits.end(), block.begin(), block.end());
  }
};

AttentionInputs WithBlocks(const AttentionCase& c, const BlockMask& mask) {
  return MakeInputs(
      c, [&](AttentionInputs* in) { in->options.block_mask = &mask; });
}

using Patterns = std::vector<std::pair<std::string, Shows>>;

// In which some query sees hundreds of keys.
Patterns WidePatterns() {
  return {{"prefix", [](int64_t q, int64_t k) { return k < 70 || k <= q; }},
          {"strided", [](int64_t q, int64_t k) { return (q - k) % 64 < 8; }},
          {"rows and columns that see nothing",
           [](int64_t q, int64_t k) { return q / 64 != 1 && k / 64 != 2; }}};
}

Patterns NarrowPatterns() {
  return {{"documents",
           [](int64_t q, int64_t k) { return (q + 9) / 45 == (k + 9) / 45; }},
          {"window and global tokens",
           [](int64_t q, int64_t k) { return k < 5 || std::abs(q - k) < 40; }},
          {"every third block",
           [](int64_t q, int64_t k) { return (q / 32 + k / 48) % 3 == 0; }},
          {"nothing", [](int64_t, int64_t) { return false; }}};
}

TEST(AttentionBlockMask, Patterns) {
  const Contexts contexts({1, 2, 16});
  Patterns patterns = WidePatterns();
  for (const auto& narrow : NarrowPatterns()) patterns.push_back(narrow);
  for (const auto& [name, shows] : patterns) {
    SCOPED_TRACE(name);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const AttentionCase c = GroupedCase(dtype, 64);
      const RuledMask ruled(shows, c.nq, c.nk, 32, 48);
      ExpectAttention(c, WithBlocks(c, ruled.mask), contexts.list());
    }
  }
}

// Of so little work that the plan does not depend on what a call sees, and with
// a softcap, so that lanes add a mask of an array nowhere but to scores.
TEST(AttentionBlockMask, SameBitsAsTheArray) {
  const Contexts contexts({1});
  for (const auto& pattern : WidePatterns()) {
    SCOPED_TRACE(pattern.first);
    const Shows& shows = pattern.second;
    AttentionCase c = GroupedCase(DType::kF32, 8);
    c.softcap = 20.0;
    const RuledMask ruled(shows, c.nq, c.nk, 64, 32);
    c.bias = DType::kBool;
    c.bias_broadcast = {true, true, false, false};
    const AttentionInputs array = MakeInputs(c, [&](AttentionInputs* in) {
      ForEachIndex(in->bias.view.sizes, [&](const Sizes& at) {
        Set(in->bias.view, at, shows(at[2], at[3]));
      });
    });
    // The same inputs, but for the mask.
    AttentionInputs by_blocks = array;
    by_blocks.options.bias = {};
    by_blocks.options.block_mask = &ruled.mask;
    const AttentionInputs& masked = by_blocks;
    const AttentionOutputs a = MakeOutputs(c, array);
    const AttentionOutputs b = MakeOutputs(c, array);
    for (const auto& [inputs, outputs] :
         {std::pair(&array, &a), std::pair(&masked, &b)}) {
      ASSERT_TRUE(
          AttentionForward(ForwardArgs(*inputs, *outputs), contexts.list()[0])
              .ok());
      ASSERT_TRUE(AttentionBackward(BackwardArgs(c, *inputs, *outputs),
                                    contexts.list()[0])
                      .ok());
    }
    for (const auto& [x, y] :
         {std::pair(&a.out, &b.out), std::pair(&a.lse, &b.lse),
          std::pair(&a.dq, &b.dq), std::pair(&a.dk, &b.dk),
          std::pair(&a.dv, &b.dv)}) {
      EXPECT_TRUE(SameBits(x->view, y->view));
    }
  }
}

// A block of a mask and none of it hidden: the plain path's bits.
TEST(AttentionBlockMask, AllBlocksAreNoMask) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const AttentionCase c = GroupedCase(dtype, 64);
    const RuledMask ruled([](int64_t, int64_t) { return true; }, c.nq, c.nk,
                          128, 128);
    const AttentionInputs inputs = MakeInputs(c);
    const AttentionOutputs plain = MakeOutputs(c, inputs);
    const AttentionOutputs masked = MakeOutputs(c, inputs);
    AttentionForwardArgs args = ForwardArgs(inputs, masked);
    args.options.block_mask = &ruled.mask;
    ASSERT_TRUE(AttentionForward(ForwardArgs(inputs, plain)).ok());
    ASSERT_TRUE(AttentionForward(args).ok());
    EXPECT_TRUE(SameBits(plain.out.view, masked.out.view));
    EXPECT_TRUE(SameBits(plain.lse.view, masked.lse.view));
  }
}

// What hidden keys and rows hold goes nowhere.
TEST(AttentionBlockMask, HiddenGarbage) {
  const Contexts contexts({1, 2});
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const AttentionCase c = GroupedCase(dtype, 32);
    const RuledMask ruled(
        [](int64_t q, int64_t k) {
          return q / 32 != 1 && k / 48 != 2 && k != 150;
        },
        c.nq, c.nk, 32, 48);
    const AttentionInputs inputs = MakeInputs(c, [&](AttentionInputs* in) {
      in->options.block_mask = &ruled.mask;
      const double garbage = std::numeric_limits<double>::quiet_NaN();
      for (const int64_t key : {96, 97, 143, 150}) {
        Set(in->k.view, {0, 0, key, 3}, garbage);
        Set(in->v.view, {0, 0, key, 5}, garbage);
      }
      for (const int64_t query : {32, 63}) {
        Set(in->q.view, {0, 1, query, 2}, garbage);
        Set(in->dout.view, {0, 1, query, 4}, 0.0);
      }
    });
    ExpectAttention(c, inputs, contexts.list());
  }
}

// ---- What is wrong with lists.

struct Bad {
  std::vector<std::string> words;  // that the sentence must hold
  std::function<void(RuledMask*)> change;
};

void ExpectRefused(const AttentionInputs& inputs, const AttentionOutputs& out,
                   const BlockMask& mask,
                   const std::vector<std::string>& words) {
  AttentionForwardArgs args = ForwardArgs(inputs, out);
  args.options.block_mask = &mask;
  out.out.buffer->Snapshot();
  const Status status = AttentionForward(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << words[0];
  for (const std::string& word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "no '" << word << "' in: " << status.message();
  }
  EXPECT_FALSE(out.out.buffer->ChangedOutside({})) << words[0];
}

TEST(AttentionBlockMask, BadLists) {
  AttentionCase c;
  c.nq = 100;
  c.nk = 90;
  const AttentionInputs inputs = MakeInputs(c);
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  // Rows of 32, columns of 16 keys: partial and full blocks in each row.
  const Shows shows = [](int64_t q, int64_t k) {
    return k < 40 || (k - q) % 2 == 0;
  };
  const std::vector<Bad> calls = {
      {{"block_q is 100", "multiple of 16"},
       [](RuledMask* m) { m->mask.block_q = 100; }},
      {{"block_k is 0", "multiple of 16"},
       [](RuledMask* m) { m->mask.block_k = 0; }},
      {{"kv_num_blocks has shape [1, 1, 4]", "[1, 1, 2]"},
       [](RuledMask* m) { m->mask.block_q = 64; }},
      {{"kv_num_blocks", "[3, 1, 4]", "[1, 1, 4]"},
       [](RuledMask* m) { m->mask.kv_num_blocks.sizes[0] = 3; }},
      {{"kv_num_blocks has dtype f32", "i32"},
       [](RuledMask* m) { m->mask.kv_num_blocks.dtype = DType::kF32; }},
      {{"kv_indices has dtype i64", "i32"},
       [](RuledMask* m) { m->mask.kv_indices.dtype = DType::kI64; }},
      {{"kv_indices has shape [1, 1, 4, 7]", "fewer columns"},
       [](RuledMask* m) {
         m->mask.kv_indices.sizes[3] = 7;
         m->mask.kv_indices.strides[2] = 1;
       }},
      {{"kv_num_blocks[0, 0, 2] is -1", "0 to 6"},
       [](RuledMask* m) { m->counts[2] = -1; }},
      {{"kv_num_blocks[0, 0, 1] is 7", "0 to 6"},
       [](RuledMask* m) { m->counts[1] = 7; }},
      {{"kv_indices[0, 0, 1, 0] is 6", "0 to 5"},
       [](RuledMask* m) { m->indices[6] = 6; }},
      {{"kv_indices[0, 0, 1, 1] is -1", "0 to 5"},
       [](RuledMask* m) { m->indices[7] = -1; }},
      {{"kv_indices[0, 0, 3, 1] is 2", "ascend", "before is 2"},
       [](RuledMask* m) { m->indices[19] = m->indices[18]; }},
      {{"full_kv_indices[0, 0, 0, 1] is 0", "ascend", "before is 1"},
       [](RuledMask* m) { std::swap(m->full_indices[0], m->full_indices[1]); }},
      {{"full_kv_indices[0, 0, 2, 1] is 2", "kv_indices too"},
       [](RuledMask* m) { m->full_indices[13] = 2; }},
      {{"full_kv_indices is not given"},
       [](RuledMask* m) { m->mask.full_kv_indices = {}; }},
      {{"full_kv_num_blocks", "[1, 1, 3]", "[1, 1, 4]"},
       [](RuledMask* m) { m->mask.full_kv_num_blocks.sizes[2] = 3; }},
      {{"bits has shape", "[1, 1, 16, 64]"},
       [](RuledMask* m) { --m->mask.bits.sizes[2]; }},
      {{"bits has dtype bool", "u8"},
       [](RuledMask* m) { m->mask.bits.dtype = DType::kBool; }},
  };
  for (const Bad& bad : calls) {
    RuledMask ruled(shows, c.nq, c.nk, 32, 16);
    ASSERT_EQ(ruled.mask.bits.sizes[2], 16);
    bad.change(&ruled);
    ExpectRefused(inputs, outputs, ruled.mask, bad.words);
  }
  RuledMask ruled(shows, c.nq, c.nk, 32, 16);
  ruled.mask.kv_num_blocks.data = nullptr;
  AttentionForwardArgs args = ForwardArgs(inputs, outputs);
  args.options.block_mask = &ruled.mask;
  EXPECT_NE(AttentionForward(args).message().find("kv_num_blocks"),
            std::string::npos);
  // An output in a list's place.
  ruled.mask.kv_num_blocks.data = outputs.out.view.data;
  EXPECT_FALSE(AttentionForward(args).ok());
}

}  // namespace
}  // namespace fa2::test
