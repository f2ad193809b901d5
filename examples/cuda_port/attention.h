// SPDX-License-Identifier: Apache-2.0

// FlashAttention-2 on a GPU, forward and backward, as plainly as it can be
// written: f32 arithmetic, P and dS rounded to bf16 as tensor cores take them.
#ifndef FA2_EXAMPLES_CUDA_PORT_ATTENTION_H_
#define FA2_EXAMPLES_CUDA_PORT_ATTENTION_H_

#include <cstdint>
#include <string>
#include <vector>

// One call. Arrays are bf16 [B, H, N, D] as bits, lse is f32 [B, H, Nq].
struct Attention {
  int batch = 0, heads = 0, kv_heads = 0, nq = 0, nk = 0;
  int dim = 0;          // 64 or 128
  bool causal = false;  // from the bottom right: key <= query + Nk - Nq
  std::vector<uint16_t> q, k, v, dout;
  std::vector<uint16_t> out, dq, dk, dv;
  std::vector<float> lse;
};

// Mistakes to plant, for which `fa2 verify` has a name.
enum Bug {
  kNone,
  kScaleMissing,
  kDeltaMissing,
  kLseBase2,
  kCausalTopLeft,
  kLastKeyTileSkipped,
  kHeadMapModulo,
  kGroupNotSummed,
  kDqOverwritten,
};

// Fills out, lse, dq, dk and dv; the result is a sentence where the GPU or the
// sizes do not do, else empty.
std::string Run(Bug bug, Attention* call);

#endif  // FA2_EXAMPLES_CUDA_PORT_ATTENTION_H_
