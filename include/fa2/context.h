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

struct ContextOptions {
  int num_threads =
      0;  // 0: FA2_NUM_THREADS, or all cores that this process may use
  size_t memory_limit =
      0;  // bytes of workspace a context may hold at once; 0: no limit
  Allocator allocator;     // empty: 2 MiB pages where the system gives them
  std::string max_target;  // Highway's name in lower case ("avx2", …); empty:
                           // FA2_MAX_TARGET, or the best
  std::string engine;      // "f32", "bf16dot" or "amx" (where the CPU has
                           // it); empty: FA2_ENGINE, or the fastest for each
                           // call
};

// What a context computes with, for logs and for `fa2 info`.
struct ContextInfo {
  int num_threads = 0;
  std::string target;  // the instruction set in use, e.g. "avx3"
  std::string engine;  // engine for bf16 inputs in precision fast
  std::vector<std::string>
      targets;  // every target that this build and this CPU have, best first
  std::vector<std::string>
      engines;  // every engine that this build and this CPU have
};

// Thread-safe: calls from several threads may share one context; each takes a
// workspace of its own from the context, which keeps it for the next call.
// After fork() the child may go on using it.
class FA2_EXPORT Context {
 public:
  // Fails with kUnsupported where options or environment name a target or
  // engine that this build or CPU lacks (the sentence lists those it has), with
  // kInvalidArgument for a negative number of threads or half an allocator.
  static Status Create(const ContextOptions& options,
                       std::unique_ptr<Context>* context);

  // The context that calls use when given none: made on first use from the
  // environment. When the environment is wrong,
  // `*context` is nullptr and the status says why.
  static Status Default(Context** context);

  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ContextInfo Info() const;

  // Floating-point operations per second (a multiply-add counts two) that the
  // arithmetic unit behind Info().engine reaches at most on num_threads threads
  // at once, on random data in registers: the denominator of an attention
  // call's share of the peak. Takes some 60 ms of all those threads. Fails with
  // kUnsupported where this build has no loop for that unit, or the system
  // gives no more threads.
  Status MeasurePeak(double* flops) const;

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
