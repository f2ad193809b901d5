// SPDX-License-Identifier: Apache-2.0
#include "fa2/context.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "src/c_api/boundary.h"
#include "src/c_api/buffer_arena.h"

// The arena outlives the context that gives its workspace back to it.
struct fa2_context {
  std::unique_ptr<fa2::c_api::BufferArena> arena;
  std::unique_ptr<fa2::Context> context;
};

namespace fa2::c_api {
namespace {

Status OptionsOf(const fa2_context_options& from, BufferArena* arena,
                 ContextOptions* to) {
  const bool functions = from.allocate != nullptr || from.release != nullptr;
  if (from.workspace != nullptr && functions) {
    return Status::InvalidArgument(
        "workspace and allocate are both given; one of them must be NULL");
  }
  if ((from.workspace == nullptr) != (from.workspace_bytes == 0)) {
    return Status::InvalidArgument(
        "workspace is " +
        std::string(from.workspace == nullptr ? "NULL" : "given") +
        " and workspace_bytes is " + std::to_string(from.workspace_bytes) +
        "; both must be given or neither");
  }
  if (from.reserved != 0) {
    return Status::InvalidArgument("options.reserved is " +
                                   std::to_string(from.reserved) +
                                   "; it must be 0");
  }
  to->num_threads = from.num_threads;
  to->memory_limit = from.memory_limit;
  to->allocator = {from.allocate, from.release, from.opaque};
  if (arena != nullptr) to->allocator = arena->Allocator();
  if (from.max_target != nullptr) to->max_target = from.max_target;
  if (from.engine != nullptr) to->engine = from.engine;
  if (from.pool != nullptr) to->pool = from.pool;
  to->thread_pool = {from.run_workers, from.pool_opaque};
  return Status::Ok();
}

Status Create(const fa2_context_options* given, fa2_context** context) {
  if (context == nullptr) {
    return Status::InvalidArgument(
        "context is NULL; it must point to the handle to fill");
  }
  fa2_context_options from = {};
  if (given != nullptr) {
    Status status = ReadStruct("options", given, sizeof(size_t), &from);
    if (!status.ok()) return status;
  }
  auto made = std::make_unique<fa2_context>();
  if (from.workspace != nullptr) {
    made->arena =
        std::make_unique<BufferArena>(from.workspace, from.workspace_bytes);
  }
  ContextOptions options;
  Status status = OptionsOf(from, made->arena.get(), &options);
  if (status.ok()) status = Context::Create(options, &made->context);
  if (status.ok()) *context = made.release();
  return status;
}

template <size_t kBytes>
void Copy(const std::string& from, char (&to)[kBytes]) {
  const size_t length = std::min(from.size(), kBytes - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

std::string Join(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : " ") + name;
  return all;
}

Status ContextOrDefault(fa2_context* given, Context** context) {
  *context = ToContext(given);
  return *context != nullptr ? Status::Ok() : Context::Default(context);
}

Status GetInfo(fa2_context* given, fa2_context_info* info) {
  fa2_context_info made = {};
  size_t size = 0;
  if (info != nullptr) {
    // Only the size is read: the rest is the caller's uninitialised memory.
    size = info->struct_size;
    if (size < sizeof(size_t) || size > sizeof(made)) {
      return Status::InvalidArgument(
          "info.struct_size is " + std::to_string(size) +
          "; it must be sizeof(the struct), which is " +
          std::to_string(sizeof(made)) + " in this version");
    }
  } else {
    return Status::InvalidArgument(
        "info is NULL; it must point to the struct to fill");
  }
  Context* context = nullptr;
  Status status = ContextOrDefault(given, &context);
  if (!status.ok()) return status;
  const ContextInfo from = context->Info();
  made.struct_size = size;
  made.num_threads = from.num_threads;
  Copy(from.pool, made.pool);
  Copy(from.target, made.target);
  Copy(from.engine, made.engine);
  Copy(Join(from.targets), made.targets);
  Copy(Join(from.engines), made.engines);
  made.workspace_bytes = context->WorkspaceBytes();
  made.peak_workspace_bytes = context->PeakWorkspaceBytes();
  made.allocation_count = context->AllocationCount();
  std::memcpy(info, &made, size);
  return Status::Ok();
}

}  // namespace

Context* ToContext(fa2_context* context) {
  return context == nullptr ? nullptr : context->context.get();
}

}  // namespace fa2::c_api

extern "C" {

fa2_status fa2_context_create(const fa2_context_options* options,
                              fa2_context** context) {
  return fa2::c_api::Guard("fa2_context_create", [&] {
    return fa2::c_api::Create(options, context);
  });
}

void fa2_context_destroy(fa2_context* context) {
  (void)fa2::c_api::Guard("fa2_context_destroy", [&] {
    delete context;
    return fa2::Status::Ok();
  });
}

fa2_status fa2_context_get_info(fa2_context* context, fa2_context_info* info) {
  return fa2::c_api::Guard("fa2_context_get_info",
                           [&] { return fa2::c_api::GetInfo(context, info); });
}

fa2_status fa2_context_release_workspace(fa2_context* context) {
  return fa2::c_api::Guard("fa2_context_release_workspace", [&] {
    fa2::Context* found = nullptr;
    fa2::Status status = fa2::c_api::ContextOrDefault(context, &found);
    if (status.ok()) found->ReleaseWorkspace();
    return status;
  });
}

}  // extern "C"
