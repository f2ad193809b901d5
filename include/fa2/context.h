// SPDX-License-Identifier: Apache-2.0

// A Context owns what a call needs beside its arguments: threads, workspace
// memory, and the choice of kernels.
#ifndef FA2_CONTEXT_H_
#define FA2_CONTEXT_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fa2/export.h"
#include "fa2/status.h"

namespace fa2 {

// Where workspace comes from. `allocate` returns memory aligned to `alignment`
// or nullptr; both are called with `opaque`.
struct Allocator {
  void* (*allocate)(void* opaque, size_t bytes, size_t alignment) = nullptr;
  void (*release)(void* opaque, void* memory, size_t bytes) = nullptr;
  void* opaque = nullptr;
};

// Threads of the program's own, for a context to run on.
struct ThreadPool {
  // Calls worker(argument, i) for i from 0 to workers - 1, each on a thread of
  // its own as far as there are threads, and returns when these calls have.
  // Those for which there is no thread may come one after another, or never:
  // then the others do their work. A worker may wait for another one that has
  // begun, so threads must not keep each other from running. Called from any
  // thread that calls fa2, several at once; does not throw, nor does worker.
  void (*run)(void* opaque, int workers,
              void (*worker)(void* argument, int index),
              void* argument) = nullptr;
  void* opaque = nullptr;
};

struct ContextOptions {
  // 0: FA2_NUM_THREADS, or all cores that this process may use.
  int num_threads = 0;
  // Bytes of workspace that the context may hold at once; 0: no limit.
  size_t memory_limit = 0;
  // Empty: 2 MiB pages where the system gives them.
  Allocator allocator;
  // Highway's name in lower case ("avx2"); empty: FA2_MAX_TARGET, or the best.
  std::string max_target;
  // "f32", "bf16dot" or "amx" (where the CPU has it); empty: FA2_ENGINE, or the
  // fastest for each call.
  std::string engine;
  // Whose threads calls run on: "tbb" (oneTBB's) or "openmp" (those of the
  // OpenMP runtime that the process has loaded); empty: FA2_POOL, or "tbb".
  std::string pool;
  // Instead of `pool`.
  ThreadPool thread_pool;
};

// What a context computes with, for logs.
struct ContextInfo {
  int num_threads = 0;
  // "tbb", "openmp" or "caller" (ThreadPool).
  std::string pool;
  // The instruction set in use, e.g. "avx3".
  std::string target;
  // Engine for bf16 inputs in precision fast.
  std::string engine;
  // Every target that this build and this CPU have, best first.
  std::vector<std::string> targets;
  // Every engine that this build and this CPU have.
  std::vector<std::string> engines;
};

// Thread-safe: calls from several threads may share one context; each takes a
// workspace of its own from the context, which keeps it for the next call.
// After fork() the child may go on using it. Results do not depend on the
// number of threads or the pool, nor on the rounding mode, flushing of
// subnormal numbers or traps that a thread has set, and leave these and the
// flags of exceptions as they are. Where fewer threads come than num_threads,
// because the system refuses more, or because the call comes from within an
// OpenMP parallel region, those that there are do the work.
class FA2_EXPORT Context {
 public:
  // Fails with kUnsupported where options or environment name a target or
  // engine that this build or CPU lacks (the sentence lists those it has), or
  // "openmp" where no OpenMP runtime is loaded; with kInvalidArgument for a
  // negative number of threads, half an allocator, a pool that is none, or
  // pool and thread_pool together.
  static Status Create(const ContextOptions& options,
                       std::unique_ptr<Context>* context);

  // The context that calls use when given none: made on first use from the
  // environment. When the environment is wrong, `*context` is nullptr and the
  // status says why.
  static Status Default(Context** context);

  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Throws std::bad_alloc where memory has run out.
  ContextInfo Info() const;

  // Bytes of workspace held now, in use or kept for reuse; the highest number
  // so far; how often memory was asked for.
  size_t WorkspaceBytes() const;
  size_t PeakWorkspaceBytes() const;
  size_t AllocationCount() const;

  // Gives workspace that no call is using back to the allocator.
  void ReleaseWorkspace();

  class Impl;
  Impl& impl() const { return *impl_; }

 private:
  explicit Context(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fa2

#endif  // FA2_CONTEXT_H_
