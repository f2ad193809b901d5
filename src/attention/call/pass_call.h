// SPDX-License-Identifier: Apache-2.0

// A call of a pass from its arguments to its end: checked, planned, given its
// workspace, run.
#ifndef FA2_SRC_ATTENTION_CALL_PASS_CALL_H_
#define FA2_SRC_ATTENTION_CALL_PASS_CALL_H_

#include <cstddef>

#include "src/attention/call/problem.h"
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

// Pass names the types Args and Plan of a pass and its State, a PassState; how
// arguments are checked and planned; what is done; and for the log a name and
// the multiply-adds of a pair of a query and a key:
//   kName, int64_t Depth(const Problem&);
//   Status Check(const Args&, Problem*);
//   void MakePlan(const Args&, const Problem&, const simd::Engine&,
//                 int threads, Plan*);
//   void Execute(State&, threading::Team&);
template <class Pass>
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
      Status status = call.Prepare(args, impl);
      if (!status.ok()) return status;
      threading::Workspace workspace;
      status = impl.workspaces().Acquire(call.WorkspaceBytes(args, impl),
                                         &workspace);
      if (!status.ok()) return status;
      threading::ScratchLayout layout(workspace.data());
      State state(call.Inputs(args, impl), &layout);
      impl.pool().Together(call.plan_.workers, [&](threading::Team& team) {
        Pass::Execute(state, team);
      });
      if (log.on()) call.Write(log, args.q.dtype, impl);
      return Status::Ok();
    });
  }

  static Status Workspace(const Args& args, size_t* bytes, Context* given) {
    return WithContext(given, [&](Context* context) {
      PassCall call;
      const Status status = call.Prepare(args, context->impl());
      if (status.ok()) *bytes = call.WorkspaceBytes(args, context->impl());
      return status;
    });
  }

 private:
  using State = typename Pass::State;

  Status Prepare(const Args& args, Context::Impl& impl) {
    const Status status = Pass::Check(args, &problem_);
    if (!status.ok()) return status;
    engine_ =
        simd::ChooseEngine(impl.targets(), impl.engine_cap(), args.q.dtype,
                           args.options.precision, problem_.most_keys());
    Pass::MakePlan(args, problem_, *engine_, impl.pool().num_threads(), &plan_);
    return status;
  }

  PassInputs<Args, typename Pass::Plan> Inputs(const Args& args,
                                               Context::Impl& impl) const {
    const DType accumulator = engine_->accumulator;
    return {args,
            problem_,
            plan_,
            *engine_,
            *simd::RowKernelsFor(accumulator, impl.targets()),
            *simd::StagingKernelsFor(accumulator, impl.targets()),
            impl.targets()};
  }

  void Write(const CallLog& log, DType dtype, Context::Impl& impl) const {
    const double products =
        problem_.pairs() * static_cast<double>(problem_.q_heads);
    log.Write({Pass::kName, ShapeOf(problem_), NameOf(dtype), engine_->name,
               plan_.workers, impl.pool().name(),
               2 * products * static_cast<double>(Pass::Depth(problem_))});
  }

  size_t WorkspaceBytes(const Args& args, Context::Impl& impl) const {
    threading::ScratchLayout layout(nullptr);
    const State state(Inputs(args, impl), &layout);
    return layout.used();
  }

  Problem problem_;
  typename Pass::Plan plan_;
  const simd::Engine* engine_ = nullptr;
};

}  // namespace attention
}  // namespace fa2

#endif  // FA2_SRC_ATTENTION_CALL_PASS_CALL_H_
