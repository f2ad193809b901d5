// SPDX-License-Identifier: Apache-2.0

// The inputs of a block-level problem, and its results by double loops.
#ifndef FA2_TESTS_SIMD_BLOCK_PROBLEM_H_
#define FA2_TESTS_SIMD_BLOCK_PROBLEM_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/simd/block_arrays.h"
#include "tests/simd/engine_block.h"

namespace fa2::simd {

// Of dropout with p = 1/4.
inline constexpr double kKeptScale = 4.0 / 3.0;
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline int64_t RoundUp(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

inline double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

inline void AddScaled(double factor, const double* x, int64_t n, double* sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] += factor * x[i];
}

// One block of keys: tensors, masks, staged arrays and packed operands.
template <class T>
struct KeyBlock {
  int64_t keys, padded;
  Tensor k, v;
  std::vector<TileState> tiles;
  Array<T> begin, end, position, bias, dropout, ds;
  std::vector<uint32_t> dropout_bits;
  std::vector<uint8_t> visible;  // [key][query]
};

template <class T>
class BlockProblem {
 public:
  BlockProblem(const Engine& engine, const BlockCase& c)
      : e_(engine),
        c_(c),
        random_(c.seed),
        nq_(c.queries),
        padded_q_(RoundUp(c.queries, engine.query_grain)),
        q_(nq_, c.head_dim, c.dtype),
        dout_(nq_, c.value_dim, c.dtype) {
    q_.Fill(random_, c.input_scale);
    dout_.Fill(random_, 1.0);
    scale_ = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    int64_t first = 0;
    for (int64_t keys : c.keys) {
      if (keys > 0) AddKeys(keys, first);
      first += keys;
    }
    Reference();
  }

 protected:
  int64_t Staged(int64_t padded_keys, int64_t key, int64_t query) const {
    const int64_t panel = e_.query_panel;
    return (query / panel * padded_keys + key) * panel + query % panel;
  }

  const Engine& e_;
  const BlockCase& c_;
  std::mt19937 random_;
  int64_t nq_, padded_q_, tile_stride_ = 0;
  double scale_ = 1.0;
  Tensor q_, dout_;
  std::vector<KeyBlock<T>> blocks_;
  std::vector<double> lse_, delta_, out_, dq_;
  std::vector<std::vector<double>> ref_dk_, ref_dv_, ref_ds_;
  double alibi_ = 0.0;

 private:
  void AddKeys(int64_t keys, int64_t first) {
    const int64_t padded = RoundUp(keys, e_.key_panel);
    blocks_.push_back({keys,
                       padded,
                       Tensor(keys, c_.head_dim, c_.dtype),
                       Tensor(keys, c_.value_dim, c_.dtype),
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {}});
    KeyBlock<T>& b = blocks_.back();
    b.k.Fill(random_, c_.input_scale);
    b.v.Fill(random_, 1.0);
    for (int64_t j = 0; c_.equal_values && j < keys; ++j) {
      for (int64_t d = 0; d < c_.value_dim; ++d) b.v.Set(j, d, 1.0);
    }
    b.begin.assign(padded_q_, T{0});
    b.end.assign(padded_q_, T{0});
    b.position.assign(padded_q_, T{0});
    for (int64_t i = 0; i < nq_; ++i) {
      int64_t begin = 0, end = keys;
      if (c_.mask == BlockMask::kRandomTiles && i % kTileQueries != 0) {
        begin = static_cast<int64_t>(b.begin[i - 1]);
        end = static_cast<int64_t>(b.end[i - 1]);
      } else if (c_.mask == BlockMask::kRandomTiles) {
        const int64_t tiles = RoundUp(keys, kTileKeys) / kTileKeys;
        begin = static_cast<int64_t>(random_() % (tiles + 1)) * kTileKeys;
        end = begin + static_cast<int64_t>(random_() % (tiles + 1)) * kTileKeys;
        begin = std::min(begin, keys);
        end = std::min(end, keys);
      } else if (c_.mask == BlockMask::kCausal) {
        end = std::min(keys, std::max<int64_t>(0, i + c_.shift + 1 - first));
      } else if (c_.mask != BlockMask::kNone) {
        begin = static_cast<int64_t>(random_() % (keys + 1));
        end = begin + static_cast<int64_t>(random_() % (keys - begin + 1));
        if (random_() % 8 == 0) begin = end;
      }
      b.begin[i] = static_cast<T>(begin);
      b.end[i] = static_cast<T>(end);
      b.position[i] = static_cast<T>(i + c_.shift - first);
    }
    std::vector<uint8_t> unseen(keys, 0);
    if (c_.nan_in_masked) {
      for (int64_t j = 0; j < keys; ++j) unseen[j] = random_() % 5 == 0;
    }
    // Ranges cannot leave out single keys: shorten them to end before the first
    // unseen one.
    for (int64_t i = 0; i < nq_ && c_.nan_in_masked; ++i) {
      for (int64_t j = static_cast<int64_t>(b.begin[i]); j < b.end[i]; ++j) {
        if (unseen[j]) b.end[i] = static_cast<T>(j);
      }
    }
    const int64_t tile_rows = (padded + kTileKeys - 1) / kTileKeys;
    tile_stride_ = (padded_q_ + kTileQueries - 1) / kTileQueries;
    b.tiles.assign(tile_rows * tile_stride_, TileState::kPartial);
    b.visible.assign(keys * nq_, 0);
    for (int64_t tk = 0; tk < tile_rows; ++tk) {
      for (int64_t tq = 0; tq < tile_stride_; ++tq) {
        int64_t seen = 0;
        for (int64_t j = tk * kTileKeys; j < (tk + 1) * kTileKeys; ++j) {
          for (int64_t i = tq * kTileQueries; i < (tq + 1) * kTileQueries;
               ++i) {
            if (i >= nq_ || j >= keys) continue;
            const bool sees = b.begin[i] <= j && j < b.end[i];
            b.visible[j * nq_ + i] = sees;
            seen += sees;
          }
        }
        TileState& state = b.tiles[tk * tile_stride_ + tq];
        if (seen == 0) {
          // Sometimes left to the masked pass.
          if (random_() % 4 != 0) state = TileState::kHidden;
        } else if (seen == kTileKeys * kTileQueries && random_() % 8 != 0) {
          state = TileState::kVisible;
        }
      }
    }
    for (int64_t j = 0; j < keys; ++j) {
      if (!unseen[j]) continue;
      for (int64_t d = 0; d < c_.head_dim; ++d) b.k.Set(j, d, kNan);
      for (int64_t d = 0; d < c_.value_dim; ++d) b.v.Set(j, d, kNan);
    }
    const int64_t staged = RoundUp(padded_q_, e_.query_panel) * padded;
    std::normal_distribution<double> normal;
    if (c_.bias) {
      b.bias.resize(staged);
      for (T& x : b.bias) {
        x = random_() % 16 == 0 ? static_cast<T>(-kInfinity)
                                : static_cast<T>(normal(random_));
      }
    }
    if (c_.dropout) {
      b.dropout.resize(staged);
      for (T& x : b.dropout)
        x = random_() % 4 == 0 ? T{0} : static_cast<T>(kKeptScale);
      // Panels of 32: element i of `dropout` is bit i % 32 of row i / 32.
      if (e_.dropout_bits) b.dropout_bits.resize(staged / 32);
      for (int64_t i = 0; e_.dropout_bits && i < staged; ++i) {
        if (b.dropout[i] != T{0}) b.dropout_bits[i / 32] |= 1u << i % 32;
      }
    }
    if (c_.want_ds) b.ds.assign(staged, static_cast<T>(kNan));
  }

