// SPDX-License-Identifier: Apache-2.0

// The flash-attention backward for bf16 training (a Metal kernel), its
// delta pre-pass and its rounding kernel, with their own buffers, parameter
// blocks and accumulate rules, against the float64 oracle.
#include "fa2/compat/metal_attention.h"

#include <cstring>
#include <limits>
#include <vector>

#include "tests/compat/expect.h"

namespace fa2::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

enum class Mask { kNone, kDense, kPerRow, kBroadcast };

struct Case {
  int64_t batch, heads, gqa, queries, keys, dim;
  bool causal = false;
  Mask mask = Mask::kNone;
  Layout layout = Layout::kBhsd;
};

std::string Name(const Case& c) {
  return "B" + std::to_string(c.batch) + " H" + std::to_string(c.heads) +
         " gqa" + std::to_string(c.gqa) + " " + std::to_string(c.queries) +
         "x" + std::to_string(c.keys) + " D" + std::to_string(c.dim) +
         (c.causal ? " causal" : "") + " mask" +
         std::to_string(static_cast<int>(c.mask)) + " " + NameOf(c.layout);
}

// The buffers of one call.
struct Call {
  Tensor q, k, v, dout, mask;
  Tensor dq, dk, dv;  // f32, dense
  Tensor dk_before, dv_before;
  Truth truth;
  fa2_metal_attention_params params = {};
  fa2_metal_attention_mask_params mask_params = {};
  uint32_t flags = 0;

  fa2_status Run(fa2_context* context = nullptr) const {
    return fa2_metal_attention_backward(
        q.view.data, k.view.data, v.view.data, dout.view.data,
        static_cast<const float*>(truth.lse.view.data),
        static_cast<const float*>(truth.delta.view.data), mask.view.data,
        static_cast<float*>(dq.view.data), static_cast<float*>(dk.view.data),
        static_cast<float*>(dv.view.data), &params,
        mask.given() ? &mask_params : nullptr, flags, context);
  }
};

void CopyStrides(const TensorView& view, int64_t (&strides)[3]) {
  for (size_t i = 0; i < 3; ++i) strides[i] = view.strides[i];
}

Tensor MakeMask(const Case& c, Random& random) {
  if (c.mask == Mask::kNone) return Tensor();
  std::array<bool, 4> broadcast = {};
  if (c.mask == Mask::kPerRow) broadcast = {true, true, true, false};
  if (c.mask == Mask::kBroadcast) broadcast = {false, true, false, false};
  const Tensor mask =
      MakeTensor(DType::kBF16, {c.batch, c.heads, c.queries, c.keys},
                 Layout::kBhsd, broadcast);
  FillNormal(mask.view, random);
  // A third of the keys hidden, and in a mask of rows one query that sees none.
  ForEachIndex(mask.view.sizes, [&](const Sizes& at) {
    const bool hidden_row = c.mask == Mask::kDense && at[2] == c.queries / 2;
    if (hidden_row || (at[2] * (c.mask != Mask::kPerRow) + at[3]) % 3 == 1)
      Set(mask.view, at, -kInf);
  });
  return mask;
}

