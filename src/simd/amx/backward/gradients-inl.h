// SPDX-License-Identifier: Apache-2.0

// The products of the backward pass on AMX that take P and dS: dV += P^T dO and
// dK += dS^T Q of a slab of keys, dQ^T += K^T dS^T of a chunk.

// Included for one Highway target only, amx/target.h.
#ifndef FA2_SRC_SIMD_AMX_BACKWARD_GRADIENTS_INL_H_
#define FA2_SRC_SIMD_AMX_BACKWARD_GRADIENTS_INL_H_

#include "src/simd/amx/backward/scratch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd::HWY_NAMESPACE {

// P or dS of a slab as left operand of dV, dK: i is the key half, k the query
// panel.
template <int kTermCount, int kPanelTiles>
struct SlabRows {
  static constexpr int kTerms = kTermCount;
  const uint8_t* base;  // of 32 keys
  int64_t term_bytes;
  int64_t turn;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    using Layout = ScoreLayout<kPanelTiles>;
    Tiles::template Load<kRegister>(base + term * term_bytes +
                                        Layout::Rows(k, turn) +
                                        i * 16 * Layout::kRow,
                                    Layout::kRow);
  }
};

// dS of a chunk as right operand of dQ^T: i is the query half, k the key panel.
template <int kTermCount, int kPanelTiles>
struct ChunkPairs {
  static constexpr int kTerms = kTermCount;
  const uint8_t* base;
  int64_t term_bytes;
  int64_t query_panel;
  int64_t chunk_panels;
  template <class Tiles, int kRegister>
  HWY_INLINE void Load(int term, int64_t i, int64_t k) const {
    using Layout = ScoreLayout<kPanelTiles>;
    Tiles::template Load<kRegister>(
        base + term * term_bytes + Layout::Pairs(k, query_panel, chunk_panels) +
            i * 64,
        Layout::kPairRow);
  }
};

template <class Variant, int kPanelTiles>
class GradientProducts {
  using Tiles = typename Variant::Tiles;
  using Layout = ScoreLayout<kPanelTiles>;
  static constexpr int kIn = Variant::kInputTerms;
  static constexpr int kP = Variant::kProbabilityTerms;
  static constexpr int kDs = Variant::kGradientTerms;

 public:
  // `queries` and `chunk` in panels; `panels` of query tiles in a slab.
  GradientProducts(const BackwardBlock& block, const BackwardScratch& scratch,
                   int64_t queries, int64_t panels, int64_t chunk)
      : b_(block),
        s_(scratch),
        queries_(queries),
        panels_(panels),
        chunk_(chunk),
        dt_(amx::DepthTiles(block.head_dim)),
        vt_(amx::DepthTiles(block.value_dim)) {}

  // dV and dK of a slab.
  template <class Side>
  void Keys(int64_t slab, int64_t slab_end, Side& side) const {
    PendingTiles pending = Dummy();
    const PendingTiles dk = KeyTiles(b_.dk, dt_, slab);
    KeyGradient<kP>(s_.p, 0, b_.dout_grad, vt_, slab, slab_end, b_.add_to_dv,
                    KeyTiles(b_.dv, vt_, slab), dk, pending, side);
    KeyGradient<kDs>(s_.ds, Layout::kGradientTurn, b_.q_grad, dt_, slab,
                     slab_end, b_.add_to_dk, dk, {}, pending, side);
    StorePending<Tiles>(pending);
  }

  // Before the first chunk's dQ, and after the last one's.
  void WaitQueries() {
    if (b_.dq != nullptr) add_to_dq_ = b_.WaitDq();
  }
  void ReleaseQueries() const {
    if (b_.dq != nullptr) b_.ReleaseDq();
  }

