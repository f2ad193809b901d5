// SPDX-License-Identifier: Apache-2.0

// A call of a pass from its arguments to its end: checked, planned, given its
// workspace, run.
#ifndef FA2_SRC_ATTENTION_CALL_PASS_CALL_H_
#define FA2_SRC_ATTENTION_CALL_PASS_CALL_H_

#include <algorithm>
#include <cstddef>

#include "src/attention/call/problem.h"
#include "src/attention/call/remembered_plans.h"
#include "src/checks/return_if_error.h"
#include "src/context/call_log.h"
#include "src/context/context_impl.h"
#include "src/simd/engines.h"
#include "src/simd/rowwise/rows.h"
#include "src/simd/rowwise/staging.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/team.h"

namespace fa2 {
namespace attention {

// What a pass works from.
template <class ArgsType, class PlanType>
struct PassInputs {
  const ArgsType& args;
  const Problem& problem;
  const PlanType& plan;
  const simd::Engine& engine;
  const simd::RowKernels& row_kernels;
  const simd::StagingKernels& staging;
  int64_t targets;

  // Bytes of an element of the engine's accumulators.
  size_t element() const { return SizeOf(engine.accumulator); }
};

// And where: its workspace, seen as typed buffers. Buffers(inputs, layout)
// keeps a reference to the inputs.
template <class Inputs, class Buffers>
struct PassState : Inputs {
  PassState(const Inputs& inputs, threading::ScratchLayout* layout)
      : Inputs(inputs), buffers(*this, layout) {}
  PassState(const PassState&) = delete;
  PassState& operator=(const PassState&) = delete;

  Buffers buffers;
};

// Pass names the types Args and Plan of a pass, Use, what a plan depends on
// beside the problem and the engine, and its State, a PassState; how
// arguments are checked and planned; what is done; and for the log a name and
// the multiply-adds of a pair of a query and a key:
//   kName, int64_t Depth(const Problem&);
//   Status Check(const Args&, Problem*);
//   Use UseOf(const Args&, const Problem&, const simd::Engine&, int threads);
//   void MakePlan(const Problem&, const simd::Engine&, const Use&, Plan*);
//   bool IsOneStep(const Problem&, const Plan&);
//   void Execute(State&, threading::Team&);
// where IsOneStep says that the team is called once, but for NaN and infinity.
// FewQueries is the same pass by products with keys as they lie, with Plan,
// Use, State, UseOf, MakePlan, IsOneStep and Execute of its own, for the calls
// that it takes:
//   bool Takes(const Args&, const Problem&, const simd::Engine&);
template <class Pass, class FewQueries>
class PassCall {
 public:
  using Args = typename Pass::Args;

  static Status Run(const Args& args, Context* given) {
    return WithContext(given, [&](Context* context) {
      // Kept from call to call, so that a second call of the same shape
      // allocates nothing.
      const KeptObject<PassCall> kept(context->impl().kept());
      PassCall& call = *kept;
      const CallLog log;
      Context::Impl& impl = context->impl();
      FA2_RETURN_IF_ERROR(call.Prepare(args, impl));
      FA2_RETURN_IF_ERROR(
          call.few_plan_ != nullptr
              ? call.template Execute<FewQueries>(args, *call.few_plan_, impl)
              : call.template Execute<Pass>(args, *call.plan_, impl));
      if (log.on()) call.Write(log, args.q.dtype, impl);
      return Status::Ok();
    });
  }

  static Status Workspace(const Args& args, size_t* bytes, Context* given) {
    return WithContext(given, [&](Context* context) {
      PassCall call;
      Context::Impl& impl = context->impl();
      FA2_RETURN_IF_ERROR(call.Prepare(args, impl));
      *bytes =
          call.few_plan_ != nullptr
              ? call.template WorkspaceBytes<FewQueries>(args, *call.few_plan_,
                                                         impl)
              : call.template WorkspaceBytes<Pass>(args, *call.plan_, impl);
      return Status::Ok();
    });
  }

 private:
  Status Prepare(const Args& args, Context::Impl& impl) {
    FA2_RETURN_IF_ERROR(Pass::Check(args, &problem_));
    engine_ =
        simd::ChooseEngine(impl.targets(), impl.engine_cap(),
                           {args.q.dtype, args.options.precision,
                            problem_.most_keys(), problem_.most_queries(),
                            std::max(problem_.head_dim, problem_.value_dim)});
    const int threads = impl.pool().num_threads();
    plan_ = nullptr;
    few_plan_ = nullptr;
    if (FewQueries::Takes(args, problem_, *engine_)) {
      few_plan_ = &PlanOf<FewQueries>(args, threads, &few_plans_);
    } else {
      plan_ = &PlanOf<Pass>(args, threads, &plans_);
    }
    return Status::Ok();
  }

  template <class Chosen>
  using Plans = RememberedPlans<typename Chosen::Use, typename Chosen::Plan>;

  template <class Chosen>
  const typename Chosen::Plan& PlanOf(const Args& args, int threads,
                                      Plans<Chosen>* plans) const {
    const auto use = Chosen::UseOf(args, problem_, *engine_, threads);
    return plans->Of(problem_, *engine_, use, [&](typename Chosen::Plan* plan) {
      Chosen::MakePlan(problem_, *engine_, use, plan);
    });
  }

  template <class Chosen>
  Status Execute(const Args& args, const typename Chosen::Plan& plan,
                 Context::Impl& impl) const {
    threading::Workspace workspace;
    FA2_RETURN_IF_ERROR(impl.workspaces().Acquire(
        WorkspaceBytes<Chosen>(args, plan, impl), &workspace));
    threading::ScratchLayout layout(workspace.data());
    typename Chosen::State state(Inputs(args, plan, impl), &layout);
    impl.pool().Together(
        plan.workers, Chosen::IsOneStep(problem_, plan),
        [&](threading::Team& team) { Chosen::Execute(state, team); });
    return Status::Ok();
  }

  template <class Plan>
  PassInputs<Args, Plan> Inputs(const Args& args, const Plan& plan,
                                Context::Impl& impl) const {
    const DType accumulator = engine_->accumulator;
    return {args,
            problem_,
            plan,
            *engine_,
            *simd::RowKernelsFor(accumulator, impl.targets()),
            *simd::StagingKernelsFor(accumulator, impl.targets()),
            impl.targets()};
  }

  template <class Chosen>
  size_t WorkspaceBytes(const Args& args, const typename Chosen::Plan& plan,
                        Context::Impl& impl) const {
    threading::ScratchLayout layout(nullptr);
    const typename Chosen::State state(Inputs(args, plan, impl), &layout);
    return layout.used();
  }

  void Write(const CallLog& log, DType dtype, Context::Impl& impl) const {
    const double products =
        problem_.pairs() * static_cast<double>(problem_.q_heads);
    log.Write({Pass::kName, ShapeOf(problem_), NameOf(dtype), engine_->name,
               few_plan_ != nullptr ? few_plan_->workers : plan_->workers,
               impl.pool().name(),
               2 * products * static_cast<double>(Pass::Depth(problem_))});
  }

  Problem problem_;
  Plans<Pass> plans_;
  Plans<FewQueries> few_plans_;
  // Of the call: one of them.
  const typename Pass::Plan* plan_ = nullptr;
  const typename FewQueries::Plan* few_plan_ = nullptr;
  const simd::Engine* engine_ = nullptr;
};

}  // namespace attention
}  // namespace fa2

#endif  // FA2_SRC_ATTENTION_CALL_PASS_CALL_H_
