// SPDX-License-Identifier: Apache-2.0

// The innermost product: a block of C of up to 6 rows x 4 vectors held in
// registers, C = A B or C += A B, by outer products.

// Per-target include guard.
#if defined(FA2_SRC_SIMD_LANE_REGISTER_BLOCK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef FA2_SRC_SIMD_LANE_REGISTER_BLOCK_INL_H_
#undef FA2_SRC_SIMD_LANE_REGISTER_BLOCK_INL_H_
#else
#define FA2_SRC_SIMD_LANE_REGISTER_BLOCK_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/simd/math/load-inl.h"
#include "src/simd/math/prefetch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fa2::simd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 6 x 4 accumulators, 4 vectors of B and one of A are 29 of 32 registers; with
// 16 registers 6 x 2 + 2 + 1 are 15. Six rows (not eight) leave both counts
// without spills, and 24 (12) independent sums hide an FMA latency of 4 at two
// a cycle three (1.5) times over.
inline constexpr size_t kBlockRows = 6;
#if (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3) || HWY_TARGET == HWY_SCALAR
inline constexpr size_t kBlockVectors = 2;
#else
inline constexpr size_t kBlockVectors = 4;
#endif

// Whether a register block prefetches its rows of C and those of A that the
// next one takes. Where a step has 8 loads for 12 multiply-adds of half the
// width, a prefetch costs more than the miss (Zen 3, backward: 1 to 2%).
inline constexpr bool kPrefetchesRows = kBlockVectors > 2;

// How a product multiplies: what a lane of A and B holds, and the sum's lane
// type.
template <typename T>
struct MultiplyAdd {
  using Element = T;  // a lane of A and of B
  using Sum = T;
  // How S and dP are multiplied, whose operands may hold other lanes.
  using Scores = MultiplyAdd;
  // Neighbours along the summed dimension that share a lane: a step of a
  // product takes this many.
  static constexpr size_t kPerLane = 1;
  // Elements that P is the sum of.
  static constexpr size_t kTerms = 1;
  // Degree of the RoughExp2 that the backward's P is worth, and that the
  // forward's, with the logsumexp; 0: T's precision.
  static constexpr int kExpDegree = 0;
  static constexpr int kForwardExpDegree = 0;
  // Calls visit(tag) with the storage tag of an input's dtype.
  template <class Visitor>
  static HWY_INLINE void WithInput(DType dtype, const Visitor& visit) {
    WithStored<T>(dtype, visit);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Right(D d, const T* HWY_RESTRICT b) {
    return hn::Load(d, b);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Left(D d, const T* HWY_RESTRICT a) {
    return hn::Set(d, *a);
  }
  template <class V>
  static HWY_INLINE V Accumulate(V a, V b, V sum) {
    return hn::MulAdd(a, b, sum);
  }
};

// Steps of a sum that one turn of its loop takes: few branches, and room in
// registers for the addresses.
inline constexpr size_t kTurn = 4;

// Strides in elements. Sums run over `segments` runs of `steps` steps each, so
// that A may lie in panels; B continues from one run to the next, each of its
// rows as wide as the block, or as a whole panel where A is by columns.
template <typename Element, typename Sum>
struct Product {
  const Element* a;
  size_t a_row, a_step, a_segment;
  const Element* b;
  Sum* c;
  size_t c_row;
  size_t steps, segments;
  bool add;
  // With `add`: C's columns times these, + A B. nullptr for ones.
  const Sum* c_factor = nullptr;
  // What is read after this product, prefetched into L2 meanwhile: a turn
  // prefetches `next_step` bytes, from `next` on.
  const char* next = nullptr;
  size_t next_step = 0;
};

// What one register block prefetches.
template <typename Element, typename Sum>
HWY_INLINE size_t NextBytes(const Product<Element, Sum>& p) {
  return p.segments * (p.steps / kTurn) * p.next_step;
}

// The value is in a register here, by now. Without this GCC 12 reorders the
// multiply-adds of a few steps until it runs out of registers, and where there
// are 16 it reads a vector of B from memory again for each row of A (Zen 3, D
// 128: 0.73 of the peak instead of 0.845).
template <class V>
HWY_INLINE void Settle(V& value) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && \
    (HWY_COMPILER_GCC || HWY_COMPILER_CLANG)
  asm volatile("" : "+v"(value.raw));
#else
  (void)value;
#endif
}

// The same pointer, of which the compiler knows nothing.
template <typename Sum>
HWY_INLINE Sum* Opaque(Sum* p) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  asm("" : "+r"(p));
#endif
  return p;
}

// Where the sums of a register block go: to C.
struct ToMemory {
  static constexpr bool kIsMemory = true;
  // Before each register block.
  void Begin() const {}
};

// kUnitStep: a_step is 1 (A by rows); otherwise a_row is 1 (A by columns). A
// sink that is not memory is given A B, a vector of columns at a time, and
// `add`, C and its factors do not count (forward_sink-inl.h).
template <class Op, bool kUnitStep, size_t kRows, size_t kVectors, class D,
          class Sink = ToMemory>
