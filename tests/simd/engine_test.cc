// SPDX-License-Identifier: Apache-2.0

// Every matrix engine, on every instruction set that this CPU has, against
// double loops, a block at a time.
#include "src/simd/amx/engine.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "src/simd/lane/bf16dot_engine.h"
#include "src/simd/lane/fma_engines.h"
#include "src/simd/target.h"
#include "tests/simd/amx_emulated.h"
#include "tests/simd/engine_block.h"

namespace fa2::simd {
namespace {

struct Subject {
  std::string name;
  const Engine* engine;
  DType dtype;
  // Relative L2 error of a gradient that many sums make up; P and dS rounded to
  // bf16 cost 1.7e-3, two bf16 terms 1e-5 and, where queries see few keys and
  // dS is a small difference, 3e-5; f32 sums 2e-7 and more with the depth.
  double tolerance;
};

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  const int64_t targets = AvailableTargets();
  for (int64_t rest = targets; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    const std::string name = TargetNames(target).front();
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      subjects.push_back({"f32_" + name + "_" + NameOf(dtype),
                          F32Engine(target), dtype, 3e-6});
    }
    subjects.push_back({"f64_" + name, F64Engine(target), DType::kF64, 1e-13});
  }
  const auto add_amx = [&subjects](const std::string& name,
                                   const Engine* (*engine)(AmxTerms)) {
    if (engine(AmxTerms::kBf16) == nullptr) return;
    subjects.push_back(
        {name + "_fast", engine(AmxTerms::kBf16), DType::kBF16, 4e-3});
    subjects.push_back({name + "_few_keys", engine(AmxTerms::kBf16FewKeys),
                        DType::kBF16, 4e-3});
    subjects.push_back(
        {name + "_exact", engine(AmxTerms::kBf16Exact), DType::kBF16, 3e-6});
    subjects.push_back(
        {name + "_f16", engine(AmxTerms::kF16), DType::kF16, 4e-5});
    subjects.push_back(
        {name + "_f32_high", engine(AmxTerms::kF32High), DType::kF32, 4e-5});
    subjects.push_back(
        {name + "_f16_exact", engine(AmxTerms::kF16Exact), DType::kF16, 3e-6});
    subjects.push_back(
        {name + "_f32", engine(AmxTerms::kF32), DType::kF32, 3e-6});
  };
  if (Bf16DotAvailable()) {
    subjects.push_back({"bf16dot_fast", Bf16DotEngine(Bf16DotTerms::kOne),
                        DType::kBF16, 4e-3});
    subjects.push_back({"bf16dot_few_keys", Bf16DotEngine(Bf16DotTerms::kTwo),
                        DType::kBF16, 4e-3});
    subjects.push_back({"bf16dot_exact", Bf16DotEngine(Bf16DotTerms::kAll),
                        DType::kBF16, 3e-6});
  }
  add_amx("amx", &AmxEngine);
  add_amx("amx_emulated", &EmulatedAmxEngine);
  return subjects;
}

class EngineTest : public testing::TestWithParam<Subject> {
 protected:
  void Check(BlockCase c) {
    const Subject& subject = GetParam();
    c.dtype = subject.dtype;
    SCOPED_TRACE(subject.name + " " + c.Name());
    const BlockErrors e = RunBlockCase(*subject.engine, c);
    EXPECT_LE(e.dq, subject.tolerance);
    EXPECT_LE(e.dk, subject.tolerance);
    EXPECT_LE(e.dv, subject.tolerance);
    EXPECT_LE(e.ds, subject.tolerance);
    EXPECT_LE(e.alibi, subject.tolerance);
    EXPECT_LE(e.out, subject.tolerance);
    // Absolute; a sum of many exponentials evens their errors out.
    EXPECT_LE(e.lse, std::max(subject.tolerance, 1e-13));
    largest_ = std::max(largest_, e.Largest());
  }
  void TearDown() override {
    std::ostringstream error;  // to_string would round it to 1e-6
    error << largest_;
    RecordProperty("largest_error", error.str());
  }

 private:
  double largest_ = 0.0;
};

TEST_P(EngineTest, Full) {
  for (int64_t depth : {64, 96, 128, 256}) {
    BlockCase c;
    c.head_dim = c.value_dim = depth;
    c.queries = 96;
    c.keys[0] = 64;
    c.keys[1] = 96;
    Check(c);
  }
}

TEST_P(EngineTest, OddHeadDims) {
  const int64_t dims[][2] = {{1, 1},    {7, 33},    {32, 32},
                             {40, 80},  {64, 17},   {80, 80},
                             {64, 128}, {192, 128}, {288, 61}};
  for (const auto& d : dims) {
    BlockCase c;
    c.head_dim = d[0];
    c.value_dim = d[1];
    c.queries = 41;
    c.keys[0] = 37;
    c.keys[1] = 16;
    c.mask = BlockMask::kCausal;
    c.shift = 12;
    Check(c);
  }
}

// What all queries see, with maxima from the block before and no padding: S
// need not go through memory. Head dims of every number of steps modulo 8, keys
// that fill register blocks and that do not.
TEST_P(EngineTest, SecondBlockOfKeys) {
  for (int64_t depth : {8, 24, 32, 34, 36, 38, 40, 42, 44, 46, 63, 200, 257}) {
    for (int64_t keys : {16, 48, 80, 96}) {
      BlockCase c;
      c.head_dim = depth;
      c.value_dim = 32;
      c.queries = 128;
      c.keys[0] = 16;
      c.keys[1] = keys;
      Check(c);
    }
  }
}

