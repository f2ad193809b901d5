// SPDX-License-Identifier: Apache-2.0
#include "src/verify/cases/case_file.h"

#include <nlohmann/json.hpp>
#include <set>

#include "src/verify/cases/error.h"
#include "src/verify/cases/names.h"
#include "src/verify/cases/safetensors.h"

namespace fa2::verify {
namespace {

// Which case a tensor's name belongs to, and its name within.
std::pair<std::string, std::string> Split(const std::string& name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos) return {"", name};
  return {name.substr(0, slash), name.substr(slash + 1)};
}

// A list of prefix sums in the options, as an i64 tensor.
void AddPrefixSums(const std::string& text, const std::string& where,
                   Case* result) {
  const nlohmann::json json =
      nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return;
  for (const char* side : {"q", "k"}) {
    const std::string name = std::string("cu_seqlens_") + side;
    for (const std::string& key : {name, std::string("cu_") + side}) {
      const auto list = json.find(key);
      if (list == json.end() || !list->is_array()) continue;
      auto sums = std::make_shared<std::vector<int64_t>>();
      for (const nlohmann::json& sum : *list) {
        if (!sum.is_number_integer()) {
          throw Error(where + "option " + key + " holds " + sum.dump() +
                      ", it must hold whole numbers");
        }
        sums->push_back(sum.get<int64_t>());
      }
      Array array;
      array.dtype = DType::kI64;
      array.shape = {static_cast<int64_t>(sums->size())};
      array.data = sums->data();
      array.owner = sums;
      result->tensors.emplace(name, array);
    }
  }
}

// Names of the file's tensors -> canonical ones, of those that are there.
std::map<std::string, std::string> Mapped(const std::string& path,
                                          const SafetensorsFile& file,
                                          const ReadOptionsOfFile& options) {
  std::set<std::string> there;
  for (const auto& [name, entry] : file.tensors) {
    there.insert(name);
    there.insert(Split(name).second);
  }
  std::map<std::string, std::string> mapped;
  for (const auto& [canonical, name] : options.names) {
    if (there.count(name) != 0) {
      mapped[name] = canonical;
      if (options.found != nullptr) options.found->insert(canonical);
    } else if (options.found == nullptr) {
      throw Error(path + ": no tensor is named " + name + ", which --map " +
                  canonical + "=" + name + " names");
    }
  }
  return mapped;
}

}  // namespace

std::vector<Case> ReadCases(const std::string& path,
                            const ReadOptionsOfFile& options) {
  const SafetensorsFile file = ReadSafetensors(path);
  const std::map<std::string, std::string> mapped = Mapped(path, file, options);
  std::set<std::string> meant;
  for (const auto& [name, canonical] : mapped) meant.insert(canonical);
  std::map<std::string, Case> cases;
  std::map<std::string, std::string> source;  // of each tensor taken
  std::vector<std::pair<std::string, std::string>> unread;
  for (const auto& [full_name, entry] : file.tensors) {
    auto [prefix, name] = Split(full_name);
    std::string canonical;
    if (const auto found = mapped.find(name); found != mapped.end()) {
      canonical = found->second;
    } else if (const auto whole = mapped.find(full_name);
               whole != mapped.end()) {
      canonical = whole->second;
      prefix.clear();
    } else {
      canonical = CanonicalName(name);
      // A mapped name stands alone, whatever else looks like a synonym.
      if (meant.count(canonical) != 0) continue;
    }
    if (canonical.empty()) {
      unread.emplace_back(prefix, full_name);
      continue;
    }
    if (!entry.dtype) {
      throw Error(path + ": tensor " + full_name + " has dtype " +
                  entry.dtype_name +
                  ", it must be F32, BF16, F16, F64, BOOL, "
                  "U8, I32 or I64");
    }
    Case& c = cases[prefix];
    c.name = prefix;
    Array array;
    array.dtype = *entry.dtype;
    array.shape = entry.shape;
    array.data = entry.data;
    array.owner = file.owner;
    if (c.tensors.count(canonical) != 0) {
      // The canonical name wins over a synonym.
      const std::string& other = source[prefix + "/" + canonical];
      if (name != canonical && other == canonical) continue;
      if (name != canonical) {
        throw Error(path + ": tensors " + other + " and " + full_name +
                    " both mean " + canonical + "; say which with --map " +
                    canonical + "=NAME");
      }
    }
    c.tensors[canonical] = array;
    source[prefix + "/" + canonical] = name;
  }
  for (const auto& [prefix, name] : unread) {
    const auto found = cases.find(prefix);
    if (found != cases.end()) found->second.unread.push_back(name);
  }
  if (cases.empty()) {
    throw Error(path +
                ": no tensor in it has a name that is known (q, k, v, "
                "dout, …); name them with --map q=NAME");
  }
  std::vector<Case> result;
  for (auto& [name, c] : cases) {
    const std::string where = path + ": " + (name.empty() ? "" : name + ": ");
    auto meta = file.metadata.find(name);
    if (meta == file.metadata.end() && cases.size() == 1) {
      meta = file.metadata.find("fa2");
    }
    if (meta != file.metadata.end()) {
      ReadOptions(meta->second, where, &c.options);
      AddPrefixSums(meta->second, where, &c);
    }
    ReadOptions(options.overrides, "", &c.options);
    result.push_back(std::move(c));
  }
  return result;
}

void WriteCases(const std::string& path, const std::vector<Case>& cases) {
  std::vector<SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;
  for (const Case& c : cases) {
    const std::string prefix = c.name.empty() ? "" : c.name + "/";
    metadata[c.name.empty() ? "fa2" : c.name] = WriteOptions(c.options);
    for (const auto& [name, array] : c.tensors) {
      tensors.push_back({prefix + name, array.dtype, array.shape, array.data});
    }
  }
  WriteSafetensors(path, tensors, metadata);
}

}  // namespace fa2::verify
