// SPDX-License-Identifier: Apache-2.0
#include "fa2/context.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "src/checks/guard.h"
#include "src/context/context_impl.h"
#include "src/platform/cores.h"
#include "src/simd/target.h"
#include "src/threading/pools.h"

namespace fa2 {
namespace {

// Beyond this a thread count is a mistake, not a machine.
constexpr int kMaxThreads = 4096;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string Join(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

Status ResolveThreads(int wanted, int* num_threads) {
  if (wanted < 0 || wanted > kMaxThreads) {
    return Status::InvalidArgument(
        "num_threads is " + std::to_string(wanted) + "; it must be 0 to " +
        std::to_string(kMaxThreads) + " (0: FA2_NUM_THREADS or all cores)");
  }
  if (wanted > 0) {
    *num_threads = wanted;
    return Status::Ok();
  }
  const std::string text = Environment("FA2_NUM_THREADS");
  if (text.empty()) {
    *num_threads = std::min(platform::UsableCores(), kMaxThreads);
    return Status::Ok();
  }
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (errno != 0 || *end != '\0' || value < 1 || value > kMaxThreads) {
    return Status::InvalidArgument("FA2_NUM_THREADS is '" + text +
                                   "'; it must be a number from 1 to " +
                                   std::to_string(kMaxThreads));
  }
  *num_threads = static_cast<int>(value);
  return Status::Ok();
}

Status ResolveTargets(const std::string& option, int64_t* targets) {
  const bool from_option = !option.empty();
  const std::string name = from_option ? option : Environment("FA2_MAX_TARGET");
  if (name.empty()) {
    *targets = simd::AvailableTargets();
    return Status::Ok();
  }
  *targets = simd::TargetsUpTo(name);
  if (*targets == 0) {
    return Status::Unsupported(
        std::string(from_option ? "max_target" : "FA2_MAX_TARGET") + " is '" +
        name + "'; this build and CPU have " +
        Join(simd::TargetNames(simd::AvailableTargets())));
  }
  return Status::Ok();
}

Status ResolveEngine(const std::string& option, int64_t targets,
                     simd::EngineCap* cap) {
  const bool from_option = !option.empty();
  cap->name = from_option ? option : Environment("FA2_ENGINE");
  if (cap->name.empty()) return Status::Ok();
  const std::vector<std::string> names = simd::EngineNames(targets);
  if (std::find(names.begin(), names.end(), cap->name) == names.end()) {
    return Status::Unsupported(
        std::string(from_option ? "engine" : "FA2_ENGINE") + " is '" +
        cap->name + "'; with target " + simd::BestTargetName(targets) +
        " this build and CPU have " + Join(names));
  }
  return Status::Ok();
}

Status MakePool(const ContextOptions& options, int num_threads,
                std::unique_ptr<threading::Pool>* pool) {
  if (options.thread_pool.run != nullptr) {
    if (!options.pool.empty()) {
      return Status::InvalidArgument("pool is '" + options.pool +
                                     "' and thread_pool is given too; one of "
                                     "them must be left out");
    }
    *pool = threading::MakeCallerPool(num_threads, options.thread_pool);
    return Status::Ok();
  }
  const bool from_option = !options.pool.empty();
  const std::string name = from_option ? options.pool : Environment("FA2_POOL");
  if (name.empty() || name == "tbb") {
    *pool = threading::MakeTbbPool(num_threads);
    return Status::Ok();
  }
  const std::string given =
      std::string(from_option ? "pool" : "FA2_POOL") + " is '" + name + "'";
  if (name != "openmp") {
    return Status::InvalidArgument(given + "; it must be 'tbb' or 'openmp'");
  }
  *pool = threading::MakeOpenMpPool(num_threads);
  if (*pool != nullptr) return Status::Ok();
  return Status::Unsupported(
      given +
      ", and the process has loaded no OpenMP runtime (libgomp, libiomp5, "
      "libomp); it must have, or the pool be 'tbb'");
}

}  // namespace

Context::Context(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Context::~Context() = default;

Status Context::Create(const ContextOptions& options,
                       std::unique_ptr<Context>* context) {
  return checks::Guarded([&]() -> Status {
    if (context == nullptr) {
      return Status::InvalidArgument(
          "context is null; it must point to the unique_ptr to fill");
    }
    if ((options.allocator.allocate == nullptr) !=
        (options.allocator.release == nullptr)) {
      return Status::InvalidArgument(
          "allocator has only one of allocate and release; it must have both "
          "or "
          "neither");
    }
    int num_threads = 0;
    int64_t targets = 0;
    simd::EngineCap cap;
    Status status = ResolveThreads(options.num_threads, &num_threads);
    if (status.ok()) status = ResolveTargets(options.max_target, &targets);
    if (status.ok()) status = ResolveEngine(options.engine, targets, &cap);
    std::unique_ptr<threading::Pool> pool;
    if (status.ok()) status = MakePool(options, num_threads, &pool);
    if (!status.ok()) return status;
    context->reset(new Context(
        std::make_unique<Impl>(options, std::move(pool), targets, cap)));
    return status;
  });
}

Status Context::Default(Context** context) {
  struct Made {
    std::unique_ptr<Context> context;
    Status status;
    Made() : status(Create(ContextOptions(), &context)) {
      // What memory may allow later is tried again.
      if (status.code() == StatusCode::kOutOfMemory) throw std::bad_alloc();
    }
  };
  *context = nullptr;
  return checks::Guarded([&]() -> Status {
    // Never destroyed: calls from other static destructors may still come.
    static const Made* const made = new Made();
    *context = made->context.get();
    return made->status;
  });
}

ContextInfo Context::Info() const {
  ContextInfo info;
  const int64_t targets = impl_->targets();
  info.num_threads = impl_->pool().num_threads();
  info.pool = impl_->pool().name();
  info.target = simd::BestTargetName(targets);
  info.engine = simd::ChooseEngine(targets, impl_->engine_cap(),
                                   {DType::kBF16, Precision::kFast,
                                    simd::kManyKeys, /*depth=*/64})
                    ->name;
  info.targets = simd::TargetNames(simd::AvailableTargets());
  info.engines = simd::EngineNames(targets);
  return info;
}

size_t Context::WorkspaceBytes() const {
  return impl_->workspaces().HeldBytes();
}
size_t Context::PeakWorkspaceBytes() const {
  return impl_->workspaces().PeakBytes();
}
size_t Context::AllocationCount() const {
  return impl_->workspaces().Allocations();
}
void Context::ReleaseWorkspace() { impl_->workspaces().Trim(); }

Status ResolveContext(Context* given, Context** context) {
  *context = given;
  return given != nullptr ? Status::Ok() : Context::Default(context);
}

}  // namespace fa2
