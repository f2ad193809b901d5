// CausalAttentionBackward against plain loops in float64, with the conventions
// of system 4: dq is overwritten, dk and dv are added to.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/ops/ops_test_util.h"

namespace fa2::test {
namespace {

struct Shape {
  int64_t batch, seq, heads, kv_heads, head_dim;
};

struct Gradients {
  std::vector<double> dq, dk, dv;
};

// One batch element, [seq, heads * head_dim], rows offset by `row0`.
void Reference(const Shape& s, int64_t row0, const Array& q, const Array& k,
               const Array& v, const Array& dout, Gradients* g) {
  const double scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  const int64_t d = s.head_dim;
  for (int64_t h = 0; h < s.heads; ++h) {
    const int64_t hq = h * d;
    const int64_t hk = h / (s.heads / s.kv_heads) * d;
    const auto at = [&](int64_t row, int64_t heads, int64_t i) {
      return static_cast<size_t>((row0 + row) * heads * d + i);
    };
    for (int64_t i = 0; i < s.seq; ++i) {
      std::vector<double> p(static_cast<size_t>(i + 1)), dp(p.size());
      double max = -1e300, sum = 0, delta = 0;
      for (int64_t j = 0; j <= i; ++j) {
        double score = 0;
        for (int64_t c = 0; c < d; ++c) {
          score += q.Get(row0 + i, hq + c) * k.Get(row0 + j, hk + c);
        }
        p[static_cast<size_t>(j)] = scale * score;
        max = std::max(max, scale * score);
      }
      for (double& x : p) sum += x = std::exp(x - max);
      for (int64_t j = 0; j <= i; ++j) {
        p[static_cast<size_t>(j)] /= sum;
        for (int64_t c = 0; c < d; ++c) {
          dp[static_cast<size_t>(j)] +=
              dout.Get(row0 + i, hq + c) * v.Get(row0 + j, hk + c);
        }
        delta += p[static_cast<size_t>(j)] * dp[static_cast<size_t>(j)];
      }
      for (int64_t j = 0; j <= i; ++j) {
        const double pij = p[static_cast<size_t>(j)];
        const double ds = pij * (dp[static_cast<size_t>(j)] - delta);
        for (int64_t c = 0; c < d; ++c) {
          g->dq[at(i, s.heads, hq + c)] += scale * ds * k.Get(row0 + j, hk + c);
          g->dk[at(j, s.kv_heads, hk + c)] +=
              scale * ds * q.Get(row0 + i, hq + c);
          g->dv[at(j, s.kv_heads, hk + c)] += pij * dout.Get(row0 + i, hq + c);
        }
      }
    }
  }
}

// Relative L2 error of the classes of fa2::Precision; what an accumulated
// output held before is taken off, and its rounding allowed for.
void ExpectClose(const char* name, const Array& actual, const Array* before,
                 const std::vector<double>& want) {
  double error = 0, size = 0, rounding = 0;
  const double ulp = actual.dtype() == DType::kBF16 ? 0x1p-9 : 0x1p-24;
  for (int64_t row = 0; row < actual.rows(); ++row) {
    for (int64_t i = 0; i < actual.dim(); ++i) {
      const double value = want[static_cast<size_t>(row * actual.dim() + i)];
      const double held = before == nullptr ? 0.0 : before->Get(row, i);
      error += std::pow(actual.Get(row, i) - held - value, 2);
      size += value * value;
      rounding += std::pow(ulp * (std::abs(held) + std::abs(value)), 2);
    }
  }
  const double limit = actual.dtype() == DType::kBF16 ? 2.5e-3 : 3e-6;
  // A first row sees one key: its dS is 0 up to rounding, hence the constant.
  EXPECT_LE(std::sqrt(error),
            limit * std::sqrt(size) + 2 * std::sqrt(rounding) + 1e-6)
      << name;
}

void TestCausal(DType dtype, const Shape& s, bool accumulate) {
  SCOPED_TRACE(std::string(NameOf(dtype)) + " B" + std::to_string(s.batch) +
               " N" + std::to_string(s.seq) + " H" + std::to_string(s.heads) +
               "/" + std::to_string(s.kv_heads) + " D" +
               std::to_string(s.head_dim));
  const int64_t rows = s.batch * s.seq;
  const int64_t q_dim = s.heads * s.head_dim;
  const int64_t kv_dim = s.kv_heads * s.head_dim;
  Array q(dtype, rows, q_dim, 3), dout(dtype, rows, q_dim),
      dq(dtype, rows, q_dim, 1);
  Array k(dtype, rows, kv_dim), v(dtype, rows, kv_dim, 5);
  Array dk(dtype, rows, kv_dim, 2), dv(dtype, rows, kv_dim);
  Array dk_before(dtype, rows, kv_dim, 2), dv_before(dtype, rows, kv_dim);
  uint32_t seed = 1;
  for (Array* a : {&q, &dout, &k, &v, &dk_before, &dv_before}) {
    a->Fill(Normal(seed++));
  }
  Gradients want{std::vector<double>(static_cast<size_t>(rows * q_dim)),
                 std::vector<double>(static_cast<size_t>(rows * kv_dim)),
                 std::vector<double>(static_cast<size_t>(rows * kv_dim))};
  for (int64_t b = 0; b < s.batch; ++b) {
    Reference(s, b * s.seq, q, k, v, dout, &want);
  }
  const auto batched = [&s](TensorView view) {
    view.sizes = {1, s.batch, s.seq, view.sizes[3]};
    view.strides[1] = s.seq * view.strides[2];
    return view;
  };
  CausalAttentionBackwardArgs args;
  args.num_heads = s.heads;
  args.num_kv_heads = s.kv_heads;
  args.dout = batched(dout.view());
  args.q = batched(q.view());
  args.k = batched(k.view());
  args.v = batched(v.view());
  args.dq = batched(dq.view());
  args.dk = batched(dk.view());
  args.dv = batched(dv.view());
  if (!accumulate) args.accumulate_dk = args.accumulate_dv = false;
  OnAllTargets(
      [&](Context* context) {
        dq.Fill(Normal(99));
        dk = dk_before;
        dv = dv_before;
        args.dk.data = batched(dk.view()).data;
        args.dv.data = batched(dv.view()).data;
        ExpectOk(CausalAttentionBackward(args, context));
        std::vector<uint8_t> all = dq.bytes();
        all.insert(all.end(), dk.bytes().begin(), dk.bytes().end());
        all.insert(all.end(), dv.bytes().begin(), dv.bytes().end());
        return all;
      },
      [&] {
        ExpectClose("dq", dq, nullptr, want.dq);
        ExpectClose("dk", dk, accumulate ? &dk_before : nullptr, want.dk);
        ExpectClose("dv", dv, accumulate ? &dv_before : nullptr, want.dv);
        EXPECT_TRUE(dq.PaddingIntact() && dk.PaddingIntact() &&
                    dv.PaddingIntact());
      });
}

TEST(CausalAttentionBackward, MatchesFloat64) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TestCausal(dtype, {1, 1, 1, 1, 8}, true);
    TestCausal(dtype, {1, 7, 2, 1, 5}, true);
    TestCausal(dtype, {2, 33, 4, 2, 16}, true);
    TestCausal(dtype, {1, 131, 3, 3, 31}, false);
    TestCausal(dtype, {3, 64, 6, 2, 64}, true);
  }
}

