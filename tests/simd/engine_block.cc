#include "tests/simd/engine_block.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>

#include "src/common/half.h"

namespace fa2::simd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of dropout with p = 1/4.
constexpr double kKeptScale = 4.0 / 3.0;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t RoundUp(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Aligned storage that starts as garbage, so that nothing passes because fresh
// memory happens to be 0.
class Bytes {
 public:
  explicit Bytes(size_t size)
      : size_(std::max<size_t>(64, (size + 63) / 64 * 64)),
        data_(static_cast<uint8_t*>(std::aligned_alloc(64, size_))) {
    std::memset(data_.get(), 0x7f, size_);
  }
  uint8_t* get() const { return data_.get(); }

 private:
  size_t size_;
  std::unique_ptr<uint8_t, Free> data_;
};

// Engines load row vectors with aligned instructions.
template <typename T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <typename U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(
        ::operator new (n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
  bool operator==(const AlignedAllocator&) const { return true; }
  bool operator!=(const AlignedAllocator&) const { return false; }
};
template <typename T>
using Array = std::vector<T, AlignedAllocator<T>>;

// Rows of a tensor as the engine reads them, and their exact values.
class Tensor {
 public:
  Tensor(int64_t rows, int64_t depth, DType dtype)
      : rows_(rows), depth_(depth), stride_(depth + 3), dtype_(dtype) {
    values_.resize(rows * depth);
    storage_.resize(rows * stride_ * SizeOf(dtype) + 64);
  }
  template <class Random>
  void Fill(Random& random, double scale) {
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t d = 0; d < depth_; ++d) Set(r, d, normal(random));
    }
  }
  void Set(int64_t r, int64_t d, double value) {
    uint8_t* at = storage_.data() + (r * stride_ + d) * SizeOf(dtype_);
    const float x = static_cast<float>(value);
    if (dtype_ == DType::kBF16) {
      const uint16_t bits = F32ToBf16(x);
      std::memcpy(at, &bits, 2);
      values_[r * depth_ + d] = Bf16ToF32(bits);
    } else if (dtype_ == DType::kF16) {
      const uint16_t bits = F32ToF16(x);
      std::memcpy(at, &bits, 2);
      values_[r * depth_ + d] = F16ToF32(bits);
    } else if (dtype_ == DType::kF64) {
      std::memcpy(at, &value, 8);
      values_[r * depth_ + d] = value;
    } else {
      std::memcpy(at, &x, 4);
      values_[r * depth_ + d] = x;
    }
  }
  double operator()(int64_t r, int64_t d) const {
    return values_[r * depth_ + d];
  }
  Rows View() const {
    return {storage_.data(), dtype_, stride_, rows_, depth_};
  }

 private:
  int64_t rows_, depth_, stride_;
  DType dtype_;
  std::vector<double> values_;
  std::vector<uint8_t> storage_;
};

class Errors {
 public:
  void Add(double got, double want) {
    if (std::isnan(want)) return;
    const double e = got - want;
    error_ += std::isfinite(e) ? e * e : kInfinity;
    norm_ += want * want;
  }
  double Relative() const {
    if (error_ == 0.0) return 0.0;
    return norm_ == 0.0 ? kInfinity : std::sqrt(error_ / norm_);
  }

 private:
  double error_ = 0.0;
  double norm_ = 0.0;
};

// One block of keys: tensors, masks, staged arrays and packed operands.
template <class T>
struct KeyBlock {
  int64_t keys, padded;
  Tensor k, v;
  std::vector<TileState> tiles;
  Array<T> begin, end, position, bias, dropout, ds;
  std::vector<uint32_t> dropout_bits;
  std::vector<uint8_t> visible;  // [key][query]
};

