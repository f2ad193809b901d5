// SPDX-License-Identifier: Apache-2.0

// Engines made of the AMX kernels: one for each variant, for one class of tile
// registers.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_ENGINE_INL_H_
#define FA2_SRC_SIMD_AMX_ENGINE_INL_H_

#include <algorithm>

#include "src/simd/amx/engine.h"
#include "src/simd/amx/layout.h"
#include "src/simd/amx/pack-inl.h"
#include "src/simd/amx/unpack-inl.h"
#include "src/simd/amx/variant-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// Blocks: K, V, K^T, dK and dV of the keys, Q and dO (packed twice) and dQ of
// the queries and dS of a chunk stay in a 2 MiB L2 (1.3 to 1.7 MiB).
template <class Variant>
BlockSizes AmxBackwardBlocks(int64_t head_dim, int64_t value_dim) {
  const int64_t depth = amx::DepthTiles(std::max(head_dim, value_dim));
  constexpr int kTerms = Variant::kInputTerms;
  if constexpr (kTerms == 1) {
    if (depth <= 2) return {1024, 512};
    if (depth <= 4) return {512, 256};
    return {256, depth <= 8 ? 256 : 128};
  }
  if (depth <= 2) return {kTerms == 2 ? 512 : 256, 256};
  if (depth <= 4) return {256, kTerms == 2 ? 256 : 128};
  return {128, 128};
}

// Forward keeps no gradients: K and V stream from L2 for every 32 queries, and
// from L3 for every block of them.
template <class Variant>
BlockSizes AmxForwardBlocks(int64_t head_dim, int64_t value_dim) {
  const int64_t depth = amx::DepthTiles(std::max(head_dim, value_dim));
  constexpr int kParts = Variant::kInputTerms == 1   ? 1
                         : Variant::kInputTerms == 2 ? 2
                                                     : 4;
  const int64_t rows = (depth <= 4 ? 1024 : 512) / kParts;
  return {rows, rows};
}

template <class Variant>
size_t AmxPackedBytes(Role, int64_t rows, int64_t depth) {
  return static_cast<size_t>(
      amx::PackedBytes(rows, depth, Variant::kInputTerms));
}

inline size_t AmxAccumulatorBytes(int64_t rows, int64_t depth) {
  return static_cast<size_t>(amx::AccumulatorBytes(rows, depth));
}

template <class Variant>
const Engine* MakeAmxEngine(const char* name) {
  static const Engine engine = [name] {
    Engine e;
    e.name = name;
    e.accumulator = DType::kF32;
    e.query_panel = e.query_grain = amx::kPanel;
    e.key_panel = e.key_step = amx::kPanel;
    // Several products of terms for one make blocks dearer: f32 with 7 queries
    // of 4,096 keys and D 16 took six times what vector lanes take.
    e.direct_queries = Variant::kInputTerms == 1 ? 4 : 10;
    e.direct_rows = Variant::kInputTerms == 1 ? 8 : 12;
    e.grad_left_is_score_left = false;
    e.lying_depth = Variant::kInputTerms == 1 ? 32 : 0;
    e.bitwise_block_invariant = true;
    e.dropout_bits = true;
    e.streams_scores = true;
    e.backward_blocks = &AmxBackwardBlocks<Variant>;
    e.forward_blocks = &AmxForwardBlocks<Variant>;
    e.packed_bytes = &AmxPackedBytes<Variant>;
    e.pack = &Pack<typename Variant::Tiles, Variant::kInputTerms>;
    e.pack_pair = &PackPair<typename Variant::Tiles, Variant::kInputTerms>;
    e.key_accumulator_bytes = &AmxAccumulatorBytes;
    e.query_accumulator_bytes = &AmxAccumulatorBytes;
    e.unpack_key_rows = &UnpackKeyRows;
    e.unpack_query_rows = &UnpackQueryRows;
    e.store_key_rows = &StoreKeyRows<typename Variant::Tiles>;
    e.store_query_rows = &StoreQueryRows<typename Variant::Tiles>;
    e.backward_scratch_bytes = &AmxBackward<Variant>::ScratchBytes;
    e.forward_scratch_bytes = &AmxForward<Variant>::ScratchBytes;
    e.backward = &AmxBackward<Variant>::Run;
    e.forward = &AmxForward<Variant>::Run;
    return e;
  }();
  return &engine;
}

template <class Tiles>
const Engine* AmxEngineFor(AmxTerms terms) {
  switch (terms) {
    case AmxTerms::kBf16:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kBf16>>("amx");
    case AmxTerms::kBf16FewKeys:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kBf16FewKeys>>("amx");
    case AmxTerms::kBf16Exact:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kBf16Exact>>(
          "amx_bf16_exact");
    case AmxTerms::kF16:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kF16>>("amx_f16");
    case AmxTerms::kF16Exact:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kF16Exact>>(
          "amx_f16_exact");
    case AmxTerms::kF32High:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kF32High>>(
          "amx_f32_high");
    case AmxTerms::kF32:
      return MakeAmxEngine<AmxVariant<Tiles, AmxTerms::kF32>>("amx_f32");
  }
  return nullptr;
}

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_ENGINE_INL_H_
