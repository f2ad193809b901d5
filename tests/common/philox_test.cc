// SPDX-License-Identifier: Apache-2.0

// Philox4x32-10 against the known answers of its authors' library (Random123,
// kat_vectors), and dropout's mapping.
#include "src/common/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

namespace fa2 {
namespace {

using Words = std::array<uint32_t, 4>;

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, OutputsFollowEachOther) {
  const uint64_t seed = 0x0123456789ABCDEFu;
  for (const uint64_t block : {uint64_t{0}, uint64_t{7}, uint64_t{1} << 33}) {
    const Words words = Philox4x32({static_cast<uint32_t>(block),
                                    static_cast<uint32_t>(block >> 32), 0, 0},
                                   {0x89ABCDEFu, 0x01234567u});
    for (uint64_t n = 0; n < 4; ++n) {
      EXPECT_EQ(PhiloxOutput(seed, 4 * block + n), words[n]);
    }
  }
}

TEST(Philox, UniformIsAboveZeroAndUpToOne) {
  EXPECT_EQ(PhiloxUniform(0), 0x1p-33f);
  EXPECT_EQ(PhiloxUniform(0xFFFFFFFFu), 1.0f);
  EXPECT_EQ(PhiloxUniform(0x80000000u), 0.5f);
}

TEST(Philox, ShareOfKeptIsOneMinusP) {
  constexpr int kCount = 200000;
  for (const double p : {0.0, 0.1, 0.3, 0.5, 0.9, 1.0}) {
    int kept = 0;
    for (uint64_t n = 0; n < kCount; ++n) kept += PhiloxKeep(p, 1246, n);
    // Five standard deviations of a binomial count; none at 0 and 1.
    const double deviation = std::sqrt(kCount * p * (1.0 - p));
    EXPECT_NEAR(kept, kCount * (1.0 - p), 5.0 * deviation) << "p " << p;
  }
}

}  // namespace
}  // namespace fa2
