// SPDX-License-Identifier: Apache-2.0

// What the tests of the entry points of other kernels share.
#ifndef FA2_TESTS_COMPAT_EXPECT_H_
#define FA2_TESTS_COMPAT_EXPECT_H_

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "fa2/attention.h"
#include "fa2/fa2_c.h"
#include "fa2/reference.h"
#include "tests/support/error.h"
#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace fa2::test {

#define EXPECT_FA2_OK(call) EXPECT_EQ((call), FA2_OK) << fa2_last_error()

// The call is refused as an invalid argument, with a sentence that holds `text`
// and says what must be.
#define EXPECT_REFUSED(call, text)                                   \
  do {                                                               \
    EXPECT_EQ((call), FA2_INVALID_ARGUMENT) << "for " << (text);     \
    const std::string sentence = fa2_last_error();                   \
    EXPECT_NE(sentence.find(text), std::string::npos) << sentence;   \
    EXPECT_NE(sentence.find("must"), std::string::npos) << sentence; \
  } while (0)

// Relative L2 error that fa2 promises for precision fast. Gradients kept in
// f32: P and dS are rounded to 16 bits where the inputs are bf16; stored in 16
// bits, they are rounded once more (half an ulp, evenly spread, of a value just
// above a power of two: 2^-8 / sqrt(3) for bf16, 2^-11 / sqrt(3) for f16).
inline double Bound(DType inputs, DType gradients) {
  const double sums = inputs == DType::kBF16  ? 2.5e-3
                      : inputs == DType::kF64 ? 1e-13
                                              : 3e-6;
  if (gradients == DType::kBF16) return sums + 0x1p-8 / std::sqrt(3.0);
  if (gradients == DType::kF16) return sums + 0x1p-11 / std::sqrt(3.0);
  return sums;
}

inline Tensor MakeNormal(DType dtype, const Sizes& sizes, Random& random,
                         Layout layout = Layout::kBhsd) {
  const Tensor tensor = MakeTensor(dtype, sizes, layout);
  FillNormal(tensor.view, random);
  return tensor;
}

// Gradients by the oracle, in f64, and the statistics of the forward.
struct Truth {
  Tensor out;    // as the backward is given it
  Tensor lse;    // f32 (f64 for f64 inputs), dense
  Tensor delta;  // the same: rowsum(out * dout)
  Tensor dq, dk, dv, dbias;
};

// For the inputs and options of `args`, and an out that was stored as
// `out_dtype`, in the layout given.
inline Truth ComputeTruth(AttentionBackwardArgs args, DType out_dtype,
                          Layout layout = Layout::kBhsd) {
  Truth truth;
  const Sizes& q = args.q.sizes;
  const DType statistic =
      args.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const Sizes rows = {q[0], q[1], q[2], 1};
  const Sizes out = {q[0], q[1], q[2], args.v.sizes[3]};
  truth.out = MakeTensor(out_dtype, out, layout);
  const Tensor lse = MakeTensor(DType::kF64, rows);
  AttentionForwardArgs forward;
  forward.q = args.q;
  forward.k = args.k;
  forward.v = args.v;
  forward.options = args.options;
  forward.out = truth.out.view;
  forward.lse = lse.view;
  Status status = AttentionReferenceForward(forward);
  EXPECT_TRUE(status.ok()) << status.message();

  truth.lse = MakeTensor(statistic, rows);
  Copy(lse.view, truth.lse.view);
  truth.delta = MakeTensor(statistic, rows);
  ForEachIndex(rows, [&](const Sizes& at) {
    double sum = 0.0;
    for (int64_t d = 0; d < out[3]; ++d) {
      const Sizes element = {at[0], at[1], at[2], d};
      sum += Get(truth.out.view, element) * Get(args.dout, element);
    }
    Set(truth.delta.view, at, sum);
  });

  truth.dq = MakeTensor(DType::kF64, args.q.sizes);
  truth.dk = MakeTensor(DType::kF64, args.k.sizes);
  truth.dv = MakeTensor(DType::kF64, args.v.sizes);
  args.out = truth.out.view;
  args.lse = lse.view;
  args.dq = truth.dq.view;
  args.dk = truth.dk.view;
  args.dv = truth.dv.view;
  if (args.options.bias.given() && args.options.bias.dtype != DType::kBool) {
    truth.dbias = MakeTensor(DType::kF64, args.options.bias.sizes);
    args.dbias = truth.dbias.view;
  }
  status = AttentionReferenceBackward(args);
  EXPECT_TRUE(status.ok()) << status.message();
  return truth;
}

// `actual` is `expected` (plus `before`, if given) within a relative L2 error
// of the gradient alone. Where every row sees one key, dS is 0 but for
// rounding: `floor` is then the size of the terms that cancel.
inline void ExpectGradient(const char* name, const ConstTensorView& actual,
                           const ConstTensorView& expected, double bound,
                           double floor = 0.0,
                           const ConstTensorView& before = {}) {
  const Tensor total = MakeTensor(DType::kF64, expected.sizes);
  double gradient_squared = 0.0;
  double before_squared = 0.0;
  ForEachIndex(expected.sizes, [&](const Sizes& at) {
    const double e = Get(expected, at);
    const double b = before.given() ? Get(before, at) : 0.0;
    gradient_squared += e * e;
    before_squared += b * b;
    Set(total.view, at, e + b);
  });
  const double count = static_cast<double>(Elements(expected.sizes));
  // The sum is stored in f32.
  const double most = bound * std::sqrt(gradient_squared) +
                      0x1p-24 * std::sqrt(before_squared) +
                      floor * std::sqrt(count);
  const Error error = ErrorOf(actual, total.view);
  EXPECT_LE(error.l2, most) << name << ": relative " << error.relative_l2()
                            << ", worst at " << Text(error.worst);
}

}  // namespace fa2::test

#endif  // FA2_TESTS_COMPAT_EXPECT_H_
