// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/verify/products.h"
#include "src/verify/visibility.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

// Queries of a block: its four arrays of scores stay in L2 up to some 4,096
// keys of f32.
constexpr int64_t kRows = 32;

// A score's absolute error, in roundings of the type it is summed in, per unit
// of its size; terms that cancel leave more than the sum shows.
constexpr double kScoreError = 2.0;

// The same over what one rounding of a product's operand costs.
double ScoreError(Products products) {
  const double sum = products == Products::kF64 ? 0x1p-53 : 0x1p-24;
  return kScoreError * sum / std::max(UnitRoundoff(products), sum);
}

// An input with what is not finite left out: a NaN reaches other results only
// where it is visible, and there the answer is NaN as well.
template <class T>
std::vector<T> LoadRows(const Array4<double>& array, int64_t batch,
                        int64_t head, int64_t begin, int64_t rows) {
  const double* from = array.row(batch, head, begin);
  std::vector<T> to(static_cast<size_t>(rows * array.sizes[3]));
  for (T& x : to) {
    const double value = *from++;
    x = std::isfinite(value) ? static_cast<T>(value) : T(0);
  }
  return to;
}

template <class T>
std::vector<T> Transpose(const std::vector<T>& x, int64_t rows,
                         int64_t columns) {
  std::vector<T> to(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < columns; ++d) {
      to[static_cast<size_t>(d * rows + i)] =
          x[static_cast<size_t>(i * columns + d)];
    }
  }
  return to;
}

template <class T>
std::vector<float> SquaredLengths(const std::vector<T>& x, int64_t rows) {
  std::vector<float> squares;
  const int64_t columns = rows == 0 ? 0 : static_cast<int64_t>(x.size()) / rows;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0.0;
    for (int64_t d = 0; d < columns; ++d) {
      const double value = x[static_cast<size_t>(i * columns + d)];
      sum += value * value;
    }
    squares.push_back(static_cast<float>(sum));
  }
  return squares;
}

template <class T>
class Head {
 public:
  Head(const Problem& problem, const Model& model, const Forward* forward,
       const Sequence& sequence, int64_t head, int64_t kv_head)
      : p_(problem),
        m_(model),
        f_(model.faults),
        forward_(forward),
        s_(sequence),
        head_(head),
        d_(problem.head_dim),
        dv_(problem.value_dim),
        gradients_(model.gradients && problem.dout.given()) {
    q_ = LoadRows<T>(p_.q, s_.batch, head, s_.q_begin, s_.nq);
    k_ = LoadRows<T>(p_.k, s_.batch, kv_head, s_.k_begin, s_.nk);
    v_ = LoadRows<T>(p_.v, s_.batch, kv_head, s_.k_begin, s_.nk);
    if (gradients_) {
      dout_ = LoadRows<T>(p_.dout, s_.batch, head, s_.q_begin, s_.nq);
      exact_dout_ = dout_;
      Round(&dout_);
    }
    Round(&q_);
    Round(&k_);
    Round(&v_);
    k_transposed_ = Transpose(k_, s_.nk, d_);
    v_transposed_ = Transpose(v_, s_.nk, dv_);
    if (m_.magnitudes) {
      q_squares_ = SquaredLengths(q_, s_.nq);
      k_squares_ = SquaredLengths(k_, s_.nk);
      v_squares_ = SquaredLengths(v_, s_.nk);
      dout_squares_ = SquaredLengths(dout_, s_.nq);
    }
    sink_ = p_.sinks.given() ? *p_.sinks.row(0, head, 0) : -kInfinity;
    if (p_.alibi_slopes.given()) {
      slope_ = *p_.alibi_slopes.row(
          p_.alibi_slopes.sizes[0] == 1 ? 0 : s_.index, head, 0);
    }
    const bool dropout = p_.options.dropout_p > 0.0 || p_.keep.given();
    dropout_ = dropout;
    keep_scale_ = 1.0 / (1.0 - p_.options.dropout_p);
  }

