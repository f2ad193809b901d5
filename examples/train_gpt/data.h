// SPDX-License-Identifier: Apache-2.0

// Training data: the bytes of one file, cut into random pieces.
#ifndef FA2_EXAMPLES_TRAIN_GPT_DATA_H_
#define FA2_EXAMPLES_TRAIN_GPT_DATA_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace train_gpt {

// Every byte is a token.
inline constexpr int64_t kVocabulary = 256;

// [batch, sequence] of both: a target is the byte after its input.
struct Batch {
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
};

class Text {
 public:
  // Throws std::runtime_error if the file cannot be read.
  explicit Text(const std::string& path);

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }

  // `batch` pieces of `sequence` bytes from random places; needs size() >
  // sequence.
  Batch Sample(int64_t batch, int64_t sequence, std::mt19937_64* random) const;

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace train_gpt

#endif  // FA2_EXAMPLES_TRAIN_GPT_DATA_H_
