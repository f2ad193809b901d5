// SPDX-License-Identifier: Apache-2.0

// What ranks hold, put together.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "src/verify/cases/error.h"
#include "src/verify/cases/shards.h"
#include "src/verify/judge/check.h"
#include "src/verify/model/generate.h"

namespace fa2::verify {
namespace {

using Rows = std::vector<std::vector<int64_t>>;  // of each rank

// The rows of one rank, of a dimension that has `inner` elements behind it.
Array Take(const Array& from, size_t dimension,
           const std::vector<int64_t>& rows) {
  std::vector<int64_t> shape = from.shape;
  shape[dimension] = static_cast<int64_t>(rows.size());
  void* data = nullptr;
  Array to = MakeArray(from.dtype, shape, &data);
  size_t outer = 1, inner = SizeOf(from.dtype);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d < dimension) outer *= static_cast<size_t>(shape[d]);
    if (d > dimension) inner *= static_cast<size_t>(shape[d]);
  }
  auto* out = static_cast<uint8_t*>(data);
  const auto all = static_cast<size_t>(from.shape[dimension]);
  for (size_t o = 0; o < outer; ++o) {
    for (const int64_t row : rows) {
      const size_t at = (o * all + static_cast<size_t>(row)) * inner;
      std::memcpy(out, static_cast<const uint8_t*>(from.data) + at, inner);
      out += inner;
    }
  }
  return to;
}

// Each rank's rows of q, dout, out, lse, dq, and of k, v, dk, dv.
std::vector<Case> Cut(const Case& whole, size_t dimension, const Rows& queries,
                      const Rows& keys) {
  std::vector<Case> ranks(queries.size(), whole);
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (auto& [name, array] : ranks[r].tensors) {
      if (name.rfind("cu_seqlens", 0) == 0) continue;
      const bool of_keys =
          name == "k" || name == "v" || name == "dk" || name == "dv";
      const size_t d = name == "lse" && dimension == 0 ? 1 : dimension;
      array = Take(array, d, of_keys ? keys[r] : queries[r]);
    }
  }
  return ranks;
}

void ExpectSame(const Case& a, const Case& b) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, array] : a.tensors) {
    const Array& other = *b.Find(name);
    ASSERT_EQ(array.shape, other.shape) << name;
    EXPECT_EQ(std::memcmp(
                  array.data, other.data,
                  static_cast<size_t>(array.elements()) * SizeOf(array.dtype)),
              0)
        << name;
  }
}

Case Whole() {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.nq = 11;
  o.nk = 8;
  o.head_dim = o.value_dim = 16;
  Case c = Generate(o);
  AddAnswers(&c, 1);
  return c;
}

TEST(Shards, OfAnyLengthsAreJoined) {
  const Case whole = Whole();
  const Rows contiguous_q = {{0, 1, 2, 3, 4, 5, 6}, {}, {7, 8, 9, 10}};
  const Rows contiguous_k = {{0}, {1, 2, 3, 4}, {5, 6, 7}};
  ExpectSame(
      JoinShards(Cut(whole, 2, contiguous_q, contiguous_k), ShardBy::kSequence),
      whole);
  // Of 6 runs of 11 the first 5 have 2 rows, of 8 the first 2.
  const Rows zigzag_q = {{0, 1, 10}, {2, 3, 8, 9}, {4, 5, 6, 7}};
  const Rows zigzag_k = {{0, 1, 7}, {2, 3, 6}, {4, 5}};
  ExpectSame(JoinShards(Cut(whole, 2, zigzag_q, zigzag_k), ShardBy::kZigzag),
             whole);
  const Rows striped_q = {{0, 3, 6, 9}, {1, 4, 7, 10}, {2, 5, 8}};
  const Rows striped_k = {{0, 3, 6}, {1, 4, 7}, {2, 5}};
  ExpectSame(JoinShards(Cut(whole, 2, striped_q, striped_k), ShardBy::kStriped),
             whole);
}

TEST(Shards, OfOtherLengthsAreRefused) {
  const Rows zigzag_q = {{0, 1, 10}, {2, 3, 8, 9}, {4, 5, 6, 7}};
  const Rows wrong_k = {{0, 1, 2}, {3, 4}, {5, 6, 7}};
  try {
    JoinShards(Cut(Whole(), 2, zigzag_q, wrong_k), ShardBy::kZigzag);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "rank 1: tensor dk has 2 rows of 8, it must have 3");
  }
}

TEST(Shards, OfPackedSequencesHaveTheWholesSums) {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.head_dim = o.value_dim = 16;
  o.lengths_q = {3, 7};
  Case whole = Generate(o);
  AddAnswers(&whole, 1);
  const Rows zigzag = {{0, 1, 2, 9}, {3, 4, 5, 6, 7, 8}};
  const Rows contiguous = {{0, 1, 2, 3}, {4, 5, 6, 7, 8, 9}};
  ExpectSame(
      JoinShards(Cut(whole, 0, contiguous, contiguous), ShardBy::kSequence),
      whole);
  EXPECT_THROW(JoinShards(Cut(whole, 0, zigzag, zigzag), ShardBy::kZigzag),
               Error);
  std::vector<Case> ranks = Cut(whole, 0, contiguous, contiguous);
  ranks.pop_back();
  EXPECT_THROW(JoinShards(ranks, ShardBy::kSequence), Error);
}

