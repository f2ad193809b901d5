// SPDX-License-Identifier: Apache-2.0

// A matrix engine: the block products of FlashAttention-2 and the fused score
// pass between them, for one instruction set.
//
// The drivers in src/attention cut a head into blocks of keys and queries, pack
// each operand once, and call one engine function a block pair. Everything
// inside a packed operand or an accumulator is the engine's own business; the
// drivers only know its bytes.
//
// All engines work on transposed scores, S^T = K Q^T (rows are keys, columns
// are queries): P and dS then leave the fused pass in the layout that dV += P^T
// dO and dK += dS^T Q want on their left, and dQ^T += K^T dS^T on its right;
// logsumexp and delta are row vectors along the lanes.
#ifndef FA2_SRC_SIMD_ENGINE_H_
#define FA2_SRC_SIMD_ENGINE_H_

#include <cstddef>
#include <cstdint>

#include "fa2/types.h"
#include "src/simd/score_types.h"

namespace fa2::simd {

// Masks, tails and skipping work on tiles of 32 queries x 16 keys.
inline constexpr int64_t kTileQueries = 32;
inline constexpr int64_t kTileKeys = 16;

enum class TileState : uint8_t {
  kHidden = 0,   // no element is visible: never computed
  kPartial = 1,  // some are: the masked variant of the fused pass
  kVisible = 2,  // all are: the plain variant
};

// Where an operand stands in a product, which decides its packed layout.
enum class Role {
  kScoreLeft,  // K, V in S^T = K Q^T, dP^T = V dO^T: rows are keys, summed over
               // the head dim
  kScoreRight,  // Q, dO in the same products
  kGradLeft,    // K in dQ^T = K^T dS^T, V in O^T = V^T P^T: summed over keys
  kGradRight,   // Q in dK = dS^T Q, dO in dV = P^T dO: summed over queries
};

// Rows of one head of a tensor; elements of a row are contiguous.
struct Rows {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;  // elements between rows, any sign
  int64_t rows = 0;
  int64_t depth = 0;
};

// Destination rows; elements of a row are contiguous.
struct MutableRows {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;  // elements between rows, any sign
  // They will have left the caches when they are read next. Who can stores them
  // non-temporally: lines then need not be read before they are written.
  bool non_temporal = false;
};

// The scores of a block: S = scale * QK^T, softcap, + bias, + ALiBi, mask, P =
// exp(S - lse), dropout. Pointers into arrays of the engine's accumulator type
// (float or double) are `void`. nullptr / 0 means "not used".
struct ScoreOptions {
  double scale = 1.0;
  double softcap = 0.0;
  double alibi_slope = 0.0;
  // Distance |query_position[i] - k| of column i to row k of the block (k
  // counts from 0); needed with ALiBi.
  const void* query_position = nullptr;
  // Column i sees rows begin[i] <= k < end[i] of the block, and of these what a
  // mask shows (mask_scan.h). Read in kPartial tiles only.
  const void* visible_begin = nullptr;
  const void* visible_end = nullptr;
  // And it sees row k only if bit k & 31 of visible_bits[(k >> 5) * stride + i]
  // is set, for a block mask; nullptr: they all are.
  const uint32_t* visible_bits = nullptr;
  int64_t visible_bits_stride = 0;
  ScoreStream mask_stream;  // engines that do not take it get a bias
  // [query panel][key][query in panel], as produced by the staging functions of
  // rowwise/staging.h; panels are Engine::query_panel wide and key_rows rows
  // high.
  const void* bias = nullptr;     // added; -inf masks
  ScoreStream bias_stream;        // or this, if the engine takes it
  const void* dropout = nullptr;  // Z: 0 or 1 / (1 - p); see dropout_bits
  DropoutBlock dropout_stream;    // or this if p > 0, see streams_scores
  double dropout_scale = 1.0;     // 1 / (1 - p)
  int64_t staged_key_rows = 0;    // rows of a panel in the staged arrays

  bool plain() const {
    return softcap == 0.0 && alibi_slope == 0.0 && bias == nullptr &&
           !bias_stream.given() && dropout == nullptr &&
           dropout_stream.p == 0.0;
  }
};

// One block of keys against one block of queries. `keys` is a multiple of
// Engine::key_panel, `queries` of Engine::query_grain; rows and columns past
// the tensors' ends are packed as zeros. Of these the keys that CountedKeys()
// takes in are hidden by kPartial tiles. Keys and values may be rows of the
// tensors as they lie (Engine::rows_as_they_lie): their stride is the elements
// between them, positive, and 0 where they are packed.
struct Block {
  int64_t keys = 0;
  int64_t queries = 0;
  // How many of them the tensors have; 0: all.
  int64_t used_keys = 0;
  int64_t used_queries = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  // [ceil(keys / kTileKeys)][tile_stride] states, or nullptr when all tiles are
  // kVisible.
  const TileState* tiles = nullptr;
  int64_t tile_stride = 0;
  ScoreOptions score;
  // What is read after this block, prefetched meanwhile.
  PrefetchList ahead;
  // Engine::backward_scratch_bytes or forward_scratch_bytes, 64-byte aligned,
  // private to the call.
  void* scratch = nullptr;

