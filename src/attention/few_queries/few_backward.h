// SPDX-License-Identifier: Apache-2.0

// The backward for few queries.
#ifndef FA2_SRC_ATTENTION_FEW_QUERIES_FEW_BACKWARD_H_
#define FA2_SRC_ATTENTION_FEW_QUERIES_FEW_BACKWARD_H_

#include "fa2/attention.h"
#include "src/attention/call/pass_call.h"
#include "src/attention/few_queries/buffers.h"
#include "src/attention/few_queries/plan.h"
#include "src/attention/few_queries/row_views.h"
#include "src/attention/scores/small_gradients.h"

namespace fa2::attention {

using FewBackwardInputs = PassInputs<AttentionBackwardArgs, FewQueriesPlan>;

// Rows of queries as products take them: `finite` has zeros for NaN and
// infinity.
struct FewOperand {
  FewOperand(int64_t rows, const ConstTensorView& tensor,
             const FewBackwardInputs& in, threading::ScratchLayout* layout);

  simd::DirectRows rows, finite_rows;
  std::byte* gathered;
  bool non_finite = false;  // some rows of some item were
};

// What a worker uses for one item after another.
struct alignas(threading::kWorkspaceAlignment) FewBackwardWorker {
  FewBackwardWorker(const FewBackwardInputs& in,
                    threading::ScratchLayout* layout);

  RowViews views;
  FewOperand q, dout;
  KeyRuns k, v;
  simd::DirectRows products, dp;
  simd::DirectRows dq;         // of a sequence that is one part
  simd::DirectRows gradients;  // dK or dV of a run of keys
  std::byte *lse, *delta;
  std::byte *gathered_out, *narrowed;
};

struct FewBackwardBuffers {
  FewBackwardBuffers(const FewBackwardInputs& inputs,
                     threading::ScratchLayout* layout);

  // dQ of the rows of an item.
  simd::DirectRows Dq(const FewQueriesItem& item,
                      const FewBackwardWorker& worker) const;

  const FewBackwardInputs& in;
  SmallGradients small;  // a term a part of a slope, a sequence of a sink
  const simd::DirectKernels& kernels;
  FewBackwardWorker* workers;
  DoneParts done;

 private:
  simd::DirectRows partials_;
};

using FewBackwardState = PassState<FewBackwardInputs, FewBackwardBuffers>;

struct FewQueriesBackward {
  using Args = AttentionBackwardArgs;
  using Plan = FewQueriesPlan;
  using Use = int;  // threads
  using State = FewBackwardState;
  // Not where dbias sums over what it broadcasts, or gradients of scores are
  // wanted that a softcap has not changed yet.
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

#endif  // FA2_SRC_ATTENTION_FEW_QUERIES_FEW_BACKWARD_H_
