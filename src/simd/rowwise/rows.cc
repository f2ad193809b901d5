// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/simd/rowwise/rows.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets the target.
#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/store-inl.h"
#include "src/simd/rowwise/rows.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
struct RowFunctions {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  using Own = StoredAs<T>;

  template <class Stored>
  static HWY_INLINE V LoadSome(D d, Stored tag, const typename Stored::Type* p,
                               size_t left) {
    return left >= hn::Lanes(d) ? LoadWide(d, tag, p)
                                : LoadWideTail(d, tag, p, left);
  }

#if HWY_TARGET != HWY_SCALAR
  // sum + the products of 2 Lanes(d) bf16 each. A lane takes an even and an odd
  // element: shifts and masks where widening in order would shuffle.
  static HWY_INLINE V DotPairs(D d, const uint16_t* a, const uint16_t* b,
                               V sum) {
    const hn::Repartition<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    const auto pairs_a = hn::BitCast(du, hn::LoadU(d16, a));
    const auto pairs_b = hn::BitCast(du, hn::LoadU(d16, b));
    const auto high = hn::Set(du, 0xFFFF0000u);
    sum = hn::MulAdd(hn::BitCast(d, hn::ShiftLeft<16>(pairs_a)),
                     hn::BitCast(d, hn::ShiftLeft<16>(pairs_b)), sum);
    return hn::MulAdd(hn::BitCast(d, hn::And(pairs_a, high)),
                      hn::BitCast(d, hn::And(pairs_b, high)), sum);
  }
#endif

  template <class StoredA, class StoredB>
  static void DotOf(StoredA tag_a, StoredB tag_b, const Rows& a, const Rows& b,
                    T* sums) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t depth = static_cast<size_t>(a.depth);
    for (int64_t r = 0; r < a.rows; ++r) {
      const auto* pa =
          static_cast<const typename StoredA::Type*>(a.data) + r * a.stride;
      const auto* pb =
          static_cast<const typename StoredB::Type*>(b.data) + r * b.stride;
      V sum = hn::Zero(d);
      size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
      if constexpr (std::is_same_v<StoredA, StoredBF16> &&
                    std::is_same_v<StoredB, StoredBF16> && sizeof(T) == 4) {
        for (; i + 2 * lanes <= depth; i += 2 * lanes) {
          sum = DotPairs(d, pa + i, pb + i, sum);
        }
      }
#endif
      for (; i < depth; i += lanes) {
        sum = hn::MulAdd(LoadSome(d, tag_a, pa + i, depth - i),
                         LoadSome(d, tag_b, pb + i, depth - i), sum);
      }
      sums[r] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }

  static void Dot(const Rows& a, const Rows& b, void* sums) {
    WithStored<T>(a.dtype, [&](auto tag_a) {
      WithStored<T>(b.dtype, [&](auto tag_b) {
        DotOf(tag_a, tag_b, a, b, static_cast<T*>(sums));
      });
    });
  }

  // Whether rows are stored non-temporally: whole cache lines alone, as parts
  // of one would be read first, and written twice.
  template <class Stored>
  static HWY_INLINE bool Streams(size_t columns, bool add,
                                 const MutableRows& out) {
    const size_t stride = static_cast<size_t>(out.stride);
    return std::is_same_v<Stored, Own> && out.non_temporal && !add &&
           columns * sizeof(T) % 64 == 0 && stride * sizeof(T) % 64 == 0 &&
           reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
  }

