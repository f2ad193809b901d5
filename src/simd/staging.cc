#include <algorithm>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/staging.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/highway.h"
#include "src/simd/load-inl.h"
#include "src/simd/philox-inl.h"
#include "src/simd/staging.h"
#include "src/simd/store-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows on their way between both layouts: 128 keys of 64 queries in f32 are
// 32 KiB.
inline constexpr int64_t kStageKeys = 128;
inline constexpr int64_t kStageQueries = 64;

// Elements [first, first + count) of a dropout stream as multipliers.
template <typename T>
class DropoutRow {
 public:
  explicit DropoutRow(const DropoutBlock& dropout)
      : seed_(dropout.seed),
        threshold_(PhiloxThreshold(dropout.p)),
        kept_(static_cast<T>(dropout.scale)) {}

  // count <= kStageKeys.
  HWY_INLINE void Get(uint64_t first, int64_t count, T* HWY_RESTRICT out) {
    const size_t skip = static_cast<size_t>(first % 4);
    PhiloxWords(seed_, first / 4, skip + static_cast<size_t>(count), words_);
    const uint32_t* HWY_RESTRICT words = words_ + skip;
    if (threshold_ > 0xFFFFFFFFu) {
      std::fill_n(out, count, T(0));
      return;
    }
    const uint32_t threshold = static_cast<uint32_t>(threshold_);
    for (int64_t i = 0; i < count; ++i) {
      out[i] = words[i] >= threshold ? kept_ : T(0);
    }
  }

 private:
  const uint64_t seed_;
  const uint64_t threshold_;
  const T kept_;
  // Room for a misaligned start and the last vector's excess.
  HWY_ALIGN uint32_t words_[kStageKeys + 2 * 4 * 64];
};

void KeepMask(double p, uint64_t seed, uint64_t first, int64_t count,
              uint8_t* keep) {
  const DropoutBlock dropout{p, 1.0, seed, first, 0};
  DropoutRow<float> row(dropout);
  HWY_ALIGN float kept[kStageKeys];
  for (int64_t n = 0; n < count; n += kStageKeys) {
    const int64_t some = std::min(kStageKeys, count - n);
    row.Get(first + static_cast<uint64_t>(n), some, kept);
    for (int64_t i = 0; i < some; ++i) keep[n + i] = kept[i] != 0.0f;
  }
}

template <typename T>
struct StagingFunctions {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  // [query][kStageKeys] -> [key][panel].
  static HWY_INLINE void TransposeIn(const T* HWY_RESTRICT rows,
                                     int64_t queries, int64_t keys,
                                     int64_t panel, T* HWY_RESTRICT staged) {
    for (int64_t k = 0; k < keys; ++k) {
      for (int64_t q = 0; q < queries; ++q) {
        staged[k * panel + q] = rows[q * kStageKeys + k];
      }
    }
  }

  // One row of bias, elements [0, count), as T; boolean false is -inf.
  static HWY_INLINE void ReadRow(const ScoreMatrix& bias, int64_t query,
                                 int64_t key, int64_t count,
                                 T* HWY_RESTRICT out) {
    constexpr T kMasked = -std::numeric_limits<T>::infinity();
    const int64_t at = query * bias.query_stride + key * bias.key_stride;
    if (bias.dtype == DType::kBool) {
      const auto* p = static_cast<const uint8_t*>(bias.data) + at;
      for (int64_t k = 0; k < count; ++k) {
        out[k] = p[k * bias.key_stride] != 0 ? T(0) : kMasked;
      }
      return;
    }
    WithAnyStored(bias.dtype, [&](auto tag) {
      using Stored = decltype(tag);
      using S = typename Stored::Type;
      const D d;
      const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
      const S* p = static_cast<const S*>(bias.data) + at;
      if (bias.key_stride != 1) {
        HWY_ALIGN S gathered[HWY_MAX_BYTES / 2] = {};
        for (int64_t k = 0; k < count; k += lanes) {
          const int64_t some = std::min(lanes, count - k);
          for (int64_t i = 0; i < some; ++i) {
            gathered[i] = p[(k + i) * bias.key_stride];
          }
          StorePart(d, LoadWide(d, tag, gathered), out + k, some);
        }
        return;
      }
      int64_t k = 0;
      for (; k + lanes <= count; k += lanes) {
        hn::StoreU(LoadWide(d, tag, p + k), d, out + k);
      }
      if (k < count) {
        HWY_ALIGN S tail[HWY_MAX_BYTES / 2] = {};
        memcpy(tail, p + k, static_cast<size_t>(count - k) * sizeof(S));
        StorePart(d, LoadWide(d, tag, tail), out + k, count - k);
      }
    });
  }

