// A call of a pass from its arguments to its end: checked, planned, given its
// workspace, run.
#ifndef FA2_SRC_ATTENTION_CALL_PASS_CALL_H_
#define FA2_SRC_ATTENTION_CALL_PASS_CALL_H_

#include <cstddef>

#include "src/attention/call/problem.h"
#include "src/context/context_impl.h"
#include "src/simd/engines.h"
#include "src/threading/scratch_layout.h"
#include "src/threading/team.h"

namespace fa2 {
namespace attention {

// Pass names the types Args, Plan and Run of a pass, and how arguments are
// checked and planned:
//   Status Check(const Args&, Problem*);
//   void MakePlan(const Args&, const Problem&, const simd::Engine&,
//                 int threads, Plan*);
template <class Pass>
class PassCall {
 public:
  using Args = typename Pass::Args;

  static Status Run(const Args& args, Context* given) {
    return WithContext(given, [&](Context* context) {
      // Kept from call to call, so that a second call of the same shape
      // allocates nothing.
      static thread_local PassCall call;
      Context::Impl& impl = context->impl();
      Status status = call.Prepare(args, impl);
      if (!status.ok()) return status;
      threading::Workspace workspace;
      status = impl.workspaces().Acquire(call.WorkspaceBytes(args, impl),
                                         &workspace);
      if (!status.ok()) return status;
      Carver carver(workspace.data());
      typename Pass::Run run = call.MakeRun(args, impl, &carver);
      impl.pool().Together(call.plan_.workers,
                           [&](threading::Team& team) { run.Execute(team); });
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
  Status Prepare(const Args& args, Context::Impl& impl) {
    const Status status = Pass::Check(args, &problem_);
    if (!status.ok()) return status;
    engine_ =
        simd::ChooseEngine(impl.targets(), impl.engine_cap(), args.q.dtype,
                           args.options.precision, problem_.most_keys());
    Pass::MakePlan(args, problem_, *engine_, impl.pool().num_threads(), &plan_);
    return status;
  }

  typename Pass::Run MakeRun(const Args& args, Context::Impl& impl,
                             Carver* carver) const {
    return typename Pass::Run(args, problem_, plan_, *engine_, impl.targets(),
                              carver);
  }

  size_t WorkspaceBytes(const Args& args, Context::Impl& impl) const {
    Carver carver(nullptr);
    MakeRun(args, impl, &carver);
    return carver.used();
  }

  Problem problem_;
  typename Pass::Plan plan_;
  const simd::Engine* engine_ = nullptr;
};

}  // namespace attention
}  // namespace fa2

#endif  // FA2_SRC_ATTENTION_CALL_PASS_CALL_H_
