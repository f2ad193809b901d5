// SPDX-License-Identifier: Apache-2.0

// fa2_causal_attention_backward against plain loops in float64: dq is
// overwritten, dk and dv too or added to.
#include "fa2/compat/causal_attention.h"

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

using Args = fa2_causal_attention_backward_args;

fa2_tensor Out(const TensorView& view) {
  fa2_tensor c = {};
  c.data = view.data;
  c.dtype = static_cast<int32_t>(view.dtype);
  std::copy(view.sizes.begin(), view.sizes.end(), c.sizes);
  std::copy(view.strides.begin(), view.strides.end(), c.strides);
  return c;
}

fa2_const_tensor In(const TensorView& view) {
  const fa2_tensor out = Out(view);
  fa2_const_tensor c = {};
  c.data = out.data;
  c.dtype = out.dtype;
  std::copy(out.sizes, out.sizes + 4, c.sizes);
  std::copy(out.strides, out.strides + 4, c.strides);
  return c;
}

Args MakeArgs(int64_t heads, int64_t kv_heads) {
  Args args = {};
  args.struct_size = sizeof args;
  args.num_heads = heads;
  args.num_kv_heads = kv_heads;
  return args;
}

// Calls run(context) on every target. The bytes it returns must not change with
// 2 and 3 threads; check() is called with one thread's outputs in place.
void OnAllTargetsOfC(
    const std::function<std::vector<uint8_t>(fa2_context*)>& run,
    const std::function<void()>& check) {
  for (const std::string& target : Targets()) {
    SCOPED_TRACE("target " + target);
    std::vector<uint8_t> expected;
    for (const int threads : {1, 2, 3}) {
      fa2_context_options options = {};
      options.struct_size = sizeof options;
      options.max_target = target.c_str();
      options.num_threads = threads;
      fa2_context* context = nullptr;
      ASSERT_EQ(fa2_context_create(&options, &context), FA2_OK)
          << fa2_last_error();
      const std::vector<uint8_t> got = run(context);
      fa2_context_destroy(context);
      if (threads == 1) {
        expected = got;
        check();
      }
      EXPECT_EQ(got, expected) << threads << " threads";
    }
  }
}

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
  Args args = MakeArgs(s.heads, s.kv_heads);
  args.dout = In(batched(dout.view()));
  args.q = In(batched(q.view()));
  args.k = In(batched(k.view()));
  args.v = In(batched(v.view()));
  args.dq = Out(batched(dq.view()));
  args.dk = Out(batched(dk.view()));
  args.dv = Out(batched(dv.view()));
  if (accumulate) args.accumulate_dk = args.accumulate_dv = 1;
  OnAllTargetsOfC(
      [&](fa2_context* context) {
        dq.Fill(Normal(99));
        dk = dk_before;
        dv = dv_before;
        args.dk.data = batched(dk.view()).data;
        args.dv.data = batched(dv.view()).data;
        EXPECT_EQ(fa2_causal_attention_backward(&args, context), FA2_OK)
            << fa2_last_error();
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

// The kernel that this stands for stopped at 2,048 positions.
TEST(CausalAttentionBackward, LongerThan2048) {
  TestCausal(DType::kF32, {1, 2309, 1, 1, 8}, true);
}

TEST(CausalAttentionBackward, EmptyCallsDoNothing) {
  Array q(DType::kF32, 0, 8), k(DType::kF32, 0, 4);
  Args args = MakeArgs(2, 1);
  args.q = args.dout = In(q.view());
  args.dq = Out(q.view());
  args.k = args.v = In(k.view());
  args.dk = args.dv = Out(k.view());
  EXPECT_EQ(fa2_causal_attention_backward(&args, nullptr), FA2_OK)
      << fa2_last_error();
}

TEST(CausalAttentionBackward, Errors) {
  Array q(DType::kF32, 4, 8), dout(DType::kF32, 4, 8), dq(DType::kF32, 4, 8);
  Array k(DType::kF32, 4, 4), v(DType::kF32, 4, 4), dk(DType::kF32, 4, 4);
  Args good = MakeArgs(2, 1);
  good.q = In(q.view());
  good.dout = In(dout.view());
  good.k = In(k.view());
  good.v = In(v.view());
  good.dq = Out(dq.view());
  good.dk = Out(dk.view());
  const std::vector<uint8_t> before = dq.bytes();
  const auto expect = [&](const Args& args, const std::string& sentence) {
    EXPECT_EQ(fa2_causal_attention_backward(&args, nullptr),
              FA2_INVALID_ARGUMENT);
    EXPECT_EQ(fa2_last_error(), sentence);
    EXPECT_EQ(dq.bytes(), before);
  };
  Args args = good;
  args.num_heads = 0;
  expect(args, "num_heads is 0; it must be 1 or more");
  args = good;
  args.q.data = nullptr;
  expect(args, "q is null; it must point to [1, 1, 4, 8] elements");
  args = good;
  args.q.dtype = FA2_I32;
  expect(args, "q has dtype i32; it must be f32 or bf16 or f16 or f64");
  args = good;
  args.k.strides[3] = 2;
  expect(args, "the last stride of k is 2; it must be 1: rows are contiguous");
  args = good;
  args.dk.dtype = FA2_F64;
  expect(args, "dk has dtype f64; it must be f32, as q has");
  args = good;
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
  args.q.strides[3] = 2;
  expect(args, "the last stride of q is 2; it must be 1: rows are contiguous");
  args = good;
  args.k = good.q;
  expect(
      args,
      "k has shape [1, 1, 4, 8]; it must be [1, 1, 4, 4], num_kv_heads heads "
      "of q's batch, length and head_dim");
  args = good;
  args.dout.sizes[2] = 3;
  expect(args,
         "dout has shape [1, 1, 3, 8]; it must be [1, 1, 4, 8], the shape of "
         "q");
  args = good;
  args.v.dtype = FA2_BF16;
  expect(args, "v has dtype bf16; it must be f32, as q has");
  args = good;
  args.dout = In(dq.view());
  expect(args, "dq overlaps the input dout; inputs are never written");
  args = good;
  args.reserved = 1;
  expect(args, "args.reserved is 1; it must be 0");
}

}  // namespace
}  // namespace fa2::test