  static HWY_INLINE void StorePart(D d, V v, T* out, int64_t count) {
    HWY_ALIGN T part[HWY_MAX_BYTES / sizeof(T)];
    hn::Store(v, d, part);
    memcpy(out, part, static_cast<size_t>(count) * sizeof(T));
  }

  // Fills the staged block with read(query, first key, count, out), and its
  // padding with `padding`.
  template <class Read>
  static HWY_INLINE void Stage(const StagedShape& shape, T padding, T* staged,
                               const Read& read) {
    HWY_ALIGN T rows[kStageQueries * kStageKeys];
    for (int64_t q0 = 0; q0 < shape.padded_queries; q0 += shape.panel) {
      T* panel = staged + q0 * shape.padded_keys;
      for (int64_t k0 = 0; k0 < shape.padded_keys; k0 += kStageKeys) {
        const int64_t keys = std::min(kStageKeys, shape.padded_keys - k0);
        const int64_t real = std::clamp<int64_t>(shape.keys - k0, 0, keys);
        for (int64_t s0 = 0; s0 < shape.panel; s0 += kStageQueries) {
          const int64_t queries = std::min(kStageQueries, shape.panel - s0);
          for (int64_t q = 0; q < queries; ++q) {
            T* row = rows + q * kStageKeys;
            const int64_t query = q0 + s0 + q;
            const int64_t count = query < shape.queries ? real : 0;
            if (count > 0) read(query, k0, count, row);
            std::fill_n(row + count, keys - count, padding);
          }
          TransposeIn(rows, queries, keys, shape.panel,
                      panel + k0 * shape.panel + s0);
        }
      }
    }
  }

  static bool StageBias(const ScoreMatrix& bias, const StagedShape& shape,
                        void* staged) {
    constexpr T kMasked = -std::numeric_limits<T>::infinity();
    bool any = false;
    Stage(shape, kMasked, static_cast<T*>(staged),
          [&](int64_t query, int64_t key, int64_t count, T* row) HWY_ATTR {
            ReadRow(bias, query, key, count, row);
            for (int64_t k = 0; !any && k < count; ++k) any = row[k] != kMasked;
          });
    return any;
  }

  static void StageDropout(const DropoutBlock& dropout,
                           const StagedShape& shape, void* staged) {
    DropoutRow<T> source(dropout);
    Stage(shape, T(0), static_cast<T*>(staged),
          [&](int64_t query, int64_t key, int64_t count, T* row) HWY_ATTR {
            source.Get(dropout.first +
                           static_cast<uint64_t>(query) * dropout.query_stride +
                           static_cast<uint64_t>(key),
                       count, row);
          });
  }

