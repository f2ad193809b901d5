// SPDX-License-Identifier: Apache-2.0

// The float64 oracle against the outputs of a GPU kernel: it agrees within that
// kernel's precision, and tells the three cases that hold the kernel's
// mistakes.
#include "tests/support/golden.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "fa2/reference.h"
#include "src/common/philox.h"
#include "tests/support/error.h"

namespace fa2::test {
namespace {

const Goldens& AllGoldens() {
  static const Goldens* const goldens =
      new Goldens(ReadGoldens(FA2_TEST_DATA "/memeff_goldens.safetensors"));
  return *goldens;
}

GoldenResults Oracle(const Golden& golden) {
  GoldenResults results = MakeResults(golden, /*f64=*/true);
  Status status = AttentionReferenceForward(ForwardArgs(golden, results));
  EXPECT_TRUE(status.ok()) << status.message();
  status = AttentionReferenceBackward(BackwardArgs(golden, results));
  EXPECT_TRUE(status.ok()) << status.message();
  return results;
}

// Relative L2 errors of the GPU (tests/data/README.md).
double GpuBound(const Golden& golden) {
  if (golden.dtype == DType::kBF16) return 3.3e-3;
  if (golden.dtype == DType::kF16) return 4e-4;
  return golden.name == "c18" ? 6e-6 : 1e-6;
}

// Of the queries only: the padding of packed sequences means nothing.
double LseError(const Golden& golden, const GoldenResults& results) {
  double worst = 0.0;
  const ConstTensorView& cu = golden.options.cu_seqlens_q;
  ForEachIndex(golden.lse.sizes, [&](const Sizes& at) {
    if (cu.given() &&
        at[2] >= Get(cu, {0, 0, 0, at[0] + 1}) - Get(cu, {0, 0, 0, at[0]})) {
      return;
    }
    worst = std::max(worst,
                     std::abs(Get(golden.lse, at) - Get(results.lse.view, at)));
  });
  return worst;
}

TEST(ReferenceGolden, AllCasesAreThere) {
  EXPECT_EQ(AllGoldens().cases.size(), 19u);
}

TEST(ReferenceGolden, AgreesWithTheGpuWithinItsPrecision) {
  for (const Golden& golden : AllGoldens().cases) {
    if (golden.forward_is_wrong) continue;
    const GoldenResults results = Oracle(golden);
    const double bound = GpuBound(golden);
    SCOPED_TRACE(golden.name + " " + golden.what);
    EXPECT_LE(ErrorOf(golden.out, results.out.view).relative_l2(), bound);
    // c18's scores reach the hundreds.
    EXPECT_LE(LseError(golden, results), golden.name == "c18" ? 5e-5 : 3e-6);
    if (golden.backward_is_wrong) continue;
    EXPECT_LE(ErrorOf(golden.dv, results.dv.view).relative_l2(), bound);
    if (golden.name == "c19") {
      // One key: dS is 0 but for rounding.
      EXPECT_LE(ErrorOf(golden.dq, results.dq.view).max_abs, 1e-6);
      EXPECT_LE(ErrorOf(golden.dk, results.dk.view).max_abs, 1e-6);
      continue;
    }
    EXPECT_LE(ErrorOf(golden.dq, results.dq.view).relative_l2(), bound);
    EXPECT_LE(ErrorOf(golden.dk, results.dk.view).relative_l2(), bound);
    if (golden.dbias.given()) {
      EXPECT_LE(ErrorOf(golden.dbias, results.dbias.view).relative_l2(), bound);
    }
  }
}

TEST(ReferenceGolden, TellsTheGpusMistakes) {
  int mistaken = 0;
  for (const Golden& golden : AllGoldens().cases) {
    if (!golden.backward_is_wrong) continue;
    ++mistaken;
    SCOPED_TRACE(golden.name + " " + golden.what);
    const GoldenResults results = Oracle(golden);
    for (const auto& [gpu, oracle] :
         {std::pair(golden.dq, results.dq), std::pair(golden.dk, results.dk),
          std::pair(golden.dv, results.dv)}) {
      EXPECT_GT(ErrorOf(gpu, oracle.view).relative_l2(), 0.5);
    }
    if (golden.forward_is_wrong) {
      EXPECT_GT(ErrorOf(golden.out, results.out.view).relative_l2(), 0.5);
    }
  }
  EXPECT_EQ(mistaken, 3);
}

// The mistakes are what README.md says they are: the oracle with these masks
// gives the GPU's numbers.
Tensor MaskWhere(const Golden& golden,
                 const std::function<bool(int64_t i, int64_t j)>& visible) {
  const Tensor mask =
      MakeTensor(DType::kBool, {1, 1, golden.q.sizes[2], golden.k.sizes[2]});
  ForEachIndex(mask.view.sizes, [&](const Sizes& at) {
    Set(mask.view, at, visible(at[2], at[3]));
  });
  return mask;
}

void UseMask(const Tensor& mask, AttentionOptions* options) {
  options->causal = Causal::kNone;
  options->window_left = options->window_right = -1;
  options->bias = mask.view;
}

TEST(ReferenceGolden, C04AndC05LeaveTheFirstLiveBlockUnmasked) {
  for (Golden golden : AllGoldens().cases) {
    if (!golden.forward_is_wrong) continue;
    SCOPED_TRACE(golden.name);
    const int64_t shift = golden.k.sizes[2] - golden.q.sizes[2];
    const int64_t first_live = -shift / 64 * 64;
    // Its rows see what the block's last row may see.
    const Tensor mask = MaskWhere(golden, [&](int64_t i, int64_t j) {
      const bool in_block = i >= first_live && i < first_live + 64;
      return j <= (in_block ? first_live + 63 : i) + shift;
    });
    UseMask(mask, &golden.options);
    EXPECT_LE(ErrorOf(golden.out, Oracle(golden).out.view).relative_l2(),
              GpuBound(golden));
  }
}

TEST(ReferenceGolden, C08CountsTheWindowFromTheWrongDiagonal) {
  for (const Golden& golden : AllGoldens().cases) {
    if (golden.name != "c08") continue;
    const GoldenResults results = Oracle(golden);
    const int64_t shift = golden.k.sizes[2] - golden.q.sizes[2];
    const int64_t window = golden.options.window_left + 1;
    // The last block of 64 queries that a block of 64 keys visits holds the
    // window's end for its first key.
    const Tensor mask = MaskWhere(golden, [&](int64_t i, int64_t j) {
      const int64_t end = (j / 64 * 64 + window + 63) / 64 * 64;
      return j <= i + shift && j > i - window && (i < end || j >= 128);
    });
    Golden mistaken = golden;
    UseMask(mask, &mistaken.options);
    const Status status =
        AttentionReferenceBackward(BackwardArgs(mistaken, results));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_LE(ErrorOf(golden.dq, results.dq.view).relative_l2(), 4e-3);
    EXPECT_LE(ErrorOf(golden.dk, results.dk.view).relative_l2(), 4e-3);
    EXPECT_LE(ErrorOf(golden.dv, results.dv.view).relative_l2(), 4e-3);
  }
}

TEST(ReferenceGolden, AnotherSeedOrOffsetIsSeen) {
  for (const Golden& golden : AllGoldens().cases) {
    if (golden.options.dropout_p == 0.0) continue;
    SCOPED_TRACE(golden.name);
    Golden other = golden;
    other.options.philox_seed += 1;
    EXPECT_GT(ErrorOf(golden.out, Oracle(other).out.view).relative_l2(), 0.1);
    other = golden;
    other.options.philox_offset += 1;
    EXPECT_GT(ErrorOf(golden.out, Oracle(other).out.view).relative_l2(), 0.1);
  }
}

// Solves X A = Y for X, n x n, by elimination with pivots; rows of X and Y are
// independent.
std::vector<double> SolveFromRight(std::vector<double> a, std::vector<double> y,
                                   int n) {
  // Columns of A as equations: for each row x of X, sum_j x_j A[j][d] = y_d.
  for (int step = 0; step < n; ++step) {
    int pivot = step;
    for (int d = step; d < n; ++d) {
      if (std::abs(a[step * n + d]) > std::abs(a[step * n + pivot])) pivot = d;
    }
    for (int r = 0; r < n; ++r) {
      std::swap(a[r * n + step], a[r * n + pivot]);
      std::swap(y[r * n + step], y[r * n + pivot]);
    }
    for (int d = 0; d < n; ++d) {
      if (d == step) continue;
      const double factor = a[step * n + d] / a[step * n + step];
      for (int r = 0; r < n; ++r) {
        a[r * n + d] -= factor * a[r * n + step];
        y[r * n + d] -= factor * y[r * n + step];
      }
    }
  }
  for (int r = 0; r < n; ++r) {
    for (int d = 0; d < n; ++d) y[r * n + d] /= a[d * n + d];
  }
  return y;
}

// c12 has as many keys as columns of V, so that the GPU's P o Z can be had back
// from its output: every one of its mask's bits is the oracle's.
TEST(ReferenceGolden, DropoutMaskEqualsTheGpusBitForBit) {
  for (const Golden& golden : AllGoldens().cases) {
    if (golden.name != "c12") continue;
    const auto [batch, heads, nq, depth] = golden.q.sizes;
    const int64_t nk = golden.k.sizes[2];
    ASSERT_EQ(nk, golden.v.sizes[3]);
    ASSERT_EQ(nk, nq);
    const int n = static_cast<int>(nk);
    const double p = golden.options.dropout_p;
    const GoldenResults results = Oracle(golden);
    int64_t bits = 0;
    int64_t kept = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        std::vector<double> v, out;
        for (int64_t j = 0; j < nk; ++j) {
          for (int64_t d = 0; d < nk; ++d) {
            v.push_back(Get(golden.v, {b, h, j, d}));
            out.push_back(Get(golden.out, {b, h, j, d}));
          }
        }
        const std::vector<double> pz = SolveFromRight(v, out, n);
        for (int64_t i = 0; i < nq; ++i) {
          for (int64_t j = 0; j < nk; ++j) {
            double score = 0.0;
            for (int64_t d = 0; d < depth; ++d) {
              score +=
                  Get(golden.q, {b, h, i, d}) * Get(golden.k, {b, h, j, d});
            }
            score /= std::sqrt(static_cast<double>(depth));
            const double probability =
                std::exp(score - Get(results.lse.view, {b, h, i, 0}));
            const bool gpu_kept =
                pz[static_cast<size_t>(i * nk + j)] > 0.5 * probability;
            const auto output =
                static_cast<uint64_t>(((b * heads + h) * nq + i) * nk + j);
            EXPECT_EQ(gpu_kept,
                      PhiloxKeep(p, golden.options.philox_seed,
                                 golden.options.philox_offset + output))
                << Text({b, h, i, j});
            ++bits;
            kept += gpu_kept;
          }
        }
      }
    }
    EXPECT_EQ(bits, batch * heads * nq * nk);
    EXPECT_NEAR(static_cast<double>(kept) / static_cast<double>(bits), 1.0 - p,
                0.02);
  }
}

}  // namespace
}  // namespace fa2::test
