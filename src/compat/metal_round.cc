// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <string>

#include "fa2/compat/metal_attention.h"
#include "src/c_api/boundary.h"
#include "src/compat/checks.h"
#include "src/context/context_impl.h"
#include "src/simd/rowwise/round_bf16.h"

namespace fa2::compat {
namespace {

// 384 KiB of input and output an item: large against the cost of handing out
// an item, small enough to balance a few cores.
constexpr uint64_t kItemElements = 65536;

Status Round(const float* input, void* output, uint64_t count,
             fa2_context* given) {
  // 6 bytes an element must not wrap an address.
  if (count > static_cast<uint64_t>(INT64_MAX) / 6) {
    return Invalid("count", std::to_string(count),
                   "a number of elements that memory can hold");
  }
  if (count == 0) return Status::Ok();
  Status status = CheckPointer("input", input, DType::kF32);
  if (status.ok()) status = CheckPointer("output", output, DType::kBF16);
  if (!status.ok()) return status;
  const uintptr_t in = reinterpret_cast<uintptr_t>(input);
  const uintptr_t out = reinterpret_cast<uintptr_t>(output);
  if (in < out + count * 2 && out < in + count * 4) {
    return Status::InvalidArgument(
        "output overlaps input; it must be memory of its own");
  }
  return WithContext(c_api::ToContext(given), [&](Context* context) {
    const Context::Impl& impl = context->impl();
    const uint64_t items = (count - 1) / kItemElements + 1;
    impl.pool().For(static_cast<int64_t>(items), [&](int64_t item, int) {
      const uint64_t begin = static_cast<uint64_t>(item) * kItemElements;
      simd::RoundToBf16(impl.targets(), input + begin,
                        std::min(kItemElements, count - begin),
                        static_cast<uint16_t*>(output) + begin);
    });
    return Status::Ok();
  });
}

}  // namespace
}  // namespace fa2::compat

extern "C" fa2_status fa2_metal_round_f32_to_bf16(const float* input,
                                                  void* output, uint64_t count,
                                                  fa2_context* context) {
  return fa2::c_api::Guard("fa2_metal_round_f32_to_bf16", [&] {
    return fa2::compat::Round(input, output, count, context);
  });
}
