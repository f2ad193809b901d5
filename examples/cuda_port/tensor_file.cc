// SPDX-License-Identifier: Apache-2.0
#include "tensor_file.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <regex>
#include <stdexcept>

namespace {

std::vector<int64_t> Numbers(const std::string& text) {
  static const std::regex number("[0-9]+");
  std::vector<int64_t> numbers;
  for (std::sregex_iterator at(text.begin(), text.end(), number), end;
       at != end; ++at) {
    numbers.push_back(std::stoll(at->str()));
  }
  return numbers;
}

}  // namespace

TensorFile TensorFile::Read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(stream)), {});
  uint64_t header_bytes = 0;
  if (all.size() >= 8) std::memcpy(&header_bytes, all.data(), 8);
  if (all.size() < 8 || header_bytes > all.size() - 8) {
    throw std::runtime_error(path + ": it cannot be read as safetensors");
  }
  TensorFile file;
  file.path_ = path;
  file.header_ = all.substr(8, header_bytes);
  const std::string data = all.substr(8 + header_bytes);
  static const std::regex entry(R"re("(\w+)":\{([^{}]*)\})re");
  static const std::regex dtype(R"re("dtype":"(\w+)")re");
  static const std::regex shape(R"re("shape":\[([^\]]*)\])re");
  static const std::regex offsets(R"re("data_offsets":\[([^\]]*)\])re");
  for (std::sregex_iterator at(file.header_.begin(), file.header_.end(), entry),
       end;
       at != end; ++at) {
    const std::string body = (*at)[2];
    std::smatch type, sizes, range;
    if (!std::regex_search(body, type, dtype) ||
        !std::regex_search(body, sizes, shape) ||
        !std::regex_search(body, range, offsets)) {
      continue;  // the metadata
    }
    const std::vector<int64_t> span = Numbers(range[1]);
    if (span.size() != 2 || span[0] > span[1] ||
        static_cast<size_t>(span[1]) > data.size()) {
      throw std::runtime_error(path + ": tensor " + (*at)[1].str() +
                               " is cut off");
    }
    file.tensors_.push_back({(*at)[1],
                             type[1],
                             Numbers(sizes[1]),
                             {data.begin() + span[0], data.begin() + span[1]}});
  }
  return file;
}

const Tensor& TensorFile::Get(const std::string& name) const {
  for (const Tensor& tensor : tensors_) {
    if (tensor.name != name) continue;
    if (tensor.dtype != "BF16" || tensor.shape.size() != 4) {
      throw std::runtime_error(path_ + ": tensor " + name + " is " +
                               tensor.dtype +
                               ", it must be BF16 of four dimensions");
    }
    return tensor;
  }
  throw std::runtime_error(path_ + ": tensor " + name + " is missing");
}

bool TensorFile::OptionIs(const std::string& name,
                          const std::string& value) const {
  // The options are JSON inside a JSON string.
  return header_.find("\\\"" + name + "\\\":\\\"" + value + "\\\"") !=
         std::string::npos;
}

void WriteTensors(const std::string& path, const std::vector<Tensor>& tensors) {
  std::string header;
  size_t end = 0;
  for (const Tensor& tensor : tensors) {
    std::string shape;
    for (const int64_t n : tensor.shape) {
      shape += (shape.empty() ? "" : ",") + std::to_string(n);
    }
    header += (header.empty() ? "{\"" : ",\"") + tensor.name +
              "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(end) + "," +
              std::to_string(end + tensor.bytes.size()) + "]}";
    end += tensor.bytes.size();
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream stream(path, std::ios::binary);
  const uint64_t size = header.size();
  stream.write(reinterpret_cast<const char*>(&size), 8);
  stream << header;
  for (const Tensor& tensor : tensors) {
    stream.write(reinterpret_cast<const char*>(tensor.bytes.data()),
                 static_cast<std::streamsize>(tensor.bytes.size()));
  }
  stream.close();
  if (!stream) throw std::runtime_error(path + ": it cannot be written");
}
