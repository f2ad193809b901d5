// SPDX-License-Identifier: Apache-2.0

// Attention kernels that are right and round in the places where kernels in
// use do: what the checker must let pass.
#ifndef FA2_TESTS_VERIFY_HONEST_KERNEL_H_
#define FA2_TESTS_VERIFY_HONEST_KERNEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/verify/cases/case.h"

namespace fa2::verify::test {

// What an honest kernel may do otherwise than its neighbour.
struct Style {
  std::string name;
  // The forward's P is rounded after it is divided by its sum, not before.
  bool normalised_p = false;
  // Keys of a tile, each with its own running maximum.
  int64_t key_tile = 64;
  // The backward multiplies dP - delta by P as rounded for dV.
  bool rounded_p_in_ds = false;
  // dS is rounded after it is multiplied by the scale.
  bool scaled_ds = false;
  // delta of the output as it was before it was stored.
  bool delta_of_exact_out = false;
  // dK and dV of each query head are stored, and then summed over the group.
  bool stored_shares = false;
  // q, or in the backward alone k, is multiplied by the scale and log2(e) and
  // rounded before the scores.
  bool scaled_q = false;
  bool scaled_k_in_backward = false;
  // Tiles are visited from the last to the first.
  bool backwards = false;
};

// Each of the above, and what PyTorch's kernels do together.
std::vector<Style> HonestStyles();

// Adds out, lse, dq, dk, dv to a case of layout bhsd with causal, scale and
// grouped heads as its only options.
void RunHonestKernel(const Style& style, Case* c);

}  // namespace fa2::verify::test

#endif  // FA2_TESTS_VERIFY_HONEST_KERNEL_H_
