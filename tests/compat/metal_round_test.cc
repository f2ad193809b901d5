// SPDX-License-Identifier: Apache-2.0

// The elementwise kernel of the Metal backend that rounds f32 to bf16.
#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "fa2/compat/metal_attention.h"
#include "tests/compat/expect.h"

namespace fa2::test {
namespace {

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The nearer of the two bf16 neighbours, by distances in double.
uint16_t Nearest(uint32_t bits) {
  const float value = FloatOf(bits);
  const auto below = static_cast<uint16_t>(bits >> 16);
  if (std::isnan(value)) return below | 0x0040;
  if (std::isinf(value)) return below;
  const double toward_zero = FloatOf(uint32_t{below} << 16);
  const uint32_t next = (uint32_t{below} + 1) << 16;
  // Past the largest bf16 the next one would be 2^128.
  const double away = std::isinf(FloatOf(next))
                          ? std::copysign(0x1p128, toward_zero)
                          : FloatOf(next);
  const double down = std::abs(value - toward_zero);
  const double up = std::abs(away - value);
  if (down < up) return below;
  if (up < down) return below + 1;
  return (below & 1) == 0 ? below : below + 1;
}

std::vector<std::string> Targets() {
  fa2_context_info info = {};
  info.struct_size = sizeof(info);
  EXPECT_EQ(fa2_context_get_info(nullptr, &info), FA2_OK);
  std::istringstream names(info.targets);
  std::vector<std::string> targets;
  for (std::string name; names >> name;) targets.push_back(name);
  return targets;
}

class OnTarget {
 public:
  explicit OnTarget(const std::string& target) {
    fa2_context_options options = {};
    options.struct_size = sizeof(options);
    options.max_target = target.c_str();
    EXPECT_EQ(fa2_context_create(&options, &context_), FA2_OK)
        << fa2_last_error();
  }
  ~OnTarget() { fa2_context_destroy(context_); }
  fa2_context* get() const { return context_; }

 private:
  fa2_context* context_ = nullptr;
};

// Every upper half with lower halves at, and one beside, the ties.
TEST(MetalRound, EveryUpperHalf) {
  std::vector<float> input;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower :
         {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      input.push_back(FloatOf(upper << 16 | lower));
    }
  }
  for (const std::string& target : Targets()) {
    SCOPED_TRACE(target);
    const OnTarget context(target);
    std::vector<uint16_t> output(input.size());
    ASSERT_EQ(fa2_metal_round_f32_to_bf16(input.data(), output.data(),
                                          input.size(), context.get()),
              FA2_OK)
        << fa2_last_error();
    for (size_t i = 0; i < input.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &input[i], sizeof(bits));
      ASSERT_EQ(output[i], Nearest(bits)) << std::hex << bits;
    }
  }
}

// Every count up to two vectors, and around the size of a work item.
TEST(MetalRound, CountsAndNothingPastTheEnd) {
  std::vector<size_t> counts = {65535, 65536, 65537, 200003};
  for (size_t count = 0; count <= 70; ++count) counts.push_back(count);
  Random random(3);
  for (const size_t count : counts) {
    std::vector<float> input(count);
    for (float& x : input) x = static_cast<float>(random.Normal());
    std::vector<uint16_t> output(count + 1, 0xABCD);
    ASSERT_EQ(fa2_metal_round_f32_to_bf16(input.data(), output.data(), count,
                                          nullptr),
              FA2_OK)
        << fa2_last_error();
    EXPECT_EQ(output[count], 0xABCD);
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &input[i], sizeof(bits));
      ASSERT_EQ(output[i], Nearest(bits)) << i << " of " << count;
    }
  }
}

TEST(MetalRound, Refusals) {
  float array[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  uint16_t output[4] = {};
  EXPECT_REFUSED(fa2_metal_round_f32_to_bf16(nullptr, output, 4, nullptr),
                 "input is NULL");
  EXPECT_REFUSED(fa2_metal_round_f32_to_bf16(array, nullptr, 4, nullptr),
                 "output is NULL");
  EXPECT_REFUSED(fa2_metal_round_f32_to_bf16(array, array + 2, 4, nullptr),
                 "output overlaps input");
  EXPECT_REFUSED(
      fa2_metal_round_f32_to_bf16(array, output, UINT64_MAX, nullptr),
      "count is");
  const auto* odd = reinterpret_cast<const float*>(
      reinterpret_cast<const uint8_t*>(array) + 1);
  EXPECT_REFUSED(fa2_metal_round_f32_to_bf16(odd, output, 2, nullptr),
                 "input is misaligned");
  EXPECT_EQ(array[2], 3.0f);
}

}  // namespace
}  // namespace fa2::test
