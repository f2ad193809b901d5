// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "fa2/reference.h"
#include "src/common/half.h"
#include "tests/support/error.h"
#include "tests/support/magnitude.h"

namespace fa2::test {
namespace {

// Rounding errors of n sums grow as sqrt(n); fa2::Precision's figures are for
// sums of a few thousand terms.
constexpr double kTermsOfTheFigures = 4096.0;

// Standard deviations that the worst of a few million elements may be off.
constexpr double kWorstElement = 8.0;

// Below this the kernels may flush a term of a sum to zero (matrix units do).
constexpr double kSmallest = 1e-30;

double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-53;
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF16:
      return 0x1p-11;
    default:
      return 0x1p-24;
  }
}

// Half the distance between `value` and its neighbour in the dtype.
double HalfUlp(DType dtype, double value) {
  // Smallest subnormals: 2^-24 (f16), 2^-133 (bf16), 2^-149 (f32).
  const double half_smallest = dtype == DType::kF16    ? 0x1p-25
                               : dtype == DType::kBF16 ? 0x1p-134
                               : dtype == DType::kF32  ? 0x1p-150
                                                       : 0.0;
  if (value == 0.0 || !std::isfinite(value)) return half_smallest;
  // The power of two at or below it: the value without its mantissa.
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits &= uint64_t{0x7FF} << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return std::max(half_smallest, power * UnitRoundoff(dtype));
}

// Error of a score as a multiple of its size: a unit of the type it is summed
// in, and more the longer the sum; up to 64 terms the vector lanes share.
double ScoreRoundoff(const AttentionCase& c) {
  return UnitRoundoff(c.statistics_dtype()) *
         std::max(1.0, std::sqrt(static_cast<double>(c.head_dim) / 64.0));
}

int64_t LongestSum(const AttentionCase& c) {
  int64_t longest = std::max(c.head_dim, c.value_dim);
  if (!c.varlen()) {
    return std::max(
        {longest, c.nk, c.nq * (c.heads / std::max<int64_t>(1, c.kv_heads))});
  }
  for (const int64_t n : c.lengths_q) longest = std::max(longest, n);
  for (const int64_t n : c.lengths_k) longest = std::max(longest, n);
  return longest;
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", value);
  return text;
}

// How many of some numbers make up most of their sum, from the sums of squares
// and of fourth powers.
double Weighty(double squares, double fourths) {
  return fourths > 0.0 ? std::max(1.0, squares * squares / fourths) : 1.0;
}

Tensor LikeF64(const Tensor& tensor) {
  return tensor.given() ? MakeTensor(DType::kF64, tensor.view.sizes) : Tensor();
}

}  // namespace

Precisions PrecisionsOf(const AttentionCase& c) {
  const double growth = std::max(
      1.0, std::sqrt(static_cast<double>(LongestSum(c)) / kTermsOfTheFigures));
  if (c.dtype == DType::kF64) return {1e-13 * growth, 0.0, 1e-13};
  const double f32 = 3e-6 * growth;
  if (c.precision == Precision::kExact) return {f32, 0.0, 1e-6};
  if (c.dtype == DType::kBF16) {
    // P and dS are rounded to bf16 as well as the results: the contract's bound
    // holds both. exp may then be a polynomial of degree 3 (1e-4).
    return {2.5e-3, 2.5e-3, 2e-4};
  }
  // Two bf16 terms on a matrix unit. f16 results are rounded 16 times as
  // coarsely.
  if (c.dtype == DType::kF16 ||
      (c.dtype == DType::kF32 && c.precision == Precision::kHigh)) {
    return {1.5e-5 * growth, 0.0, 1e-5};
  }
  return {f32, 0.0, 1e-6};
}

