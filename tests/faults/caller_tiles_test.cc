// SPDX-License-Identifier: Apache-2.0

// AMX tiles of the caller's own, configured and loaded before a call, on its
// thread and on those of its pool: calls give the same bits, and leave the
// tiles released, or as they were where a call has no use for them.
#include <cpuid.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "fa2/context.h"
#include "src/platform/amx_permission.h"
#include "src/platform/tile_config.h"
#include "tests/support/attention_case.h"
#include "tests/support/output_hash.h"

namespace fa2::test {
namespace {

using platform::TileConfig;

TileConfig StoredConfig() {
  TileConfig config;
  asm volatile("sttilecfg %0" : "=m"(config));
  return config;
}

bool IsReleased(const TileConfig& config) {
  const TileConfig initial;
  return std::memcmp(&config, &initial, sizeof(config)) == 0;
}

// Whether the CPU counts tiles among the state that a context switch has to
// save: XINUSE, where it can be read.
bool TilesAreInUse() {
  unsigned a, b, c, d;
  constexpr unsigned kXgetbvOne = 1u << 2;
  if (__get_cpuid_count(0xd, 1, &a, &b, &c, &d) == 0 || (a & kXgetbvOne) == 0) {
    return false;
  }
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(1));
  constexpr unsigned kTileConfig = 1u << 17, kTileData = 1u << 18;
  return (a & (kTileConfig | kTileData)) != 0;
}

// A caller's product of bytes in tiles, C (5 x 7) += A (5 x 12) B (12 x 7), in
// shapes that fa2 has none of: B has four summation indices to an element.
class CallersProduct {
 public:
  explicit CallersProduct(int seed) {
    for (int i = 0; i < kRows; ++i) {
      for (int k = 0; k < kInner; ++k) a_[i][k] = Element(seed + 31 * i + k);
    }
    for (int k = 0; k < kInner; ++k) {
      for (int j = 0; j < kColumns; ++j) {
        b_[k / 4][4 * j + k % 4] = Element(seed + 17 * k + j);
      }
    }
  }

  void LoadTiles() const {
    TileConfig config;
    config.palette = 1;
    config.rows[0] = config.rows[1] = kRows;
    config.rows[2] = kInner / 4;
    config.row_bytes[0] = config.row_bytes[2] = 4 * kColumns;
    config.row_bytes[1] = kInner;
    asm volatile("ldtilecfg %0" : : "m"(config));
    asm volatile(
        "tilezero %%tmm0\n\t"
        "tileloadd (%0,%1,1), %%tmm1\n\t"
        "tileloadd (%2,%3,1), %%tmm2"
        :
        : "r"(a_.data()), "r"(int64_t{sizeof(a_[0])}), "r"(b_.data()),
          "r"(int64_t{sizeof(b_[0])})
        : "memory");
  }

  // Of the tiles as they are.
  bool TilesGiveTheProduct() const {
    std::array<std::array<int32_t, kColumns>, kRows> c = {};
    asm volatile(
        "tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"
        "tilestored %%tmm0, (%0,%1,1)"
        :
        : "r"(c.data()), "r"(int64_t{sizeof(c[0])})
        : "memory");
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; ++j) {
        int32_t sum = 0;
        for (int k = 0; k < kInner; ++k) {
          sum += a_[i][k] * b_[k / 4][4 * j + k % 4];
        }
        if (c[i][j] != sum) return false;
      }
    }
    return true;
  }

  // After a call of fa2's. Leaves the tiles released.
  bool TilesAreReleasedOrAsTheyWere() const {
    const bool good =
        IsReleased(StoredConfig()) ? !TilesAreInUse() : TilesGiveTheProduct();
    asm volatile("tilerelease");
    return good;
  }

 private:
  static constexpr int kRows = 5, kColumns = 7, kInner = 12;
  static int8_t Element(int i) {
    return static_cast<int8_t>(i * 37 % 251 - 125);
  }
  std::array<std::array<int8_t, kInner>, kRows> a_;
  std::array<std::array<int8_t, 4 * kColumns>, kInner / 4> b_;
};

// A pool whose threads all have the caller's tiles loaded when they come to
// fa2's work, the calling one too.
struct TiledThreads {
  std::atomic<int> wrong{0};

  static void Run(void* opaque, int workers, void (*worker)(void*, int),
                  void* argument) {
    TiledThreads* const pool = static_cast<TiledThreads*>(opaque);
    const auto work = [=](int index) {
      const CallersProduct product(index);
      product.LoadTiles();
      worker(argument, index);
      if (!product.TilesAreReleasedOrAsTheyWere()) ++pool->wrong;
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < workers; ++i) threads.emplace_back(work, i);
    work(0);
    for (std::thread& thread : threads) thread.join();
  }
};