  template <class Stored>
  static void StoreAs(Stored tag, const T* rows, int64_t row_stride,
                      int64_t count, int64_t depth, double factor,
                      const T* row_factor, bool add, const MutableRows& out) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t columns = static_cast<size_t>(depth);
    const bool streams = Streams<Stored>(columns, add, out);
    for (int64_t r = 0; r < count; ++r) {
      const T* in = rows + r * row_stride;
      auto* to = static_cast<typename Stored::Type*>(out.data) + r * out.stride;
      const V scale =
          hn::Mul(hn::Set(d, static_cast<T>(factor)),
                  hn::Set(d, row_factor == nullptr ? T(1) : row_factor[r]));
      for (size_t i = 0; i < columns; i += lanes) {
        const size_t left = columns - i;
        if (left >= lanes) {
          V v = hn::Mul(hn::LoadU(d, in + i), scale);
          if (add) v = hn::Add(v, LoadWide(d, tag, to + i));
          if constexpr (std::is_same_v<Stored, Own>) {
            if (streams) {
              hn::Stream(v, d, to + i);
              continue;
            }
          }
          StoreNarrow(d, tag, v, to + i);
        } else {
          V v = hn::Mul(LoadWideTail(d, Own(), in + i, left), scale);
          if (add) v = hn::Add(v, LoadWideTail(d, tag, to + i, left));
          StoreNarrowTail(d, tag, v, to + i, left);
        }
      }
    }
    if (streams) hwy::FlushStream();
  }

  static void Store(const void* rows, int64_t row_stride, int64_t count,
                    int64_t depth, double factor, const void* row_factor,
                    bool add, const MutableRows& out) {
    WithAnyStored(out.dtype, [&](auto tag) {
      StoreAs(tag, static_cast<const T*>(rows), row_stride, count, depth,
              factor, static_cast<const T*>(row_factor), add, out);
    });
  }

  static void Add(void* sum, const void* term, int64_t count) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    T* HWY_RESTRICT to = static_cast<T*>(sum);
    const T* HWY_RESTRICT from = static_cast<const T*>(term);
    const size_t n = static_cast<size_t>(count);
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d,
                 to + i);
    }
    for (; i < n; ++i) to[i] += from[i];
  }

  static void Widen(const Rows& row, void* out) {
    WithStored<T>(row.dtype, [&](auto tag) {
      using Stored = decltype(tag);
      const D d;
      const size_t lanes = hn::Lanes(d);
      const size_t depth = static_cast<size_t>(row.depth);
      const auto* in = static_cast<const typename Stored::Type*>(row.data);
      T* to = static_cast<T*>(out);
      size_t i = 0;
      for (; i + lanes <= depth; i += lanes) {
        hn::StoreU(LoadWide(d, tag, in + i), d, to + i);
      }
      if (i < depth) {
        const V tail = LoadWideTail(d, tag, in + i, depth - i);
        StoreNarrowTail(d, Own(), tail, to + i, depth - i);
      }
    });
  }

  // Of positive x, infinite too; NaN stays NaN.
  static HWY_INLINE V LogOf(D d, V x) {
    return hn::IfThenElse(hn::Lt(x, hn::Inf(d)), hn::Log(d, x), x);
  }

  // Of x <= 0; NaN stays NaN.
  static HWY_INLINE V ExpOf(D d, V x) {
    return hn::IfThenElse(hn::Eq(x, x), hn::Exp(d, x), x);
  }

  static HWY_INLINE void FinishVector(D d, const float* sink, V& max, V sum,
                                      V& weight) {
    const V hidden = hn::Neg(hn::Inf(d));
    V shrink = hn::Set(d, T(1));
    if (sink != nullptr) {
      // exp(sink) joins the sums under the greater of both maxima.
      const V logit = hn::Set(d, static_cast<T>(*sink));
      const V with_sink = hn::IfThenElse(hn::Lt(max, logit), logit, max);
      shrink = hn::IfThenZeroElse(hn::Eq(max, hidden),
                                  ExpOf(d, hn::Sub(max, with_sink)));
      const V of_sink = ExpOf(d, hn::Sub(logit, with_sink));
      sum = hn::MulAdd(sum, shrink, of_sink);
      weight = hn::MulAdd(weight, shrink, of_sink);
      max = with_sink;
    }
    const auto saw_nothing = hn::Eq(sum, hn::Zero(d));
    max = hn::IfThenElse(saw_nothing, hidden, hn::Add(max, LogOf(d, sum)));
    weight = hn::IfThenZeroElse(saw_nothing, hn::Div(shrink, weight));
  }

  static void Finish(void* max, const void* sum, void* weight, int64_t count,
                     const float* sink) {
    const D d;
    const size_t lanes = hn::Lanes(d);
    const size_t rows = static_cast<size_t>(count);
    T* const m = static_cast<T*>(max);
    const T* const l = static_cast<const T*>(sum);
    T* const w = static_cast<T*>(weight);
    for (size_t i = 0; i < rows; i += lanes) {
      const size_t left = rows - i;
      V row_max = LoadSome(d, Own(), m + i, left);
      V row_weight = LoadSome(d, Own(), w + i, left);
      FinishVector(d, sink, row_max, LoadSome(d, Own(), l + i, left),
                   row_weight);
      if (left >= lanes) {
        hn::StoreU(row_max, d, m + i);
        hn::StoreU(row_weight, d, w + i);
      } else {
        StoreNarrowTail(d, Own(), row_max, m + i, left);
        StoreNarrowTail(d, Own(), row_weight, w + i, left);
      }
    }
  }

  static const RowKernels* Get() {
    static const RowKernels kernels = {Dot, Store, Add, Widen, Finish};
    return &kernels;
  }
};

const RowKernels* GetF32RowKernels() { return RowFunctions<float>::Get(); }
const RowKernels* GetF64RowKernels() { return RowFunctions<double>::Get(); }

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "src/simd/target.h"

namespace fa2::simd {

HWY_EXPORT(GetF32RowKernels);
HWY_EXPORT(GetF64RowKernels);

const RowKernels* RowKernelsFor(DType accumulator, int64_t targets) {
  return accumulator == DType::kF64
             ? FA2_TARGET_FUNCTION(GetF64RowKernels, targets)()
             : FA2_TARGET_FUNCTION(GetF32RowKernels, targets)();
}

}  // namespace fa2::simd

#endif  // HWY_ONCE
