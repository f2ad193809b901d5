// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/visibility.h"

#include <algorithm>
#include <limits>

#include "src/common/philox.h"
#include "src/reference/tensor_access.h"

namespace fa2::verify {

KeyRange VisibleKeys(const Options& options, const Faults& faults,
                     const Sequence& s, int64_t i) {
  const Causal causal = faults.causal.value_or(options.causal);
  const int64_t bottom_right = i + s.nk - s.nq;
  int64_t begin = faults.key_begin;
  int64_t end = std::numeric_limits<int64_t>::max() / 4;
  if (causal != Causal::kNone) {
    const int64_t diagonal = causal == Causal::kTopLeft ? i : bottom_right;
    end = std::min(end, diagonal + 1 + faults.causal_shift);
  }
  // The window keeps the declared diagonal where only the causal edge moves.
  const bool from_top_left =
      (options.causal == Causal::kTopLeft) != faults.window_from_other_diagonal;
  const int64_t diagonal = from_top_left ? i : bottom_right;
  if (options.window_left >= 0) {
    begin = std::max(begin, diagonal - options.window_left - faults.left_shift);
    if (faults.window_block > 0) {
      const int64_t block = faults.window_block;
      const auto last_query = [&](int64_t j) {
        const int64_t end_of_window =
            j / block * block + options.window_left + 1;
        return (end_of_window + block - 1) / block * block;
      };
      while (begin < s.nk && last_query(begin) <= i) {
        begin = (begin / block + 1) * block;
      }
    }
  }
  if (options.window_right >= 0) {
    end =
        std::min(end, diagonal + options.window_right + 1 + faults.right_shift);
  }
  KeyRange range;
  const int64_t padded =
      faults.padded_tile > 0
          ? (faults.padded_tile - s.nk % faults.padded_tile) %
                faults.padded_tile
          : faults.padded_keys;
  const int64_t cut =
      faults.key_tile_cut > 0 ? s.nk % faults.key_tile_cut : faults.keys_cut;
  range.padded = std::clamp<int64_t>(end - s.nk, 0, padded);
  range.begin = std::max<int64_t>(0, begin);
  range.end = std::min(end, s.nk - cut);
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

namespace {

// Where element (i, j) is read from when the mask is shifted. False where it
// lies past the edge, and *keep says what is there.
bool Shifted(const Faults& faults, int64_t rows, int64_t columns, int64_t* i,
             int64_t* j, bool* keep) {
  *i += faults.keep_row_shift;
  *j += faults.keep_column_shift;
  switch (faults.keep_edge) {
    case Edge::kWrapped:
      *i = (*i % rows + rows) % rows;
      *j = (*j % columns + columns) % columns;
      return true;
    case Edge::kFlat:
      return true;
    case Edge::kClamped:
      *i = std::clamp<int64_t>(*i, 0, rows - 1);
      *j = std::clamp<int64_t>(*j, 0, columns - 1);
      return true;
    case Edge::kDropped:
    case Edge::kKept:
      *keep = faults.keep_edge == Edge::kKept;
      return *i >= 0 && *i < rows && *j >= 0 && *j < columns;
  }
  return true;
}

// The element of a mask so many rows and columns on in memory, which wraps.
bool FlatKeep(const ConstTensorView& keep, const Faults& faults,
              const Sizes& at) {
  int64_t size = 1;
  for (const int64_t n : keep.sizes) size *= n;
  const int64_t offset = reference::OffsetOf(keep, at[0], at[1], at[2], at[3]) +
                         faults.keep_row_shift * keep.sizes[3] +
                         faults.keep_column_shift;
  return reference::LoadAt(keep.data, keep.dtype,
                           (offset % size + size) % size) != 0.0;
}

}  // namespace

template <class T>
void KeepRow(const Problem& problem, const Faults& faults, const Sequence& s,
             int64_t head, int64_t i, int64_t begin, int64_t end, T* keep) {
  const Options& options = problem.options;
  const int64_t rows = problem.keep.given() ? s.nq : problem.max_q;
  const int64_t columns = problem.keep.given() ? s.nk : problem.max_k;
  const bool shifted =
      faults.keep_row_shift != 0 || faults.keep_column_shift != 0;
  head = (head + faults.keep_head_shift + problem.heads) % problem.heads;
  const auto row =
      static_cast<uint64_t>((s.index * problem.heads + head) * problem.max_q);
  for (int64_t j = begin; j < end; ++j) {
    int64_t from_i = i, from_j = j;
    bool kept = true;
    if (!shifted || Shifted(faults, rows, columns, &from_i, &from_j, &kept)) {
      if (problem.keep.given()) {
        kept = shifted && faults.keep_edge == Edge::kFlat
                   ? FlatKeep(problem.keep.view, faults, {s.index, head, i, j})
                   : Get(problem.keep.view, {s.index, head, from_i, from_j}) !=
                         0.0;
      } else {
        const uint64_t n = options.philox_offset +
                           (row + static_cast<uint64_t>(from_i)) *
                               static_cast<uint64_t>(problem.max_k) +
                           static_cast<uint64_t>(from_j);
        kept = PhiloxKeep(options.dropout_p, *options.philox_seed, n);
      }
    }
    keep[j - begin] = static_cast<T>(kept ? 1 : 0);
  }
}

template void KeepRow(const Problem&, const Faults&, const Sequence&, int64_t,
                      int64_t, int64_t, int64_t, float*);
template void KeepRow(const Problem&, const Faults&, const Sequence&, int64_t,
                      int64_t, int64_t, int64_t, double*);

}  // namespace fa2::verify
