// SPDX-License-Identifier: Apache-2.0
#include "tools/demo/golden_table.h"

#include <fmt/core.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "fa2/reference.h"
#include "tests/support/error.h"
#include "tests/support/golden.h"

namespace fa2::demo {
namespace {

using test::Error;
using test::Golden;
using test::GoldenResults;

// Gradients whose exact value is 0 (a row that sees one key) are judged by
// their absolute error, that of f32 on numbers near 1.
constexpr double kZero = 1e-6;

// What the GPU reaches in the cases where it is right: relative L2 errors.
double GpuPrecision(DType dtype) {
  if (dtype == DType::kBF16) return 3.3e-3;
  return dtype == DType::kF16 ? 4e-4 : 1e-6;
}

struct Comparison {
  std::string text;  // "1.9e-03 / 2.1e-03"
  bool good = false;
};

Comparison Compare(const ConstTensorView& fa2, const ConstTensorView& gpu,
                   const ConstTensorView& exact, bool gpu_is_wrong,
                   double precision) {
  const Error own = test::ErrorOf(fa2, exact);
  const Error other = test::ErrorOf(gpu, exact);
  Comparison result;
  if (own.expected_l2 < kZero) {
    result.text = fmt::format("{:7.1e} / {:7.1e}", own.l2, other.l2);
    result.good = own.l2 <= kZero;
    return result;
  }
  result.text =
      fmt::format("{:7.1e} / {:7.1e}", own.relative_l2(), other.relative_l2());
  result.good =
      gpu_is_wrong ? own.relative_l2() <= precision : own.l2 <= other.l2;
  return result;
}

void Require(const Status& status, const Golden& golden) {
  if (!status.ok()) {
    throw std::runtime_error(golden.name + ": " + status.message());
  }
}

// fa2 runs as a user would: backward takes fa2's own out and lse.
bool PrintCase(const Golden& golden, Context* context) {
  const GoldenResults exact = MakeResults(golden, /*f64=*/true);
  Require(AttentionReferenceForward(ForwardArgs(golden, exact)), golden);
  Require(AttentionReferenceBackward(BackwardArgs(golden, exact)), golden);
  const GoldenResults fa2 = MakeResults(golden, /*f64=*/false);
  Require(AttentionForward(ForwardArgs(golden, fa2), context), golden);
  Require(AttentionBackward(BackwardArgs(golden, fa2), context), golden);

  const double precision = GpuPrecision(golden.dtype);
  const auto compare = [&](const test::Tensor& own, const ConstTensorView& gpu,
                           const test::Tensor& truth, bool gpu_is_wrong) {
    return Compare(own.view, gpu, truth.view, gpu_is_wrong, precision);
  };
  const Comparison columns[] = {
      compare(fa2.out, golden.out, exact.out, golden.forward_is_wrong),
      compare(fa2.dq, golden.dq, exact.dq, golden.backward_is_wrong),
      compare(fa2.dk, golden.dk, exact.dk, golden.backward_is_wrong),
      compare(fa2.dv, golden.dv, exact.dv, golden.backward_is_wrong)};
  bool good = true;
  std::string row = fmt::format("{}  {:<45}", golden.name, golden.what);
  for (const Comparison& column : columns) {
    row += "  " + column.text;
    good &= column.good;
  }
  row += good ? "  ok" : "  WORSE";
  if (golden.forward_is_wrong) {
    row += " (the GPU is wrong)";
  } else if (golden.backward_is_wrong) {
    row += " (the GPU's backward is wrong)";
  }
  fmt::print("{}\n", row);
  std::fflush(stdout);
  return good;
}

}  // namespace

bool PrintGoldenTable(const std::string& path, Context* context) {
  fmt::print(
      "Errors against float64, fa2 / GPU: relative L2; absolute where the "
      "exact value is 0 (c19's dq, dk).\n\n");
  fmt::print("{:<50}  {:<17}  {:<17}  {:<17}  {:<17}\n", "case", "out", "dq",
             "dk", "dv");
  const test::Goldens goldens = test::ReadGoldens(path);
  size_t good = 0;
  for (const Golden& golden : goldens.cases) {
    good += PrintCase(golden, context);
  }
  fmt::print(
      "\n{} of {} cases: fa2's error is no larger than the GPU's (where the "
      "GPU is wrong: than the GPU's elsewhere).\n",
      good, goldens.cases.size());
  fmt::print(
      "The GPU's mistakes: c04, c05 leave the first block of 64 rows that "
      "sees any key unmasked;\nc08's backward counts the window from the "
      "top-left diagonal.\n");
  return good == goldens.cases.size();
}

}  // namespace fa2::demo
