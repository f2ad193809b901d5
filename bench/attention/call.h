// SPDX-License-Identifier: Apache-2.0

// A benchmark's call of fa2: random arrays, arguments, a context.
#ifndef FA2_BENCH_ATTENTION_CALL_H_
#define FA2_BENCH_ATTENTION_CALL_H_

#include <cstddef>
#include <memory>

#include "bench/attention/case.h"
#include "bench/peak/peak.h"
#include "fa2/context.h"
#include "fa2/status.h"

namespace fa2::bench {

class AttentionCall {
 public:
  // Runs the forward, whose out and lse the backward reads, and what is timed
  // once: caches and workspace are warm then.
  static Status Create(const AttentionCase& c,
                       std::unique_ptr<AttentionCall>* result);
  ~AttentionCall();

  Status Run() const;
  ContextInfo Info() const;
  size_t PeakWorkspaceBytes() const;
  // Of inputs and outputs, each once: what must come from memory or go there.
  size_t Bytes() const;

 private:
  struct Problem;
  AttentionCall(const AttentionCase& c, std::unique_ptr<Context> context);

  AttentionCase case_;
  std::unique_ptr<Context> context_;
  std::unique_ptr<Problem> problem_;
};

// The unit that bounds a case.
peak::Unit UnitOf(const AttentionCase& c, const ContextInfo& info);

}  // namespace fa2::bench

#endif  // FA2_BENCH_ATTENTION_CALL_H_
