// SPDX-License-Identifier: Apache-2.0

// What the roundings of a kernel leave in each row of its results, counted
// where any kernel in use rounds: P and O in the forward; P before it is
// multiplied by dP - delta, and dS; P for dV; a query head's share of dK and
// dV.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "src/verify/model/head_block.h"
#include "src/verify/model/products.h"

namespace fa2::verify {
namespace {

// A score's absolute error, in roundings of the type it is summed in, per unit
// of its size; terms that cancel leave more than the sum shows.
constexpr double kScoreError = 2.0;

// The same over what one rounding of a product's operand costs.
double ScoreError(Products products) {
  const double sum = products == Products::kF64 ? 0x1p-53 : 0x1p-24;
  return kScoreError * sum / std::max(UnitRoundoff(products), sum);
}

// Below its smallest normal number, 2^-14, f16 rounds by up to 2^-25, as much
// as a rounding of 2^-14 may err: no term counts for less. Such errors are
// spread evenly, which makes their mean square larger than that of relative
// ones. The other types' smallest numbers lie below any sum's.
double LeastTerm(Products products) {
  return products == Products::kF16 ? 1.36 * 0x1p-14 : 0.0;
}

// Relative errors over the larger of the two that a case has: of an operand of
// a product, of a result as it is stored, and of a sum.
struct Units {
  explicit Units(const Model& model) {
    const double products = UnitRoundoff(model.products);
    const double out = UnitRoundoff(model.out);
    const double largest = std::max(products, out);
    product = products / largest;
    stored = out / largest;
    sum = (model.products == Products::kF64 ? 0x1p-53 : 0x1p-24) / largest;
  }
  double product, stored, sum;
};

double Square(double x) { return x * x; }

void Add(double weight, RowError* error) {
  error->squares += weight;
  error->fourths += weight * weight;
}

// The weights of one query's terms in rows of keys. A query has one delta: its
// terms in rows of a tile of the judgement err alike.
class KeyWeights {
 public:
  KeyWeights(int64_t first_row, std::vector<RowError>* errors)
      : first_row_(first_row), errors_(errors) {}
  ~KeyWeights() { Flush(); }

  // `shared`: of the weight, what delta's error has.
  void Add(int64_t key, double weight, double shared) {
    const int64_t tile = (first_row_ + key) / kTileRows;
    if (tile != tile_) Flush();
    tile_ = tile;
    sum_ += shared;
    terms_.emplace_back(key, shared);
    verify::Add(weight, &(*errors_)[static_cast<size_t>(key)]);
  }

 private:
  void Flush() {
    for (const auto& [key, shared] : terms_) {
      (*errors_)[static_cast<size_t>(key)].shared += shared * sum_;
    }
    terms_.clear();
    sum_ = 0.0;
  }

  int64_t first_row_;
  std::vector<RowError>* errors_;
  int64_t tile_ = -1;
  double sum_ = 0.0;
  std::vector<std::pair<int64_t, double>> terms_;
};

// What one query's gradients are summed from.
template <class T>
class QueryTerms {
 public:
  QueryTerms(const HeadOperands<T>& head, const Block<T>& block, int64_t r,
             const HeadResults<T>& results)
      : h_(head),
        first_(static_cast<size_t>((block.begin + r) * head.value_depth)),
        out_(results.out.data() + first_),
        p_(block.row(block.p, r)),
        s_(block.row(block.scores, r)),
        dp_(block.row(block.dp, r)),
        keep_(head.dropout ? block.row(block.keep, r) : nullptr),
        width_(block.width),
        lse_(std::abs(results.lse[static_cast<size_t>(block.begin + r)])),
        score_error_(ScoreError(head.model.products)) {}

  bool Visible(int64_t j) const { return p_[j] != T(0); }
  double P(int64_t j) const { return p_[j]; }
  // What its score's error adds to P.
  double ScoreShare(int64_t j) const {
    return p_[j] * score_error_ * (std::abs(double(s_[j])) + lse_);
  }
  // dP as dropout leaves it.
  double Dp(int64_t j) const {
    return keep_ == nullptr ? double(dp_[j])
                            : dp_[j] * keep_[j] * h_.keep_scale;
  }

  double OutSquares() const {
    double sum = 0.0;
    for (int64_t c = 0; c < h_.value_depth; ++c) sum += Square(Out(c));
    return sum;
  }