// The kernel of system 4 stopped at 2,048 positions.
TEST(CausalAttentionBackward, LongerThan2048) {
  TestCausal(DType::kF32, {1, 2309, 1, 1, 8}, true);
}

TEST(CausalAttentionBackward, EmptyCallsDoNothing) {
  Array q(DType::kF32, 0, 8);
  CausalAttentionBackwardArgs args;
  args.num_heads = 2;
  args.num_kv_heads = 1;
  args.q = args.dout = args.dq = q.view();
  Array k(DType::kF32, 0, 4);
  args.k = args.v = args.dk = args.dv = k.view();
  ExpectOk(CausalAttentionBackward(args));
}

TEST(CausalAttentionBackward, Errors) {
  Array q(DType::kF32, 4, 8), dout(DType::kF32, 4, 8), dq(DType::kF32, 4, 8);
  Array k(DType::kF32, 4, 4), v(DType::kF32, 4, 4), dk(DType::kF32, 4, 4);
  CausalAttentionBackwardArgs good;
  good.num_heads = 2;
  good.num_kv_heads = 1;
  good.q = q.view();
  good.dout = dout.view();
  good.k = k.view();
  good.v = v.view();
  good.dq = dq.view();
  good.dk = dk.view();
  const std::vector<uint8_t> before = dq.bytes();
  const auto expect = [&](const CausalAttentionBackwardArgs& args,
                          const std::string& sentence) {
    const Status status = CausalAttentionBackward(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), sentence);
    EXPECT_EQ(dq.bytes(), before);
  };
  CausalAttentionBackwardArgs args = good;
  args.num_kv_heads = 0;
  expect(args, "num_kv_heads is 0; it must be 1 or more");
  args = good;
  args.num_heads = 3;
  args.num_kv_heads = 2;
  expect(args, "num_heads is 3; it must be a multiple of num_kv_heads, 2");
  args = good;
  args.num_heads = 3;
  expect(args,
         "q is [1, 1, 4, 8]; it must be [1, B, seq, num_heads * head_dim] with "
         "num_heads = 3");
  args = good;
  args.k = q.view();
  expect(args,
         "k is [1, 1, 4, 8]; it must be [1, 1, 4, 4], num_kv_heads heads of "
         "q's batch, length and head_dim");
  args = good;
  args.dout.sizes[2] = 3;
  expect(args, "dout is [1, 1, 3, 8]; it must be [1, 1, 4, 8], the shape of q");
  args = good;
  args.v.dtype = DType::kBF16;
  expect(args, "v has type bf16; it must be f32");
  args = good;
  args.dout = dq.view();
  expect(args,
         "dq overlaps dout; an output must not share memory with an input");
}

}  // namespace
}  // namespace fa2::test