template <class T>
class BlockProblem {
 public:
  BlockProblem(const Engine& engine, const BlockCase& c)
      : e_(engine),
        c_(c),
        random_(c.seed),
        nq_(c.queries),
        padded_q_(RoundUp(c.queries, engine.query_panel)),
        q_(nq_, c.head_dim, c.dtype),
        dout_(nq_, c.value_dim, c.dtype) {
    q_.Fill(random_, c.input_scale);
    dout_.Fill(random_, 1.0);
    scale_ = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    int64_t first = 0;
    for (int64_t keys : c.keys) {
      if (keys > 0) AddKeys(keys, first);
      first += keys;
    }
    Reference();
  }

  BlockErrors Run() {
    BlockErrors errors;
    Backward(errors);
    Forward(errors);
    return errors;
  }

 private:
  int64_t Staged(int64_t padded_keys, int64_t key, int64_t query) const {
    const int64_t panel = e_.query_panel;
    return (query / panel * padded_keys + key) * panel + query % panel;
  }

  void AddKeys(int64_t keys, int64_t first) {
    const int64_t padded = RoundUp(keys, e_.key_panel);
    blocks_.push_back({keys,
                       padded,
                       Tensor(keys, c_.head_dim, c_.dtype),
                       Tensor(keys, c_.value_dim, c_.dtype),
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {},
                       {}});
    KeyBlock<T>& b = blocks_.back();
    b.k.Fill(random_, c_.input_scale);
    b.v.Fill(random_, 1.0);
    for (int64_t j = 0; c_.equal_values && j < keys; ++j) {
      for (int64_t d = 0; d < c_.value_dim; ++d) b.v.Set(j, d, 1.0);
    }
    b.begin.assign(padded_q_, T{0});
    b.end.assign(padded_q_, T{0});
    b.position.assign(padded_q_, T{0});
    for (int64_t i = 0; i < nq_; ++i) {
      int64_t begin = 0, end = keys;
      if (c_.mask == BlockMask::kRandomTiles && i % kTileQueries != 0) {
        begin = static_cast<int64_t>(b.begin[i - 1]);
        end = static_cast<int64_t>(b.end[i - 1]);
      } else if (c_.mask == BlockMask::kRandomTiles) {
        const int64_t tiles = RoundUp(keys, kTileKeys) / kTileKeys;
        begin = static_cast<int64_t>(random_() % (tiles + 1)) * kTileKeys;
        end = begin + static_cast<int64_t>(random_() % (tiles + 1)) * kTileKeys;
        begin = std::min(begin, keys);
        end = std::min(end, keys);
      } else if (c_.mask == BlockMask::kCausal) {
        end = std::min(keys, std::max<int64_t>(0, i + c_.shift + 1 - first));
      } else if (c_.mask != BlockMask::kNone) {
        begin = static_cast<int64_t>(random_() % (keys + 1));
        end = begin + static_cast<int64_t>(random_() % (keys - begin + 1));
        if (random_() % 8 == 0) begin = end;
      }
      b.begin[i] = static_cast<T>(begin);
      b.end[i] = static_cast<T>(end);
      b.position[i] = static_cast<T>(i + c_.shift - first);
    }
    std::vector<uint8_t> unseen(keys, 0);
    if (c_.nan_in_masked) {
      for (int64_t j = 0; j < keys; ++j) unseen[j] = random_() % 5 == 0;
    }
    // Ranges cannot leave out single keys: shorten them to end before the first
    // unseen one.
    for (int64_t i = 0; i < nq_ && c_.nan_in_masked; ++i) {
      for (int64_t j = static_cast<int64_t>(b.begin[i]); j < b.end[i]; ++j) {
        if (unseen[j]) b.end[i] = static_cast<T>(j);
      }
    }
    const int64_t tile_rows = (padded + kTileKeys - 1) / kTileKeys;
    tile_stride_ = (padded_q_ + kTileQueries - 1) / kTileQueries;
    b.tiles.assign(tile_rows * tile_stride_, TileState::kPartial);
    b.visible.assign(keys * nq_, 0);
    for (int64_t tk = 0; tk < tile_rows; ++tk) {
      for (int64_t tq = 0; tq < tile_stride_; ++tq) {
        int64_t seen = 0;
        for (int64_t j = tk * kTileKeys; j < (tk + 1) * kTileKeys; ++j) {
          for (int64_t i = tq * kTileQueries; i < (tq + 1) * kTileQueries;
               ++i) {
            if (i >= nq_ || j >= keys) continue;
            const bool sees = b.begin[i] <= j && j < b.end[i];
            b.visible[j * nq_ + i] = sees;
            seen += sees;
          }
        }
        TileState& state = b.tiles[tk * tile_stride_ + tq];
        if (seen == 0) {
          // Sometimes left to the masked pass.
          if (random_() % 4 != 0) state = TileState::kHidden;
        } else if (seen == kTileKeys * kTileQueries && random_() % 8 != 0) {
          state = TileState::kVisible;
        }
      }
    }
    for (int64_t j = 0; j < keys; ++j) {
      if (!unseen[j]) continue;
      for (int64_t d = 0; d < c_.head_dim; ++d) b.k.Set(j, d, kNan);
      for (int64_t d = 0; d < c_.value_dim; ++d) b.v.Set(j, d, kNan);
    }
    // One more row of panels than there are, so that a wrong stride shows.
    const int64_t staged =
        (padded_q_ / e_.query_panel) * padded * e_.query_panel;
    std::normal_distribution<double> normal;
    if (c_.bias) {
      b.bias.resize(staged);
      for (T& x : b.bias) {
        x = random_() % 16 == 0 ? static_cast<T>(-kInfinity)
                                : static_cast<T>(normal(random_));
      }
    }
    if (c_.dropout) {
      b.dropout.resize(staged);
      for (T& x : b.dropout)
        x = random_() % 4 == 0 ? T{0} : static_cast<T>(kKeptScale);
      // Panels of 32: element i of `dropout` is bit i % 32 of row i / 32.
      if (e_.dropout_bits) b.dropout_bits.resize(staged / 32);
      for (int64_t i = 0; e_.dropout_bits && i < staged; ++i) {
        if (b.dropout[i] != T{0}) b.dropout_bits[i / 32] |= 1u << i % 32;
      }
    }
    if (c_.want_ds) b.ds.assign(staged, static_cast<T>(kNan));
  }