HWY_NOINLINE void RegisterBlock(
    D d, const Product<typename Op::Element, typename Op::Sum>& product,
    const Sink& sink = Sink()) {
  using V = hn::Vec<D>;
  using Element = typename Op::Element;
  using Sum = typename Op::Sum;
  const size_t lanes = hn::Lanes(d);
  // Sizeless vector types cannot stand in arrays, hence 24 names. Those that
  // a smaller block does not use cost nothing.
  V c00 = hn::Zero(d), c01 = c00, c02 = c00, c03 = c00;
  V c10 = c00, c11 = c00, c12 = c00, c13 = c00;
  V c20 = c00, c21 = c00, c22 = c00, c23 = c00;
  V c30 = c00, c31 = c00, c32 = c00, c33 = c00;
  V c40 = c00, c41 = c00, c42 = c00, c43 = c00;
  V c50 = c00, c51 = c00, c52 = c00, c53 = c00;

  // The sums that C holds come from L2 at best: prefetched now, they are in L1
  // when the loop ends.
  const size_t c_row = product.c_row;
  const Sum* HWY_RESTRICT ahead = product.c;
  for (size_t i = 0; kPrefetchesRows && Sink::kIsMemory && i < kRows;
       ++i, ahead += c_row) {
    for (size_t j = 0; j < kVectors; ++j) hwy::Prefetch(ahead + j * lanes);
  }

  const size_t a_row = kUnitStep ? product.a_row : 1;
  const size_t a_step = kUnitStep ? 1 : product.a_step;
  const size_t b_step = (kUnitStep ? kVectors : kBlockVectors) * lanes;
  const Element* HWY_RESTRICT b = product.b;
  const size_t next_step = product.next_step;
  const size_t next_half = next_step / 2;
  const char* next =
      next_step == 0 ? reinterpret_cast<const char*>(product.b) : product.next;
#define FA2_SUM(c, b)               \
  {                                 \
    c = Op::Accumulate(left, b, c); \
    Settle(c);                      \
  }
#define FA2_ROW(i)                                                       \
  if constexpr (kRows > i) {                                             \
    const auto left =                                                    \
        Op::Left(d, (i < 3 ? a : a3) + (i % 3) * a_row + step * a_step); \
    FA2_SUM(c##i##0, b0)                                                 \
    if constexpr (kVectors > 1) FA2_SUM(c##i##1, b1)                     \
    if constexpr (kVectors > 2) FA2_SUM(c##i##2, b2)                     \
    if constexpr (kVectors > 3) FA2_SUM(c##i##3, b3)                     \
  }
#define FA2_STEP(s)                                                   \
  {                                                                   \
    constexpr size_t step = s;                                        \
    const Element* HWY_RESTRICT right = b + step * b_step;            \
    auto b0 = Op::Right(d, right);                                    \
    auto b1 = b0, b2 = b0, b3 = b0;                                   \
    if constexpr (kVectors > 1) b1 = Op::Right(d, right + lanes);     \
    if constexpr (kVectors > 2) b2 = Op::Right(d, right + 2 * lanes); \
    if constexpr (kVectors > 3) b3 = Op::Right(d, right + 3 * lanes); \
    if constexpr (kBlockVectors == 2) Settle(b0);                     \
    if constexpr (kBlockVectors == 2 && kVectors > 1) Settle(b1);     \
    FA2_ROW(0)                                                        \
    FA2_ROW(1)                                                        \
    FA2_ROW(2)                                                        \
    FA2_ROW(3)                                                        \
    FA2_ROW(4)                                                        \
    FA2_ROW(5)                                                        \
  }
  for (size_t segment = 0; segment < product.segments; ++segment) {
    const Element* HWY_RESTRICT a = product.a + segment * product.a_segment;
    const Element* HWY_RESTRICT a3 = a + 3 * a_row;
    size_t done = 0;
    for (; done + kTurn <= product.steps; done += kTurn) {
      if constexpr (kUnitStep && kPrefetchesRows) {
        // A line of each of the rows that the next block starts with.
        if (done % (64 / sizeof(Element)) == 0) {
          for (size_t i = 0; i < kRows; ++i) {
            hwy::Prefetch(a + (kRows + i) * a_row);
          }
        }
      }
      PrefetchL2(next);
      PrefetchL2(next + next_half);
      next += next_step;
      FA2_STEP(0)
      FA2_STEP(1)
      FA2_STEP(2)
      FA2_STEP(3)
      a += kTurn * a_step;
      a3 += kTurn * a_step;
      b += kTurn * b_step;
    }
    for (; done < product.steps; ++done) {
      FA2_STEP(0)
      a += a_step;
      a3 += a_step;
      b += b_step;
    }
  }
#undef FA2_SUM
#undef FA2_STEP
#undef FA2_ROW

  if constexpr (!Sink::kIsMemory) {
#define FA2_COLUMN(j)                                                     \
  if constexpr (kVectors > j) {                                           \
    sink.template Column<kRows>(d, j * lanes, c0##j, c1##j, c2##j, c3##j, \
                                c4##j, c5##j);                            \
  }
    FA2_COLUMN(0)
    FA2_COLUMN(1)
    FA2_COLUMN(2)
    FA2_COLUMN(3)
#undef FA2_COLUMN
    return;
  }

  // The compiler must not keep the addresses of 24 vectors from the prefetches
  // to here: it would spill them around the loop.
  Sum* HWY_RESTRICT c = Opaque(product.c);
#define FA2_ADD(i, j)         \
  if constexpr (kVectors > j) \
    c##i##j = hn::Add(hn::Load(d, c + j * lanes), c##i##j);
#define FA2_SCALE_ADD(i, j)   \
  if constexpr (kVectors > j) \
    c##i##j = hn::MulAdd(f##j, hn::Load(d, c + j * lanes), c##i##j);
#define FA2_STORE(i, j) \
  if constexpr (kVectors > j) hn::Store(c##i##j, d, c + j * lanes);
#define FA2_EACH(f, i)                          \
  if constexpr (kRows > i) {                    \
    f(i, 0) f(i, 1) f(i, 2) f(i, 3) c += c_row; \
  }
  if (product.add && product.c_factor != nullptr) {
    const Sum* HWY_RESTRICT f = product.c_factor;
    const V f0 = hn::Load(d, f);
    V f1 = f0, f2 = f0, f3 = f0;
    if constexpr (kVectors > 1) f1 = hn::Load(d, f + lanes);
    if constexpr (kVectors > 2) f2 = hn::Load(d, f + 2 * lanes);
    if constexpr (kVectors > 3) f3 = hn::Load(d, f + 3 * lanes);
    FA2_EACH(FA2_SCALE_ADD, 0)
    FA2_EACH(FA2_SCALE_ADD, 1)
    FA2_EACH(FA2_SCALE_ADD, 2)
    FA2_EACH(FA2_SCALE_ADD, 3)
    FA2_EACH(FA2_SCALE_ADD, 4)
    FA2_EACH(FA2_SCALE_ADD, 5)
    c = Opaque(product.c);
  } else if (product.add) {
    FA2_EACH(FA2_ADD, 0)
    FA2_EACH(FA2_ADD, 1)
    FA2_EACH(FA2_ADD, 2)
    FA2_EACH(FA2_ADD, 3)
    FA2_EACH(FA2_ADD, 4)
    FA2_EACH(FA2_ADD, 5)
    c = Opaque(product.c);
  }
  FA2_EACH(FA2_STORE, 0)
  FA2_EACH(FA2_STORE, 1)
  FA2_EACH(FA2_STORE, 2)
  FA2_EACH(FA2_STORE, 3)
  FA2_EACH(FA2_STORE, 4)
  FA2_EACH(FA2_STORE, 5)
#undef FA2_EACH
#undef FA2_SCALE_ADD
#undef FA2_ADD
#undef FA2_STORE
}

template <class Op, bool kUnitStep, size_t kVectors, class D>
HWY_INLINE void RegisterBlockOfRows(
    D d, size_t rows,
    const Product<typename Op::Element, typename Op::Sum>& product) {
  switch (rows) {
    case 1:
      return RegisterBlock<Op, kUnitStep, 1, kVectors>(d, product);
    case 2:
      return RegisterBlock<Op, kUnitStep, 2, kVectors>(d, product);
    case 3:
      return RegisterBlock<Op, kUnitStep, 3, kVectors>(d, product);
    case 4:
      return RegisterBlock<Op, kUnitStep, 4, kVectors>(d, product);
    case 5:
      return RegisterBlock<Op, kUnitStep, 5, kVectors>(d, product);
    default:
      return RegisterBlock<Op, kUnitStep, 6, kVectors>(d, product);
  }
}

// 1 <= rows <= kBlockRows, 1 <= vectors <= kBlockVectors.
template <class Op, bool kUnitStep, class D>
HWY_INLINE void AnyRegisterBlock(
    D d, size_t rows, size_t vectors,
    const Product<typename Op::Element, typename Op::Sum>& product) {
  if (vectors == kBlockVectors) {
    return RegisterBlockOfRows<Op, kUnitStep, kBlockVectors>(d, rows, product);
  }
  if constexpr (kBlockVectors > 2) {
    if (vectors == 3) {
      return RegisterBlockOfRows<Op, kUnitStep, 3>(d, rows, product);
    }
    if (vectors == 2) {
      return RegisterBlockOfRows<Op, kUnitStep, 2>(d, rows, product);
    }
  }
  RegisterBlockOfRows<Op, kUnitStep, 1>(d, rows, product);
}

}  // namespace HWY_NAMESPACE
}  // namespace fa2::simd
HWY_AFTER_NAMESPACE();

#endif
