// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/data.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

namespace train_gpt {

Text::Text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  bytes_.assign(std::istreambuf_iterator<char>(file), {});
  if (!file) throw std::runtime_error("cannot read '" + path + "'");
}

Batch Text::Sample(int64_t batch, int64_t sequence,
                   std::mt19937_64* random) const {
  Batch result;
  for (int64_t b = 0; b < batch; ++b) {
    // The remainder's bias is below 1e-10 for any text that fits in memory.
    const auto first = static_cast<size_t>(
        (*random)() % static_cast<uint64_t>(size() - sequence));
    for (size_t i = first; i < first + static_cast<size_t>(sequence); ++i) {
      result.inputs.push_back(bytes_[i]);
      result.targets.push_back(bytes_[i + 1]);
    }
  }
  return result;
}

}  // namespace train_gpt
