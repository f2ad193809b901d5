// SPDX-License-Identifier: Apache-2.0

// The ways in which a computation may differ from attention: what a mistake of
// a kernel is put together from.
#ifndef FA2_SRC_VERIFY_MODEL_FAULTS_H_
#define FA2_SRC_VERIFY_MODEL_FAULTS_H_

#include <array>
#include <cstdint>
#include <optional>

#include "fa2/attention.h"

namespace fa2::verify {

// What the backward takes for lse.
enum class LseUse {
  kRight,
  kTimesLn2,     // taken for one in base 2
  kOverLn2,      // in base 2, taken for a natural one
  kWithoutMax,   // log of the sum of exp(S - max)
  kMax,          // the maximum alone: P is not normalised
  kWithoutSink,  // the sinks' term is left out
};

enum class DeltaUse { kRight, kZero, kSumOfDout };

// What a mask that is read off its place holds past its edge; flat: what lies
// there in memory.
enum class Edge { kWrapped, kFlat, kClamped, kDropped, kKept };

struct Faults {
  // Which pass the mistakes in the scores, the mask and dropout are in.
  bool in_forward = true;
  bool in_backward = true;

  int scale_power = 1;        // of scale in dQ and dK
  int score_scale_power = 1;  // of scale in S
  LseUse lse = LseUse::kRight;
  DeltaUse delta = DeltaUse::kRight;

  std::optional<Causal> causal;
  int64_t causal_shift = 0;  // keys that the diagonal lets through, more
  int64_t left_shift = 0;    // keys that the window is wider by
  int64_t right_shift = 0;
  bool window_from_other_diagonal = false;
  // > 0: a block of so many keys is left by the blocks of as many queries past
  // the one that holds the end of its first key's window.
  int64_t window_block = 0;

  int64_t key_begin = 0;    // keys before it add nothing
  int64_t keys_cut = 0;     // keys at the end that add nothing
  int64_t queries_cut = 0;  // queries at the end that add nothing
  int64_t padded_keys = 0;  // keys of zeros behind the last one
  // > 0: the same of the partial tile of so many, where sequences differ.
  int64_t key_tile_cut = 0;
  int64_t query_tile_cut = 0;
  int64_t padded_tile = 0;
  // > 0: dQ is what the last tile of so many keys adds; `of_row`: the last that
  // the row's block of as many queries visits.
  int64_t dq_tile = 0;
  bool dq_tile_of_row = false;
  bool dq_row_alone = false;  // that block has one query

  // K or V is read as if the file's heads and rows were exchanged.
  bool k_layout_swapped = false;
  bool v_layout_swapped = false;
  // dK and dV are written where K and V are read.
  bool kv_gradients_swapped = false;
  bool head_map_modulo = false;
  int64_t key_batch_shift = 0;  // K and V are those of so many batches on
  int group_member = -1;  // >= 0: dK and dV of that query head of the group

  bool dv_from_dp = false;
  bool dv_from_masked_dp = false;  // the same, with dP of masked scores too
  bool softcap_slope_missing = false;

  bool keep_unscaled_out = false;  // 1 / (1 - p) left out in O = (P Z) V
  bool keep_unscaled_dv = false;
  bool keep_unscaled_dp = false;
  bool keep_not_in_dp = false;
  bool keep_scale_in_dp = false;  // its factor alone is, then
  int64_t keep_row_shift = 0;
  int64_t keep_column_shift = 0;
  int64_t keep_head_shift = 0;  // wraps
  Edge keep_edge = Edge::kWrapped;

  bool alibi_from_top_left = false;

  // >= 0: dbias of that index alone, in a dimension that bias broadcasts.
  std::array<int64_t, 4> bias_slice = {-1, -1, -1, -1};

  // > 0: sums of gradients, or of out, are rounded to 16 bits after each tile
  // of so many terms.
  int64_t rounded_tile = 0;
  int64_t rounded_out_tile = 0;
  bool rounded_to_f16 = false;  // of f32 products; else bf16
};

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_FAULTS_H_
