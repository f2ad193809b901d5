// SPDX-License-Identifier: Apache-2.0

// Accumulators stored as rows of bf16 in one pass, against what unpacking,
// adding and rounding them gives, to the bit; rows of f32 and f64 stored
// non-temporally.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "src/common/half.h"
#include "src/simd/amx/engine.h"
#include "src/simd/engine.h"
#include "src/simd/lane/bf16dot_engine.h"
#include "src/simd/rowwise/rows.h"
#include "src/simd/target.h"
#include "tests/simd/amx_emulated.h"
#include "tests/simd/key_rows.h"

namespace fa2::simd {
namespace {

struct RowStoreCase {
  bool keys;      // key rows, or query rows
  int64_t depth;  // elements of a row
  int64_t count;  // rows
  int parts;
  bool row_factor;
  int64_t shift;   // elements from the start of a cache line to the first row
  int64_t stride;  // elements
  bool non_temporal;

  std::string Name() const {
    return std::string(keys ? "key" : "query") + " rows, depth " +
           std::to_string(depth) + ", count " + std::to_string(count) +
           ", parts " + std::to_string(parts) + ", shift " +
           std::to_string(shift) + ", stride " + std::to_string(stride) +
           (row_factor ? ", row factor" : "") +
           (non_temporal ? ", non-temporal" : "");
  }
};

template <typename T>
struct Aligned {
  explicit Aligned(int64_t count) : storage(static_cast<size_t>(count) + 64) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(storage.data());
    data = reinterpret_cast<T*>((start + 63) & ~uintptr_t{63});
  }
  std::vector<T> storage;
  T* data;
};

void CheckRowStore(const Engine& engine, const RowStoreCase& c) {
  SCOPED_TRACE(std::string(engine.name) + ", " + c.Name());
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const int64_t panel = c.keys ? engine.key_panel : engine.query_grain;
  const int64_t rows = (c.count + panel - 1) / panel * panel;
  const size_t bytes = (c.keys ? engine.key_accumulator_bytes
                               : engine.query_accumulator_bytes)(rows, c.depth);
  const int64_t elements = static_cast<int64_t>(bytes / sizeof(float));
  const float factor = 0.37f;
  std::vector<float> row_factor(static_cast<size_t>(rows));
  for (float& f : row_factor) f = normal(random);

  // The sum of the parts, as rows.
  std::vector<Aligned<float>> parts;
  std::vector<const void*> accumulators;
  std::vector<float> sum(static_cast<size_t>(c.count * c.depth));
  for (int part = 0; part < c.parts; ++part) {
    parts.emplace_back(elements);
    float* const accumulator = parts.back().data;
    for (int64_t i = 0; i < elements; ++i) accumulator[i] = normal(random);
    accumulators.push_back(accumulator);
    std::vector<float> unpacked(sum.size());
    if (c.keys) {
      KeyRows(engine, accumulator, rows, c.depth, c.count, unpacked.data());
    } else {
      engine.unpack_query_rows(accumulator, rows, c.depth, 0, c.count,
                               unpacked.data(), c.depth);
    }
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] = part == 0 ? unpacked[i] : sum[i] + unpacked[i];
    }
  }

  constexpr uint16_t kUntouched = 0x5a5a;
  Aligned<uint16_t> out(c.shift + c.count * c.stride + 64);
  for (uint16_t& x : out.storage) x = kUntouched;
  std::vector<uint16_t> expected = out.storage;
  const int64_t first = out.data - out.storage.data() + c.shift;
  for (int64_t r = 0; r < c.count; ++r) {
    const float scale =
        c.row_factor ? factor * row_factor[static_cast<size_t>(r)] : factor;
    for (int64_t d = 0; d < c.depth; ++d) {
      expected[static_cast<size_t>(first + r * c.stride + d)] =
          F32ToBf16(sum[static_cast<size_t>(r * c.depth + d)] * scale);
    }
  }
  (c.keys ? engine.store_key_rows : engine.store_query_rows)(
      accumulators.data(), c.parts, c.depth, c.count, factor,
      c.row_factor ? row_factor.data() : nullptr,
      {out.data + c.shift, DType::kBF16, c.stride, c.non_temporal});
  EXPECT_EQ(out.storage, expected);
}

// One of each kind: the number of terms does not matter to accumulators.
std::vector<const Engine*> EnginesThatStoreRows() {
  std::vector<const Engine*> engines;
  if (Bf16DotAvailable()) {
    engines.push_back(Bf16DotEngine(Bf16DotTerms::kOne));
  }
  if (AmxAvailable()) engines.push_back(AmxEngine(AmxTerms::kBf16));
  if (const Engine* emulated = EmulatedAmxEngine(AmxTerms::kBf16)) {
    engines.push_back(emulated);
  }
  return engines;
}

TEST(RowStore, MatchesUnpackedRows) {
  const std::vector<const Engine*> engines = EnginesThatStoreRows();
  if (engines.empty()) GTEST_SKIP() << "no engine of this CPU stores rows";
  for (const Engine* engine : engines) {
    ASSERT_NE(engine->store_key_rows, nullptr) << engine->name;
    ASSERT_NE(engine->store_query_rows, nullptr) << engine->name;
    for (const bool keys : {true, false}) {
      for (const int64_t depth : {1, 33, 40, 64, 128, 160}) {
        for (const int64_t count : {5, 32, 50}) {
          for (const int64_t shift : {0, 1, 16}) {
            for (const int64_t padding : {0, 3, 32}) {
              for (const bool non_temporal : {false, true}) {
                const int64_t stride = depth + padding;
                CheckRowStore(*engine, {keys, depth, count, 1, false, shift,
                                        stride, non_temporal});
                CheckRowStore(*engine, {keys, depth, count, 3, true, shift,
                                        stride, non_temporal});
              }
            }
          }
        }
      }
    }
  }
}

// Rows of whole lines and others, aligned and not, added to what is there or
// not: the same elements, and nothing beside them.
template <typename T>
void CheckNonTemporal(DType dtype) {
  const RowKernels& kernels = *RowKernelsFor(dtype, AvailableTargets());
  std::mt19937 random(7);
  std::normal_distribution<T> normal;
  constexpr int64_t kRows = 5;
  for (const int64_t depth : {1, 16, 33, 64}) {
    for (const int64_t padding : {0, 3, 16}) {
      for (const int64_t shift : {0, 1, 16}) {
        for (const bool add : {false, true}) {
          const int64_t stride = depth + padding;
          Aligned<T> rows(kRows * depth);
          Aligned<T> out(shift + kRows * stride + 64);
          for (T& x : rows.storage) x = normal(random);
          for (T& x : out.storage) x = normal(random);
          std::vector<T> expected = out.storage;
          const int64_t first = out.data - out.storage.data() + shift;
          for (int64_t r = 0; r < kRows; ++r) {
            for (int64_t d = 0; d < depth; ++d) {
              T& to = expected[static_cast<size_t>(first + r * stride + d)];
              to = rows.data[r * depth + d] * T(0.5) + (add ? to : T(0));
            }
          }
          kernels.store(rows.data, depth, kRows, depth, 0.5, nullptr, add,
                        {out.data + shift, dtype, stride, true});
          EXPECT_EQ(out.storage, expected)
              << "depth " << depth << ", stride " << stride << ", shift "
              << shift << (add ? ", add" : "");
        }
      }
    }
  }
}

TEST(RowStore, NonTemporalRows) {
  CheckNonTemporal<float>(DType::kF32);
  CheckNonTemporal<double>(DType::kF64);
}

}  // namespace
}  // namespace fa2::simd
