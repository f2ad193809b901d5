// SPDX-License-Identifier: Apache-2.0
#include "src/verify/cases/safetensors.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/verify/cases/error.h"

namespace fa2::verify {
namespace {

// The format's own limit, which keeps a forged length from being believed.
constexpr uint64_t kMaxHeader = 100'000'000;
constexpr size_t kMaxRank = 32;

struct NamedType {
  const char* name;
  size_t bytes;
  std::optional<DType> dtype;
};

constexpr NamedType kTypes[] = {
    {"F64", 8, DType::kF64},     {"F32", 4, DType::kF32},
    {"F16", 2, DType::kF16},     {"BF16", 2, DType::kBF16},
    {"I64", 8, DType::kI64},     {"I32", 4, DType::kI32},
    {"BOOL", 1, DType::kBool},   {"U8", 1, DType::kBool},
    {"I8", 1, std::nullopt},     {"I16", 2, std::nullopt},
    {"U16", 2, std::nullopt},    {"U32", 4, std::nullopt},
    {"U64", 8, std::nullopt},    {"F8_E4M3", 1, std::nullopt},
    {"F8_E5M2", 1, std::nullopt}};

constexpr bool kLittleEndian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

// A file's bytes, and where memory orders those of a number the other way, the
// tensors that are read from it.
struct Storage {
  std::vector<uint8_t> file;
  std::vector<std::vector<uint8_t>> tensors;
};

// Numbers of `size` bytes each, from the file's byte order to this machine's or
// back, where these differ.
std::vector<uint8_t> Reversed(const void* data, size_t bytes, size_t size) {
  const uint8_t* const first = static_cast<const uint8_t*>(data);
  std::vector<uint8_t> result(first, first + bytes);
  for (size_t at = 0; at + size <= bytes; at += size) {
    std::reverse(result.begin() + static_cast<ptrdiff_t>(at),
                 result.begin() + static_cast<ptrdiff_t>(at + size));
  }
  return result;
}

const char* NameOfType(DType dtype) {
  for (const NamedType& type : kTypes) {
    if (type.dtype == dtype) return type.name;
  }
  throw Error("a tensor has a dtype that safetensors lacks");
}

const NamedType& TypeNamed(const std::string& tensor, const std::string& name) {
  for (const NamedType& type : kTypes) {
    if (name == type.name) return type;
  }
  throw Error("tensor " + tensor + " has the unknown dtype " + name);
}

// `unclaimed`: bytes of data that the tensors before have left. The format lets
// no two share any, and a copy of each takes no more memory than the file.
SafetensorsEntry ParseEntry(const std::string& name,
                            const nlohmann::json& value, const uint8_t* data,
                            uint64_t data_bytes, uint64_t* unclaimed,
                            Storage* storage) {
  SafetensorsEntry entry;
  entry.dtype_name = value.at("dtype").get<std::string>();
  const NamedType& type = TypeNamed(name, entry.dtype_name);
  entry.dtype = type.dtype;
  const nlohmann::json& shape = value.at("shape");
  const nlohmann::json& offsets = value.at("data_offsets");
  if (!shape.is_array() || shape.size() > kMaxRank || !offsets.is_array() ||
      offsets.size() != 2) {
    throw Error("tensor " + name + " has no proper shape or data_offsets");
  }
  const auto whole = [&name](const nlohmann::json& number) -> uint64_t {
    if (!number.is_number_unsigned()) {
      throw Error("tensor " + name + " has a size or offset that is not a " +
                  "whole number");
    }
    return number.get<uint64_t>();
  };
  bool empty = false;
  uint64_t bytes = type.bytes;
  for (const nlohmann::json& size : shape) {
    const uint64_t n = whole(size);
    if (n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      throw Error("tensor " + name + " has a size past 2^63");
    }
    entry.shape.push_back(static_cast<int64_t>(n));
    empty |= n == 0;
  }
  for (const int64_t size : entry.shape) {
    const auto n = static_cast<uint64_t>(empty ? 0 : size);
    if (n != 0 && bytes > data_bytes / n) {
      throw Error("tensor " + name + " is larger than the file");
    }
    bytes *= n;
  }
  const uint64_t begin = whole(offsets[0]);
  const uint64_t end = whole(offsets[1]);
  if (begin > end || end > data_bytes || end - begin != bytes) {
    throw Error("tensor " + name + " is cut off, or its data_offsets do not " +
                "fit its shape");
  }
  if (bytes > *unclaimed) {
    throw Error("tensor " + name + " shares bytes with another");
  }
  *unclaimed -= bytes;
  entry.data = data + begin;
  if (!kLittleEndian && type.bytes > 1) {
    storage->tensors.push_back(Reversed(entry.data, bytes, type.bytes));
    entry.data = storage->tensors.back().data();
  }
  return entry;
}

SafetensorsFile Parse(const std::shared_ptr<Storage>& storage) {
  SafetensorsFile file;
  file.owner = storage;
  const std::vector<uint8_t>& all = storage->file;
  if (all.size() < 8) throw Error("it is no safetensors file: no header");
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= uint64_t{all[i]} << (8 * i);
  if (header_bytes > kMaxHeader || header_bytes > all.size() - 8) {
    throw Error("it is no safetensors file, or its header is cut off");
  }
  const uint8_t* const header = all.data() + 8;
  const uint8_t* const data = header + header_bytes;
  const uint64_t data_bytes = all.size() - 8 - header_bytes;
  // Deep nesting would overflow the parser's stack; a header has three levels.
  const auto shallow = [](int level, nlohmann::json::parse_event_t,
                          nlohmann::json&) {
    if (level > 8) throw Error("its header is nested too deeply");
    return true;
  };
  const nlohmann::json json = nlohmann::json::parse(header, data, shallow);
  if (!json.is_object()) throw Error("its header is no JSON object");
  uint64_t unclaimed = data_bytes;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      file.metadata = value.get<std::map<std::string, std::string>>();
    } else {
      file.tensors[name] =
          ParseEntry(name, value, data, data_bytes, &unclaimed, storage.get());
    }
  }
  return file;
}

}  // namespace

