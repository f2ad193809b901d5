// SPDX-License-Identifier: Apache-2.0

// One step of training through an attention layer: forward, then gradients.
#include "fa2/attention.h"

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <random>
#include <vector>

#include "fa2/context.h"

namespace {

std::vector<float> RandomArray(int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = normal(random);
  return values;
}

fa2::Status Step() {
  // Eight query heads share two key/value heads (GQA).
  const int64_t batch = 1, heads = 8, kv_heads = 2, length = 512, dim = 64;
  const std::vector<float> q = RandomArray(batch * heads * length * dim, 1);
  const std::vector<float> k = RandomArray(batch * kv_heads * length * dim, 2);
  const std::vector<float> v = RandomArray(batch * kv_heads * length * dim, 3);
  const std::vector<float> dout = RandomArray(batch * heads * length * dim, 4);
  std::vector<float> out(q.size()), dq(q.size()), dk(k.size()), dv(v.size());
  std::vector<float> lse(static_cast<size_t>(batch * heads * length));

  // A context holds threads and workspace; one serves all calls.
  fa2::ContextOptions context_options;
  context_options.num_threads = 2;
  std::unique_ptr<fa2::Context> context;
  fa2::Status status = fa2::Context::Create(context_options, &context);
  if (!status.ok()) return status;

  const fa2::DType f32 = fa2::DType::kF32;
  fa2::AttentionForwardArgs forward;
  forward.q = fa2::Dense(q.data(), f32, batch, heads, length, dim);
  forward.k = fa2::Dense(k.data(), f32, batch, kv_heads, length, dim);
  forward.v = fa2::Dense(v.data(), f32, batch, kv_heads, length, dim);
  forward.out = fa2::Dense(out.data(), f32, batch, heads, length, dim);
  forward.lse = fa2::Dense(lse.data(), f32, batch, heads, length);
  forward.options.causal = fa2::Causal::kTopLeft;
  status = fa2::AttentionForward(forward, context.get());
  if (!status.ok()) return status;

  fa2::AttentionBackwardArgs backward;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.options = forward.options;
  backward.dout = fa2::Dense(dout.data(), f32, batch, heads, length, dim);
  backward.dq = fa2::Dense(dq.data(), f32, batch, heads, length, dim);
  backward.dk = fa2::Dense(dk.data(), f32, batch, kv_heads, length, dim);
  backward.dv = fa2::Dense(dv.data(), f32, batch, kv_heads, length, dim);
  status = fa2::AttentionBackward(backward, context.get());
  if (!status.ok()) return status;

  std::printf("lse[0] = %.4f, dq[0] = %.4f, dk[0] = %.4f, dv[0] = %.4f\n",
              lse[0], dq[0], dk[0], dv[0]);
  return fa2::Status::Ok();
}

}  // namespace

int main() {
  const fa2::Status status = Step();
  if (!status.ok()) {
    std::cerr << status.message() << '\n';
    return 1;
  }
  return 0;
}
