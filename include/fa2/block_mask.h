// SPDX-License-Identifier: Apache-2.0

// Block masks: which blocks of queries x keys are visible, as lists for each
// row of blocks. Hidden blocks are neither computed nor packed, and a mask
// takes memory for the blocks that it lists alone (the lists of FlexAttention's
// BlockMask, Dong et al. 2024, arXiv:2412.05496).
#ifndef FA2_BLOCK_MASK_H_
#define FA2_BLOCK_MASK_H_

#include <cstdint>

#include "fa2/types.h"

namespace fa2 {

// Queries [r * block_q, (r + 1) * block_q) are row r of the blocks, keys [c *
// block_k, (c + 1) * block_k) column c; the last of each may have fewer. With
// cu_seqlens both count the packed rows of all sequences, and pairs of
// different sequences stay hidden.
//
// A block is listed as partial or as full, or else hidden. A pair of a query
// and a key is visible if its block is full or its bit is set, and causal,
// window and bias let it be.
struct BlockMask {
  // Multiples of 16, at most 2^30.
  int64_t block_q = 128;
  int64_t block_k = 128;

  // i32 [B or 1, Hq or 1, rows], rows = ceil(Nq / block_q): how many partial
  // blocks each row has.
  ConstTensorView kv_num_blocks;
  // i32 [.., .., rows, columns or fewer], columns = ceil(Nk / block_k) and the
  // first sizes those of kv_num_blocks: their columns, ascending. What follows
  // the first kv_num_blocks of a row is not read.
  ConstTensorView kv_indices;
  // The same of the full blocks; both or neither.
  ConstTensorView full_kv_num_blocks;
  ConstTensorView full_kv_indices;

  // u8 [1, 1, partial blocks, block_q * block_k / 8], the last dimension
  // contiguous. Partial blocks are numbered in the order of (batch, head, row,
  // position in the list). A block is [block_q][block_k / 8] bytes: the key j
  // of a query is bit j & 7 of its byte j >> 3, 1 is visible. Not given: all of
  // a partial block is visible.
  ConstTensorView bits;
};

}  // namespace fa2

#endif  // FA2_BLOCK_MASK_H_