  void Reference() {
    const int64_t dk = c_.head_dim, dv = c_.value_dim;
    lse_.assign(nq_, -kInfinity);
    delta_.assign(nq_, 0.0);
    out_.assign(nq_ * dv, 0.0);
    dq_.assign(nq_ * dk, 0.0);
    ref_dk_.clear();
    alibi_ = 0.0;
    struct Element {
      double p, distance, slope, z;
    };
    std::vector<std::vector<Element>> elements;
    for (const KeyBlock<T>& b : blocks_) {
      elements.emplace_back(b.keys * nq_, Element{0, 0, 1, 1});
      ref_dk_.emplace_back(b.keys * dk, 0.0);
      ref_dv_.emplace_back(b.keys * dv, 0.0);
      ref_ds_.emplace_back(b.keys * nq_, 0.0);
    }
    for (int64_t i = 0; i < nq_; ++i) {
      double max = -kInfinity, sum = 0.0;
      for (size_t n = 0; n < blocks_.size(); ++n) {
        const KeyBlock<T>& b = blocks_[n];
        for (int64_t j = 0; j < b.keys; ++j) {
          Element& e = elements[n][j * nq_ + i];
          e.p = -kInfinity;
          if (!b.visible[j * nq_ + i]) continue;
          double s = scale_ * Dot(q_.Row(i), b.k.Row(j), dk);
          if (c_.softcap != 0.0) {
            const double t = std::tanh(s / c_.softcap);
            s = c_.softcap * t;
            e.slope = 1.0 - t * t;
          }
          if (c_.bias) s += static_cast<double>(b.bias[Staged(b.padded, j, i)]);
          e.distance = std::abs(static_cast<double>(b.position[i]) - j);
          s -= c_.alibi_slope * e.distance;
          if (c_.dropout) {
            e.z = static_cast<double>(b.dropout[Staged(b.padded, j, i)]);
          }
          e.p = s;
          max = std::max(max, s);
        }
      }
      if (max == -kInfinity) {
        for (auto& block : elements) {
          for (size_t j = i; j < block.size(); j += nq_) block[j].p = 0.0;
        }
        continue;
      }
      for (auto& block : elements) {
        for (size_t j = i; j < block.size(); j += nq_) {
          sum += std::exp(block[j].p - max);
        }
      }
      lse_[i] = max + std::log(sum);
      for (size_t n = 0; n < blocks_.size(); ++n) {
        for (int64_t j = 0; j < blocks_[n].keys; ++j) {
          Element& e = elements[n][j * nq_ + i];
          e.p = std::exp(e.p - lse_[i]);
          if (e.p == 0.0) continue;
          AddScaled(e.p * e.z, blocks_[n].v.Row(j), dv, &out_[i * dv]);
        }
      }
      delta_[i] = Dot(&out_[i * dv], dout_.Row(i), dv);
      for (size_t n = 0; n < blocks_.size(); ++n) {
        const KeyBlock<T>& b = blocks_[n];
        for (int64_t j = 0; j < b.keys; ++j) {
          const Element& e = elements[n][j * nq_ + i];
          if (e.p == 0.0) continue;
          const double dp = Dot(dout_.Row(i), b.v.Row(j), dv);
          const double ds = e.p * (e.z * dp - delta_[i]);
          ref_ds_[n][j * nq_ + i] = ds;
          alibi_ -= ds * e.distance;
          AddScaled(e.p * e.z, dout_.Row(i), dv, &ref_dv_[n][j * dv]);
          AddScaled(ds * e.slope, b.k.Row(j), dk, &dq_[i * dk]);
          AddScaled(ds * e.slope, q_.Row(i), dk, &ref_dk_[n][j * dk]);
        }
      }
    }
  }
};

}  // namespace fa2::simd

#endif  // FA2_TESTS_SIMD_BLOCK_PROBLEM_H_
