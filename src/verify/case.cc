// SPDX-License-Identifier: Apache-2.0
#include "src/verify/case.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "src/verify/error.h"

namespace fa2::verify {
namespace {

using Json = nlohmann::json;

struct Synonyms {
  const char* name;
  std::vector<std::string> others;
};

// Lower case, with '.' as '_'.
const std::vector<Synonyms>& AllSynonyms() {
  static const auto* const kAll = new std::vector<Synonyms>{
      {"q", {"query", "queries", "query_states", "query_layer"}},
      {"k", {"key", "keys", "key_states", "key_layer"}},
      {"v", {"value", "values", "value_states", "value_layer"}},
      {"dout",
       {"grad_out", "grad_output", "do", "d_out", "d_o", "grad_o", "out_grad",
        "o_grad", "doutput", "grad_outputs", "output_grad"}},
      {"out", {"o", "output", "attn_out", "attn_output", "attention_output"}},
      {"lse",
       {"softmax_lse", "logsumexp", "log_sum_exp", "l", "m", "softmax_stats"}},
      {"dq",
       {"grad_query", "grad_q", "d_q", "q_grad", "query_grad", "dquery",
        "d_query"}},
      {"dk",
       {"grad_key", "grad_k", "d_k", "k_grad", "key_grad", "dkey", "d_key"}},
      {"dv",
       {"grad_value", "grad_v", "d_v", "v_grad", "value_grad", "dvalue",
        "d_value"}},
      {"bias", {"attn_bias", "attn_mask", "attention_bias", "attention_mask"}},
      {"dbias",
       {"grad_bias", "d_bias", "bias_grad", "grad_attn_bias", "dattn_bias"}},
      {"dlse",
       {"grad_lse", "d_lse", "lse_grad", "grad_logsumexp", "dsoftmax_lse"}},
      {"sinks", {"sink", "s_aux", "attention_sinks", "learnable_sink"}},
      {"dsinks", {"grad_sinks", "dsink", "d_sinks", "sinks_grad", "grad_sink"}},
      {"alibi_slopes", {"alibi", "slopes"}},
      {"dalibi_slopes",
       {"dalibi", "grad_alibi_slopes", "alibi_slopes_grad", "dslopes"}},
      {"cu_seqlens_q", {"cu_q", "cu_seq_lens_q", "cu_seqlen_q", "seqstart_q"}},
      {"cu_seqlens_k", {"cu_k", "cu_seq_lens_k", "cu_seqlen_k", "seqstart_k"}},
      {"keep", {"keep_mask", "dropout_mask", "dropout_keep"}}};
  return *kAll;
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

std::string Word(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void ReadCausal(const std::string& where, const Json& value, Options* options) {
  if (value.is_null() || value == false || value == "none") {
    options->causal = Causal::kNone;
  } else if (value == "top_left") {
    options->causal = Causal::kTopLeft;
  } else if (value == "bottom_right") {
    options->causal = Causal::kBottomRight;
  } else {
    Wrong(where, "causal", value, "null, \"top_left\" or \"bottom_right\"");
  }
}

void ReadLayout(const std::string& where, const Json& value, Options* options) {
  const std::string word = Word(value);
  if (word == "bhsd" || word == "BHSD") {
    options->layout = Layout::kBhsd;
  } else if (word == "bshd" || word == "BSHD") {
    options->layout = Layout::kBshd;
  } else if (word == "thd" || word == "THD") {
    options->layout = Layout::kThd;
  } else {
    Wrong(where, "layout", value, "\"bhsd\", \"bshd\" or \"thd\"");
  }
}

void ReadPrecision(const std::string& where, const Json& value,
                   Options* options) {
  if (value.is_null()) {
    options->precision.reset();
    return;
  }
  for (const Products products :
       {Products::kBF16, Products::kF16, Products::kF32, Products::kTF32,
        Products::kF64}) {
    if (value == NameOf(products)) {
      options->precision = products;
      return;
    }
  }
  Wrong(where, "precision", value,
        "\"bf16\", \"f16\", \"f32\", \"tf32\" or \"f64\"");
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

const char* NameOf(Layout layout) {
  switch (layout) {
    case Layout::kBhsd:
      return "bhsd";
    case Layout::kBshd:
      return "bshd";
    case Layout::kThd:
      return "thd";
  }
  return "unknown";
}

const char* NameOf(Products products) {
  switch (products) {
    case Products::kBF16:
      return "bf16";
    case Products::kF16:
      return "f16";
    case Products::kF32:
      return "f32";
    case Products::kTF32:
      return "tf32";
    case Products::kF64:
      return "f64";
  }
  return "unknown";
}

int64_t Array::elements() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

const Array* Case::Find(const std::string& name) const {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

const std::vector<std::string>& InputNames() {
  static const auto* const kNames = new std::vector<std::string>{"q",
                                                                 "k",
                                                                 "v",
                                                                 "dout",
                                                                 "bias",
                                                                 "dlse",
                                                                 "sinks",
                                                                 "alibi_slopes",
                                                                 "cu_seqlens_q",
                                                                 "cu_seqlens_k",
                                                                 "keep"};
  return *kNames;
}

const std::vector<std::string>& OutputNames() {
  static const auto* const kNames = new std::vector<std::string>{
      "out", "lse", "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"};
  return *kNames;
}

std::string CanonicalName(const std::string& name) {
  std::string lower = name;
  for (char& c : lower) {
    c = c == '.'
            ? '_'
            : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  for (const Synonyms& synonyms : AllSynonyms()) {
    if (lower == synonyms.name) return synonyms.name;
  }
  for (const Synonyms& synonyms : AllSynonyms()) {
    if (std::find(synonyms.others.begin(), synonyms.others.end(), lower) !=
        synonyms.others.end()) {
      return synonyms.name;
    }
  }
  return "";
}

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
      ReadLayout(where, value, options);
    } else if (key == "causal") {
      ReadCausal(where, value, options);
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
      const std::string word = Word(value);
      if (word != "e" && word != "2") Wrong(where, key, value, "\"e\" or 2");
      options->lse_base2 = word == "2";
    } else if (key == "precision") {
      ReadPrecision(where, value, options);
    }
  }
}

std::string WriteOptions(const Options& options) {
  Json json;
  json["layout"] = NameOf(options.layout);
  json["causal"] = nullptr;
  if (options.causal == Causal::kTopLeft) json["causal"] = "top_left";
  if (options.causal == Causal::kBottomRight) json["causal"] = "bottom_right";
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

Case Combine(const Case& inputs, const Case& outputs) {
  Case result;
  result.name = inputs.name;
  result.options = inputs.options;
  for (const std::string& name : InputNames()) {
    if (const Array* array = inputs.Find(name)) result.tensors[name] = *array;
  }
  for (const std::string& name : OutputNames()) {
    const Array* array = outputs.Find(name);
    if (array == nullptr && (name == "out" || name == "lse")) {
      array = inputs.Find(name);
    }
    if (array != nullptr) result.tensors[name] = *array;
  }
  return result;
}

}  // namespace fa2::verify
