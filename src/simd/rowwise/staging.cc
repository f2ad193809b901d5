// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/rowwise/staging.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/math/dropout-inl.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/store-inl.h"
#include "src/simd/math/transpose-inl.h"
#include "src/simd/rowwise/staging.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Queries on their way between both layouts, with kStageKeys keys each: 8 KiB
// in f32.
inline constexpr int64_t kStageQueries = 16;

// A boolean mask as a bias: false is -inf.
struct StoredMask {
  using Type = uint8_t;
};
template <class D>
HWY_INLINE hn::Vec<D> LoadWide(D d, StoredMask, const uint8_t* p) {
  const auto hidden = hn::Neg(hn::Inf(d));
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint8_t, D> d8;
    const auto bytes = hn::PromoteTo(du, hn::LoadU(d8, p));
    return hn::IfThenElseZero(hn::RebindMask(d, hn::Eq(bytes, hn::Zero(du))),
                              hidden);
  } else {
    HWY_ALIGN hn::TFromD<D> shown[HWY_MAX_BYTES / sizeof(double)];
    for (size_t i = 0; i < hn::Lanes(d); ++i) shown[i] = p[i] != 0;
    return hn::IfThenElseZero(hn::Eq(hn::Load(d, shown), hn::Zero(d)), hidden);
  }
}

template <typename T>
struct StagingFunctions {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  // Elements [0, count) of a row of bias, which are key_stride apart, as T.
  template <class Stored>
  static HWY_INLINE void ReadRow(Stored tag, const typename Stored::Type* p,
                                 int64_t key_stride, int64_t count,
                                 T* HWY_RESTRICT out) {
    using S = typename Stored::Type;
    const D d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    HWY_ALIGN S some[HWY_MAX_BYTES / 2];
    FillWithZeros(some, hn::Lanes(d) * sizeof(S));
    int64_t k = 0;
    if (key_stride == 1) {
      for (; k + lanes <= count; k += lanes) {
        hn::StoreU(LoadWide(d, tag, p + k), d, out + k);
      }
    }
    for (; k < count; k += lanes) {
      const int64_t left = std::min(lanes, count - k);
      for (int64_t i = 0; i < left; ++i) some[i] = p[(k + i) * key_stride];
      StorePart(d, LoadWide(d, tag, some), out + k, left);
    }
  }

  static HWY_INLINE void StorePart(D d, V v, T* out, int64_t count) {
    HWY_ALIGN T part[HWY_MAX_BYTES / sizeof(T)];
    hn::Store(v, d, part);
    memcpy(out, part, static_cast<size_t>(count) * sizeof(T));
  }

  // Fills the staged block with read(query, first key, count, out), and its
  // padding with `padding`. Where no padding is in the way, find(query, first
  // key, keys) may point to rows of T, `stride` apart, instead.
  template <class Read, class Find>
  static HWY_INLINE void Stage(const StagedShape& shape, T padding, T* staged,
                               int64_t stride, const Read& read,
                               const Find& find) {
    HWY_ALIGN T rows[kStageQueries * kStageKeys];
    const int64_t group = std::min(kStageQueries, shape.panel);
    for (int64_t q0 = 0; q0 < shape.padded_queries; q0 += group) {
      T* panel = staged + q0 / shape.panel * shape.panel * shape.padded_keys +
                 q0 % shape.panel;
      const bool whole = q0 + group <= shape.queries;
      for (int64_t k0 = 0; k0 < shape.padded_keys; k0 += kStageKeys) {
        const int64_t keys = std::min(kStageKeys, shape.padded_keys - k0);
        const int64_t real = std::clamp<int64_t>(shape.keys - k0, 0, keys);
        T* out = panel + k0 * shape.panel;
        const T* in = whole && real == keys ? find(q0, k0, keys) : nullptr;
        if (in != nullptr) {
          Transpose(in, stride, group, keys, out, shape.panel);
          continue;
        }
        for (int64_t q = 0; q < group; ++q) {
          T* row = rows + q * kStageKeys;
          const int64_t count = q0 + q < shape.queries ? real : 0;
          if (count > 0) read(q0 + q, k0, count, row);
          std::fill_n(row + count, keys - count, padding);
        }
        Transpose(rows, kStageKeys, group, keys, out, shape.panel);
      }
    }
  }

