// SPDX-License-Identifier: Apache-2.0

// Safetensors files as bytes, without the code under test.
#ifndef FA2_TESTS_VERIFY_SAFETENSORS_BYTES_H_
#define FA2_TESTS_VERIFY_SAFETENSORS_BYTES_H_

#include <cstdint>
#include <string>

namespace fa2::verify {

// A file of this header and tensors.
inline std::string SafetensorsBytes(const std::string& header,
                                    const std::string& tensors) {
  std::string length;
  for (int i = 0; i < 8; ++i) {
    length += static_cast<char>(uint64_t{header.size()} >> (8 * i) & 0xff);
  }
  return length + header + tensors;
}

}  // namespace fa2::verify

#endif  // FA2_TESTS_VERIFY_SAFETENSORS_BYTES_H_