Call MakeCall(const Case& c) {
  Random random(static_cast<uint64_t>(c.queries * 1000 + c.keys));
  const int64_t kv_heads = c.heads / c.gqa;
  Call call;
  call.q = MakeNormal(DType::kBF16, {c.batch, c.heads, c.queries, c.dim},
                      random, c.layout);
  call.dout = MakeNormal(DType::kBF16, {c.batch, c.heads, c.queries, c.dim},
                         random, c.layout);
  call.k = MakeNormal(DType::kBF16, {c.batch, kv_heads, c.keys, c.dim}, random,
                      c.layout);
  call.v = MakeNormal(DType::kBF16, {c.batch, kv_heads, c.keys, c.dim}, random,
                      c.layout);
  call.mask = MakeMask(c, random);

  AttentionBackwardArgs args;
  args.q = call.q.view;
  args.k = call.k.view;
  args.v = call.v.view;
  args.dout = call.dout.view;
  args.options.scale = 0.09f;
  if (c.causal) args.options.causal = Causal::kTopLeft;
  args.options.bias = call.mask.view;
  call.truth = ComputeTruth(args, DType::kF64);

  // dQ is overwritten: whatever it holds (NaN here) must go. dK and dV are
  // added to.
  call.dq = MakeTensor(DType::kF32, call.q.view.sizes);
  call.dk = MakeNormal(DType::kF32, call.k.view.sizes, random);
  call.dv = MakeNormal(DType::kF32, call.v.view.sizes, random);
  call.dk_before = MakeTensor(DType::kF32, call.k.view.sizes);
  call.dv_before = MakeTensor(DType::kF32, call.v.view.sizes);
  Copy(call.dk.view, call.dk_before.view);
  Copy(call.dv.view, call.dv_before.view);
  for (const Tensor* tensor : {&call.dq, &call.dk, &call.dv})
    tensor->buffer->Snapshot();

  fa2_metal_attention_params& p = call.params;
  p.B = static_cast<int32_t>(c.batch);
  p.H = static_cast<int32_t>(c.heads);
  p.D = static_cast<int32_t>(c.dim);
  p.qL = static_cast<int32_t>(c.queries);
  p.kL = static_cast<int32_t>(c.keys);
  p.gqa_factor = static_cast<int32_t>(c.gqa);
  p.scale = 0.09f;
  p.softcapping = 1.0f;
  p.NQ = (p.qL + 31) / 32;
  p.NK = (p.kL + 15) / 16;
  p.NQ_aligned = p.qL / 32;
  p.NK_aligned = p.kL / 16;
  p.qL_rem = p.qL % 32;
  p.kL_rem = p.kL % 16;
  CopyStrides(call.q.view, p.Q_strides);
  CopyStrides(call.k.view, p.K_strides);
  CopyStrides(call.v.view, p.V_strides);
  CopyStrides(call.dout.view, p.O_strides);
  if (p.qL_rem == 0) call.flags |= FA2_METAL_ALIGN_Q;
  if (p.kL_rem == 0) call.flags |= FA2_METAL_ALIGN_K;
  if (c.causal) call.flags |= FA2_METAL_DO_CAUSAL;
  if (call.mask.given()) {
    call.flags |= FA2_METAL_HAS_MASK;
    CopyStrides(call.mask.view, call.mask_params.M_strides);
  }
  return call;
}

void RunAndCheck(const Case& c) {
  SCOPED_TRACE(Name(c));
  const Call call = MakeCall(c);
  ASSERT_EQ(call.Run(), FA2_OK) << fa2_last_error();
  const double bound = Bound(DType::kBF16, DType::kF32);
  const bool one_key = c.keys == 1 || (c.causal && c.queries == 1);
  const double floor = one_key ? bound : 0.0;
  ExpectGradient("dQ", call.dq.view, call.truth.dq.view, bound, floor);
  ExpectGradient("dK", call.dk.view, call.truth.dk.view, bound, floor,
                 call.dk_before.view);
  ExpectGradient("dV", call.dv.view, call.truth.dv.view, bound, 0.0,
                 call.dv_before.view);
  EXPECT_FALSE(call.dq.buffer->ChangedOutside({call.dq.view}));
  EXPECT_FALSE(call.dk.buffer->ChangedOutside({call.dk.view}));
  EXPECT_FALSE(call.dv.buffer->ChangedOutside({call.dv.view}));
}

// Lengths around the kernel's tile of 32 queries and 16 keys: a tile that does
// not divide the sequence counts in full.
TEST(MetalAttentionBackward, TailsOfTiles) {
  for (const auto& [queries, keys] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                {1, 17},
                                                {31, 15},
                                                {32, 16},
                                                {33, 17},
                                                {64, 48},
                                                {50, 7},
                                                {7, 50},
                                                {97, 131}}) {
    for (const bool causal : {false, true}) {
      RunAndCheck({1, 2, 1, queries, keys, 64, causal});
    }
  }
}

TEST(MetalAttentionBackward, HeadDims) {
  for (const int64_t dim : {1, 40, 64, 128, 256}) {
    RunAndCheck({1, 2, 2, 45, 67, dim, true});
  }
}

// dK and dV sum over the query heads of their group, each counted once.
TEST(MetalAttentionBackward, GroupsOfHeads) {
  for (const int64_t gqa : {1, 2, 4}) {
    RunAndCheck({2, 4, gqa, 70, 70, 64, true, Mask::kNone, Layout::kBshd});
  }
}

TEST(MetalAttentionBackward, StridedInputs) {
  for (const Layout layout : {Layout::kBshd, Layout::kPaddedRows}) {
    RunAndCheck({2, 2, 1, 37, 53, 64, false, Mask::kDense, layout});
  }
}

// -inf hides (also all keys of a query), other values are added.
TEST(MetalAttentionBackward, Masks) {
  for (const Mask mask : {Mask::kDense, Mask::kPerRow, Mask::kBroadcast}) {
    for (const bool causal : {false, true}) {
      RunAndCheck({2, 2, 2, 49, 61, 64, causal, mask});
    }
  }
}