TEST_P(EngineTest, TailsOfEveryKind) {
  for (int64_t queries : {1, 2, 15, 31, 32, 33, 47, 64, 65}) {
    for (int64_t keys : {1, 3, 15, 16, 17, 32, 33, 63}) {
      BlockCase c;
      c.head_dim = 32;
      c.value_dim = 32;
      c.queries = queries;
      c.keys[0] = keys;
      c.keys[1] = 5;
      c.seed = static_cast<uint32_t>(queries * 100 + keys);
      Check(c);
    }
  }
}

TEST_P(EngineTest, Causal) {
  for (int64_t depth : {64, 128, 256}) {
    for (int64_t shift : {-40, 0, 33}) {
      BlockCase c;
      c.head_dim = c.value_dim = depth;
      c.queries = 160;
      c.keys[0] = 128;
      c.keys[1] = 80;
      c.mask = BlockMask::kCausal;
      c.shift = shift;
      Check(c);
    }
  }
}

TEST_P(EngineTest, MoreThanOneChunkOfKeys) {
  for (int64_t depth : {64, 128}) {
    BlockCase c;
    c.head_dim = c.value_dim = depth;
    c.queries = 72;
    c.keys[0] = 600;
    c.keys[1] = 530;
    c.mask = BlockMask::kCausal;
    c.shift = 700;
    Check(c);
  }
}

TEST_P(EngineTest, RandomVisibility) {
  for (BlockMask mask : {BlockMask::kRandomRanges, BlockMask::kRandomTiles}) {
    for (uint32_t seed = 1; seed <= 6; ++seed) {
      for (int64_t depth : {64, 72}) {
        BlockCase c;
        c.head_dim = c.value_dim = depth;
        c.queries = 30 + 37 * seed;
        c.keys[0] = 200 - 23 * seed;
        c.keys[1] = 97;
        c.mask = mask;
        c.seed = seed;
        Check(c);
      }
    }
  }
}

TEST_P(EngineTest, Options) {
  for (int option = 0; option < 6; ++option) {
    for (BlockMask mask : {BlockMask::kNone, BlockMask::kRandomTiles}) {
      for (int64_t depth : {64, 80}) {
        BlockCase c;
        c.head_dim = c.value_dim = depth;
        c.queries = 83;
        c.keys[0] = 70;
        c.keys[1] = 50;
        c.shift = 10;
        c.mask = mask;
        if (option == 0 || option == 5) c.softcap = 1.5;
        if (option == 1 || option == 5) c.alibi_slope = 0.0625;
        if (option == 2 || option == 5) c.bias = true;
        if (option == 3 || option == 5) c.dropout = true;
        c.want_ds = option >= 4;
        Check(c);
      }
    }
  }
}

TEST_P(EngineTest, NanInKeysThatNoQuerySees) {
  for (bool general : {false, true}) {
    for (uint32_t seed = 1; seed <= 4; ++seed) {
      BlockCase c;
      c.queries = 70;
      c.keys[0] = 90;
      c.keys[1] = 33;
      c.nan_in_masked = true;
      c.want_ds = general;
      c.seed = seed;
      Check(c);
    }
  }
}

TEST_P(EngineTest, LargeScores) {
  // |S| to 60: the running maximum moves far, and rows are one key's alone.
  // Errors of S are amplified as much.
  BlockCase c;
  c.queries = 64;
  c.keys[0] = 64;
  c.keys[1] = 320;
  c.input_scale = 4.0;
  const Subject& subject = GetParam();
  c.dtype = subject.dtype;
  const BlockErrors e = RunBlockCase(*subject.engine, c);
  EXPECT_LE(e.Largest(), 16 * subject.tolerance);
}

TEST_P(EngineTest, RoundedWeightsSumToOne) {
  if (!GetParam().engine->rounds_probabilities) GTEST_SKIP() << "not rounded";
  for (BlockMask mask : {BlockMask::kNone, BlockMask::kCausal}) {
    BlockCase c;
    c.queries = 71;
    c.keys[0] = 50;
    c.keys[1] = 90;
    c.mask = mask;
    c.input_scale = 2.0;
    c.equal_values = true;
    const BlockErrors e = RunBlockCase(*GetParam().engine, c);
    EXPECT_LE(e.out, 1e-6);
    EXPECT_LE(e.lse, 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EngineTest, testing::ValuesIn(Subjects()),
                         [](const testing::TestParamInfo<Subject>& info) {
                           return info.param.name;
                         });

TEST(AmxTiles, HardwareMatchesEmulation) {
  if (!AmxAvailable()) GTEST_SKIP() << "no AMX here";
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    EXPECT_LE(TileProductDifference(seed), 0.0) << "seed " << seed;
  }
}

TEST(AmxTiles, EnginesComeTogether) {
  for (AmxTerms terms :
       {AmxTerms::kBf16, AmxTerms::kBf16FewKeys, AmxTerms::kBf16Exact,
        AmxTerms::kF16, AmxTerms::kF16Exact, AmxTerms::kF32High,
        AmxTerms::kF32}) {
    EXPECT_EQ(AmxEngine(terms) != nullptr, AmxAvailable());
  }
}

}  // namespace
}  // namespace fa2::simd