  // Of delta = sum of O dO: O is stored, and a product with a rounded P. An
  // error of a score moves P of all keys: what they have in common stays.
  double DeltaError() const {
    const Units unit(h_.model);
    const double least = LeastTerm(h_.model.products);
    double stored = 0.0, product = 0.0, mean = 0.0;
    for (int64_t c = 0; c < h_.value_depth; ++c) {
      stored += Square(Out(c) * h_.exact_dout[first_ + static_cast<size_t>(c)]);
    }
    for (int64_t j = 0; j < width_; ++j) {
      if (Visible(j)) mean += P(j) * Dp(j);
    }
    for (int64_t j = 0; j < width_; ++j) {
      if (!Visible(j)) continue;
      product += Square((P(j) + least) * Dp(j)) +
                 Square(ScoreShare(j) * (Dp(j) - mean));
    }
    return Square(unit.stored) * stored + Square(unit.product) * product;
  }

 private:
  double Out(int64_t c) const { return std::isfinite(out_[c]) ? out_[c] : 0.0; }

  const HeadOperands<T>& h_;
  size_t first_;
  const T* out_;
  const T* p_;
  const T* s_;
  const T* dp_;
  const T* keep_;
  int64_t width_;
  double lse_, score_error_;
};

// The weights of one query's terms in its row of dbias. Delta is the same in
// all of them.
template <class T>
class BiasWeights {
 public:
  BiasWeights(const Problem& p, int64_t query, HeadResults<T>* results)
      : columns_(static_cast<double>(p.bias.sizes[3])) {
    if (results->dbias_error.empty()) return;
    error_ = &results->dbias_error[static_cast<size_t>(
        p.bias.sizes[2] == 1 ? 0 : query)];
  }

  // `own`: of dS; `shared`: what delta's error adds to its mean square.
  void Add(double p, double own, double shared) {
    if (error_ == nullptr) return;
    verify::Add(own / columns_, error_);
    p_ += p;
    shared_ += shared;
  }
  void AddDelta(double delta_error) {
    if (error_ == nullptr) return;
    // Summed over keys, P is.
    verify::Add(columns_ == 1.0 ? p_ * p_ * delta_error : shared_ / columns_,
                error_);
  }