  void Reference() {
    const int64_t dk = c_.head_dim, dv = c_.value_dim;
    lse_.assign(nq_, -kInfinity);
    delta_.assign(nq_, 0.0);
    out_.assign(nq_ * dv, 0.0);
    dq_.assign(nq_ * dk, 0.0);
    ref_dk_.clear();
    alibi_ = 0.0;
    struct Element {
      double p, distance, slope, z;
    };
    std::vector<std::vector<Element>> elements;
    for (const KeyBlock<T>& b : blocks_) {
      elements.emplace_back(b.keys * nq_, Element{0, 0, 1, 1});
      ref_dk_.emplace_back(b.keys * dk, 0.0);
      ref_dv_.emplace_back(b.keys * dv, 0.0);
      ref_ds_.emplace_back(b.keys * nq_, 0.0);
    }
    for (int64_t i = 0; i < nq_; ++i) {
      double max = -kInfinity, sum = 0.0;
      for (size_t n = 0; n < blocks_.size(); ++n) {
        const KeyBlock<T>& b = blocks_[n];
        for (int64_t j = 0; j < b.keys; ++j) {
          Element& e = elements[n][j * nq_ + i];
          e.p = -kInfinity;
          if (!b.visible[j * nq_ + i]) continue;
          double s = 0.0;
          for (int64_t d = 0; d < dk; ++d) s += q_(i, d) * b.k(j, d);
          s *= scale_;
          if (c_.softcap != 0.0) {
            const double t = std::tanh(s / c_.softcap);
            s = c_.softcap * t;
            e.slope = 1.0 - t * t;
          }
          if (c_.bias) s += static_cast<double>(b.bias[Staged(b.padded, j, i)]);
          e.distance = std::abs(static_cast<double>(b.position[i]) - j);
          s -= c_.alibi_slope * e.distance;
          if (c_.dropout) {
            e.z = static_cast<double>(b.dropout[Staged(b.padded, j, i)]);
          }
          e.p = s;
          max = std::max(max, s);
        }
      }
      if (max == -kInfinity) {
        for (auto& block : elements) {
          for (size_t j = i; j < block.size(); j += nq_) block[j].p = 0.0;
        }
        continue;
      }
      for (auto& block : elements) {
        for (size_t j = i; j < block.size(); j += nq_) {
          sum += std::exp(block[j].p - max);
        }
      }
      lse_[i] = max + std::log(sum);
      for (size_t n = 0; n < blocks_.size(); ++n) {
        for (int64_t j = 0; j < blocks_[n].keys; ++j) {
          Element& e = elements[n][j * nq_ + i];
          e.p = std::exp(e.p - lse_[i]);
          if (e.p == 0.0) continue;
          for (int64_t d = 0; d < dv; ++d) {
            out_[i * dv + d] += e.p * e.z * blocks_[n].v(j, d);
          }
        }
      }
      for (int64_t d = 0; d < dv; ++d) {
        delta_[i] += out_[i * dv + d] * dout_(i, d);
      }
      for (size_t n = 0; n < blocks_.size(); ++n) {
        const KeyBlock<T>& b = blocks_[n];
        for (int64_t j = 0; j < b.keys; ++j) {
          const Element& e = elements[n][j * nq_ + i];
          if (e.p == 0.0) continue;
          double dp = 0.0;
          for (int64_t d = 0; d < dv; ++d) dp += dout_(i, d) * b.v(j, d);
          const double ds = e.p * (e.z * dp - delta_[i]);
          ref_ds_[n][j * nq_ + i] = ds;
          alibi_ -= ds * e.distance;
          for (int64_t d = 0; d < dv; ++d) {
            ref_dv_[n][j * dv + d] += e.p * e.z * dout_(i, d);
          }
          for (int64_t d = 0; d < dk; ++d) {
            dq_[i * dk + d] += ds * e.slope * b.k(j, d);
            ref_dk_[n][j * dk + d] += ds * e.slope * q_(i, d);
          }
        }
      }
    }
  }

