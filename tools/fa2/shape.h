// SPDX-License-Identifier: Apache-2.0

// Sizes of an attention call as a word on the command line.
#ifndef FA2_TOOLS_FA2_SHAPE_H_
#define FA2_TOOLS_FA2_SHAPE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace fa2::tool {

struct Shape {
  int64_t batch = 0, heads = 0, kv_heads = 0;  // 0: not given
  int64_t nq = 0, nk = 0, head_dim = 0, value_dim = 0;
  std::string dtype;

  // Takes what the other gives.
  void Override(const Shape& other);
  // Sets what is not given.
  void Complete();
};

// "B,H,Hkv,Nq,Nk,D,Dv" (Dv may be left out; four numbers are B,H,N,D, five
// B,H,Hkv,N,D), the same with 'x' between the numbers, "B=1,H=8,Nq=512", or
// "B1/H8/KV2/N512x1024/D64x32/bf16". Throws verify::Error.
Shape ParseShape(const std::string& text);

// "1,2,3" or "1x2x3".
std::vector<int64_t> ParseNumbers(const std::string& flag,
                                  const std::string& text);

}  // namespace fa2::tool

#endif  // FA2_TOOLS_FA2_SHAPE_H_
