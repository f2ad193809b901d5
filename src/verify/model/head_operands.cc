// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/head_operands.h"

#include <cmath>
#include <limits>

namespace fa2::verify {
namespace {

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

// The same where heads and rows of the file's layout are taken for each other:
// row j of head h is what lies where the other layout has it.
template <class T>
std::vector<T> LoadSwapped(const Array4<double>& array, bool heads_first,
                           int64_t batch, int64_t head, int64_t begin,
                           int64_t rows) {
  std::vector<T> to;
  for (int64_t j = begin; j < begin + rows; ++j) {
    const auto [h, n] =
        SwappedRow(heads_first, array.sizes[1], array.sizes[2], head, j);
    const std::vector<T> row = LoadRows<T>(array, batch, h, n, 1);
    to.insert(to.end(), row.begin(), row.end());
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
void Round(Products products, std::vector<T>* x) {
  RoundRow(products, x->data(), static_cast<int64_t>(x->size()));
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

}  // namespace

std::pair<int64_t, int64_t> SwappedRow(bool heads_first, int64_t heads,
                                       int64_t rows, int64_t head,
                                       int64_t row) {
  const int64_t flat = heads_first ? row * heads + head : head * rows + row;
  return heads_first ? std::pair(flat / rows, flat % rows)
                     : std::pair(flat % heads, flat / heads);
}

template <class T>
HeadOperands<T>::HeadOperands(const Problem& p, const Model& m,
                              const Sequence& s, int64_t query_head,
                              int64_t key_head)
    : problem(p),
      model(m),
      sequence(s),
      head(query_head),
      kv_head(key_head),
      depth(p.head_dim),
      value_depth(p.value_dim),
      gradients(m.gradients && p.dout.given()),
      dropout(p.options.dropout_p > 0.0 || p.keep.given()),
      keep_scale(1.0 / (1.0 - p.options.dropout_p)),
      sink(p.sinks.given() ? *p.sinks.row(0, query_head, 0)
                           : -std::numeric_limits<double>::infinity()) {
  q = LoadRows<T>(p.q, s.batch, head, s.q_begin, s.nq);
  if (gradients) {
    dout = LoadRows<T>(p.dout, s.batch, head, s.q_begin, s.nq);
    exact_dout = dout;
    Round(m.products, &dout);
  }
  if (!p.q_rounded) Round(m.products, &q);
  if (m.magnitudes) {
    q_squares = SquaredLengths(q, s.nq);
    dout_squares = SquaredLengths(dout, s.nq);
  }
  if (p.alibi_slopes.given()) {
    slope = *p.alibi_slopes.row(p.alibi_slopes.sizes[0] == 1 ? 0 : s.index,
                                head, 0);
  }
}

template <class T>
void HeadOperands<T>::LoadKeys(const Faults& faults) {
  const Sequence& s = sequence;
  // A pass without the mistake reads the head that is right.
  const int64_t from =
      faults.head_map_modulo ? kv_head : head / problem.group();
  const int64_t batch = (s.batch + faults.key_batch_shift) % problem.batch;
  const auto load = [&](const Array4<double>& array, bool swapped, bool round) {
    std::vector<T> x =
        swapped ? LoadSwapped<T>(array, problem.options.layout == Layout::kBhsd,
                                 batch, from, s.k_begin, s.nk)
                : LoadRows<T>(array, batch, from, s.k_begin, s.nk);
    if (round) Round(model.products, &x);
    return x;
  };
  k = load(problem.k, faults.k_layout_swapped, !problem.k_rounded);
  v = load(problem.v, faults.v_layout_swapped, true);
  k_transposed = Transpose(k, s.nk, depth);
  v_transposed = Transpose(v, s.nk, value_depth);
  if (model.magnitudes) {
    k_squares = SquaredLengths(k, s.nk);
    v_squares = SquaredLengths(v, s.nk);
  }
}

template struct HeadOperands<float>;
template struct HeadOperands<double>;

}  // namespace fa2::verify
