// SPDX-License-Identifier: Apache-2.0

// The engines made of vector lanes: F32Fma, its double, F64, and Bf16Dot, whose
// lanes hold pairs.
//
// With one element a lane P and dS stay in the panel layout [panel][key][W],
// which is the left operand (by rows) of dV and dK and the right operand of
// dQ^T at once.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_ENGINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_ENGINE_INL_H_
#undef FA2_SRC_SIMD_LANE_ENGINE_INL_H_
#else
#define FA2_SRC_SIMD_LANE_ENGINE_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "src/simd/engine.h"
#include "src/simd/lane/backward-inl.h"
#include "src/simd/lane/forward-inl.h"
#include "src/simd/lane/pack-inl.h"
#include "src/simd/lane/score_arrays-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {

// Engine::store_key_rows and store_query_rows.
template <class Op>
struct RowStore {
  static constexpr Engine::StoreBf16 kKeyRows = nullptr;
  static constexpr Engine::StoreBf16 kQueryRows = nullptr;
};

template <class Op>
struct LaneEngine : LaneProducts<Op> {
  using Products = LaneProducts<Op>;
  using Products::Ptr;
  using typename Products::D;
  using typename Products::Scores;
  using typename Products::T;

  // A panel of the right operand holds `rows` x W elements and should fill at
  // most two thirds of a 48 KiB L1, with the rest left to A and C: 128 rows of
  // 64 f32 are 32 KiB. Deep heads take smaller blocks, so that K, V, their
  // gradients and the Q and dO of a block (10 arrays of rows x depth) stay
  // within a 2 MiB L2.
  static BlockSizes Blocks(int64_t head_dim, int64_t value_dim) {
    const D d;
    const int64_t width = static_cast<int64_t>(PanelWidth(d));
    const int64_t depth = std::max<int64_t>(head_dim, value_dim);
    int64_t rows = 128;
    while (rows > width && rows > 2 * kTileKeys &&
           rows * depth * static_cast<int64_t>(sizeof(T)) * 10 > (2 << 20)) {
      rows /= 2;
    }
    // Products with pairs are so fast that the last rows of a block would tell:
    // 96 keys are 16 register blocks of 6.
    const int64_t keys = Op::kPerLane == 1 ? rows : rows / 4 * 3;
    return {keys, static_cast<int64_t>(RoundUp(rows, width))};
  }

  // With pairs O's accumulator is read and written often beside its products:
  // half as often is 1% faster, and P of 192 keys takes 24 KiB of L1. With
  // panels of two vectors P of 256 keys takes 16 KiB, which for rows of up to
  // 256 bytes is 2% faster (f32, D 64; of 512 bytes 1 to 3% slower, f64 8%), as
  // 256 queries are for any D (Zen 3): K and V come from L2 or L3 half as
  // often.
  static BlockSizes ForwardBlocks(int64_t head_dim, int64_t value_dim) {
    BlockSizes blocks = Blocks(head_dim, value_dim);
    if (Op::kPerLane > 1) {
      blocks.keys *= 2;
    } else if (kBlockVectors == 2) {
      if (std::max(head_dim, value_dim) * sizeof(T) <= 256) blocks.keys *= 2;
      blocks.queries *= 2;
    }
    return blocks;
  }

  // Calls visit(op) with the products that take an operand of this role.
  template <class Visitor>
  static void WithProducts(Role role, const Visitor& visit) {
    if (role == Role::kScoreLeft || role == Role::kScoreRight) {
      visit(Scores());
    } else {
      visit(Op());
    }
  }

  static size_t PackedBytes(Role role, int64_t rows, int64_t depth) {
    size_t bytes = 0;
    WithProducts(role, [&](auto op) {
      bytes = PackedBytesOf<decltype(op)>(D(), role, static_cast<size_t>(rows),
                                          static_cast<size_t>(depth));
    });
    return bytes;
  }

  static bool Pack(Role role, const Rows& rows, int64_t padded_rows,
                   bool finite_only, void* packed) {
    bool finite = true;
    WithProducts(role, [&](auto op) {
      using RoleOp = decltype(op);
      RoleOp::WithInput(rows.dtype, [&](auto tag) {
        finite = PackRows<RoleOp>(
            D(), tag, role, rows, static_cast<size_t>(padded_rows), finite_only,
            static_cast<typename RoleOp::Element*>(packed));
      });
    });
    return finite;
  }

