// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/alibi_reach.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa2::attention {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The lesser and the greater of both; NaN if one is.
float Lower(float a, float b) { return std::isnan(a) || a <= b ? a : b; }
float Higher(float a, float b) { return std::isnan(a) || a >= b ? a : b; }

simd::Rows Part(simd::Rows rows, int64_t first, int64_t count) {
  rows.data = static_cast<const char*>(rows.data) +
              first * rows.stride * static_cast<int64_t>(SizeOf(rows.dtype));
  rows.rows = count;
  return rows;
}

// Calls use(dots) with the dot products of rows of `a` and `b`, at most 32 of
// them, as the accumulator has them.
template <class Use>
void WithDots(const simd::RowKernels& kernels, DType accumulator,
              const simd::Rows& a, const simd::Rows& b, const Use& use) {
  const auto run = [&](auto zero) {
    decltype(zero) dots[simd::kTileQueries];
    kernels.dot(a, b, dots);
    use(dots);
  };
  if (accumulator == DType::kF64) {
    run(0.0);
  } else {
    run(0.0f);
  }
}

}  // namespace

AlibiReach::AlibiReach(const Problem& problem, const simd::RowKernels& kernels,
                       threading::ScratchLayout* layout)
    : problem_(problem),
      kernels_(kernels),
      // 100 (f64: 960) ln 2, below which exponentials are 0, and 1 for the
      // rounding of what is compared.
      range_(problem.accumulator() == DType::kF64 ? 666.4f : 70.3f) {
  if (!problem.options.alibi_slopes.given() || problem.options.bias.given() ||
      problem.blocks.given()) {
    return;
  }
  const int64_t sequences = static_cast<int64_t>(problem.sequences.size());
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t h = 0; h < problem.q_heads; ++h) wanted_ |= Steep(s, h);
  }
  // Whatever the slopes are, so that the workspace follows from shapes.
  query_panels_ = PanelsBefore(problem.q.sizes[0] * problem.q.sizes[2],
                               sequences, simd::kTileQueries);
  key_tiles_ = PanelsBefore(problem.k.sizes[0] * problem.k.sizes[2], sequences,
                            simd::kTileKeys);
  const size_t panels = static_cast<size_t>(query_panels_ * problem.q_heads);
  query_norm_ = layout->Take<float>(panels);
  floor_ = layout->Take<float>(panels);
  key_norm_ =
      layout->Take<float>(static_cast<size_t>(key_tiles_ * problem.kv_heads));
}

bool AlibiReach::Steep(int64_t sequence, int64_t head) const {
  const Sequence& s = problem_.sequences[sequence];
  return AlibiSlope(problem_, sequence, head) *
             static_cast<double>(std::max(s.nq(), s.nk())) >
         static_cast<double>(range_);
}

float AlibiReach::Greatest(float query_norm, float key_norm) const {
  // A hundredth for the rounding of norms and scores.
  const float most = 1.01f * std::fabs(static_cast<float>(problem_.scale)) *
                     query_norm * key_norm;
  const float softcap = static_cast<float>(problem_.options.softcap);
  return softcap > 0.0f && most > softcap ? softcap : most;
}

float AlibiReach::Norm(const simd::Rows& rows) const {
  float most = 1e-18f;  // squares of less may be lost
  WithDots(kernels_, problem_.accumulator(), rows, rows,
           [&](const auto* squares) {
             for (int64_t i = 0; i < rows.rows; ++i) {
               const float norm = static_cast<float>(std::sqrt(squares[i]));
               most = norm < kInfinity ? Higher(most, norm) : kNaN;
             }
           });
  return most;
}

void AlibiReach::Norms(const simd::Rows& rows, int64_t size,
                       float* norms) const {
  for (int64_t first = 0; first < rows.rows; first += size) {
    *norms++ = Norm(Part(rows, first, std::min(size, rows.rows - first)));
  }
}

void AlibiReach::PairScores(const simd::Rows& q, const simd::Rows& k,
                            float* scores) const {
  const double softcap = problem_.options.softcap;
  WithDots(kernels_, problem_.accumulator(), q, k, [&](const auto* dots) {
    for (int64_t i = 0; i < q.rows; ++i) {
      const double score = problem_.scale * static_cast<double>(dots[i]);
      scores[i] = static_cast<float>(
          softcap > 0.0 ? softcap * std::tanh(score / softcap) : score);
    }
  });
}

int64_t AlibiReach::QueryPanel(int64_t sequence, int64_t head,
                               int64_t q) const {
  const Sequence& s = problem_.sequences[sequence];
  return head * query_panels_ +
         PanelsBefore(s.batch * problem_.q.sizes[2] + s.q_begin, sequence,
                      simd::kTileQueries) +
         q / simd::kTileQueries;
}

int64_t AlibiReach::KeyTile(int64_t sequence, int64_t kv_head,
                            int64_t k) const {
  const Sequence& s = problem_.sequences[sequence];
  return kv_head * key_tiles_ +
         PanelsBefore(s.batch * problem_.k.sizes[2] + s.k_begin, sequence,
                      simd::kTileKeys) +
         k / simd::kTileKeys;
}

void AlibiReach::SeeKeys(const BlockRows& keys, const simd::Rows& k) const {
  if (!wanted_) return;
  Norms(k, simd::kTileKeys,
        key_norm_ + KeyTile(keys.sequence, keys.head, keys.begin()));
}