  Bytes PackRows(Role role, const Tensor& t, int64_t padded,
                 bool finite_only = false) const {
    Bytes packed(e_.packed_bytes(role, padded, t.View().depth));
    e_.pack(role, t.View(), padded, finite_only, packed.get());
    return packed;
  }

  void Describe(const KeyBlock<T>& b, Block& block,
                const Bytes& scratch) const {
    block.keys = b.padded;
    block.queries = padded_q_;
    block.head_dim = c_.head_dim;
    block.value_dim = c_.value_dim;
    bool all = true;
    for (TileState s : b.tiles) all &= s == TileState::kVisible;
    if (!all) {
      block.tiles = b.tiles.data();
      block.tile_stride = tile_stride_;
      block.score.visible_begin = b.begin.data();
      block.score.visible_end = b.end.data();
    }
    block.score.scale = scale_;
    block.score.softcap = c_.softcap;
    block.score.alibi_slope = c_.alibi_slope;
    if (c_.alibi_slope != 0.0 || c_.want_ds) {
      block.score.query_position = b.position.data();
    }
    if (c_.bias) block.score.bias = b.bias.data();
    if (c_.dropout) {
      block.score.dropout = b.dropout.data();
      if (e_.dropout_bits) block.score.dropout = b.dropout_bits.data();
      block.score.dropout_scale = kKeptScale;
    }
    block.score.staged_key_rows = b.padded;
    block.scratch = scratch.get();
  }

  size_t ScratchBytes() const {
    int64_t keys = 0;
    for (const KeyBlock<T>& b : blocks_) keys = std::max(keys, b.padded);
    return e_.scratch_bytes({keys, padded_q_}, c_.head_dim, c_.value_dim);
  }

