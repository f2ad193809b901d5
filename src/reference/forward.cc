// SPDX-License-Identifier: Apache-2.0

// O = (P o Z) V and lse, row by row, in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "fa2/reference.h"
#include "src/checks/guard.h"
#include "src/platform/float_environment.h"
#include "src/reference/check.h"
#include "src/reference/scores.h"
#include "src/reference/sequences.h"
#include "src/reference/tensor_access.h"

namespace fa2 {

namespace {

// Of one head of one sequence. All results are kept until the last is there, so
// that a call whose memory ends has written nothing.
struct HeadResult {
  reference::Matrix out;
  std::vector<double> lse;
};

Status Forward(const AttentionForwardArgs& args) {
  namespace ref = reference;
  const AttentionOptions& options = args.options;
  if (Status status = ref::CheckForward(args); !status.ok()) return status;

  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const ref::Sequences sequences = ref::SequencesOf(args.q, args.k, options);
  const int64_t heads = args.q.sizes[1];
  const int64_t kv_heads = args.k.sizes[1];
  const int64_t value_dim = args.v.sizes[3];
  const double scale = ref::ScaleOf(options, args.q.sizes[3]);

  std::vector<HeadResult> results;
  for (const ref::Sequence& seq : sequences.list) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv_head = h / (heads / kv_heads);
      const ref::Matrix q =
          ref::LoadRows(args.q, seq.batch, h, seq.q_begin, seq.nq);
      const ref::Matrix k =
          ref::LoadRows(args.k, seq.batch, kv_head, seq.k_begin, seq.nk);
      const ref::Matrix v =
          ref::LoadRows(args.v, seq.batch, kv_head, seq.k_begin, seq.nk);
      const double sink = options.sinks.given()
                              ? ref::Load(options.sinks, 0, h, 0, 0)
                              : -kInfinity;
      HeadResult result{ref::Matrix(seq.nq, value_dim), {}};
      ref::Matrix& out = result.out;
      for (int64_t i = 0; i < seq.nq; ++i) {
        const std::vector<ref::Score> scores = ref::ScoreRow(
            options, scale, {sequences, seq, h, heads, i}, q.row(i), k);

        // lse = log(sum_j exp(S_ij) + exp(sink)), the greatest term in front.
        double lse = sink;
        if (!scores.empty()) {
          double max = sink;
          for (const ref::Score& s : scores) max = std::max(max, s.value);
          double sum = std::exp(sink - max);
          for (const ref::Score& s : scores) sum += std::exp(s.value - max);
          lse = max + std::log(sum);
        }

        for (const ref::Score& s : scores) {
          if (s.keep == 0.0) continue;
          const double p = std::exp(s.value - lse) * s.keep;
          const double* v_row = v.row(s.key);
          for (int64_t d = 0; d < value_dim; ++d) {
            out.row(i)[d] += p * v_row[d];
          }
        }
        if (args.lse.given()) result.lse.push_back(lse);
      }
      results.push_back(std::move(result));
    }
  }

  size_t next = 0;
  for (const ref::Sequence& seq : sequences.list) {
    for (int64_t h = 0; h < heads; ++h) {
      const HeadResult& result = results[next++];
      ref::StoreRows(result.out, false, args.out, seq.batch, h, seq.q_begin,
                     seq.nq);
      for (size_t i = 0; i < result.lse.size(); ++i) {
        ref::StoreStatistic(args.lse, sequences, seq, h,
                            static_cast<int64_t>(i), result.lse[i]);
      }
    }
  }
  return Status::Ok();
}

}  // namespace

Status AttentionReferenceForward(const AttentionForwardArgs& args) {
  return checks::Guarded([&] {
    const platform::DefaultFloatEnvironment floats;
    return Forward(args);
  });
}

}  // namespace fa2