  static size_t KeyAccumulatorBytes(int64_t keys, int64_t depth) {
    return static_cast<size_t>(keys) *
           RowStride(D(), static_cast<size_t>(depth)) * sizeof(T);
  }

  static size_t QueryAccumulatorBytes(int64_t queries, int64_t depth) {
    const size_t rows =
        RoundUp(static_cast<size_t>(queries), QueryGrain<Op>(D()));
    return rows * static_cast<size_t>(depth) * sizeof(T);
  }

  static int64_t KeyAccumulatorStride(int64_t depth) {
    return static_cast<int64_t>(RowStride(D(), static_cast<size_t>(depth)));
  }

  static void UnpackQueryRows(const void* accumulator, int64_t queries,
                              int64_t depth, int64_t first, int64_t count,
                              void* rows, int64_t row_stride) {
    const int64_t panel = static_cast<int64_t>(PanelWidth(D()));
    for (int64_t r = 0; r < count;) {
      const int64_t column = (first + r) % panel;
      const int64_t width = std::min(panel, queries - (first + r - column));
      const int64_t columns = std::min(count - r, width - column);
      Transpose(Ptr(accumulator) + (first + r - column) * depth + column, width,
                depth, columns, Ptr(rows) + r * row_stride, row_stride);
      r += columns;
    }
  }

  static size_t BackwardScratchBytes(const BlockSizes& blocks,
                                     int64_t /*head_dim*/,
                                     int64_t /*value_dim*/) {
    const size_t width = PanelWidth(D());
    return BackwardScores<Op>::Bytes(
        width, static_cast<size_t>(blocks.keys),
        RoundUp(static_cast<size_t>(blocks.queries), width));
  }

  static size_t ForwardScratchBytes(const BlockSizes& blocks,
                                    int64_t /*head_dim*/,
                                    int64_t /*value_dim*/) {
    const size_t width = PanelWidth(D());
    return LaneForward<Op>::kRowArrays * width * sizeof(T) +
           ForwardScores<Op>::Bytes(width, static_cast<size_t>(blocks.keys));
  }

  static const Engine* Get(const char* name, DType accumulator) {
    static const Engine engine = [name, accumulator] {
      Engine e;
      e.name = name;
      e.accumulator = accumulator;
      e.query_panel = static_cast<int64_t>(PanelWidth(D()));
      e.query_grain = static_cast<int64_t>(QueryGrain<Op>(D()));
      e.key_panel = kTileKeys;
      e.key_step = static_cast<int64_t>(Op::kPerLane);
      // Zen 4, N 4 to 16 against 16 to 2,048 keys: twice as fast with 4, at
      // least as fast with 10, 0.7 with 16.
      e.direct_queries = 10;
      // Emerald Rapids, f32: 12 rows of 12 keys take 0.9 of the time, 24 of 24
      // 1.2; 24 rows of 2,048 keys and more 0.8 to 1.0, D 16 to 128.
      e.direct_rows = 12;
      if (Op::kPerLane == 1 && hn::Lanes(D()) == 16) e.direct_long_rows = 24;
      e.grad_left_is_score_left = Scores::kPerLane == 1;
      e.rows_as_they_lie = Op::kPerLane == 1 && Scores::kPerLane == 1;
      e.rounds_probabilities = Op::kPerLane * Op::kTerms == 2;
      e.backward_blocks = Blocks;
      e.forward_blocks = ForwardBlocks;
      e.packed_bytes = PackedBytes;
      e.pack = Pack;
      e.key_accumulator_bytes = KeyAccumulatorBytes;
      e.query_accumulator_bytes = QueryAccumulatorBytes;
      e.key_accumulator_stride = KeyAccumulatorStride;
      e.unpack_query_rows = UnpackQueryRows;
      e.store_key_rows = RowStore<Op>::kKeyRows;
      e.store_query_rows = RowStore<Op>::kQueryRows;
      e.backward_scratch_bytes = BackwardScratchBytes;
      e.forward_scratch_bytes = ForwardScratchBytes;
      e.backward = LaneBackward<Op>::Run;
      e.forward = LaneForward<Op>::Run;
      return e;
    }();
    return &engine;
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