TEST(MetalAttentionBackward, HiddenQueryHasNoGradient) {
  const Case c = {1, 1, 1, 41, 33, 64, false, Mask::kDense};
  const Call call = MakeCall(c);
  ASSERT_EQ(call.Run(), FA2_OK) << fa2_last_error();
  for (int64_t d = 0; d < c.dim; ++d)
    EXPECT_EQ(Get(call.dq.view, {0, 0, c.queries / 2, d}), 0.0);
}

TEST(MetalAttentionBackward, SizesOfZero) {
  for (const Case& c : {Case{1, 2, 1, 0, 5, 64}, Case{1, 2, 1, 5, 0, 64},
                        Case{0, 2, 1, 5, 5, 64}}) {
    RunAndCheck(c);
  }
}

// Tile counts and qL_off are not read, and the align flags are hints.
TEST(MetalAttentionBackward, UnreadFieldsChangeNothing) {
  const Case c = {1, 2, 1, 64, 48, 64, true};
  const Call plain = MakeCall(c);
  ASSERT_EQ(plain.Run(), FA2_OK) << fa2_last_error();
  Call other = MakeCall(c);
  other.flags = FA2_METAL_DO_CAUSAL;
  other.params.qL_off = 1234;
  other.params.softcapping = 0.0f;
  other.params.NQ = other.params.NK = -7;
  other.params.NQ_aligned = other.params.NK_aligned = -7;
  other.params.qL_rem = other.params.kL_rem = other.params.pad = -7;
  ASSERT_EQ(other.Run(), FA2_OK) << fa2_last_error();
  EXPECT_TRUE(SameBits(plain.dq.view, other.dq.view));
  EXPECT_TRUE(SameBits(plain.dk.view, other.dk.view));
  EXPECT_TRUE(SameBits(plain.dv.view, other.dv.view));
}

// The block as the kernel's caller lays it out in bytes.
TEST(MetalAttentionBackward, ParameterBlockIsTheKernels) {
  std::vector<uint8_t> bytes;
  const auto put = [&bytes](auto value) {
    const auto* begin = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), begin, begin + sizeof(value));
  };
  for (int32_t i = 1; i <= 6; ++i) put(i);
  put(0.5f);
  put(1.5f);
  for (int32_t i = 9; i <= 16; ++i) put(i);
  for (int64_t i = 17; i <= 28; ++i) put(i);
  ASSERT_EQ(bytes.size(), 160u);
  fa2_metal_attention_params p;
  ASSERT_EQ(sizeof(p), bytes.size());
  std::memcpy(&p, bytes.data(), bytes.size());
  EXPECT_EQ(p.B, 1);
  EXPECT_EQ(p.H, 2);
  EXPECT_EQ(p.D, 3);
  EXPECT_EQ(p.qL, 4);
  EXPECT_EQ(p.kL, 5);
  EXPECT_EQ(p.gqa_factor, 6);
  EXPECT_EQ(p.scale, 0.5f);
  EXPECT_EQ(p.softcapping, 1.5f);
  EXPECT_EQ(p.NQ, 9);
  EXPECT_EQ(p.kL_rem, 14);
  EXPECT_EQ(p.qL_off, 15);
  EXPECT_EQ(p.pad, 16);
  EXPECT_EQ(p.Q_strides[0], 17);
  EXPECT_EQ(p.K_strides[0], 20);
  EXPECT_EQ(p.V_strides[0], 23);
  EXPECT_EQ(p.O_strides[2], 28);
}