  template <class Stored>
  static void UnstageAs(Stored tag, const T* staged, const StagedShape& shape,
                        bool add, const ScoreMatrix& out) {
    using S = typename Stored::Type;
    const D d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    S* data = static_cast<S*>(const_cast<void*>(out.data));
    HWY_ALIGN T row[kStageKeys + HWY_MAX_BYTES / sizeof(T)];
    HWY_ALIGN S part[HWY_MAX_BYTES / 2] = {};
    for (int64_t q = 0; q < shape.queries; ++q) {
      const T* column = staged +
                        q / shape.panel * shape.panel * shape.padded_keys +
                        q % shape.panel;
      for (int64_t k0 = 0; k0 < shape.keys; k0 += kStageKeys) {
        const int64_t keys = std::min(kStageKeys, shape.keys - k0);
        for (int64_t k = 0; k < keys; ++k) {
          row[k] = column[(k0 + k) * shape.panel];
        }
        S* to = data + q * out.query_stride + k0 * out.key_stride;
        for (int64_t k = 0; k < keys; k += lanes) {
          const int64_t some = std::min(lanes, keys - k);
          if (out.key_stride == 1 && some == lanes) {
            V v = hn::LoadU(d, row + k);
            if (add) v = hn::Add(v, LoadWide(d, tag, to + k));
            StoreNarrow(d, tag, v, to + k);
            continue;
          }
          for (int64_t i = 0; i < some; ++i) {
            part[i] = to[(k + i) * out.key_stride];
          }
          V v = hn::LoadU(d, row + k);
          if (add) v = hn::Add(v, LoadWide(d, tag, part));
          StoreNarrow(d, tag, v, part);
          for (int64_t i = 0; i < some; ++i) {
            to[(k + i) * out.key_stride] = part[i];
          }
        }
      }
    }
  }

  static void Unstage(const void* staged, const StagedShape& shape, bool add,
                      const ScoreMatrix& out) {
    WithAnyStored(out.dtype, [&](auto tag) {
      UnstageAs(tag, static_cast<const T*>(staged), shape, add, out);
    });
  }

  static void SumQueries(const void* staged, const StagedShape& shape,
                         void* sums) {
    const T* in = static_cast<const T*>(staged);
    T* out = static_cast<T*>(sums);
    for (int64_t q0 = 0; q0 < shape.queries; q0 += shape.panel) {
      const int64_t queries = std::min(shape.panel, shape.queries - q0);
      const T* panel = in + q0 * shape.padded_keys;
      for (int64_t k = 0; k < shape.keys; ++k) {
        T sum = T(0);
        for (int64_t q = 0; q < queries; ++q) sum += panel[k * shape.panel + q];
        out[k] += sum;
      }
    }
  }

  static void SumKeys(const void* staged, const StagedShape& shape,
                      void* sums) {
    const T* in = static_cast<const T*>(staged);
    T* out = static_cast<T*>(sums);
    for (int64_t q0 = 0; q0 < shape.queries; q0 += shape.panel) {
      const int64_t queries = std::min(shape.panel, shape.queries - q0);
      const T* panel = in + q0 * shape.padded_keys;
      for (int64_t k = 0; k < shape.keys; ++k) {
        for (int64_t q = 0; q < queries; ++q) {
          out[q0 + q] += panel[k * shape.panel + q];
        }
      }
    }
  }

  static const StagingKernels* Get() {
    static const StagingKernels kernels = {StageBias,  StageDropout, Unstage,
                                           SumQueries, SumKeys,      KeepMask};
    return &kernels;
  }
};

const StagingKernels* GetF32StagingKernels() {
  return StagingFunctions<float>::Get();
}
const StagingKernels* GetF64StagingKernels() {
  return StagingFunctions<double>::Get();
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "src/simd/target.h"

namespace fa2::simd {

HWY_EXPORT(GetF32StagingKernels);
HWY_EXPORT(GetF64StagingKernels);

const StagingKernels* StagingKernelsFor(DType accumulator, int64_t targets) {
  return accumulator == DType::kF64
             ? FA2_TARGET_FUNCTION(GetF64StagingKernels, targets)()
             : FA2_TARGET_FUNCTION(GetF32StagingKernels, targets)();
}

}  // namespace fa2::simd

#endif  // HWY_ONCE