  // The keys that an engine looks at: those that are used, padded to its
  // key_step. Gradients of the others are left as they are.
  int64_t CountedKeys(int64_t key_step) const {
    const int64_t used = used_keys == 0 ? keys : used_keys;
    return (used + key_step - 1) / key_step * key_step;
  }
  int64_t UsedQueries() const {
    return used_queries == 0 ? queries : used_queries;
  }
};

struct BackwardBlock : Block {
  const void* k_score = nullptr;
  const void* v_score = nullptr;
  const void* k_grad = nullptr;
  int64_t k_score_stride = 0;  // see Block
  int64_t v_score_stride = 0;
  int64_t k_grad_stride = 0;
  const void* q_score = nullptr;
  const void* dout_score = nullptr;
  const void* q_grad = nullptr;
  const void* dout_grad = nullptr;
  const void* lse = nullptr;    // [queries], natural log
  const void* delta = nullptr;  // [queries]
  // Accumulators of the block: added to when the flag is set, else overwritten
  // (hidden parts with zeros). dQ without the scale, dK without it too.
  // nullptr: that gradient is not wanted.
  void* dv = nullptr;
  void* dk = nullptr;
  void* dq = nullptr;
  bool add_to_dv = false;
  bool add_to_dk = false;
  bool add_to_dq = false;
  // Guards dq where blocks that run at the same time add to it. `wait` is
  // called, if given, before dq is first read or written, returns when the
  // blocks before this one are through with it, and tells what add_to_dq is;
  // `release` after it is last written. Neither if dq is nullptr.
  struct DqSemaphore {
    bool (*wait)(void* state) = nullptr;
    void (*release)(void* state) = nullptr;
    void* state = nullptr;
  };
  DqSemaphore dq_semaphore;
  bool WaitDq() const {
    return dq_semaphore.wait == nullptr ? add_to_dq
                                        : dq_semaphore.wait(dq_semaphore.state);
  }
  void ReleaseDq() const {
    if (dq_semaphore.release != nullptr) {
      dq_semaphore.release(dq_semaphore.state);
    }
  }
  // Optional outputs of the fused pass: dS (d loss / d (S after softcap),
  // without the scale), staged like `bias`, 0 where masked; and the sum of -dS
  // * distance, added to *alibi_gradient.
  void* ds = nullptr;
  ScoreStream ds_stream;  // or to this, if the engine takes it
  double* alibi_gradient = nullptr;
};

// Maxima that were taken before some keys serve for them too while no sum of
// exp(S - m) is more: floats are as precise at 2^16 as they are below 1, and
// leave V and the sums another 2^100.
inline constexpr float kMostOfServing = 65536.0f;

// Where a row's maximum or logsumexp is larger than this, its scores are
// rounded before it is subtracted: where S scale - m is one fused operation, m
// has been rounded and S scale has not, and what rounding leaves of a score of
// 2^14 is 2^-10, of one of 1e10 hundreds.
inline constexpr float kLargeScore = 16384.0f;

// Running state of forward rows: m (maximum), l (sum of exp(S - m)), and the
// accumulator of O^T.
struct ForwardBlock : Block {
  const void* q_score = nullptr;
  const void* k_score = nullptr;
  const void* v_grad = nullptr;
  int64_t k_stride = 0;  // see Block
  int64_t v_stride = 0;
  void* row_max = nullptr;  // [queries], -inf before the first block
  void* row_sum = nullptr;  // [queries], 0 before the first block
  // The sum of P as the product V^T P takes it, which O is to be divided by;
  // only engines with rounds_probabilities keep it, nullptr if not wanted.
  void* row_weight = nullptr;  // [queries], 0 before the first block
  void* out = nullptr;  // accumulator of `queries` rows and value_dim columns
  // Whether the scores have outgrown the maxima of the blocks before, so that
  // it does not pay to try with those: false before the first block, set by the
  // engine. nullptr: it may try each time.
  bool* outgrown = nullptr;
  bool first = false;  // the accumulator holds nothing yet
};

struct BlockSizes {
  int64_t keys = 0;
  int64_t queries = 0;
};

// Functions of one engine on one target. All are re-entrant.
struct Engine {
  const char* name = "";            // "f32", "f64", "bf16dot", "amx"
  DType accumulator = DType::kF32;  // type of lse, delta, positions, staged
                                    // arrays and unpacked rows
  int64_t query_panel = 0;  // multiple of kTileQueries or a divisor of it:
                            // blocks of queries begin with one
  int64_t query_grain = 0;  // packed queries are padded to it, a divisor of
                            // query_panel: the last panel may be narrower
  int64_t key_panel = 0;    // packed keys are padded to it
  int64_t key_step = 0;     // Block::CountedKeys, a divisor of key_panel
  bool grad_left_is_score_left = false;  // one packing serves both roles
  // What packing kScoreLeft and kGradLeft makes of rows of the accumulator's
  // type are those rows: both passes take them as they lie.
  bool rows_as_they_lie = false;
  // Forward blocks take K of bf16 as it lies where the head dim is a multiple
  // of this and all keys fill whole panels; 0: never.
  int64_t lying_depth = 0;
  // A backward block gives the bits that parts of its keys or queries would
  // give in turn: every sum goes on from the accumulator's value, row by row.
  // And a forward block those that parts of its queries would give.
  bool bitwise_block_invariant = false;
  // P is rounded for the products: the forward pass keeps ForwardBlock's
  // row_weight, so that the weights of V still sum to 1.
  bool rounds_probabilities = false;