  // dQ of a chunk.
  void Queries(int64_t chunk, int64_t chunk_end) const {
    if (b_.dq == nullptr) return;
    PendingTiles pending = Dummy();
    NoSideWork side;
    AccumulatorFetch<NoSideWork> fetch(side);
    const int64_t columns = 2 * dt_;
    const int64_t panels = chunk_end - chunk;
    const uint8_t* const k_grad = static_cast<const uint8_t*>(b_.k_grad) +
                                  chunk * columns * kIn * kTileBytes;
    const bool add = add_to_dq_ || chunk > 0;
    for (int64_t query = 0; query < queries_; ++query) {
      const SubBlockMap::Range seen =
          s_.sub_blocks.SeenKeys(query, {chunk, chunk_end});
      const int64_t first = seen.begin - chunk, last = seen.end - chunk;
      const ChunkPairs<kDs, kPanelTiles> pairs{s_.pairs, s_.chunk_bytes, query,
                                               chunk_};
      uint8_t* c =
          static_cast<uint8_t*>(b_.dq) + query * columns * 2 * kTileBytes;
      for (int64_t d = 0; d < columns; d += 2) {
        const TileStrip<kIn, true> strip{k_grad + d * panels * kTileBytes,
                                         columns * panels * kTileBytes,
                                         panels * kTileBytes};
        const PendingTiles tiles{c + 2 * d * kTileBytes, 2 * kTileBytes,
                                 kTileBytes};
        fetch.Begin({tiles.c + 4 * kTileBytes, tiles.row, tiles.column},
                    last - first);
        ProductOrZero<Variant>(strip, pairs, first, last, add, tiles, pending,
                               fetch);
      }
    }
    StorePending<Tiles>(pending);
  }

 private:
  // Takes what is in the tile registers before the first product.
  PendingTiles Dummy() const { return {s_.tiles, 0, 0}; }

  // The first tiles of a panel of keys in dV or dK.
  static PendingTiles KeyTiles(void* accumulator, int64_t depth_tiles,
                               int64_t key) {
    if (accumulator == nullptr) return {};
    const int64_t row = 2 * depth_tiles * kTileBytes;
    return {static_cast<uint8_t*>(accumulator) + 2 * key * row, row,
            kTileBytes};
  }

  // dV (P, dO) or dK (dS, Q) of a slab, from the tiles `c` on; next comes
  // `after`.
  template <int kTerms, class Side>
  void KeyGradient(const uint8_t* left, int64_t turn, const void* right,
                   int64_t depth_tiles, int64_t slab, int64_t slab_end,
                   bool add, PendingTiles c, const PendingTiles& after,
                   PendingTiles& pending, Side& side) const {
    if (c.c == nullptr) return;
    // Stays in registers, as no other function sees it: 8%.
    AccumulatorFetch<Side> fetch(side);
    const int64_t columns = 2 * depth_tiles;
    const uint8_t* const r = static_cast<const uint8_t*>(right);
    for (int64_t key = slab; key < slab_end; ++key) {
      const SubBlockMap::Range seen = s_.sub_blocks.SeenQueries(key);
      const SlabRows<kTerms, kPanelTiles> a{
          left + Layout::KeyPanel(key - slab, panels_), s_.slab_bytes,
          key ^ turn};
      for (int64_t d = 0; d < columns; d += 2) {
        const TileStrip<kIn, true> strip{r + d * queries_ * kTileBytes,
                                         columns * queries_ * kTileBytes,
                                         queries_ * kTileBytes};
        PendingTiles next = c;
        next.c += d + 2 < columns ? 2 * c.column : 2 * c.row - d * c.column;
        if (d + 2 >= columns && key + 1 >= slab_end) next = after;
        fetch.Begin(next, next.c == nullptr ? 0 : seen.end - seen.begin);
        ProductOrZero<Variant>(a, strip, seen.begin, seen.end, add, c, pending,
                               fetch);
        c = next;
      }
    }
  }

  const BackwardBlock& b_;
  const BackwardScratch& s_;
  const int64_t queries_, panels_, chunk_;
  const int64_t dt_, vt_;
  bool add_to_dq_ = false;
};

}  // namespace fa2::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FA2_SRC_SIMD_AMX_BACKWARD_GRADIENTS_INL_H_