std::vector<AttentionCase> Cases() {
  std::vector<AttentionCase> cases;
  struct Size {
    DType dtype;
    int64_t nq, nk, head_dim;
  };
  for (const Size& size : {Size{DType::kBF16, 300, 300, 64},    // blocks
                           Size{DType::kBF16, 40, 40, 32},      // short heads
                           Size{DType::kBF16, 1, 500, 128},     // one query
                           Size{DType::kF16, 150, 150, 64},     // widened
                           Size{DType::kF32, 100, 100, 64}}) {  // no tiles
    AttentionCase c;
    c.dtype = size.dtype;
    c.heads = c.kv_heads = 6;
    c.nq = size.nq;
    c.nk = size.nk;
    c.head_dim = c.value_dim = size.head_dim;
    c.causal = Causal::kBottomRight;
    cases.push_back(c);
  }
  return cases;
}

std::unique_ptr<Context> Make(int threads, TiledThreads* pool) {
  ContextOptions options;
  options.num_threads = threads;
  if (pool != nullptr) options.thread_pool = {TiledThreads::Run, pool};
  std::unique_ptr<Context> context;
  const Status status = Context::Create(options, &context);
  EXPECT_TRUE(status.ok()) << status.message();
  return context;
}

class CallersTiles : public testing::Test {
 protected:
  void SetUp() override {
    if (!platform::MayUseAmxBf16()) GTEST_SKIP() << "no AMX here";
    unsigned a, b, c, d = 0;
    constexpr unsigned kInt8 = 1u << 25;
    (void)__get_cpuid_count(7, 0, &a, &b, &c, &d);
    if ((d & kInt8) == 0) GTEST_SKIP() << "no AMX for bytes here";
  }
};

TEST_F(CallersTiles, ChangeNothingAndAreLeftAlone) {
  for (const AttentionCase& c : Cases()) {
    SCOPED_TRACE(Describe(c));
    const AttentionInputs inputs = MakeInputs(c);
    uint64_t expected = 0, hash = 0;
    ASSERT_TRUE(HashOfCall(c, inputs, Make(1, nullptr).get(), &expected).ok());
    ASSERT_NE(expected, 0u);
    const auto alone = Make(1, nullptr);
    TiledThreads pool;
    const auto pooled = Make(3, &pool);
    for (int round = 0; round < 20; ++round) {
      const CallersProduct product(round);
      product.LoadTiles();
      ASSERT_TRUE(HashOfCall(c, inputs, alone.get(), &hash).ok());
      EXPECT_TRUE(product.TilesAreReleasedOrAsTheyWere()) << round;
      EXPECT_EQ(hash, expected) << round;
      ASSERT_TRUE(HashOfCall(c, inputs, pooled.get(), &hash).ok());
      EXPECT_EQ(hash, expected) << round;
      product.LoadTiles();
      EXPECT_TRUE(product.TilesGiveTheProduct()) << round;
      asm volatile("tilerelease");
    }
    EXPECT_EQ(pool.wrong.load(), 0);
  }
}

// So that a thread which has no more use for tiles has none to save.
TEST_F(CallersTiles, AreReleasedByCallsOnTiles) {
  const auto context = Make(1, nullptr);
  if (context->Info().engine != "amx") GTEST_SKIP() << "another engine";
  const AttentionCase c = Cases()[0];
  uint64_t hash = 0;
  CallersProduct(1).LoadTiles();
  EXPECT_FALSE(IsReleased(StoredConfig()));
  ASSERT_TRUE(HashOfCall(c, MakeInputs(c), context.get(), &hash).ok());
  EXPECT_TRUE(IsReleased(StoredConfig()));
  EXPECT_FALSE(TilesAreInUse());
}

// Both kinds of code at once, on threads of their own.
TEST_F(CallersTiles, WorkBesideCalls) {
  const AttentionCase c = Cases()[0];
  const AttentionInputs inputs = MakeInputs(c);
  const auto context = Make(2, nullptr);
  uint64_t expected = 0;
  ASSERT_TRUE(HashOfCall(c, inputs, context.get(), &expected).ok());
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0}, done{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; !over.load() || i == 0; ++i) {
        const CallersProduct product(100 * caller + i % 100);
        product.LoadTiles();
        std::this_thread::yield();
        if (!product.TilesGiveTheProduct()) ++wrong;
        asm volatile("tilerelease");
        ++done;
      }
    });
  }
  for (int round = 0; round < 50; ++round) {
    uint64_t hash = 0;
    EXPECT_TRUE(HashOfCall(c, inputs, context.get(), &hash).ok());
    EXPECT_EQ(hash, expected) << round;
  }
  over.store(true);
  for (std::thread& thread : callers) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_GE(done.load(), 3);
}

}  // namespace
}  // namespace fa2::test
