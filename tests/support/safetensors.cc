// SPDX-License-Identifier: Apache-2.0
#include "tests/support/safetensors.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace fa2::test {
namespace {

DType DTypeNamed(const std::string& name) {
  if (name == "F32") return DType::kF32;
  if (name == "BF16") return DType::kBF16;
  if (name == "F16") return DType::kF16;
  if (name == "F64") return DType::kF64;
  if (name == "I32") return DType::kI32;
  if (name == "I64") return DType::kI64;
  if (name == "BOOL") return DType::kBool;
  throw std::runtime_error("a tensor has the unknown dtype " + name);
}

SafetensorsFile Parse(std::vector<uint8_t> bytes) {
  SafetensorsFile file;
  file.bytes = std::move(bytes);
  uint64_t header_bytes = 0;
  if (file.bytes.size() < 8) throw std::runtime_error("it has no header");
  std::memcpy(&header_bytes, file.bytes.data(), 8);
  if (header_bytes > file.bytes.size() - 8) {
    throw std::runtime_error("its header is cut off");
  }
  const uint8_t* const header = file.bytes.data() + 8;
  const uint8_t* const data = header + header_bytes;
  const uint64_t data_bytes = file.bytes.size() - 8 - header_bytes;
  const nlohmann::json json = nlohmann::json::parse(header, data);
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      file.metadata = value.get<std::map<std::string, std::string>>();
      continue;
    }
    SafetensorsEntry entry;
    entry.dtype = DTypeNamed(value.at("dtype").get<std::string>());
    entry.shape = value.at("shape").get<std::vector<int64_t>>();
    const auto begin = value.at("data_offsets").at(0).get<uint64_t>();
    const auto end = value.at("data_offsets").at(1).get<uint64_t>();
    uint64_t elements = 1;
    for (const int64_t size : entry.shape) {
      elements *= static_cast<uint64_t>(size);
    }
    if (begin > end || end > data_bytes ||
        end - begin != elements * SizeOf(entry.dtype)) {
      throw std::runtime_error("tensor " + name + " is cut off");
    }
    entry.data = data + begin;
    file.tensors[name] = entry;
  }
  return file;
}

}  // namespace

SafetensorsFile ReadSafetensors(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path + " cannot be read");
  std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(stream)),
                             std::istreambuf_iterator<char>());
  try {
    return Parse(std::move(bytes));
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

}  // namespace fa2::test
