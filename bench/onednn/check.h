// SPDX-License-Identifier: Apache-2.0

// Whether oneDNN computed attention: its results beside fa2's, so that no wrong
// kernel is timed.
#ifndef FA2_BENCH_ONEDNN_CHECK_H_
#define FA2_BENCH_ONEDNN_CHECK_H_

#include <string>

#include "bench/attention/case.h"
#include "bench/onednn/training_graph.h"

namespace fa2::bench {

// The largest relative L2 difference of out, logsumexp, dQ, dK and dV, after
// both passes have run, from those that fa2 computes from the same inputs in
// f32, `exact`. A sentence in *error where that is more than rounding explains.
double Difference(const AttentionCase& c, const TrainingGraph& graph,
                  std::string* error);

}  // namespace fa2::bench

#endif  // FA2_BENCH_ONEDNN_CHECK_H_
