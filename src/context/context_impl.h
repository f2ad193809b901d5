// SPDX-License-Identifier: Apache-2.0

// What the library itself sees of a Context.
#ifndef FA2_SRC_CONTEXT_CONTEXT_IMPL_H_
#define FA2_SRC_CONTEXT_CONTEXT_IMPL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "fa2/context.h"
#include "src/checks/guard.h"
#include "src/context/kept_objects.h"
#include "src/platform/float_environment.h"
#include "src/simd/engines.h"
#include "src/threading/pool.h"
#include "src/threading/workspace.h"

namespace fa2 {

class Context::Impl {
 public:
  Impl(const ContextOptions& options, std::unique_ptr<threading::Pool> pool,
       int64_t targets, const simd::EngineCap& cap)
      : pool_(std::move(pool)),
        workspaces_(options.allocator, options.memory_limit),
        targets_(targets),
        cap_(cap) {}

  const threading::Pool& pool() const { return *pool_; }
  threading::WorkspacePool& workspaces() { return workspaces_; }
  const threading::WorkspacePool& workspaces() const { return workspaces_; }
  KeptObjects& kept() { return kept_; }
  // Highway targets that calls on this context may use; the best one is used.
  int64_t targets() const { return targets_; }
  // Which matrix engines calls may use.
  const simd::EngineCap& engine_cap() const { return cap_; }

 private:
  std::unique_ptr<threading::Pool> pool_;
  threading::WorkspacePool workspaces_;
  KeptObjects kept_;
  int64_t targets_;
  simd::EngineCap cap_;
};

// The given context, or the default one; an error when there is none to be had.
Status ResolveContext(Context* given, Context** context);

// Runs call(context) on the given or the default context, guarded: running out
// of memory anywhere inside becomes a status, and the caller's floating-point
// settings count for nothing.
template <class Call>
Status WithContext(Context* given, const Call& call) {
  return checks::Guarded([&]() -> Status {
    const platform::DefaultFloatEnvironment floats;
    Context* context = nullptr;
    if (Status status = ResolveContext(given, &context); !status.ok()) {
      return status;
    }
    return call(context);
  });
}

}  // namespace fa2

#endif  // FA2_SRC_CONTEXT_CONTEXT_IMPL_H_