SafetensorsFile ReadSafetensors(const std::string& path) {
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = stream ? std::streamoff(stream.tellg()) : -1;
  // A folder opens on some systems, and reports a length past every file's.
  if (size < 0 || size == std::numeric_limits<std::streamoff>::max()) {
    throw Error(path + ": the file cannot be read");
  }
  const auto storage = std::make_shared<Storage>();
  storage->file.resize(static_cast<size_t>(size));
  stream.seekg(0);
  stream.read(reinterpret_cast<char*>(storage->file.data()), size);
  if (!stream && size > 0) throw Error(path + ": the file cannot be read");
  try {
    return Parse(storage);
  } catch (const Error& error) {
    throw Error(path + ": " + error.what());
  } catch (const nlohmann::json::exception&) {
    throw Error(path + ": its header is not the JSON of a safetensors file");
  }
}

void WriteSafetensors(const std::string& path,
                      const std::vector<SafetensorsTensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::json json = nlohmann::json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  uint64_t end = 0;
  std::vector<uint64_t> sizes;
  for (const SafetensorsTensor& tensor : tensors) {
    uint64_t bytes = SizeOf(tensor.dtype);
    for (const int64_t n : tensor.shape) bytes *= static_cast<uint64_t>(n);
    json[tensor.name] = {{"dtype", NameOfType(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"data_offsets", {end, end + bytes}}};
    sizes.push_back(bytes);
    end += bytes;
  }
  std::string header = json.dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream stream(path, std::ios::binary);
  for (int i = 0; i < 8; ++i) {
    stream.put(static_cast<char>(uint64_t{header.size()} >> (8 * i) & 0xff));
  }
  stream.write(header.data(), static_cast<std::streamsize>(header.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const void* data = tensors[i].data;
    std::vector<uint8_t> reversed;
    if (!kLittleEndian) {
      reversed = Reversed(data, sizes[i], SizeOf(tensors[i].dtype));
      data = reversed.data();
    }
    stream.write(static_cast<const char*>(data),
                 static_cast<std::streamsize>(sizes[i]));
  }
  stream.close();
  if (!stream) throw Error(path + ": the file cannot be written");
}

}  // namespace fa2::verify
