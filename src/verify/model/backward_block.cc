// SPDX-License-Identifier: Apache-2.0

// What a block of queries adds to the gradients.
#include <algorithm>
#include <cmath>
#include <limits>

#include "src/verify/model/head_block.h"
#include "src/verify/model/products.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
class Backward {
 public:
  Backward(const HeadOperands<T>& head, const Faults& faults, Block<T>* block,
           HeadResults<T>* results)
      : h_(head), p_(head.problem), f_(faults), b_(*block), r_(*results) {}

  void Run() {
    const auto count = static_cast<size_t>(b_.rows * b_.width);
    b_.p.resize(count);
    b_.dp.assign(count, T(0));
    b_.ds.resize(count);
    AddProduct(
        Product<T>{b_.rows,
                   b_.width,
                   h_.value_depth,
                   {h_.dout.data() + b_.begin * h_.value_depth, h_.value_depth},
                   {h_.v_transposed.data() + b_.lo, h_.sequence.nk},
                   b_.dp.data(),
                   b_.width});
    b_.delta_errors.assign(static_cast<size_t>(b_.rows), 0.0);
    for (int64_t r = 0; r < b_.rows; ++r) ScoreGradients(r);
    if (h_.model.magnitudes) AddDeltaMagnitudes(h_, &b_, &r_);
    AddGradients();
  }

 private:
  double Delta(int64_t i) const {
    const T* dout = h_.exact_dout.data() + i * h_.value_depth;
    const T* out = r_.out.data() + i * h_.value_depth;
    double delta = 0.0;
    if (f_.delta == DeltaUse::kRight) {
      T sum = 0;
      for (int64_t c = 0; c < h_.value_depth; ++c) {
        if (std::isfinite(out[c])) sum += out[c] * dout[c];
      }
      delta = sum;
    } else if (f_.delta == DeltaUse::kSumOfDout) {
      for (int64_t c = 0; c < h_.value_depth; ++c) delta += dout[c];
    }
    return p_.dlse.given() ? delta - DlseOf(i) : delta;
  }

  double DlseOf(int64_t i) const {
    return *p_.dlse.row(h_.sequence.batch, h_.head, h_.sequence.q_begin + i);
  }

  // Multiplies by what dropout keeps, times a factor.
  void Drop(int64_t r, bool unscaled, T* x) const {
    const T* keep = b_.row(b_.keep, r);
    const auto factor = static_cast<T>(unscaled ? 1.0 : h_.keep_scale);
    for (int64_t j = 0; j < b_.width; ++j) x[j] *= keep[j] * factor;
  }

  // P and dS of row r, as the products take them.
  void ScoreGradients(int64_t r) {
    const int64_t i = b_.begin + r;
    T* p = b_.row(&b_.p, r);
    T* ds = b_.row(&b_.ds, r);
    T* dp = b_.row(&b_.dp, r);
    const double max = b_.maxima[static_cast<size_t>(r)];
    if (max == -kInfinity || b_.width == 0) {
      // No key: lse is the sink alone.
      if (h_.model.given) r_.stored_lse[static_cast<size_t>(i)] = -kInfinity;
      std::fill(p, p + b_.width, T(0));
      std::fill(ds, ds + b_.width, T(0));
      if (std::isfinite(h_.sink) && p_.dlse.given()) r_.dsink += DlseOf(i);
      return;
    }
    const double delta = Delta(i);
    const double lse =
        LseInBackward(h_, f_, r_.lse[static_cast<size_t>(i)], max);
    ExpRow(b_.row(b_.scores, r), b_.width, static_cast<T>(lse), p);
    double& delta_error = b_.delta_errors[static_cast<size_t>(r)];
    if (h_.model.magnitudes) {
      delta_error = AddGradientMagnitudes(h_, b_, r, delta, &r_);
    }
    if (h_.dropout && !f_.keep_not_in_dp) Drop(r, f_.keep_unscaled_dp, dp);
    if (h_.dropout && f_.keep_scale_in_dp) {
      const auto factor = static_cast<T>(h_.keep_scale);
      for (int64_t j = 0; j < b_.width; ++j) dp[j] *= factor;
    }
    const T d = static_cast<T>(delta);
    // A masked score adds nothing, whatever lse is (0 * inf).
    for (int64_t j = 0; j < b_.width; ++j) {
      ds[j] = p[j] == T(0) ? T(0) : p[j] * (dp[j] - d);
    }
    AddSmallGradients(i, ds, lse, delta * delta + delta_error, delta);
    if (p_.options.softcap > 0.0 && !f_.softcap_slope_missing) {
      const T* slope = b_.row(b_.cap_slope, r);
      for (int64_t j = 0; j < b_.width; ++j) ds[j] *= slope[j];
    }
    if (f_.dv_from_dp) {
      for (int64_t j = 0; j < b_.width; ++j) {
        if (p[j] != T(0) || f_.dv_from_masked_dp) p[j] = dp[j];
      }
    }
    if (h_.dropout) Drop(r, f_.keep_unscaled_dv, p);
    RoundRow(h_.model.products, p, b_.width);
    RoundRow(h_.model.products, ds, b_.width);
  }

