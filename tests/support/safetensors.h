// SPDX-License-Identifier: Apache-2.0

// Reads files in the safetensors format: an 8-byte little-endian length, a JSON
// header of that length, then the tensors' bytes
// (https://huggingface.co/docs/safetensors).
#ifndef FA2_TESTS_SUPPORT_SAFETENSORS_H_
#define FA2_TESTS_SUPPORT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fa2/types.h"

namespace fa2::test {

struct SafetensorsEntry {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // dense, owned by the file
};

struct SafetensorsFile {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::vector<uint8_t> bytes;
};

// Throws std::runtime_error with the path and what is wrong.
SafetensorsFile ReadSafetensors(const std::string& path);

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_SAFETENSORS_H_