TEST(Shards, TheWrongRankIsNamed) {
  const Case whole = Whole();
  const Rows queries = {{0, 1}, {2, 3, 4, 5, 6, 7}, {8, 9, 10}};
  const Rows keys = {{0}, {1, 2, 3, 4}, {5, 6, 7}};
  std::vector<Case> ranks = Cut(whole, 2, queries, keys);
  const Array dk = *ranks[1].Find("dk");
  void* data = nullptr;
  ranks[1].tensors["dk"] = MakeArray(dk.dtype, dk.shape, &data);
  CheckOptions options;
  options.threads = 1;
  options.diagnose = false;
  const CaseReport report =
      Check(JoinShards(ranks, ShardBy::kSequence), options);
  EXPECT_FALSE(report.pass);
  bool named = false;
  for (const TensorVerdict& t : report.tensors) {
    for (const std::string& finding : t.findings) {
      named |= t.name == "dk" && finding == "the error lies in ranks 1 of 3";
    }
  }
  EXPECT_TRUE(named);
}

// What is wrong with pieces; empty where nothing is.
std::string ErrorOf(const std::vector<Case>& ranks, ShardBy by) {
  try {
    JoinShards(ranks, by);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Every tensor of a case with all options, cut by heads or batch elements.
TEST(Shards, OfHeadsAndBatchesAreJoined) {
  GenerateOptions o;
  o.batch = 3;
  o.heads = o.kv_heads = 4;
  o.nq = 8;
  o.nk = 12;
  o.head_dim = o.value_dim = 16;
  o.sinks = o.alibi = o.dlse = true;
  o.bias = {3, 4, 8, 1};
  for (const Layout layout : {Layout::kBhsd, Layout::kBshd}) {
    o.options.layout = layout;
    Case whole = Generate(o);
    AddAnswers(&whole, 1);
    const size_t heads = layout == Layout::kBhsd ? 1 : 2;
    const auto cut = [&](size_t rank, bool by_heads) {
      Case part = whole;
      const std::vector<int64_t> taken =
          rank == 0 ? std::vector<int64_t>{0} : std::vector<int64_t>{1, 2};
      for (auto& [name, array] : part.tensors) {
        size_t d = by_heads ? heads : 0;
        if (name == "sinks" || name == "dsinks" || name == "alibi_slopes" ||
            name == "dalibi_slopes") {
          if (!by_heads) continue;
          d = 0;
        } else if (name == "bias" || name == "dbias" || name == "lse" ||
                   name == "dlse") {
          d = by_heads ? 1 : 0;
        }
        std::vector<int64_t> rows = taken;
        if (by_heads && rank == 1) rows.push_back(3);
        array = Take(array, d, rows);
      }
      return part;
    };
    ExpectSame(JoinShards({cut(0, true), cut(1, true)}, ShardBy::kHeads),
               whole);
    ExpectSame(JoinShards({cut(0, false), cut(1, false)}, ShardBy::kBatch),
               whole);
    // A bias that broadcasts is the same on every rank.
    std::vector<Case> ranks = {cut(0, true), cut(1, true)};
    for (Case& rank : ranks) {
      rank.tensors["bias"] = Take(*whole.Find("bias"), 1, {0});
      rank.tensors["dbias"] = Take(*whole.Find("dbias"), 1, {0});
    }
    const Case joined = JoinShards(ranks, ShardBy::kHeads);
    EXPECT_EQ(joined.Find("bias")->shape, (std::vector<int64_t>{3, 1, 8, 1}));
    // Also where each rank has one head; of two that differ it is cut.
    ranks = {cut(0, true), cut(0, true)};
    EXPECT_EQ(JoinShards(ranks, ShardBy::kHeads).Find("bias")->shape[1], 1);
    ranks[1].tensors["bias"] = Take(*whole.Find("bias"), 1, {2});
    EXPECT_EQ(JoinShards(ranks, ShardBy::kHeads).Find("bias")->shape[1], 2);
  }
}

TEST(Shards, OfPackedSequencesAreJoinedByBatch) {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.head_dim = o.value_dim = 16;
  o.lengths_q = {3, 7};
  o.lengths_k = {4, 5};
  Case whole = Generate(o);
  AddAnswers(&whole, 1);
  std::vector<Case> ranks = Cut(whole, 0, {{0, 1, 2}, {3, 4, 5, 6, 7, 8, 9}},
                                {{0, 1, 2, 3}, {4, 5, 6, 7, 8}});
  // Each rank's own sums, of either integer type.
  static const int32_t first[] = {0, 3}, last[] = {0, 7};
  static const int64_t first_k[] = {0, 4}, last_k[] = {0, 5};
  const auto sums = [](DType dtype, const void* data) {
    Array array;
    array.dtype = dtype;
    array.shape = {2};
    array.data = data;
    return array;
  };
  ranks[0].tensors["cu_seqlens_q"] = sums(DType::kI32, first);
  ranks[1].tensors["cu_seqlens_q"] = sums(DType::kI32, last);
  ranks[0].tensors["cu_seqlens_k"] = sums(DType::kI64, first_k);
  ranks[1].tensors["cu_seqlens_k"] = sums(DType::kI64, last_k);
  const Case joined = JoinShards(ranks, ShardBy::kBatch);
  for (const char* name : {"q", "k", "dv", "lse"}) {
    EXPECT_EQ(joined.Find(name)->shape, whole.Find(name)->shape) << name;
  }
  CheckOptions options;
  options.threads = 1;
  EXPECT_TRUE(Check(joined, options).pass);
  // Cut by rows, the sums are the whole's, and must end where the rows do.
  ranks[1].tensors["cu_seqlens_q"] = ranks[0].tensors["cu_seqlens_q"];
  ranks[1].tensors["cu_seqlens_k"] = ranks[0].tensors["cu_seqlens_k"];
  EXPECT_EQ(ErrorOf(ranks, ShardBy::kSequence),
            "rank 0: tensor cu_seqlens_q ends with 3, all ranks' q have 10 "
            "rows: it must be that of the whole batch on every rank");
}

TEST(Shards, WhatDoesNotFitIsNamed) {
  const Case whole = Whole();
  const Rows queries = {{0, 1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}};
  const Rows keys = {{0, 1, 2, 3}, {4, 5, 6, 7}};
  const std::vector<Case> good = Cut(whole, 2, queries, keys);
  EXPECT_EQ(ErrorOf(good, ShardBy::kSequence), "");
  const auto wrong = [&](const auto& change) {
    std::vector<Case> ranks = good;
    ranks[0].name = ranks[1].name = "c";
    change(&ranks[1]);
    return ErrorOf(ranks, ShardBy::kSequence);
  };
  EXPECT_EQ(wrong([](Case* c) {
              c->options.softcap = 2.0;
            }).rfind("c: rank 1: its options are ", 0),
            0u);
  EXPECT_EQ(wrong([](Case* c) { c->tensors.erase("dk"); }),
            "c: rank 1: it has 8 tensors, rank 0 has 9");
  EXPECT_EQ(wrong([](Case* c) {
              c->tensors["sinks"] = *c->Find("dk");
              c->tensors.erase("dk");
            }),
            "c: rank 1: tensor dk is missing");
  EXPECT_EQ(wrong([](Case* c) { c->tensors["dk"].dtype = DType::kF16; }),
            "c: rank 1: tensor dk has another dtype or number of dimensions "
            "than on rank 0");
  EXPECT_EQ(wrong([](Case* c) {
              c->tensors["dk"].shape = {2, 4, 16};
            }),
            "c: rank 1: tensor dk has another dtype or number of dimensions "
            "than on rank 0");
  EXPECT_EQ(wrong([](Case* c) {
              c->tensors["dk"].shape = {1, 4, 4, 8};
            }),
            "c: rank 1: tensor dk has another shape than on rank 0");
  // What is not cut must be the same.
  std::vector<Case> ranks = good;
  for (Case& rank : ranks) {
    void* data = nullptr;
    rank.tensors["sinks"] = MakeArray(DType::kF32, {2}, &data);
    std::memset(data, 0, 8);
  }
  EXPECT_EQ(ErrorOf(ranks, ShardBy::kSequence), "");
  ranks[1].tensors["sinks"].shape = {1};
  EXPECT_NE(ErrorOf(ranks, ShardBy::kSequence).find("differs from rank 0's"),
            std::string::npos);
  void* data = nullptr;
  ranks[1].tensors["sinks"] = MakeArray(DType::kF32, {2}, &data);
  std::memset(data, 1, 8);
  EXPECT_NE(ErrorOf(ranks, ShardBy::kSequence).find("a gradient reduced"),
            std::string::npos);
}

TEST(Shards, NamesAndPlaces) {
  EXPECT_EQ(ShardByNamed("heads"), ShardBy::kHeads);
  EXPECT_EQ(ShardByNamed("batch"), ShardBy::kBatch);
  EXPECT_THROW(ShardByNamed("rows"), Error);
  // Sizes that no rank has told: equal runs.
  Shards shards;
  shards.ranks = 2;
  EXPECT_EQ(shards.RankOf(4, 10), 0);
  EXPECT_EQ(shards.RankOf(5, 10), 1);
  shards.counts[10] = {7, 3};
  EXPECT_EQ(shards.RankOf(6, 10), 0);
  EXPECT_EQ(shards.RankOf(7, 10), 1);
}

}  // namespace
}  // namespace fa2::verify