  // ScoreOptions::dropout is uint32_t [query panel][key], bit i telling whether
  // query i of the panel, which is 32 wide, is kept. The forward pass leaves it
  // to its caller to multiply `out` by dropout_scale.
  bool dropout_bits = false;
  // Takes bias_stream and ds_stream: what a whole block would stage passes
  // through a buffer that stays in L1, and is prefetched. Takes
  // mask_stream too, and dropout_stream where DropoutBlock::by_lanes().
  bool streams_scores = false;

  // Up to so many queries of a sequence, or so many rows of queries that share
  // a head of keys, products with keys as they lie (direct/) are faster than
  // packing them.
  int64_t direct_queries = 0;
  int64_t direct_rows = 0;
  int64_t direct_long_rows =
      0;  // of rows against many keys, where that is more

  // Block sizes that suit the caches; multiples of the panels.
  BlockSizes (*backward_blocks)(int64_t head_dim, int64_t value_dim);
  BlockSizes (*forward_blocks)(int64_t head_dim, int64_t value_dim);

  // Bytes of `rows` (padded as above) x depth packed for a role, a multiple
  // of 64; a block of a larger packed array starts at PackedBytes(role, first
  // row of the block, depth) when every block before it is full: blocks are
  // packed one by one.
  size_t (*packed_bytes)(Role role, int64_t rows, int64_t depth);
  // Packs one block: rows past rows.rows up to padded_rows are zero. With
  // `finite_only`, elements that are NaN or infinite are packed as 0. Returns
  // whether all elements are finite. With rows_as_they_lie `packed` may be
  // nullptr: nothing is packed then.
  bool (*pack)(Role role, const Rows& rows, int64_t padded_rows,
               bool finite_only, void* packed);

  // Packs a block for both of its roles, from one read, as two calls of `pack`
  // would without `finite_only`; nullptr where that spares nothing.
  bool (*pack_pair)(Role score, Role grad, const Rows& rows,
                    int64_t padded_rows, void* packed_score,
                    void* packed_grad) = nullptr;

  // Bytes of an f32 (f64) accumulator of a block.
  size_t (*key_accumulator_bytes)(int64_t keys, int64_t depth);
  size_t (*query_accumulator_bytes)(int64_t queries, int64_t depth);
  // Elements between the rows of a key accumulator, where it is these, in
  // order; nullptr: they are unpacked.
  int64_t (*key_accumulator_stride)(int64_t depth) = nullptr;
  // Rows [first, first + count) of an accumulator as dense rows
  // [count][row_stride]. `count` is a multiple of 16 or ends the block.
  void (*unpack_key_rows)(const void* accumulator, int64_t keys, int64_t depth,
                          int64_t first, int64_t count, void* rows,
                          int64_t row_stride) = nullptr;
  void (*unpack_query_rows)(const void* accumulator, int64_t queries,
                            int64_t depth, int64_t first, int64_t count,
                            void* rows, int64_t row_stride);

  // Rows [0, count) of the sum, in order, of `parts` accumulators, times factor
  // and (unless nullptr) row_factor[row], rounded and stored as rows of bf16:
  // what adding, unpacking and rounding give, in one pass. `count` are all that
  // the block has. nullptr where there is none.
  using StoreBf16 = void (*)(const void* const* accumulators, int parts,
                             int64_t depth, int64_t count, float factor,
                             const void* row_factor, MutableRows out);
  StoreBf16 store_key_rows = nullptr;
  StoreBf16 store_query_rows = nullptr;

  // What `backward` and `forward` need beside their operands for blocks of at
  // most these sizes.
  using ScratchBytes = size_t (*)(const BlockSizes& blocks, int64_t head_dim,
                                  int64_t value_dim);
  ScratchBytes backward_scratch_bytes;
  ScratchBytes forward_scratch_bytes;
  void (*backward)(const BackwardBlock& block);
  void (*forward)(const ForwardBlock& block);
};

}  // namespace fa2::simd

#endif  // FA2_SRC_SIMD_ENGINE_H_