void AlibiReach::SeeQueries(const BlockRows& queries,
                            const simd::Rows& q) const {
  if (!wanted_ || !Steep(queries.sequence, queries.head)) return;
  Norms(q, simd::kTileQueries,
        query_norm_ +
            QueryPanel(queries.sequence, queries.head, queries.begin()));
}

template <class Take>
void AlibiReach::ForSeeing(int64_t sequence, int64_t q,
                           const Take& take) const {
  const Mask& mask = problem_.sequences[sequence].mask;
  const int64_t end = std::min(q + simd::kTileQueries, mask.nq());
  for (int64_t i = q; i < end; ++i) {
    const Interval keys = mask.Keys(i);
    if (!keys.empty()) take(i, keys);
  }
}

Interval AlibiReach::OwnKeys(const BlockRows& queries) const {
  if (!wanted_ || !Steep(queries.sequence, queries.head)) return {};
  const int64_t diagonal = Diagonal(queries.sequence);
  return {std::max(queries.begin() + diagonal, int64_t{0}),
          std::min(queries.rows.end + diagonal,
                   problem_.sequences[queries.sequence].nk())};
}

void AlibiReach::BoundByNearestKey(const BlockRows& queries,
                                   const simd::Rows& q,
                                   const simd::Rows& k) const {
  const int64_t sequence = queries.sequence, head = queries.head;
  const Interval rows = queries.rows;
  if (!wanted_ || !Steep(sequence, head)) return;
  const float slope = static_cast<float>(AlibiSlope(problem_, sequence, head));
  const int64_t diagonal = Diagonal(sequence);
  const int64_t kv_head = head / problem_.group();
  const Interval own = OwnKeys(queries);
  for (int64_t at = rows.begin; at < rows.end; at += simd::kTileQueries) {
    const int64_t count = std::min(simd::kTileQueries, rows.end - at);
    const int64_t key = at + diagonal;
    const bool have_own = key >= own.begin && key + count <= own.end;
    float scores[simd::kTileQueries];
    if (have_own) {
      PairScores(Part(q, at - rows.begin, count),
                 Part(k, key - own.begin, count), scores);
    }
    const int64_t panel = QueryPanel(sequence, head, at);
    float floor = kInfinity;
    ForSeeing(sequence, at, [&](int64_t i, Interval keys) {
      const int64_t position = i + diagonal;
      const int64_t nearest = std::clamp(position, keys.begin, keys.end - 1);
      const float most = Greatest(
          query_norm_[panel], key_norm_[KeyTile(sequence, kv_head, nearest)]);
      // A hundredth for rounding.
      const float score = have_own && nearest == position
                              ? scores[i - at] - 0.01f * most
                              : -most;
      floor = Lower(floor, score - slope * static_cast<float>(
                                               std::abs(position - nearest)));
    });
    floor_[panel] = floor;
  }
}

template <typename T>
void AlibiReach::BoundBy(const BlockRows& queries, const T* lse,
                         const T* delta) const {
  for (int64_t q = queries.begin(); q < queries.rows.end;
       q += simd::kTileQueries) {
    float floor = kInfinity;
    ForSeeing(queries.sequence, q, [&](int64_t i, Interval) {
      const int64_t row = i - queries.begin();
      const float least = std::isfinite(lse[row]) && std::isfinite(delta[row])
                              ? static_cast<float>(lse[row])
                              : kNaN;
      floor = Lower(floor, least);
    });
    floor_[QueryPanel(queries.sequence, queries.head, q)] = floor;
  }
}

void AlibiReach::BoundByStatistics(const BlockRows& queries, const void* lse,
                                   const void* delta) const {
  if (!wanted_ || !Steep(queries.sequence, queries.head)) return;
  if (problem_.accumulator() == DType::kF64) {
    BoundBy(queries, static_cast<const double*>(lse),
            static_cast<const double*>(delta));
  } else {
    BoundBy(queries, static_cast<const float*>(lse),
            static_cast<const float*>(delta));
  }
}

bool AlibiReach::MayHide(const PairRows& pair) const {
  const int64_t sequence = pair.queries.sequence, head = pair.queries.head;
  const Interval queries = pair.queries.rows;
  const Interval keys = pair.keys.rows;
  if (!wanted_ || !Steep(sequence, head)) return false;
  const float slope = static_cast<float>(AlibiSlope(problem_, sequence, head));
  const int64_t diagonal = Diagonal(sequence);
  for (int64_t q = queries.begin; q < queries.end; q += simd::kTileQueries) {
    const int64_t end = std::min(q + simd::kTileQueries, queries.end);
    const int64_t most = std::max(end - 1 + diagonal - keys.begin,
                                  keys.end - 1 - (q + diagonal));
    if (slope * static_cast<float>(most) >
        range_ - floor_[QueryPanel(sequence, head, q)]) {
      return true;
    }
  }
  return false;
}

bool AlibiReach::Hides(int64_t sequence, int64_t head, int64_t q,
                       int64_t k) const {
  const int64_t panel = QueryPanel(sequence, head, q);
  const int64_t position = q + Diagonal(sequence);
  const int64_t least =
      std::max({k - (position + simd::kTileQueries - 1),
                position - (k + simd::kTileKeys - 1), int64_t{0}});
  const float most =
      Greatest(query_norm_[panel],
               key_norm_[KeyTile(sequence, head / problem_.group(), k)]) -
      static_cast<float>(AlibiSlope(problem_, sequence, head)) *
          static_cast<float>(least);
  return most < floor_[panel] - range_;
}

}  // namespace fa2::attention