ExpectedOutputs ComputeExpected(const AttentionCase& c,
                                const AttentionInputs& inputs) {
  ExpectedOutputs expected;
  AttentionOutputs outputs;
  outputs.out = LikeF64(inputs.dout);
  outputs.lse = MakeTensor(DType::kF64, inputs.lse.view.sizes);
  outputs.dq = LikeF64(inputs.q);
  outputs.dk = LikeF64(inputs.k);
  outputs.dv = LikeF64(inputs.v);
  if (inputs.bias.given() && inputs.bias.view.dtype != DType::kBool) {
    outputs.dbias = LikeF64(inputs.bias);
  }
  outputs.dalibi = LikeF64(inputs.alibi_slopes);
  outputs.dsinks = LikeF64(inputs.sinks);
  Status status = AttentionReferenceForward(ForwardArgs(inputs, outputs));
  if (status.ok()) {
    AttentionCase plain = c;
    plain.accumulate_dq = plain.accumulate_dk = false;
    plain.accumulate_dv = plain.accumulate_dbias = false;
    status = AttentionReferenceBackward(BackwardArgs(plain, inputs, outputs));
  }
  if (!status.ok()) throw std::logic_error(status.message());
  expected.out.value = outputs.out;
  expected.lse.value = outputs.lse;
  expected.dq.value = outputs.dq;
  expected.dk.value = outputs.dk;
  expected.dv.value = outputs.dv;
  expected.dbias.value = outputs.dbias;
  expected.dalibi.value = outputs.dalibi;
  expected.dsinks.value = outputs.dsinks;
  const double score_error = 4.0 * ScoreRoundoff(c) / PrecisionsOf(c).sums;
  ComputeMagnitudes(c, inputs, score_error, &expected);
  return expected;
}

std::string Compare(const AttentionCase& c, const std::string& name,
                    const ConstTensorView& actual, const Expected& expected,
                    double amplification, const ConstTensorView& before,
                    double factor) {
  const Precisions precisions = PrecisionsOf(c);
  const DType stored = actual.dtype;
  // The contract's bound for 16-bit results holds their own rounding too.
  const bool rounding_within =
      stored == DType::kBF16 && precisions.stored > 0.0;
  const double bound = precisions.sums;
  const Sizes& sizes = expected.value.view.sizes;
  const double f32_roundoff = UnitRoundoff(c.statistics_dtype());
  const double smallest =
      kSmallest * factor *
      static_cast<double>(std::max<int64_t>(1, LongestSum(c)));

  double error2 = 0.0, value2 = 0.0, rounding2 = 0.0, before2 = 0.0;
  double magnitude2 = 0.0, magnitude4 = 0.0;
  double worst_excess = 0.0;
  Sizes worst = {0, 0, 0, 0};
  double worst_actual = 0.0, worst_expected = 0.0, worst_allowed = 0.0;
  double magnitude = 0.0;
  double row_magnitude2 = 0.0;
  const bool of_elements = expected.magnitude.view.sizes[3] == sizes[3];
  const auto columns = static_cast<double>(sizes[3]);
  ForEachIndex(sizes, [&](const Sizes& at) {
    const double held = before.given() ? Get(before, at) : 0.0;
    const double gradient = Get(expected.value.view, at);
    const double e = gradient + held;
    const double a = Get(actual, at);
    if (at[3] == 0) row_magnitude2 = 0.0;
    if (of_elements || at[3] == 0) {
      magnitude = Get(expected.magnitude.view, at);
    }
    const double rounding = HalfUlp(stored, e);
    double error = std::abs(a - e);
    const bool matches =
        std::isfinite(e) ? std::isfinite(a) : !std::isfinite(a);
    if (!std::isfinite(e) && matches) error = 0.0;
    if (!matches) error = std::numeric_limits<double>::infinity();
    error2 += error * error;
    if (std::isfinite(gradient)) value2 += gradient * gradient;
    before2 += held * held;
    rounding2 += rounding * rounding;
    if (std::isfinite(magnitude)) {
      magnitude2 += magnitude * magnitude;
      row_magnitude2 += magnitude * magnitude / columns;
    }
    if (at[3] + 1 == sizes[3]) magnitude4 += row_magnitude2 * row_magnitude2;
    const double allowed =
        kWorstElement * bound *
            (magnitude + std::abs(gradient) * amplification) +
        rounding * (1.0 + 1e-6) + 4.0 * f32_roundoff * std::abs(held) +
        smallest;
    const double excess =
        std::isfinite(e) ? error / allowed : (matches ? 0.0 : error);
    // NaN in `allowed` (a magnitude that is not finite) must not pass.
    if (!(excess <= worst_excess)) {
      worst_excess = excess;
      worst = at;
      worst_actual = a;
      worst_expected = e;
      worst_allowed = allowed;
    }
  });
  if (Elements(sizes) == 0) return "";

  // A mean over few errors spreads: allow three deviations, where the number is
  // that of the rows which carry the weight. Roundings of equal elements (rows
  // or columns may repeat) are equal, so nothing is known of their mean.
  const double independent =
      expected.one_error ? 1.0 : Weighty(magnitude2 / columns, magnitude4);
  const double few = 1.0 + 3.0 / std::sqrt(independent);
  const double error = std::sqrt(error2);
  const double size =
      std::max(std::sqrt(value2) * amplification, std::sqrt(magnitude2));
  const double rounding =
      rounding_within && before2 == 0.0 ? 0.0 : std::sqrt(rounding2);
  const double allowed = bound * few * size + rounding +
                         4.0 * f32_roundoff * std::sqrt(before2) +
                         kSmallest * factor;
  std::string failure;
  if (!(error <= allowed)) {
    failure = name + ": L2 error " + Number(error) + " is over the bound " +
              Number(allowed) + " (values " + Number(std::sqrt(value2)) +
              ", magnitude " + Number(std::sqrt(magnitude2)) + ")";
  } else if (!(worst_excess <= 1.0)) {
    failure = name + ": an element is past its bound";
  }
  if (failure.empty()) return "";
  return failure + "; worst at " + Text(worst) + " of " + Text(sizes) +
         ": it is " + Number(worst_actual) + ", must be " +
         Number(worst_expected) + " +- " + Number(worst_allowed);
}

