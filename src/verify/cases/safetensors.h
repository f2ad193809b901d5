// SPDX-License-Identifier: Apache-2.0

// Files in the safetensors format: an 8-byte length, a JSON header of that
// length, then the tensors' bytes, all numbers little-endian
// (https://huggingface.co/docs/safetensors).
#ifndef FA2_SRC_VERIFY_CASES_SAFETENSORS_H_
#define FA2_SRC_VERIFY_CASES_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fa2/types.h"

namespace fa2::verify {

struct SafetensorsEntry {
  std::string dtype_name;  // the file's own word
  // None where fa2 has no such type; u8 is read as bool.
  std::optional<DType> dtype;
  std::vector<int64_t> shape;
  // Dense, of this machine's byte order, owned by the file; may be unaligned.
  const void* data = nullptr;
};

struct SafetensorsFile {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::shared_ptr<const void> owner;            // of the tensors' data
};

// Nothing in the header is trusted: lengths, offsets and sizes are held against
// the bytes that are there. Throws Error with the path and what is wrong.
SafetensorsFile ReadSafetensors(const std::string& path);

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // dense, of this machine's byte order
};

// Throws Error if the file cannot be written.
void WriteSafetensors(const std::string& path,
                      const std::vector<SafetensorsTensor>& tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_SAFETENSORS_H_
