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

}  // namespace
}  // namespace fa2::verify
