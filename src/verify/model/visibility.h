// SPDX-License-Identifier: Apache-2.0

// Which keys a query sees, and which of its scores dropout keeps.
#ifndef FA2_SRC_VERIFY_MODEL_VISIBILITY_H_
#define FA2_SRC_VERIFY_MODEL_VISIBILITY_H_

#include <cstdint>

#include "src/verify/model/faults.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;     // of the keys that are there
  int64_t padded = 0;  // keys of zeros that join behind them
};

// Keys that query i of the sequence sees by causal mask and window.
KeyRange VisibleKeys(const Options& options, const Faults& faults,
                     const Sequence& sequence, int64_t i);

// 1 where dropout keeps element (i, j) for j in [begin, end), else 0.
template <class T>
void KeepRow(const Problem& problem, const Faults& faults,
             const Sequence& sequence, int64_t head, int64_t i, int64_t begin,
             int64_t end, T* keep);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_VISIBILITY_H_