  // dbias, dalibi and dsink of query i, from its dS.
  void AddSmallGradients(int64_t i, const T* ds, double lse, double delta2,
                         double delta) {
    if (p_.alibi_slopes.given()) {
      for (int64_t j = 0; j < b_.width; ++j) {
        r_.dalibi -=
            static_cast<double>(ds[j]) * AlibiDistance(h_, f_, i, b_.lo + j);
      }
    }
    if (p_.sinks.given()) {
      const double p = std::exp(h_.sink - lse);
      r_.dsink -= p * delta;
      r_.dsink_squares += p * p * delta2;
    }
    if (!r_.dbias.empty()) {
      const auto& slice = h_.model.faults.bias_slice;
      const Sizes& n = p_.bias.sizes;
      if (slice[2] >= 0 && i != slice[2]) return;
      double* dbias = r_.dbias.data() + (n[2] == 1 ? 0 : i * n[3]);
      if (n[3] == 1) {
        for (int64_t j = 0; j < b_.width; ++j) {
          if (slice[3] < 0 || b_.lo + j == slice[3]) *dbias += ds[j];
        }
      } else {
        for (int64_t j = 0; j < b_.width; ++j) dbias[b_.lo + j] += ds[j];
      }
    }
  }

  void AddGradients() {
    if (b_.width == 0) return;
    const auto scale = static_cast<T>(std::pow(p_.scale, f_.scale_power));
    // Queries past the cut add nothing to dK and dV, and have no dQ.
    const int64_t nq = h_.sequence.nq;
    const int64_t cut =
        f_.query_tile_cut > 0 ? nq % f_.query_tile_cut : f_.queries_cut;
    const int64_t rows = std::clamp<int64_t>(nq - cut - b_.begin, 0, b_.rows);
    AddDq(rows, scale);
    AddToKeys(b_.ds, h_.q, h_.depth, rows, scale, &r_.dk);
    AddToKeys(b_.p, h_.dout, h_.value_depth, rows, T(1), &r_.dv);
  }

  // dq[rows, depth] += dS[r.., keys from..to) K.
  void AddKeys(int64_t r, int64_t rows, int64_t from, int64_t to, T* dq) const {
    if (from >= to) return;
    AddProduct(Product<T>{rows,
                          h_.depth,
                          to - from,
                          {b_.row(b_.ds, r) + (from - b_.lo), b_.width},
                          {h_.k.data() + from * h_.depth, h_.depth},
                          dq,
                          h_.depth});
  }

  void AddDq(int64_t rows, T scale) {
    T* const dq = r_.dq.data() + b_.begin * h_.depth;
    const int64_t count = rows * h_.depth;
    if (h_.model.faults.rounded_tile > 0) {
      AddRoundedDq(rows, scale, dq);
      return;
    }
    if (f_.dq_tile > 0) {
      for (int64_t r = 0; r < rows; ++r) AddLastTile(r, dq + r * h_.depth);
    } else {
      AddKeys(0, rows, b_.lo, b_.hi, dq);
    }
    for (int64_t n = 0; n < count; ++n) dq[n] *= scale;
  }

  // What the last tile of keys adds to the dQ of row r.
  void AddLastTile(int64_t r, T* dq) const {
    int64_t end = h_.sequence.nk;
    if (f_.dq_tile_of_row) {
      // The block of queries ends where it ends or the queries do.
      const int64_t rows = f_.dq_row_alone ? 1 : f_.dq_tile;
      const int64_t block = (b_.begin + r) / rows + 1;
      const int64_t last = std::min(h_.sequence.nq, block * rows) - 1;
      end = VisibleKeys(p_.options, f_, h_.sequence, last).end;
    }
    const int64_t begin =
        std::max<int64_t>(0, (end - 1) / f_.dq_tile * f_.dq_tile);
    AddKeys(r, 1, std::max(begin, b_.lo), std::min(end, b_.hi), dq);
  }

  // dQ in 16 bits after each tile of keys.
  void AddRoundedDq(int64_t rows, T scale, T* dq) {
    const int64_t tile = h_.model.faults.rounded_tile;
    for (int64_t j = b_.lo / tile * tile; j < b_.hi; j += tile) {
      b_.part.assign(static_cast<size_t>(rows * h_.depth), T(0));
      AddKeys(0, rows, std::max(j, b_.lo), std::min(j + tile, b_.hi),
              b_.part.data());
      AddPart(scale, dq);
    }
  }

  // to[j, :] += factor * sum over rows of weights[r, j] * from[r, :].
  void AddToKeys(const std::vector<T>& weights, const std::vector<T>& from,
                 int64_t columns, int64_t rows, T factor, std::vector<T>* to) {
    if (rows == 0) return;
    b_.part.assign(static_cast<size_t>(b_.width * columns), T(0));
    AddProduct(Product<T>{b_.width,
                          columns,
                          rows,
                          {weights.data(), 1, b_.width},
                          {from.data() + b_.begin * columns, columns},
                          b_.part.data(),
                          columns});
    AddPart(factor, to->data() + b_.lo * columns);
  }

  void AddPart(T factor, T* sums) const {
    for (size_t n = 0; n < b_.part.size(); ++n) sums[n] += b_.part[n] * factor;
    if (h_.model.faults.rounded_tile == 0) return;
    RoundRow(SumsIn16Bits(h_.model), sums,
             static_cast<int64_t>(b_.part.size()));
  }

  const HeadOperands<T>& h_;
  const Problem& p_;
  const Faults& f_;
  Block<T>& b_;
  HeadResults<T>& r_;
};

}  // namespace

template <class T>
void BackwardBlock(const HeadOperands<T>& head, const Faults& faults,
                   Block<T>* block, HeadResults<T>* results) {
  Backward<T>(head, faults, block, results).Run();
}

template void BackwardBlock(const HeadOperands<float>&, const Faults&,
                            Block<float>*, HeadResults<float>*);
template void BackwardBlock(const HeadOperands<double>&, const Faults&,
                            Block<double>*, HeadResults<double>*);

}  // namespace fa2::verify
