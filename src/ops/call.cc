// SPDX-License-Identifier: Apache-2.0
#include "src/ops/call.h"

#include <string>

#include "src/simd/target.h"

namespace fa2::ops {
namespace {

// "2x8x1024x64": the log's fields hold no comma.
std::string LoggedShape(const ConstTensorView& x) {
  std::string text;
  for (const int64_t size : x.sizes) {
    if (!text.empty()) text += 'x';
    text += std::to_string(size);
  }
  return text;
}

}  // namespace

void WriteLine(const CallLog& log, const char* name, const ConstTensorView& x,
               const Context& context) {
  const Context::Impl& impl = context.impl();
  // These kernels wait for memory, not for arithmetic: no rate.
  log.Write({name, LoggedShape(x), NameOf(x.dtype),
             simd::BestTargetName(impl.targets()), impl.pool().num_threads(),
             impl.pool().name(), /*flops=*/0});
}

}  // namespace fa2::ops
