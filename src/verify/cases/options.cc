// SPDX-License-Identifier: Apache-2.0
#include "src/verify/cases/options.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "src/verify/cases/error.h"

namespace fa2::verify {
namespace {

using Json = nlohmann::json;

template <class E>
struct Word {
  E value;
  const char* name;
};

constexpr Word<Layout> kLayouts[] = {
    {Layout::kBhsd, "bhsd"}, {Layout::kBshd, "bshd"}, {Layout::kThd, "thd"}};
constexpr Word<Causal> kCausals[] = {{Causal::kNone, "none"},
                                     {Causal::kTopLeft, "top_left"},
                                     {Causal::kBottomRight, "bottom_right"}};
constexpr Word<Products> kProducts[] = {{Products::kBF16, "bf16"},
                                        {Products::kF16, "f16"},
                                        {Products::kF32, "f32"},
                                        {Products::kTF32, "tf32"},
                                        {Products::kF64, "f64"}};

template <class E, size_t n>
const char* WordOf(const Word<E> (&words)[n], E value) {
  for (const Word<E>& word : words) {
    if (word.value == value) return word.name;
  }
  return "unknown";
}

[[noreturn]] void Wrong(const std::string& where, const std::string& key,
                        const Json& value, const std::string& must) {
  throw Error(where + "option " + key + " is " + value.dump() +
              ", it must be " + must);
}

double Number(const std::string& where, const std::string& key,
              const Json& value) {
  if (!value.is_number()) Wrong(where, key, value, "a number");
  return value.get<double>();
}

int64_t WindowSide(const std::string& where, const Json& value) {
  if (value.is_null()) return -1;
  if (!value.is_number_integer()) {
    Wrong(where, "window", value, "whole numbers, -1 or null for unbounded");
  }
  const auto side = value.get<int64_t>();
  if (side < -1) {
    Wrong(where, "window", value, "at least 0, or -1 for unbounded");
  }
  return side;
}

uint64_t Unsigned(const std::string& where, const std::string& key,
                  const Json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  // Seeds and offsets are 64 bits; frameworks print them signed.
  if (value.is_number_integer()) {
    return static_cast<uint64_t>(value.get<int64_t>());
  }
  Wrong(where, key, value, "a whole number");
}

std::string TextOf(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// The word that a value is, upper case as lower case.
template <class E, size_t n>
E ReadWord(const std::string& where, const std::string& key, const Json& value,
           const Word<E> (&words)[n]) {
  std::string text = TextOf(value);
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
  std::string all;
  for (size_t i = 0; i < n; ++i) {
    if (text == words[i].name) return words[i].value;
    all += i == 0 ? "" : i + 1 == n ? " or " : ", ";
    all += "\"" + std::string(words[i].name) + "\"";
  }
  Wrong(where, key, value, all);
}

// The parameters of a memory-efficient CUDA kernel by their own names.
void ReadMemEfficient(const std::string& where, const Json& json,
                      Options* options) {
  const Json& type = json.at("custom_mask_type");
  if (type == 0) {
    options->causal = Causal::kNone;
  } else if (type == 1) {
    options->causal = Causal::kTopLeft;
  } else if (type == 2) {
    options->causal = Causal::kBottomRight;
  } else {
    Wrong(where, "custom_mask_type", type, "0, 1 or 2");
  }
  if (!json.contains("layout")) options->layout = Layout::kBshd;
  // A window of w ends at the diagonal: the w - 1 keys before it count too.
  if (const auto window = json.find("window_size");
      window != json.end() && window->is_number_integer() && *window > 0) {
    options->window_left = window->get<int64_t>() - 1;
  }
}

}  // namespace

const char* NameOf(Layout layout) { return WordOf(kLayouts, layout); }
const char* NameOf(Products products) { return WordOf(kProducts, products); }

void ReadOptions(const std::string& text, const std::string& where,
                 Options* options) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    throw Error(where + "the options in the metadata are no JSON object");
  }
  if (json.contains("custom_mask_type")) {
    ReadMemEfficient(where, json, options);
  }
  for (const auto& [key, value] : json.items()) {
    if (key == "layout") {
      options->layout = ReadWord(where, key, value, kLayouts);
    } else if (key == "causal") {
      const bool none = value.is_null() || value == false;
      options->causal =
          none ? Causal::kNone : ReadWord(where, key, value, kCausals);
    } else if (key == "window") {
      if (value.is_null()) {
        options->window_left = options->window_right = -1;
      } else if (value.is_array() && value.size() == 2) {
        options->window_left = WindowSide(where, value[0]);
        options->window_right = WindowSide(where, value[1]);
      } else {
        Wrong(where, key, value, "[left, right]");
      }
    } else if (key == "scale") {
      options->scale.reset();
      if (!value.is_null()) {
        options->scale = Number(where, key, value);
        if (!std::isfinite(*options->scale)) {
          Wrong(where, key, value, "finite");
        }
      }
    } else if (key == "softcap") {
      options->softcap = value.is_null() ? 0.0 : Number(where, key, value);
      if (!(options->softcap >= 0.0)) Wrong(where, key, value, "at least 0");
    } else if (key == "dropout_p") {
      options->dropout_p = value.is_null() ? 0.0 : Number(where, key, value);
      if (!(options->dropout_p >= 0.0 && options->dropout_p < 1.0)) {
        Wrong(where, key, value, "at least 0 and below 1");
      }
    } else if (key == "philox_seed") {
      options->philox_seed.reset();
      if (!value.is_null()) options->philox_seed = Unsigned(where, key, value);
    } else if (key == "philox_offset") {
      options->philox_offset =
          value.is_null() ? 0 : Unsigned(where, key, value);
    } else if (key == "lse_base") {
      const std::string word = TextOf(value);
      const bool two = word == "2" || value == 2.0;
      if (word != "e" && !two) Wrong(where, key, value, "\"e\" or 2");
      options->lse_base2 = two;
    } else if (key == "precision") {
      options->precision.reset();
      if (!value.is_null()) {
        options->precision = ReadWord(where, key, value, kProducts);
      }
    }
  }
}

std::string WriteOptions(const Options& options) {
  Json json;
  json["layout"] = NameOf(options.layout);
  json["causal"] = nullptr;
  if (options.causal != Causal::kNone) {
    json["causal"] = WordOf(kCausals, options.causal);
  }
  json["window"] = {options.window_left, options.window_right};
  if (options.scale) json["scale"] = *options.scale;
  if (options.softcap > 0.0) json["softcap"] = options.softcap;
  if (options.dropout_p > 0.0) json["dropout_p"] = options.dropout_p;
  if (options.philox_seed) {
    json["philox_seed"] = *options.philox_seed;
    json["philox_offset"] = options.philox_offset;
  }
  if (options.lse_base2) json["lse_base"] = 2;
  if (options.precision) json["precision"] = NameOf(*options.precision);
  return json.dump();
}

}  // namespace fa2::verify
