// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/bias_tiles.h"

#include <algorithm>
#include <atomic>

namespace fa2::attention {
namespace {

// Tiles that one thread looks at in the time that a step of 16 threads takes,
// 2 us.
constexpr int64_t kFewTiles = 256;

int64_t TilesOf(const Problem& problem) {
  const ConstTensorView& bias = problem.options.bias;
  return bias.sizes[0] * bias.sizes[1] *
         CeilDiv(bias.sizes[2], simd::kTileQueries) *
         CeilDiv(problem.k.sizes[2], simd::kTileKeys);
}

// Whether a scan may tell something, see BiasTiles::known.
bool IsScanned(const Problem& problem) {
  const ConstTensorView& bias = problem.options.bias;
  if (!bias.given()) return false;
  const int64_t rows = bias.sizes[0] * bias.sizes[1] * bias.sizes[2];
  const int64_t all_rows =
      problem.q.sizes[0] * problem.q_heads * problem.q.sizes[2];
  return bias.dtype == DType::kBool || rows < all_rows;
}

}  // namespace

simd::ScoreMatrix MatrixOf(const ConstTensorView& view, int64_t batch,
                           int64_t head, int64_t query, int64_t key) {
  const auto index = [&view](int dim, int64_t i) {
    return view.sizes[dim] == 1 ? 0 : i;
  };
  simd::ScoreMatrix matrix;
  matrix.data =
      At(view, index(0, batch), index(1, head), index(2, query), index(3, key));
  matrix.dtype = view.dtype;
  matrix.query_stride = view.sizes[2] == 1 ? 0 : view.strides[2];
  matrix.key_stride = view.sizes[3] == 1 ? 0 : view.strides[3];
  return matrix;
}

bool AnyVisible(const simd::ScoreMatrix& bias, const simd::StagedShape& shape) {
  const int64_t size = static_cast<int64_t>(SizeOf(bias.dtype));
  for (int64_t q = 0; q < shape.queries; ++q) {
    const char* element =
        static_cast<const char*>(bias.data) + q * bias.query_stride * size;
    for (int64_t k = 0; k < shape.keys; ++k) {
      if (!simd::Hides(element, bias.dtype)) return true;
      element += bias.key_stride * size;
    }
  }
  return false;
}

BiasTiles::BiasTiles(const Problem& problem, bool wants_gradient,
                     int64_t targets, threading::ScratchLayout* layout)
    : problem_(problem),
      scan_(wants_gradient ? nullptr : simd::MaskScanFor(targets)) {
  if (!IsScanned(problem)) return;
  const ConstTensorView& bias = problem.options.bias;
  plane_heads_ = bias.sizes[1];
  planes_ = bias.sizes[0] * bias.sizes[1];
  query_tiles_ = CeilDiv(bias.sizes[2], simd::kTileQueries);
  key_tiles_ = CeilDiv(problem.k.sizes[2], simd::kTileKeys);
  states_ =
      layout->Take<simd::TileState>(static_cast<size_t>(TilesOf(problem)));
}

bool BiasTiles::ScannedByLeader(const Problem& problem) {
  return !IsScanned(problem) || TilesOf(problem) <= kFewTiles;
}

simd::ScoreMatrix BiasTiles::From(int64_t tile_row, int64_t key,
                                  int64_t* queries) const {
  const ConstTensorView& bias = problem_.options.bias;
  const int64_t plane = tile_row / query_tiles_;
  const int64_t query = tile_row % query_tiles_ * simd::kTileQueries;
  *queries = std::min(simd::kTileQueries, bias.sizes[2] - query);
  return MatrixOf(bias, plane / plane_heads_, plane % plane_heads_, query, key);
}

bool BiasTiles::ScanMask(int64_t tile_row) const {
  int64_t queries;
  const simd::ScoreMatrix row = From(tile_row, 0, &queries);
  return scan_(row, queries, problem_.k.sizes[2],
               states_ + tile_row * key_tiles_);
}

void BiasTiles::ScanBias(int64_t tile_row) const {
  simd::StagedShape shape;
  for (int64_t tile = 0; tile < key_tiles_; ++tile) {
    const int64_t key = tile * simd::kTileKeys;
    shape.keys = std::min(simd::kTileKeys, problem_.k.sizes[2] - key);
    const bool any = AnyVisible(From(tile_row, key, &shape.queries), shape);
    states_[tile_row * key_tiles_ + tile] =
        any ? simd::TileState::kPartial : simd::TileState::kHidden;
  }
}

template <class Body>
void BiasTiles::ForTileRows(threading::Team& team, const Body& body) const {
  const int64_t tile_rows = planes_ * query_tiles_;
  if (ScannedByLeader(problem_)) {
    for (int64_t tile_row = 0; tile_row < tile_rows; ++tile_row) body(tile_row);
  } else {
    team.For(tile_rows, [&](int64_t tile_row, int) { body(tile_row); });
  }
}

void BiasTiles::Scan(threading::Team& team) {
  if (!known()) return;
  is_mask_ = false;
  if (scan_ != nullptr) {
    std::atomic<bool> mask{true};
    ForTileRows(team, [&](int64_t tile_row) {
      if (mask.load(std::memory_order_relaxed) && !ScanMask(tile_row)) {
        mask.store(false, std::memory_order_relaxed);
      }
    });
    is_mask_ = mask.load(std::memory_order_relaxed);
  }
  if (is_mask_) return;
  ForTileRows(team, [&](int64_t tile_row) { ScanBias(tile_row); });
}

const simd::TileState* BiasTiles::Row(int64_t sequence, int64_t head,
                                      int64_t q) const {
  const ConstTensorView& bias = problem_.options.bias;
  const int64_t b = bias.sizes[0] == 1 ? 0 : sequence;
  const int64_t h = bias.sizes[1] == 1 ? 0 : head;
  const int64_t query_tile = bias.sizes[2] == 1 ? 0 : q / simd::kTileQueries;
  return states_ +
         ((b * plane_heads_ + h) * query_tiles_ + query_tile) * key_tiles_;
}

}  // namespace fa2::attention