  HeadResults<T> Run() {
    const auto size = [](int64_t rows, int64_t columns) {
      return static_cast<size_t>(rows * columns);
    };
    r_.out.resize(size(s_.nq, dv_));
    r_.lse.resize(size(s_.nq, 1));
    r_.stored_lse.resize(size(s_.nq, 1));
    if (gradients_) {
      r_.dq.resize(size(s_.nq, d_));
      r_.dk.resize(size(s_.nk, d_));
      r_.dv.resize(size(s_.nk, dv_));
      if (p_.bias.given() && !p_.bias_is_mask) {
        r_.dbias.resize(size(p_.bias.sizes[2], p_.bias.sizes[3]));
      }
    }
    if (m_.magnitudes) {
      r_.out_squares.resize(size(s_.nq, 1));
      r_.dq_squares.resize(size(s_.nq, 1));
      r_.dk_squares.resize(size(s_.nk, 1));
      r_.dv_squares.resize(size(s_.nk, 1));
    }
    const int64_t rows =
        f_.rounded_tile > 0 ? std::min(kRows, f_.rounded_tile) : kRows;
    for (int64_t i = 0; i < s_.nq; i += rows) {
      RunBlock(i, std::min(rows, s_.nq - i));
    }
    return std::move(r_);
  }

 private:
  void Round(std::vector<T>* x) const {
    RoundRow(m_.products, x->data(), static_cast<int64_t>(x->size()));
  }

  // Scores of a block with one pass's mistakes; masked ones are -inf.
  void Scores(const Faults& faults, int64_t i0, int64_t rows) {
    lo_ = s_.nk;
    hi_ = 0;
    ranges_.clear();
    for (int64_t r = 0; r < rows; ++r) {
      const KeyRange range = VisibleKeys(p_.options, faults, s_, i0 + r);
      ranges_.push_back(range);
      if (range.begin < range.end) {
        lo_ = std::min(lo_, range.begin);
        hi_ = std::max(hi_, range.end);
      }
    }
    if (hi_ < lo_) lo_ = hi_ = 0;
    width_ = hi_ - lo_;
    const auto count = static_cast<size_t>(rows * width_);
    scores_.assign(count, T(0));
    cap_slope_.assign(p_.options.softcap > 0.0 ? count : 0, T(1));
    Product<T> x;
    x.m = rows;
    x.n = width_;
    x.depth = d_;
    x.a = q_.data() + i0 * d_;
    x.a_row = d_;
    x.b = k_transposed_.data() + lo_;
    x.b_row = s_.nk;
    x.c = scores_.data();
    x.c_row = width_;
    AddProduct(x);
    const T scale =
        static_cast<T>(std::pow(p_.scale, faults.score_scale_power));
    const auto cap = static_cast<T>(p_.options.softcap);
    for (int64_t r = 0; r < rows; ++r) {
      T* s = scores_.data() + r * width_;
      const KeyRange& range = ranges_[static_cast<size_t>(r)];
      const int64_t begin = range.begin - lo_;
      const int64_t end = range.begin < range.end ? range.end - lo_ : begin;
      if (begin >= end) {
        std::fill(s, s + width_, static_cast<T>(-kInfinity));
        continue;
      }
      std::fill(s, s + begin, static_cast<T>(-kInfinity));
      std::fill(s + end, s + width_, static_cast<T>(-kInfinity));
      for (int64_t j = begin; j < end; ++j) s[j] *= scale;
      if (cap > T(0)) {
        for (int64_t j = begin; j < end; ++j) {
          const T tanh = std::tanh(s[j] / cap);
          s[j] = cap * tanh;
          cap_slope_[static_cast<size_t>(r * width_ + j)] = 1 - tanh * tanh;
        }
      }
      if (p_.bias.given()) AddBias(i0 + r, begin, end, s);
      if (p_.alibi_slopes.given()) {
        for (int64_t j = begin; j < end; ++j) {
          s[j] -= static_cast<T>(slope_ * Distance(faults, i0 + r, lo_ + j));
        }
      }
    }
  }