  template <class Stored>
  static bool StageBiasAs(Stored tag, const ScoreMatrix& bias,
                          const StagedShape& shape, T* staged) {
    using S = typename Stored::Type;
    constexpr T kMasked = -std::numeric_limits<T>::infinity();
    constexpr bool kSame = std::is_same_v<S, T>;
    const auto at = [&](int64_t query, int64_t key) {
      return static_cast<const S*>(bias.data) + query * bias.query_stride +
             key * bias.key_stride;
    };
    // Prefetches what the same row of the next keys, or of the next group of
    // queries, will need.
    const auto fetch_next = [&](int64_t query, int64_t key) {
      if (bias.key_stride != 1 || bias.query_stride == 0) return;
      key += kStageKeys;
      if (key >= shape.keys) {
        key = 0;
        query += kStageQueries;
      }
      if (query >= shape.queries) return;
      const int64_t count = std::min(kStageKeys, shape.keys - key);
      const S* row = at(query, key);
      for (int64_t i = 0; i < count; i += 64 / int64_t{sizeof(S)}) {
        hwy::Prefetch(row + i);
      }
    };
    bool any = false;
    const auto look = [&](const T* row, int64_t count) HWY_ATTR {
      const D d;
      const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
      int64_t k = 0;
      for (; !any && k + lanes <= count; k += lanes) {
        any =
            !hn::AllTrue(d, hn::Eq(hn::LoadU(d, row + k), hn::Set(d, kMasked)));
      }
      for (; !any && k < count; ++k) any = row[k] != kMasked;
    };
    Stage(
        shape, kMasked, staged, bias.query_stride,
        [&](int64_t query, int64_t key, int64_t count, T* row) HWY_ATTR {
          fetch_next(query, key);
          ReadRow(tag, at(query, key), bias.key_stride, count, row);
          look(row, count);
        },
        [&](int64_t query, int64_t key, int64_t keys) HWY_ATTR -> const T* {
          if constexpr (kSame) {
            if (bias.key_stride != 1) return nullptr;
            const int64_t group = std::min(kStageQueries, shape.panel);
            for (int64_t q = query; q < query + group; ++q) {
              fetch_next(q, key);
              look(at(q, key), keys);
            }
            return at(query, key);
          } else {
            return nullptr;
          }
        });
    return any;
  }

  static bool StageBias(const ScoreMatrix& bias, const StagedShape& shape,
                        void* staged) {
    bool any = false;
    const auto stage = [&](auto tag) HWY_ATTR {
      any = StageBiasAs(tag, bias, shape, static_cast<T*>(staged));
    };
    if (bias.dtype == DType::kBool) {
      stage(StoredMask());
    } else {
      WithAnyStored(bias.dtype, stage);
    }
    return any;
  }

  static void StageDropout(const DropoutBlock& dropout,
                           const StagedShape& shape, void* staged) {
#if HWY_TARGET != HWY_SCALAR
    if constexpr (sizeof(T) == 4) {
      float* const out = static_cast<float*>(staged);
      const float kept = static_cast<float>(dropout.scale);
      if (VisitKept(
              dropout, shape,
              [&](int64_t key, int64_t query, auto d32, auto keep) HWY_ATTR {
                const hn::Rebind<float, decltype(d32)> d;
                hn::StoreU(hn::IfThenElseZero(hn::RebindMask(d, keep),
                                              hn::Set(d, kept)),
                           d,
                           out +
                               (query / shape.panel * shape.padded_keys + key) *
                                   shape.panel +
                               query % shape.panel);
              })) {
        return;
      }
    }
#endif
    DropoutRow<T> source(dropout);
    Stage(
        shape, T(0), static_cast<T*>(staged), 0,
        [&](int64_t query, int64_t key, int64_t count, T* row) HWY_ATTR {
          source.Get(dropout.first +
                         static_cast<uint64_t>(query) * dropout.query_stride +
                         static_cast<uint64_t>(key),
                     count, row);
        },
        [](int64_t, int64_t, int64_t) -> const T* { return nullptr; });
  }

  template <class Stored>
  static void UnstageAs(Stored tag, const T* staged, const StagedShape& shape,
                        bool add, const ScoreMatrix& out) {
    using S = typename Stored::Type;
    const D d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    S* data = static_cast<S*>(const_cast<void*>(out.data));
    HWY_ALIGN T rows[kStageQueries * kStageKeys];
    HWY_ALIGN S part[HWY_MAX_BYTES / 2];
    FillWithZeros(part, hn::Lanes(d) * sizeof(S));
    const int64_t group = std::min(kStageQueries, shape.panel);
    for (int64_t q0 = 0; q0 < shape.queries; q0 += group) {
      const int64_t queries = std::min(group, shape.queries - q0);
      const T* panel = staged +
                       q0 / shape.panel * shape.panel * shape.padded_keys +
                       q0 % shape.panel;
      for (int64_t k0 = 0; k0 < shape.keys; k0 += kStageKeys) {
        const int64_t keys = std::min(kStageKeys, shape.keys - k0);
        const int64_t padded = std::min(kStageKeys, shape.padded_keys - k0);
        if constexpr (std::is_same_v<S, T>) {
          if (!add && out.key_stride == 1 && queries == group) {
            Transpose(panel + k0 * shape.panel, shape.panel, keys, group,
                      data + q0 * out.query_stride + k0, out.query_stride);
            continue;
          }
        }
        Transpose(panel + k0 * shape.panel, shape.panel, padded, group, rows,
                  kStageKeys);
        for (int64_t q = 0; q < queries; ++q) {
          const T* row = rows + q * kStageKeys;
          S* to = data + (q0 + q) * out.query_stride + k0 * out.key_stride;
          for (int64_t k = 0; k < keys; k += lanes) {
            const int64_t some = std::min(lanes, keys - k);
            V v = hn::LoadU(d, row + k);
            if (out.key_stride == 1 && some == lanes) {
              if (add) v = hn::Add(v, LoadWide(d, tag, to + k));
              StoreNarrow(d, tag, v, to + k);
              continue;
            }
            for (int64_t i = 0; i < some; ++i) {
              part[i] = to[(k + i) * out.key_stride];
            }
            if (add) v = hn::Add(v, LoadWide(d, tag, part));
            StoreNarrow(d, tag, v, part);
            for (int64_t i = 0; i < some; ++i) {
              to[(k + i) * out.key_stride] = part[i];
            }
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
    static const StagingKernels kernels = {
        StageBias,  StageDropout, StageDropoutBits, Unstage,
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