  void Backward(BlockErrors& errors) {
    const int64_t dk = c_.head_dim, dv = c_.value_dim;
    const Bytes scratch(ScratchBytes());
    const Bytes q_score = PackRows(Role::kScoreRight, q_, padded_q_);
    const Bytes q_grad = PackRows(Role::kGradRight, q_, padded_q_);
    const Bytes o_score = PackRows(Role::kScoreRight, dout_, padded_q_);
    const Bytes o_grad = PackRows(Role::kGradRight, dout_, padded_q_);
    Array<T> lse(padded_q_, T{0}), delta(padded_q_, T{0});
    for (int64_t i = 0; i < nq_; ++i) {
      lse[i] = static_cast<T>(lse_[i]);
      delta[i] = static_cast<T>(delta_[i]);
    }
    const Bytes dq(e_.query_accumulator_bytes(padded_q_, dk));
    double alibi = 0.0;
    Errors ek, ev, es, eq;
    for (size_t n = 0; n < blocks_.size(); ++n) {
      KeyBlock<T>& b = blocks_[n];
      const Bytes k_score = PackRows(Role::kScoreLeft, b.k, b.padded);
      const Bytes v_score = PackRows(Role::kScoreLeft, b.v, b.padded);
      const Bytes k_grad =
          PackRows(Role::kGradLeft, b.k, b.padded, /*finite_only=*/true);
      const Bytes acc_k(e_.key_accumulator_bytes(b.padded, dk));
      const Bytes acc_v(e_.key_accumulator_bytes(b.padded, dv));
      BackwardBlock block;
      Describe(b, block, scratch);
      block.k_score = k_score.get();
      block.v_score = v_score.get();
      block.k_grad = k_grad.get();
      block.q_score = q_score.get();
      block.dout_score = o_score.get();
      block.q_grad = q_grad.get();
      block.dout_grad = o_grad.get();
      block.lse = lse.data();
      block.delta = delta.data();
      block.dv = acc_v.get();
      block.dk = acc_k.get();
      block.dq = dq.get();
      block.add_to_dq = n > 0;
      if (c_.want_ds) {
        block.ds = b.ds.data();
        block.alibi_gradient = &alibi;
      }
      e_.backward(block);
      // A second time onto dK and dV alone: they double.
      const Array<T> ds = b.ds;
      block.dq = nullptr;
      block.ds = nullptr;
      block.alibi_gradient = nullptr;
      block.add_to_dk = block.add_to_dv = true;
      e_.backward(block);
      Array<T> rows(b.keys * std::max(dk, dv));
      e_.unpack_key_rows(acc_k.get(), b.padded, dk, 0, b.keys, rows.data(), dk);
      for (int64_t x = 0; x < b.keys * dk; ++x) {
        ek.Add(rows[x] / 2, ref_dk_[n][x]);
      }
      e_.unpack_key_rows(acc_v.get(), b.padded, dv, 0, b.keys, rows.data(), dv);
      for (int64_t x = 0; x < b.keys * dv; ++x) {
        ev.Add(rows[x] / 2, ref_dv_[n][x]);
      }
      for (int64_t j = 0; c_.want_ds && j < b.keys; ++j) {
        for (int64_t i = 0; i < nq_; ++i) {
          const double got = ds[Staged(b.padded, j, i)];
          const double want = ref_ds_[n][j * nq_ + i];
          if (!b.visible[j * nq_ + i] && got != 0.0) es.Add(kInfinity, 0.0);
          es.Add(got, want);
        }
      }
    }
    // In two parts, as the drivers do.
    const int64_t half = RoundUp(nq_ / 2, kTileKeys);
    Array<T> rows(nq_ * dk);
    e_.unpack_query_rows(dq.get(), padded_q_, dk, 0, std::min(half, nq_),
                         rows.data(), dk);
    if (half < nq_) {
      e_.unpack_query_rows(dq.get(), padded_q_, dk, half, nq_ - half,
                           rows.data() + half * dk, dk);
    }
    for (int64_t x = 0; x < nq_ * dk; ++x) eq.Add(rows[x], dq_[x]);
    errors.dq = eq.Relative();
    errors.dk = ek.Relative();
    errors.dv = ev.Relative();
    errors.ds = es.Relative();
    if (c_.want_ds) {
      // Sums of both signs: measured against the sum of magnitudes.
      double size = 0.0;
      for (const auto& ds : ref_ds_) {
        for (double x : ds) size += std::abs(x);
      }
      errors.alibi = size == 0.0 ? 0.0 : std::abs(alibi - alibi_) / (size * 32);
    }
  }