  void AddBias(int64_t i, int64_t begin, int64_t end, T* s) const {
    const Sizes& n = p_.bias.sizes;
    const double* bias = p_.bias.row(n[0] == 1 ? 0 : s_.index,
                                     n[1] == 1 ? 0 : head_, n[2] == 1 ? 0 : i);
    for (int64_t j = begin; j < end; ++j) {
      const double b = bias[n[3] == 1 ? 0 : lo_ + j];
      s[j] = b == -kInfinity ? static_cast<T>(-kInfinity)
                             : s[j] + static_cast<T>(std::isfinite(b) ? b : 0);
    }
  }

  double Distance(const Faults& faults, int64_t i, int64_t j) const {
    const int64_t diagonal = faults.alibi_from_top_left ? i : i + s_.nk - s_.nq;
    return std::abs(static_cast<double>(diagonal - j));
  }

  void KeepBlock(const Faults& faults, int64_t i0, int64_t rows) {
    keep_.resize(static_cast<size_t>(rows * width_));
    for (int64_t r = 0; r < rows; ++r) {
      KeepRow(p_, faults, s_, head_, i0 + r, lo_, hi_,
              keep_.data() + r * width_);
    }
  }

  void RunBlock(int64_t i0, int64_t rows) {
    const Faults none;
    const Faults& forward_faults = f_.in_forward ? f_ : none;
    const Faults& backward_faults = f_.in_backward ? f_ : none;
    Scores(forward_faults, i0, rows);
    if (m_.given) {
      CopyForward(i0, rows);
      if (!f_.in_forward != !f_.in_backward && gradients_) {
        Scores(backward_faults, i0, rows);
      }
      FindMaxima(rows);
    } else {
      if (dropout_) KeepBlock(forward_faults, i0, rows);
      FindMaxima(rows);
      ForwardBlock(forward_faults, i0, rows);
      if (gradients_ && f_.in_forward != f_.in_backward) {
        Scores(backward_faults, i0, rows);
        FindMaxima(rows);
      }
    }
    if (gradients_) {
      if (dropout_) KeepBlock(backward_faults, i0, rows);
      BackwardBlock(backward_faults, i0, rows);
    }
  }

  void CopyForward(int64_t i0, int64_t rows) {
    for (int64_t i = i0; i < i0 + rows; ++i) {
      const double* out = forward_->out.row(s_.batch, head_, s_.q_begin + i);
      for (int64_t c = 0; c < dv_; ++c) {
        r_.out[static_cast<size_t>(i * dv_ + c)] = static_cast<T>(out[c]);
      }
      r_.lse[static_cast<size_t>(i)] =
          *forward_->lse.row(s_.batch, head_, s_.q_begin + i);
    }
  }

  void FindMaxima(int64_t rows) {
    maxima_.clear();
    for (int64_t r = 0; r < rows; ++r) {
      const T* s = scores_.data() + r * width_;
      T max = static_cast<T>(-kInfinity);
      for (int64_t j = 0; j < width_; ++j) max = std::max(max, s[j]);
      maxima_.push_back(static_cast<double>(max));
    }
  }