TEST(MetalAttentionBackward, Refusals) {
  const auto expect = [](const char* text, const auto& change) {
    Call call = MakeCall({1, 4, 2, 33, 17, 64, false, Mask::kDense});
    change(call);
    EXPECT_REFUSED(call.Run(), text);
    for (const Tensor* tensor : {&call.dq, &call.dk, &call.dv})
      EXPECT_FALSE(tensor->buffer->ChangedOutside({})) << text;
  };
  expect("params.B is -1", [](Call& c) { c.params.B = -1; });
  expect("params.H is -4", [](Call& c) { c.params.H = -4; });
  expect("params.D is -64", [](Call& c) { c.params.D = -64; });
  expect("params.qL is -1", [](Call& c) { c.params.qL = -1; });
  expect("params.kL is -1", [](Call& c) { c.params.kL = -1; });
  expect("params.gqa_factor is 0", [](Call& c) { c.params.gqa_factor = 0; });
  expect("params.H is 4", [](Call& c) { c.params.gqa_factor = 3; });
  expect("params.softcapping", [](Call& c) { c.params.softcapping = 30.0f; });
  expect("scale", [](Call& c) {
    c.params.scale = std::numeric_limits<float>::quiet_NaN();
  });
  expect("params.qL is 33", [](Call& c) { c.flags |= FA2_METAL_ALIGN_Q; });
  expect("params.kL is 17", [](Call& c) { c.flags |= FA2_METAL_ALIGN_K; });
  expect("flags is", [](Call& c) { c.flags |= 64; });
  expect("mask is NULL", [](Call& c) { c.mask.view.data = nullptr; });
  expect("Q is NULL", [](Call& c) { c.q.view.data = nullptr; });
  expect("dO is NULL", [](Call& c) { c.dout.view.data = nullptr; });
  expect("L is NULL", [](Call& c) { c.truth.lse.view.data = nullptr; });
  expect("Dvec is NULL", [](Call& c) { c.truth.delta.view.data = nullptr; });
  expect("K is misaligned by 1", [](Call& c) {
    c.k.view.data = static_cast<uint8_t*>(c.k.view.data) + 1;
  });
  expect("dV is misaligned by 2", [](Call& c) {
    c.dv.view.data = static_cast<uint8_t*>(c.dv.view.data) + 2;
  });
  EXPECT_REFUSED(
      fa2_metal_attention_backward(nullptr, nullptr, nullptr, nullptr, nullptr,
                                   nullptr, nullptr, nullptr, nullptr, nullptr,
                                   nullptr, nullptr, 0, nullptr),
      "params is NULL");
}

TEST(MetalAttentionDelta, SumsOfProducts) {
  Random random(7);
  for (const Sizes& sizes :
       {Sizes{2, 3, 37, 64}, Sizes{1, 1, 1, 1}, Sizes{1, 2, 5, 256},
        Sizes{2, 2, 33, 31}, Sizes{1, 2, 0, 64}, Sizes{1, 2, 3, 0}}) {
    SCOPED_TRACE(Text(sizes));
    const Tensor out = MakeNormal(DType::kBF16, sizes, random);
    const Tensor dout = MakeNormal(DType::kBF16, sizes, random);
    const Tensor delta =
        MakeTensor(DType::kF32, {sizes[0], sizes[1], sizes[2], 1});
    delta.buffer->Snapshot();
    const fa2_metal_delta_params params = {
        static_cast<uint32_t>(sizes[0]), static_cast<uint32_t>(sizes[1]),
        static_cast<uint32_t>(sizes[2]), static_cast<uint32_t>(sizes[3])};
    ASSERT_EQ(fa2_metal_attention_delta(out.view.data, dout.view.data,
                                        static_cast<float*>(delta.view.data),
                                        &params, nullptr),
              FA2_OK)
        << fa2_last_error();
    ForEachIndex(delta.view.sizes, [&](const Sizes& at) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t d = 0; d < sizes[3]; ++d) {
        const Sizes element = {at[0], at[1], at[2], d};
        const double term = Get(out.view, element) * Get(dout.view, element);
        sum += term;
        magnitude += std::abs(term);
      }
      // Each of D roundings is at most half an ulp of what is summed so far.
      EXPECT_NEAR(Get(delta.view, at), sum,
                  static_cast<double>(sizes[3] + 1) * 0x1p-24 * magnitude);
    });
    EXPECT_FALSE(delta.buffer->ChangedOutside({delta.view}));
  }
}

TEST(MetalAttentionDelta, Refusals) {
  uint16_t o[4] = {}, dout[4] = {};
  float delta[2] = {-1.0f, -1.0f};
  const fa2_metal_delta_params params = {1, 1, 2, 2};
  EXPECT_REFUSED(fa2_metal_attention_delta(o, dout, delta, nullptr, nullptr),
                 "params is NULL");
  EXPECT_REFUSED(
      fa2_metal_attention_delta(nullptr, dout, delta, &params, nullptr),
      "O is NULL");
  EXPECT_REFUSED(fa2_metal_attention_delta(o, nullptr, delta, &params, nullptr),
                 "dO is NULL");
  EXPECT_REFUSED(fa2_metal_attention_delta(o, dout, nullptr, &params, nullptr),
                 "Dvec is NULL");
  EXPECT_EQ(delta[0], -1.0f);
}

}  // namespace
}  // namespace fa2::test
