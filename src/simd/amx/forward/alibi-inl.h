// SPDX-License-Identifier: Apache-2.0

// ALiBi with the exponentials of the forward pass on AMX: no pass over S for
// it alone.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_FORWARD_ALIBI_INL_H_
#define FA2_SRC_SIMD_AMX_FORWARD_ALIBI_INL_H_

#include <algorithm>
#include <cmath>

#include "src/simd/amx/elements-inl.h"
#include "src/simd/amx/forward/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Where all queries of a sub-block are on one side of all its keys, what ALiBi
// takes from a score shrinks or grows by the slope from key to key. And the
// running maximum may be any bound that is not far above the scores: the
// greatest product, as if it were at the least distance.
class AlibiMaxima {
 public:
  explicit AlibiMaxima(const ScoreOptions& o)
      : options_(o), factors_(o, 1.0), slope2_(factors_.slope * kLog2E<float>) {
    for (int i = 0; i < 32; ++i) {
      row_penalty_[32 + i] = static_cast<float>(i) * slope2_;
      row_penalty_[i] = -row_penalty_[32 + i];
    }
  }

  // Whether the bound is near enough: 31 keys make P 2^-58 at most, and 2^-68
  // of that is still kept.
  bool given() const {
    return options_.alibi_slope >= 0.0 && options_.alibi_slope <= 1.3;
  }

  bool OneSided(int64_t key, int64_t query) const {
    return After(key, query) || Position(query)[31] <= First(key);
  }

  // For columns of a half of the queries.
  HWY_INLINE Floats Bound(Floats product, int64_t key, int64_t query,
                          int half) const {
    const FloatTag d;
    const Floats at = hn::Sub(hn::LoadU(d, Position(query) + 16 * half),
                              hn::Set(d, First(key)));
    const Floats distance =
        hn::Max(hn::Sub(hn::Zero(d), at), hn::Sub(at, hn::Set(d, 31.0f)));
    return hn::NegMulAdd(hn::Set(d, factors_.slope), distance,
                         hn::Mul(product, hn::Set(d, factors_.scale)));
  }

  // Maxima times log2(e) with what ALiBi takes from scores of the first key.
  const float* Lift(const float* max, int64_t key, int64_t query,
                    float* lifted) const {
    const float slope = After(key, query) ? slope2_ : -slope2_;
    for (int i = 0; i < 32; ++i) {
      lifted[i] = max[i] + slope * (Position(query)[i] - First(key));
    }
    return lifted;
  }
  // What it takes from those of the others beyond that, times log2(e).
  const float* RowPenalty(int64_t key, int64_t query) const {
    return row_penalty_ + (After(key, query) ? 0 : 32);
  }

  // The key up to which scores of a strip have grown towards its queries.
  float LastGrown(const Strip& strip) const {
    return given_position() ? std::min(Last(strip), Position(strip.query)[31])
                            : -HUGE_VALF;
  }

  // How far ahead of a strip's scores maxima are set, so that they serve until
  // a key further on: as far as scores will grow, but not so far that P is lost
  // (see given()). Sums of a strip's P may reach e^11 (SumsAreLow), of which
  // some e^5 are the number of its keys, and e^3 how products differ.
  float Ahead(const Strip& strip, float* serves_until) const {
    constexpr float kOver = 3.0f;
    const float last = Last(strip);
    const float growth =
        factors_.slope * std::max(0.0f, Position(strip.query)[31] - last);
    *serves_until = HUGE_VALF;
    if (growth <= kOver) return 0.0f;
    const float most = std::max(0.0f, 40.0f - 31.0f * factors_.slope);
    if (growth <= most) return growth;
    *serves_until = last + (most + kOver) / factors_.slope;
    return most;
  }

  // Of the queries, less the sub-block's first key.
  void Positions(int64_t key, int64_t query, float* position) const {
    for (int i = 0; i < 32; ++i) {
      position[i] = Position(query)[i] - First(key);
    }
  }

 private:
  const float* Position(int64_t query) const {
    return static_cast<const float*>(options_.query_position) + 32 * query;
  }
  bool given_position() const { return options_.query_position != nullptr; }
  static float First(int64_t key) { return static_cast<float>(32 * key); }
  static float Last(const Strip& strip) {
    return First(strip.key[strip.count - 1]) + 31.0f;
  }
  // The queries come after the keys.
  bool After(int64_t key, int64_t query) const {
    return Position(query)[0] >= First(key) + 31.0f;
  }

  const ScoreOptions& options_;
  const ScoreFactors factors_;
  const float slope2_;     // times log2(e)
  float row_penalty_[64];  // of queries after the keys, before them
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_FORWARD_ALIBI_INL_H_