  void ForwardBlock(const Faults& faults, int64_t i0, int64_t rows) {
    p_block_.resize(static_cast<size_t>(rows * width_));
    std::vector<T> factor(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t padded = ranges_[static_cast<size_t>(r)].padded;
      double max = std::max(maxima_[static_cast<size_t>(r)], sink_);
      if (padded > 0) max = std::max(max, 0.0);
      T* p = p_block_.data() + r * width_;
      double& lse = r_.lse[static_cast<size_t>(i0 + r)];
      if (max == -kInfinity) {
        std::fill(p, p + width_, T(0));
        lse = -kInfinity;
        r_.stored_lse[static_cast<size_t>(i0 + r)] = lse;
        continue;
      }
      const double sum =
          ExpRow(scores_.data() + r * width_, width_, static_cast<T>(max), p) +
          std::exp(sink_ - max) + static_cast<double>(padded) * std::exp(-max);
      lse = max + std::log(sum);
      if (m_.f32_lse) lse = static_cast<float>(lse);
      r_.stored_lse[static_cast<size_t>(i0 + r)] = LseOf(faults, i0 + r, r);
      double normaliser = 1.0 / sum;
      if (dropout_) {
        const T* keep = keep_.data() + r * width_;
        for (int64_t j = 0; j < width_; ++j) p[j] *= keep[j];
        if (!faults.keep_unscaled_out) normaliser *= keep_scale_;
      }
      factor[static_cast<size_t>(r)] = static_cast<T>(normaliser);
      if (m_.magnitudes) OutMagnitude(i0 + r, r, normaliser);
      RoundRow(m_.products, p, width_);
    }
    T* out = r_.out.data() + i0 * dv_;
    Product<T> x;
    x.m = rows;
    x.n = dv_;
    x.depth = width_;
    x.a = p_block_.data();
    x.a_row = width_;
    x.b = v_.data() + lo_ * dv_;
    x.b_row = dv_;
    x.c = out;
    x.c_row = dv_;
    AddProduct(x);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < dv_; ++c) {
        T& o = out[r * dv_ + c];
        o = static_cast<T>(
            RoundStored(m_.out, o * factor[static_cast<size_t>(r)]));
      }
    }
  }

  void OutMagnitude(int64_t i, int64_t r, double normaliser) {
    const T* p = p_block_.data() + r * width_;
    const T* s = scores_.data() + r * width_;
    const double lse = std::abs(r_.lse[static_cast<size_t>(i)]);
    const double score_error = ScoreError(m_.products);
    double sum = 0.0;
    for (int64_t j = 0; j < width_; ++j) {
      if (p[j] == T(0)) continue;
      const double a = p[j] * normaliser *
                       (1.0 + score_error * (std::abs(double(s[j])) + lse));
      sum += a * a * v_squares_[static_cast<size_t>(lo_ + j)];
    }
    r_.out_squares[static_cast<size_t>(i)] =
        static_cast<float>(sum / static_cast<double>(dv_));
  }

  // The exponent's subtrahend of row r in the backward.
  double LseOf(const Faults& faults, int64_t i, int64_t r) const {
    const double lse = r_.lse[static_cast<size_t>(i)];
    const double max = maxima_[static_cast<size_t>(r)];
    switch (faults.lse) {
      case LseUse::kRight:
        return lse;
      case LseUse::kTimesLn2:
        return lse * kLn2;
      case LseUse::kOverLn2:
        return lse / kLn2;
      case LseUse::kWithoutMax:
        return lse - max;
      case LseUse::kMax:
        return max;
      case LseUse::kWithoutSink:
        return max + std::log(std::max(
                         1e-300, std::exp(lse - max) - std::exp(sink_ - max)));
    }
    return lse;
  }

  double Delta(const Faults& faults, int64_t i) const {
    const T* dout = exact_dout_.data() + i * dv_;
    const T* out = r_.out.data() + i * dv_;
    double delta = 0.0;
    if (faults.delta == DeltaUse::kRight) {
      T sum = 0;
      for (int64_t c = 0; c < dv_; ++c) {
        if (std::isfinite(out[c])) sum += out[c] * dout[c];
      }
      delta = sum;
    } else if (faults.delta == DeltaUse::kSumOfDout) {
      for (int64_t c = 0; c < dv_; ++c) delta += dout[c];
    }
    if (p_.dlse.given()) {
      delta -= *p_.dlse.row(s_.batch, head_, s_.q_begin + i);
    }
    return delta;
  }

  void BackwardBlock(const Faults& faults, int64_t i0, int64_t rows) {
    const auto count = static_cast<size_t>(rows * width_);
    p_block_.resize(count);
    dp_.assign(count, T(0));
    Product<T> x;
    x.m = rows;
    x.n = width_;
    x.depth = dv_;
    x.a = dout_.data() + i0 * dv_;
    x.a_row = dv_;
    x.b = v_transposed_.data() + lo_;
    x.b_row = s_.nk;
    x.c = dp_.data();
    x.c_row = width_;
    AddProduct(x);
    ds_.resize(count);
    const auto keep_dv =
        static_cast<T>(faults.keep_unscaled_dv ? 1.0 : keep_scale_);
    const auto keep_dp =
        static_cast<T>(faults.keep_unscaled_dp ? 1.0 : keep_scale_);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = i0 + r;
      T* p = p_block_.data() + r * width_;
      T* ds = ds_.data() + r * width_;
      T* dp = dp_.data() + r * width_;
      const double delta = Delta(faults, i);
      const double max = maxima_[static_cast<size_t>(r)];
      if (max == -kInfinity || width_ == 0) {
        // No key: lse is the sink alone.
        std::fill(p, p + width_, T(0));
        std::fill(ds, ds + width_, T(0));
        if (std::isfinite(sink_) && p_.dlse.given()) {
          r_.dsink += *p_.dlse.row(s_.batch, head_, s_.q_begin + i);
        }
        continue;
      }
      const double lse = LseOf(faults, i, r);
      ExpRow(scores_.data() + r * width_, width_, static_cast<T>(lse), p);
      if (m_.magnitudes) BackwardMagnitude(i, r, delta);
      if (dropout_ && !faults.keep_not_in_dp) {
        const T* keep = keep_.data() + r * width_;
        for (int64_t j = 0; j < width_; ++j) dp[j] *= keep[j] * keep_dp;
      }
      const T d = static_cast<T>(delta);
      // A masked score adds nothing, whatever lse is (0 * inf).
      for (int64_t j = 0; j < width_; ++j) {
        ds[j] = p[j] == T(0) ? T(0) : p[j] * (dp[j] - d);
      }
      Statistics(faults, i, r, lse, delta);
      if (p_.options.softcap > 0.0 && !faults.softcap_slope_missing) {
        const T* slope = cap_slope_.data() + r * width_;
        for (int64_t j = 0; j < width_; ++j) ds[j] *= slope[j];
      }
      if (faults.dv_from_dp) {
        for (int64_t j = 0; j < width_; ++j) {
          if (p[j] != T(0)) p[j] = dp[j];
        }
      }
      if (dropout_) {
        const T* keep = keep_.data() + r * width_;
        for (int64_t j = 0; j < width_; ++j) p[j] *= keep[j] * keep_dv;
      }
      RoundRow(m_.products, p, width_);
      RoundRow(m_.products, ds, width_);
    }
    AddGradients(faults, i0, rows);
  }

  // dbias, dalibi and dsink of a row, from its dS.
  void Statistics(const Faults& faults, int64_t i, int64_t r, double lse,
                  double delta) {
    const T* ds = ds_.data() + r * width_;
    if (p_.alibi_slopes.given()) {
      for (int64_t j = 0; j < width_; ++j) {
        r_.dalibi -= static_cast<double>(ds[j]) * Distance(faults, i, lo_ + j);
      }
    }
    if (p_.sinks.given()) {
      r_.dsink -= std::exp(sink_ - lse) * delta;
      r_.dsink_squares += std::exp(2.0 * (sink_ - lse)) * delta * delta;
    }
    if (!r_.dbias.empty()) {
      const Sizes& n = p_.bias.sizes;
      if (f_.bias_dimension == 2 && i != f_.bias_index) return;
      double* dbias = r_.dbias.data() + (n[2] == 1 ? 0 : i * n[3]);
      if (n[3] == 1) {
        for (int64_t j = 0; j < width_; ++j) *dbias += ds[j];
      } else {
        for (int64_t j = 0; j < width_; ++j) dbias[lo_ + j] += ds[j];
      }
    }
  }

  void BackwardMagnitude(int64_t i, int64_t r, double delta) {
    const T* p = p_block_.data() + r * width_;
    const T* s = scores_.data() + r * width_;
    const double lse = std::abs(r_.lse[static_cast<size_t>(i)]);
    const double score_error = ScoreError(m_.products);
    const double dout2 = dout_squares_[static_cast<size_t>(i)];
    double out2 = 0.0;
    for (int64_t c = 0; c < dv_; ++c) {
      const double o = r_.out[static_cast<size_t>(i * dv_ + c)];
      if (std::isfinite(o)) out2 += o * o;
    }
    const double columns = static_cast<double>(dv_);
    const double delta2 =
        std::max(dout2 * out2 / columns, delta * delta * 1e-6);
    const double q2 = q_squares_[static_cast<size_t>(i)];
    const double scale2 = p_.scale * p_.scale / static_cast<double>(d_);
    const double keep2 = dropout_ ? keep_scale_ * keep_scale_ : 1.0;
    double sum = 0.0;
    for (int64_t j = 0; j < width_; ++j) {
      if (p[j] == T(0)) continue;
      const auto key = static_cast<size_t>(lo_ + j);
      const double a =
          p[j] * (1.0 + score_error * (std::abs(double(s[j])) + lse));
      const double pa2 = a * a * keep2;
      const double ds2 =
          pa2 * (dout2 * v_squares_[key] / columns * keep2 + delta2);
      sum += ds2 * k_squares_[key];
      r_.dk_squares[key] += static_cast<float>(ds2 * q2 * scale2);
      r_.dv_squares[key] += static_cast<float>(pa2 * dout2 / columns);
      r_.dbias_squares += ds2;
      if (p_.alibi_slopes.given()) {
        const double distance = Distance(f_, i, lo_ + j);
        r_.dalibi_squares += ds2 * distance * distance;
      }
    }
    r_.dq_squares[static_cast<size_t>(i)] = static_cast<float>(sum * scale2);
  }

  void AddGradients(const Faults& faults, int64_t i0, int64_t rows) {
    if (width_ == 0) return;
    const auto scale = static_cast<T>(std::pow(p_.scale, faults.scale_power));
    // Queries past the cut add nothing to dK and dV, and have no dQ.
    const int64_t cut = faults.query_tile_cut > 0
                            ? s_.nq % faults.query_tile_cut
                            : faults.queries_cut;
    const int64_t rows_left = std::clamp<int64_t>(s_.nq - cut - i0, 0, rows);
    AddDq(faults, i0, rows_left, scale);
    AddToKeys(ds_, q_.data() + i0 * d_, d_, rows_left, scale, &r_.dk);
    AddToKeys(p_block_, dout_.data() + i0 * dv_, dv_, rows_left, T(1), &r_.dv);
  }

  void AddDq(const Faults& faults, int64_t i0, int64_t rows, T scale) {
    T* const dq = r_.dq.data() + i0 * d_;
    Product<T> x;
    x.m = rows;
    x.n = d_;
    x.a_row = width_;
    x.b_row = d_;
    x.c = dq;
    x.c_row = d_;
    const int64_t tile = f_.rounded_tile;
    if (faults.dq_tile > 0) {
      for (int64_t r = 0; r < rows; ++r) {
        int64_t end = s_.nk;
        if (faults.dq_tile_of_row) {
          // The block of queries ends where it ends or the queries do.
          const int64_t last = std::min(s_.nq, ((i0 + r) / faults.dq_tile + 1) *
                                                   faults.dq_tile) -
                               1;
          end = VisibleKeys(p_.options, faults, s_, last).end;
        }
        const int64_t begin =
            std::max<int64_t>(0, (end - 1) / faults.dq_tile * faults.dq_tile);
        const int64_t from = std::max(begin, lo_);
        const int64_t to = std::min(end, hi_);
        if (from >= to) continue;
        x.m = 1;
        x.depth = to - from;
        x.a = ds_.data() + r * width_ + (from - lo_);
        x.b = k_.data() + from * d_;
        x.c = dq + r * d_;
        AddProduct(x);
      }
    } else if (tile > 0) {
      std::vector<T> part(static_cast<size_t>(rows * d_));
      x.c = part.data();
      for (int64_t j = lo_ / tile * tile; j < hi_; j += tile) {
        const int64_t from = std::max(j, lo_);
        std::fill(part.begin(), part.end(), T(0));
        x.depth = std::min(j + tile, hi_) - from;
        x.a = ds_.data() + (from - lo_);
        x.b = k_.data() + from * d_;
        AddProduct(x);
        for (size_t n = 0; n < part.size(); ++n) {
          dq[n] += part[n] * scale;
        }
        RoundSums(dq, static_cast<int64_t>(part.size()));
      }
      return;
    } else {
      x.depth = width_;
      x.a = ds_.data();
      x.b = k_.data() + lo_ * d_;
      AddProduct(x);
    }
    for (int64_t n = 0; n < rows * d_; ++n) dq[n] *= scale;
  }

  // to[j, :] += factor * sum over rows of weights[r, j] * from[r, :].
  void AddToKeys(const std::vector<T>& weights, const T* from, int64_t columns,
                 int64_t rows, T factor, std::vector<T>* to) {
    if (rows == 0) return;
    part_.assign(static_cast<size_t>(width_ * columns), T(0));
    Product<T> x;
    x.m = width_;
    x.n = columns;
    x.depth = rows;
    x.a = weights.data();
    x.a_row = 1;
    x.a_column = width_;
    x.b = from;
    x.b_row = columns;
    x.c = part_.data();
    x.c_row = columns;
    AddProduct(x);
    T* const sums = to->data() + lo_ * columns;
    for (size_t n = 0; n < part_.size(); ++n) sums[n] += part_[n] * factor;
    if (f_.rounded_tile > 0) {
      RoundSums(sums, static_cast<int64_t>(part_.size()));
    }
  }

  void RoundSums(T* sums, int64_t count) const {
    // f32 kernels that sum in 16 bits do so in bf16.
    RoundRow(m_.products == Products::kF16 ? Products::kF16 : Products::kBF16,
             sums, count);
  }

  const Problem& p_;
  const Model& m_;
  const Faults& f_;
  const Forward* forward_;
  const Sequence& s_;
  int64_t head_, d_, dv_;
  bool gradients_;
  bool dropout_ = false;
  double keep_scale_ = 1.0, sink_ = -kInfinity, slope_ = 0.0;
  std::vector<T> q_, k_, v_, dout_, exact_dout_, k_transposed_, v_transposed_;
  std::vector<float> q_squares_, k_squares_, v_squares_, dout_squares_;

  // Of the block at hand: keys [lo, hi), width of its arrays.
  int64_t lo_ = 0, hi_ = 0, width_ = 0;
  std::vector<KeyRange> ranges_;
  std::vector<double> maxima_;
  std::vector<T> scores_, cap_slope_, keep_, p_block_, dp_, ds_, part_;
  HeadResults<T> r_;
};

}  // namespace

