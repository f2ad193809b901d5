// SPDX-License-Identifier: Apache-2.0

// The forward for few queries (flash-decoding).
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_FEW_FORWARD_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_FEW_FORWARD_H_

#include "fa2/attention.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/few_queries/buffers.h"
#include "src/attention/few_queries/plan.h"
#include "src/attention/few_queries/row_views.h"

namespace fa2::attention {

using FewForwardInputs = PassInputs<AttentionForwardArgs, FewQueriesPlan>;

// The rows of an item: what they have of O, their maxima and their sums.
struct FewForwardRows {
  // Of so many items.
  FewForwardRows(int64_t items, const FewForwardInputs& in,
                 threading::ScratchLayout* layout);
  // Those of an item.
  FewForwardRows Of(int64_t item, const FewForwardInputs& in) const;

  simd::DirectRows out;
  std::byte *max, *sum;
};

// What a worker uses for one item after another.
struct alignas(threading::kWorkspaceAlignment) FewForwardWorker {
  FewForwardWorker(const FewForwardInputs& in,
                   threading::ScratchLayout* layout);

  int64_t run_keys;
  RowViews views;
  FewForwardRows rows;  // of an item that is whole
  KeyRuns k, v;
  simd::DirectRows q, products;
  std::byte *gathered_q, *narrowed;
};

struct FewForwardBuffers {
  FewForwardBuffers(const FewForwardInputs& inputs,
                    threading::ScratchLayout* layout);

  // The rows of an item.
  FewForwardRows Rows(const FewQueriesItem& item,
                      const FewForwardWorker& worker) const;

  const FewForwardInputs& in;
  const simd::DirectKernels& kernels;
  FewForwardWorker* workers;
  DoneParts done;

 private:
  FewForwardRows partials_;
};

using FewForwardState = PassState<FewForwardInputs, FewForwardBuffers>;

struct FewQueriesForward {
  using Args = AttentionForwardArgs;
  using Plan = FewQueriesPlan;
  using Use = int;  // threads
  using State = FewForwardState;
  static bool Takes(const Args& args, const Problem& problem,
                    const simd::Engine& engine);
  static Use UseOf(const Args& /*args*/, const Problem& /*problem*/,
                   const simd::Engine& /*engine*/, int threads) {
    return threads;
  }
  static void MakePlan(const Problem& problem, const simd::Engine& engine,
                       Use threads, Plan* plan);
  static bool IsOneStep(const Problem& /*problem*/, const Plan& /*plan*/) {
    return true;
  }
  static void Execute(State& call, threading::Team& team);
};

}  // namespace fa2::attention

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_FEW_FORWARD_H_