 private:
  double columns_;
  RowError* error_ = nullptr;
  double p_ = 0.0, shared_ = 0.0;
};

}  // namespace

template <class T>
void AddOutMagnitude(const HeadOperands<T>& h, const Block<T>& b, int64_t r,
                     double normaliser, HeadResults<T>* results) {
  const T* p = b.row(b.p, r);
  const T* s = b.row(b.scores, r);
  const auto i = static_cast<size_t>(b.begin + r);
  const double lse = std::abs(results->lse[i]);
  const double score_error = ScoreError(h.model.products);
  const double least = LeastTerm(h.model.products);
  const auto columns = static_cast<double>(h.value_depth);
  const auto v2 = [&](int64_t j) {
    return double(h.v_squares[static_cast<size_t>(b.lo + j)]);
  };
  double mean2 = 0.0;  // of V, as P weighs it
  for (int64_t j = 0; j < b.width; ++j) mean2 += normaliser * p[j] * v2(j);
  RowError& error = results->out_error[i];
  for (int64_t j = 0; j < b.width; ++j) {
    if (p[j] == T(0)) continue;
    const double share = normaliser * p[j];
    // A score's error moves O towards V of its key, and not where O is that.
    const double others =
        h.dropout ? 1.0 : std::clamp(1.0 - share, 0.0, 1.0) + 0x1p-20;
    const double moved =
        share * score_error * (std::abs(double(s[j])) + lse) * others;
    Add((Square(share + normaliser * least) * v2(j) +
         Square(moved) * (v2(j) + mean2)) /
            columns,
        &error);
  }
}

template <class T>
double AddGradientMagnitudes(const HeadOperands<T>& h, const Block<T>& b,
                             int64_t r, double delta, HeadResults<T>* results) {
  const Problem& problem = h.problem;
  const Units unit(h.model);
  const QueryTerms<T> terms(h, b, r, *results);
  const int64_t query = b.begin + r;
  const auto i = static_cast<size_t>(query);
  const auto columns = static_cast<double>(h.value_depth);
  const double out2 = terms.OutSquares();
  const double delta_error = terms.DeltaError();
  const double dout2 = h.dout_squares[i];
  const double delta2 = std::max(dout2 * out2 / columns, delta * delta * 1e-6);
  const double q2 = h.q_squares[i];
  const double scale2 =
      problem.scale * problem.scale / static_cast<double>(h.depth);
  const double keep2 = h.dropout ? h.keep_scale * h.keep_scale : 1.0;
  const double least_p = LeastTerm(h.model.products);
  // Some kernels round dS after they have multiplied it by the scale.
  const double least_ds =
      least_p == 0.0
          ? 0.0
          : least_p / std::clamp(std::abs(problem.scale), least_p, 1.0);
  KeyWeights dk(h.sequence.k_begin, &results->dk_error);
  BiasWeights<T> dbias(problem, query, results);
  double distances = 0.0;  // as P weighs them
  for (int64_t j = 0; j < b.width; ++j) {
    if (!terms.Visible(j)) continue;
    const auto key = static_cast<size_t>(b.lo + j);
    const double exact2 = Square(terms.P(j));
    const double a2 = Square(terms.P(j) + terms.ScoreShare(j));
    // P and dS = P (dP - delta) are rounded, and dP and delta are sums.
    const double own2 =
        (2.0 * a2 + least_p * least_p) *
            Square(unit.product * (terms.Dp(j) - delta)) +
        exact2 * Square(unit.sum) * keep2 *
            (dout2 * h.v_squares[key] / columns * keep2 + delta2) +
        least_ds * least_ds;
    const double shared2 = exact2 * delta_error;
    const double p2 = a2 * keep2 + least_p * least_p;
    Add(own2 * h.k_squares[key] * scale2, &results->dq_error[i]);
    dk.Add(b.lo + j, (own2 + shared2) * q2 * scale2, shared2 * q2 * scale2);
    Add(p2 * dout2 / columns, &results->dv_error[key]);
    if (problem.alibi_slopes.given()) {
      const double distance = AlibiDistance(h, h.model.faults, query, b.lo + j);
      results->dalibi_squares += own2 * distance * distance;
      distances += terms.P(j) * distance;
    }
    dbias.Add(terms.P(j), own2, shared2);
  }
  results->dalibi_squares += Square(distances) * delta_error;
  dbias.AddDelta(delta_error);
  return delta_error;
}

template <class T>
void AddDeltaMagnitudes(const HeadOperands<T>& h, Block<T>* b,
                        HeadResults<T>* results) {
  const double scale2 =
      h.problem.scale * h.problem.scale / static_cast<double>(h.depth);
  b->part.assign(static_cast<size_t>(b->rows * h.depth), T(0));
  AddProduct(Product<T>{b->rows,
                        h.depth,
                        b->width,
                        {b->p.data(), b->width},
                        {h.k.data() + b->lo * h.depth, h.depth},
                        b->part.data(),
                        h.depth});
  for (int64_t r = 0; r < b->rows; ++r) {
    double squares = 0.0;
    for (int64_t d = 0; d < h.depth; ++d) {
      squares += Square(b->part[static_cast<size_t>(r * h.depth + d)]);
    }
    Add(b->delta_errors[static_cast<size_t>(r)] * squares * scale2,
        &results->dq_error[static_cast<size_t>(b->begin + r)]);
  }
}

template <class T>
void AddShareMagnitudes(const HeadOperands<T>& h, HeadResults<T>* results) {
  const double unit = Units(h.model).stored;
  const auto add = [&](const std::vector<T>& share, int64_t columns,
                       std::vector<RowError>* errors) {
    for (size_t n = 0; n < share.size(); ++n) {
      (*errors)[n / static_cast<size_t>(columns)].squares +=
          Square(unit * share[n]) / static_cast<double>(columns);
    }
  };
  add(results->dk, h.depth, &results->dk_error);
  add(results->dv, h.value_depth, &results->dv_error);
}

template void AddOutMagnitude(const HeadOperands<float>&, const Block<float>&,
                              int64_t, double, HeadResults<float>*);
template double AddGradientMagnitudes(const HeadOperands<float>&,
                                      const Block<float>&, int64_t, double,
                                      HeadResults<float>*);
template void AddDeltaMagnitudes(const HeadOperands<float>&, Block<float>*,
                                 HeadResults<float>*);
template void AddShareMagnitudes(const HeadOperands<float>&,
                                 HeadResults<float>*);
template void AddOutMagnitude(const HeadOperands<double>&, const Block<double>&,
                              int64_t, double, HeadResults<double>*);
template double AddGradientMagnitudes(const HeadOperands<double>&,
                                      const Block<double>&, int64_t, double,
                                      HeadResults<double>*);
template void AddDeltaMagnitudes(const HeadOperands<double>&, Block<double>*,
                                 HeadResults<double>*);
template void AddShareMagnitudes(const HeadOperands<double>&,
                                 HeadResults<double>*);

}  // namespace fa2::verify