  void Forward(BlockErrors& errors) {
    const int64_t dv = c_.value_dim;
    const Bytes scratch(ScratchBytes());
    const Bytes q_score = PackRows(Role::kScoreRight, q_, padded_q_);
    Array<T> m(padded_q_, static_cast<T>(-kInfinity));
    Array<T> l(padded_q_, T{0}), weight(padded_q_, T{0});
    const Bytes acc(e_.query_accumulator_bytes(padded_q_, dv));
    bool first = true;
    for (const KeyBlock<T>& b : blocks_) {
      const Bytes k_score = PackRows(Role::kScoreLeft, b.k, b.padded);
      const Bytes v_grad =
          PackRows(Role::kGradLeft, b.v, b.padded, /*finite_only=*/true);
      ForwardBlock block;
      Describe(b, block, scratch);
      block.q_score = q_score.get();
      block.k_score = k_score.get();
      block.v_grad = v_grad.get();
      block.row_max = m.data();
      block.row_sum = l.data();
      if (e_.rounds_probabilities) block.row_weight = weight.data();
      block.out = acc.get();
      block.first = first;
      first = false;
      e_.forward(block);
    }
    Array<T> rows(nq_ * dv);
    e_.unpack_query_rows(acc.get(), padded_q_, dv, 0, nq_, rows.data(), dv);
    Errors eo;
    for (int64_t i = 0; i < nq_; ++i) {
      const double sum = static_cast<double>(l[i]);
      const double divisor =
          e_.rounds_probabilities ? static_cast<double>(weight[i]) : sum;
      for (int64_t d = 0; d < dv; ++d) {
        const double x = rows[i * dv + d];
        eo.Add(sum == 0.0 ? x : x / divisor, out_[i * dv + d]);
      }
      if (lse_[i] == -kInfinity) {
        if (sum != 0.0) errors.lse = kInfinity;
      } else {
        const double lse = static_cast<double>(m[i]) + std::log(sum);
        const double e = std::abs(lse - lse_[i]);
        errors.lse = std::isnan(e) ? kInfinity : std::max(errors.lse, e);
      }
    }
    errors.out = eo.Relative();
  }

  const Engine& e_;
  const BlockCase& c_;
  std::mt19937 random_;
  int64_t nq_, padded_q_, tile_stride_ = 0;
  double scale_ = 1.0;
  Tensor q_, dout_;
  std::vector<KeyBlock<T>> blocks_;
  std::vector<double> lse_, delta_, out_, dq_;
  std::vector<std::vector<double>> ref_dk_, ref_dv_, ref_ds_;
  double alibi_ = 0.0;
};

}  // namespace

std::string BlockCase::Name() const {
  std::string name =
      "d" + std::to_string(head_dim) + "_dv" + std::to_string(value_dim) +
      "_q" + std::to_string(queries) + "_k" + std::to_string(keys[0]) + "+" +
      std::to_string(keys[1]) + "_mask" +
      std::to_string(static_cast<int>(mask)) + "_" + NameOf(dtype);
  if (softcap != 0.0) name += "_softcap";
  if (alibi_slope != 0.0) name += "_alibi";
  if (bias) name += "_bias";
  if (dropout) name += "_dropout";
  if (want_ds) name += "_ds";
  if (nan_in_masked) name += "_nan";
  if (equal_values) name += "_equal";
  return name;
}

double BlockErrors::Largest() const {
  return std::max({dq, dk, dv, ds, alibi, out});
}

BlockErrors RunBlockCase(const Engine& engine, const BlockCase& c) {
  return engine.accumulator == DType::kF64
             ? BlockProblem<double>(engine, c).Run()
             : BlockProblem<float>(engine, c).Run();
}

}  // namespace fa2::simd
