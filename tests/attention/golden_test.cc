// SPDX-License-Identifier: Apache-2.0

// fa2 on the inputs of a GPU's kernel: forward, then backward from its own out
// and lse. Its error against float64 must not be larger than the GPU's, nor,
// in the cases where that kernel is mistaken, than the kernel's precision.
#include "tests/support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "fa2/attention.h"
#include "fa2/reference.h"
#include "tests/support/error.h"

namespace fa2::test {
namespace {

const Goldens& AllGoldens() {
  static const Goldens* const goldens =
      new Goldens(ReadGoldens(FA2_TEST_DATA "/memeff_goldens.safetensors"));
  return *goldens;
}

// What the GPU reaches where it is right (tests/data/README.md).
double GpuPrecision(const Golden& golden) {
  if (golden.dtype == DType::kBF16) return 3.3e-3;
  return golden.dtype == DType::kF16 ? 4e-4 : 1e-6;
}

void ExpectNoWorse(const std::string& name, const ConstTensorView& actual,
                   const ConstTensorView& gpu, bool gpu_is_wrong,
                   const ConstTensorView& exact, double precision) {
  if (!exact.given()) return;
  const Error error = ErrorOf(actual, exact);
  const Error gpu_error = ErrorOf(gpu, exact);
  if (gpu_is_wrong) {
    EXPECT_LE(error.relative_l2(), precision) << name;
  } else {
    // c19: gradients that are 0 up to rounding, f32's of values near 1.
    EXPECT_LE(error.l2,
              std::max(gpu_error.l2, 1e-6 * (error.expected_l2 < 1e-6)))
        << name << ": relative " << error.relative_l2() << ", the GPU's "
        << gpu_error.relative_l2();
  }
}

void CheckGoldens(bool wanted(const Golden&), Precision precision) {
  int cases = 0;
  for (Golden golden : AllGoldens().cases) {
    if (!wanted(golden)) continue;
    ++cases;
    SCOPED_TRACE(golden.name + " " + golden.what);
    golden.options.precision = precision;
    const GoldenResults exact = MakeResults(golden, /*f64=*/true);
    ASSERT_TRUE(AttentionReferenceForward(ForwardArgs(golden, exact)).ok());
    ASSERT_TRUE(AttentionReferenceBackward(BackwardArgs(golden, exact)).ok());
    const GoldenResults fa2 = MakeResults(golden, /*f64=*/false);
    Status status = AttentionForward(ForwardArgs(golden, fa2));
    ASSERT_TRUE(status.ok()) << status.message();
    status = AttentionBackward(BackwardArgs(golden, fa2));
    ASSERT_TRUE(status.ok()) << status.message();
    const double bound = GpuPrecision(golden);
    ExpectNoWorse("out", fa2.out.view, golden.out, golden.forward_is_wrong,
                  exact.out.view, bound);
    ExpectNoWorse("dq", fa2.dq.view, golden.dq, golden.backward_is_wrong,
                  exact.dq.view, bound);
    ExpectNoWorse("dk", fa2.dk.view, golden.dk, golden.backward_is_wrong,
                  exact.dk.view, bound);
    ExpectNoWorse("dv", fa2.dv.view, golden.dv, golden.backward_is_wrong,
                  exact.dv.view, bound);
    ExpectNoWorse("dbias", fa2.dbias.view, golden.dbias, false,
                  exact.dbias.view, bound);
  }
  EXPECT_GT(cases, 0);
}

bool IsPlain(const Golden& golden) {
  return !golden.options.bias.given() && golden.options.dropout_p == 0.0 &&
         !golden.options.cu_seqlens_q.given();
}
bool HasBias(const Golden& golden) { return golden.options.bias.given(); }
bool HasDropout(const Golden& golden) { return golden.options.dropout_p > 0.0; }
bool IsPacked(const Golden& golden) {
  return golden.options.cu_seqlens_q.given();
}

TEST(AttentionGolden, PlainFast) { CheckGoldens(IsPlain, Precision::kFast); }
TEST(AttentionGolden, PlainExact) { CheckGoldens(IsPlain, Precision::kExact); }
TEST(AttentionGolden, Bias) { CheckGoldens(HasBias, Precision::kFast); }
TEST(AttentionGolden, Dropout) { CheckGoldens(HasDropout, Precision::kFast); }
TEST(AttentionGolden, Packed) { CheckGoldens(IsPacked, Precision::kFast); }

}  // namespace
}  // namespace fa2::test
