// SPDX-License-Identifier: Apache-2.0

// A call of a training kernel: on its context, with its line in the log, and
// its rows shared out among the workers.
#ifndef FA2_SRC_OPS_CALL_H_
#define FA2_SRC_OPS_CALL_H_

#include <cstdint>

#include "src/context/call_log.h"
#include "src/context/context_impl.h"
#include "src/ops/rows.h"

namespace fa2::ops {

// Writes the line of a call that is over.
void WriteLine(const CallLog& log, const char* name, const ConstTensorView& x,
               const Context& context);

// Runs call(context), whose `context` is the given or the default one and which
// checks its arguments first. The log names the kernel and the shape and dtype
// of `x`, its main argument.
template <class Function>
Status Call(const char* name, const ConstTensorView& x, Context* given,
            const Function& call) {
  return WithContext(given, [&](Context* context) -> Status {
    const CallLog log;
    const Status status = call(*context);
    if (log.on() && status.ok()) WriteLine(log, name, x, *context);
    return status;
  });
}

// run(rows, item, worker) for `rows` rows in items of `step`.
template <class Function>
void ForRows(const Context& context, int64_t rows, int64_t step,
             const Function& run) {
  context.impl().pool().For(CeilDiv(rows, step),
                            [&run, step, rows](int64_t item, int worker) {
                              run(ItemRows(item, step, rows), item, worker);
                            });
}

}  // namespace fa2::ops

#endif  // FA2_SRC_OPS_CALL_H_
