// SPDX-License-Identifier: Apache-2.0
#include "src/attention/scores/non_finite.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "src/common/half.h"
#include "src/simd/rowwise/mask_scan.h"

namespace fa2::attention {
namespace {

double Load(const char* element, DType dtype) {
  switch (dtype) {
    case DType::kF64: {
      double value;
      memcpy(&value, element, sizeof(value));
      return value;
    }
    case DType::kF32: {
      float value;
      memcpy(&value, element, sizeof(value));
      return value;
    }
    default: {
      uint16_t bits;
      memcpy(&bits, element, sizeof(bits));
      return dtype == DType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits);
    }
  }
}

void Store(double value, DType dtype, char* element) {
  switch (dtype) {
    case DType::kF64:
      memcpy(element, &value, sizeof(value));
      return;
    case DType::kF32: {
      const float narrow = static_cast<float>(value);
      memcpy(element, &narrow, sizeof(narrow));
      return;
    }
    default: {
      const float narrow = static_cast<float>(value);
      const uint16_t bits =
          dtype == DType::kBF16 ? F32ToBf16(narrow) : F32ToF16(narrow);
      memcpy(element, &bits, sizeof(bits));
      return;
    }
  }
}

void Change(double source, NonFinite how, DType dtype, char* element) {
  const double change = how == NonFinite::kIsAdded
                            ? source
                            : std::numeric_limits<double>::quiet_NaN();
  Store(Load(element, dtype) + change, dtype, element);
}

// Whether block mask and bias leave query i, key j of the sequence visible.
bool Visible(const Problem& problem, const Sequence& sequence, int64_t head,
             int64_t i, int64_t j) {
  if (problem.blocks.given() &&
      !problem.blocks.Visible(sequence.batch, head, sequence.q_begin + i,
                              sequence.k_begin + j)) {
    return false;
  }
  const ConstTensorView& bias = problem.options.bias;
  if (!bias.given()) return true;
  const auto index = [&bias](int dim, int64_t n) {
    return bias.sizes[dim] == 1 ? 0 : n;
  };
  const char* element = At(bias, index(0, sequence.batch), index(1, head),
                           index(2, i), index(3, j));
  return !simd::Hides(element, bias.dtype);
}

// Calls body(d, value) for the non-finite elements of a row.
template <class Body>
void ForNonFinite(const ConstTensorView& view, int64_t batch, int64_t head,
                  int64_t row, const Body& body) {
  for (int64_t d = 0; d < view.sizes[3]; ++d) {
    const double value = Load(At(view, batch, head, row, d), view.dtype);
    if (!std::isfinite(value)) body(d, value);
  }
}

}  // namespace

void SpreadFromQueries(const Problem& problem, const ConstTensorView& source,
                       const TensorView& target, NonFinite how,
                       threading::Team& team) {
  // One kv head an item: its rows of `target` have one writer.
  const int64_t sequences = static_cast<int64_t>(problem.sequences.size());
  team.For(sequences * problem.kv_heads, [&](int64_t item, int) {
    const Sequence& s = problem.sequences[item / problem.kv_heads];
    const int64_t kv_head = item % problem.kv_heads;
    for (int64_t head = kv_head * problem.group();
         head < (kv_head + 1) * problem.group(); ++head) {
      for (int64_t i = 0; i < s.nq(); ++i) {
        const Interval keys = s.mask.Keys(i);
        ForNonFinite(source, s.batch, head, s.q_begin + i,
                     [&](int64_t d, double value) {
                       for (int64_t j = keys.begin; j < keys.end; ++j) {
                         if (!Visible(problem, s, head, i, j)) continue;
                         Change(value, how, target.dtype,
                                At(target, s.batch, kv_head, s.k_begin + j, d));
                       }
                     });
      }
    }
  });
}

void SpreadFromKeys(const Problem& problem, const ConstTensorView& source,
                    const TensorView& target, NonFinite how,
                    threading::Team& team) {
  const int64_t sequences = static_cast<int64_t>(problem.sequences.size());
  team.For(sequences * problem.q_heads, [&](int64_t item, int) {
    const Sequence& s = problem.sequences[item / problem.q_heads];
    const int64_t head = item % problem.q_heads;
    for (int64_t j = 0; j < s.nk(); ++j) {
      const Interval queries = s.mask.QueriesOf({j, j + 1});
      ForNonFinite(source, s.batch, head / problem.group(), s.k_begin + j,
                   [&](int64_t d, double value) {
                     for (int64_t i = queries.begin; i < queries.end; ++i) {
                       if (!Visible(problem, s, head, i, j)) continue;
                       Change(value, how, target.dtype,
                              At(target, s.batch, head, s.q_begin + i, d));
                     }
                   });
    }
  });
}

}  // namespace fa2::attention