Forward CandidateForward(const Problem& problem) {
  Forward forward;
  forward.out = Array4<double>(problem.SizesOf("out"));
  forward.lse = Array4<double>(problem.SizesOf("lse"));
  const ConstTensorView& out = problem.Output("out")->view;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.heads; ++h) {
      for (int64_t i = 0; i < problem.nq; ++i) {
        double* row = forward.out.row(b, h, i);
        for (int64_t c = 0; c < problem.value_dim; ++c) {
          row[c] = Get(out, {b, h, i, c});
        }
      }
    }
  }
  for (const Sequence& s : problem.sequences) {
    for (int64_t h = 0; h < problem.heads; ++h) {
      for (int64_t i = 0; i < s.nq; ++i) {
        *forward.lse.row(s.batch, h, s.q_begin + i) =
            problem.CandidateLse(s, h, i);
      }
    }
  }
  return forward;
}

template <class T>
HeadResults<T> RunHead(const Problem& problem, const Model& model,
                       const Forward* forward, const Sequence& sequence,
                       int64_t head, int64_t kv_head) {
  return Head<T>(problem, model, forward, sequence, head, kv_head).Run();
}

template HeadResults<float> RunHead(const Problem&, const Model&,
                                    const Forward*, const Sequence&, int64_t,
                                    int64_t);
template HeadResults<double> RunHead(const Problem&, const Model&,
                                     const Forward*, const Sequence&, int64_t,
                                     int64_t);

}  // namespace fa2::verify