namespace {

// lse is compared absolutely: an error of it is a relative error of P. The
// padding of packed sequences means nothing.
std::string CompareLse(const AttentionCase& c, const ConstTensorView& actual,
                       const ExpectedOutputs& expected) {
  const double per_size = 8.0 * ScoreRoundoff(c);
  const double absolute = PrecisionsOf(c).lse;
  std::string failure;
  ForEachIndex(actual.sizes, [&](const Sizes& at) {
    if (c.padded_lse && at[2] >= c.lengths_q[static_cast<size_t>(at[0])]) {
      return;
    }
    const double e = Get(expected.lse.value.view, at);
    const double a = Get(actual, at);
    if (e == a || (!std::isfinite(e) && std::isnan(e) && !std::isfinite(a))) {
      return;
    }
    // Scores may be larger than lse where signs mix.
    const double size = std::abs(e) + 8.0 * c.q_sigma + c.softcap;
    const double allowed = absolute + per_size * size;
    if (std::abs(a - e) <= allowed || !failure.empty()) return;
    failure = "lse at " + Text(at) + " is " + Number(a) + ", must be " +
              Number(e) + " +- " + Number(allowed);
  });
  return failure;
}

void AddFailure(const std::string& failure,
                std::vector<std::string>* failures) {
  if (!failure.empty()) failures->push_back(failure);
}

}  // namespace

std::vector<std::string> CompareForward(const AttentionCase& c,
                                        const AttentionOutputs& actual,
                                        const ExpectedOutputs& expected) {
  std::vector<std::string> failures;
  if (actual.out.given()) {
    AddFailure(Compare(c, "out", actual.out.view, expected.out,
                       expected.amplification),
               &failures);
  }
  if (actual.lse.given()) {
    AddFailure(CompareLse(c, actual.lse.view, expected), &failures);
  }
  return failures;
}

std::vector<std::string> CompareBackward(const AttentionCase& c,
                                         const AttentionOutputs& actual,
                                         const ExpectedOutputs& expected,
                                         const AttentionOutputs& before) {
  std::vector<std::string> failures;
  const auto compare = [&](const char* name, const Tensor& a, const Expected& e,
                           const Tensor& b, double factor = 1.0) {
    if (!a.given()) return;
    AddFailure(
        Compare(c, name, a.view, e, expected.amplification, b.view, factor),
        &failures);
  };
  compare("dq", actual.dq, expected.dq, before.dq);
  compare("dk", actual.dk, expected.dk, before.dk);
  compare("dv", actual.dv, expected.dv, before.dv);
  compare("dbias", actual.dbias, expected.dbias, before.dbias);
  // Each dS times a distance.
  compare("dalibi_slopes", actual.dalibi, expected.dalibi, before.dalibi,
          static_cast<double>(LongestSum(c)));
  compare("dsinks", actual.dsinks, expected.dsinks, before.dsinks);
  return failures;
}

}  // namespace fa2::test
