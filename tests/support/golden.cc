// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace fa2::test {
namespace {

// [B, M, H, K] seen as [B, H, M, K].
ConstTensorView RowsOf(const verify::SafetensorsEntry& entry) {
  const auto& s = entry.shape;
  return {entry.data,
          *entry.dtype,
          {s[0], s[2], s[1], s[3]},
          {s[1] * s[2] * s[3], s[3], s[2] * s[3], 1}};
}

// [B, H, >= Mq], of which the first `rows` count; packed cases keep their
// padding, [sequences, H, >= longest, 1].
ConstTensorView LseOf(const verify::SafetensorsEntry& entry, int64_t rows) {
  const auto& s = entry.shape;
  return {entry.data,
          *entry.dtype,
          {s[0], s[1], rows, 1},
          {s[1] * s[2], s[2], 1, 1}};
}

ConstTensorView BiasOf(const verify::SafetensorsEntry& entry) {
  const auto& s = entry.shape;
  const Sizes sizes = {s[0], s[1], s[2], s[3]};
  return {entry.data, *entry.dtype, sizes, DenseStrides(sizes)};
}

Tensor PrefixSums(const std::vector<int32_t>& sums) {
  const auto n = static_cast<int64_t>(sums.size());
  Tensor tensor = MakeTensor(DType::kI32, {1, 1, 1, n});
  std::copy(sums.begin(), sums.end(), static_cast<int32_t*>(tensor.view.data));
  return tensor;
}

std::string Describe(const nlohmann::json& meta) {
  const auto number = [&](const char* key) {
    return std::to_string(meta.at(key).get<int64_t>());
  };
  std::string text = meta.at("dtype").get<std::string>() + " B" + number("B") +
                     " H" + number("H") + " " + number("Mq") + "x" +
                     number("Mk") + " D" + number("K");
  if (meta.at("Kv") != meta.at("K")) text += "/" + number("Kv");
  if (meta.at("custom_mask_type") == 1) text += " causal";
  if (meta.at("custom_mask_type") == 2) text += " bottom-right";
  if (meta.at("window_size") != 0) text += " window " + number("window_size");
  if (meta.at("bias").get<bool>()) text += " bias";
  if (meta.at("dropout_p") != 0.0) {
    text += " dropout " + meta.at("dropout_p").dump();
  }
  if (!meta.at("scale").is_null()) text += " scale " + meta.at("scale").dump();
  if (!meta.at("cu_q").is_null()) text += " varlen";
  return text;
}

AttentionOptions OptionsOf(const nlohmann::json& meta) {
  AttentionOptions options;
  if (!meta.at("scale").is_null()) options.scale = meta.at("scale");
  options.causal =
      static_cast<Causal>(meta.at("custom_mask_type").get<int32_t>());
  // A window of w ends at the diagonal: the w - 1 keys before it count too.
  const int64_t window = meta.at("window_size");
  if (window > 0) options.window_left = window - 1;
  options.dropout_p = meta.at("dropout_p");
  options.philox_seed = meta.at("philox_seed");
  options.philox_offset = meta.at("philox_offset");
  return options;
}

}  // namespace

Goldens ReadGoldens(const std::string& path) {
  Goldens goldens;
  goldens.file = verify::ReadSafetensors(path);
  for (const auto& [name, text] : goldens.file.metadata) {
    const nlohmann::json meta = nlohmann::json::parse(text);
    const auto entry = [&, prefix = name](const char* tensor) {
      return goldens.file.tensors.at(prefix + "/" + tensor);
    };
    Golden golden;
    golden.name = name;
    golden.what = Describe(meta);
    golden.q = RowsOf(entry("query"));
    golden.k = RowsOf(entry("key"));
    golden.v = RowsOf(entry("value"));
    golden.dout = RowsOf(entry("grad_out"));
    golden.out = RowsOf(entry("out"));
    golden.dq = RowsOf(entry("grad_query"));
    golden.dk = RowsOf(entry("grad_key"));
    golden.dv = RowsOf(entry("grad_value"));
    golden.dtype = golden.q.dtype;
    golden.options = OptionsOf(meta);
    int64_t lse_rows = golden.q.sizes[2];
    if (meta.at("bias").get<bool>()) {
      golden.options.bias = BiasOf(entry("bias"));
      golden.dbias = BiasOf(entry("grad_bias"));
    }
    if (!meta.at("cu_q").is_null()) {
      lse_rows = entry("lse").shape[2];
      for (const char* key : {"cu_q", "cu_k"}) {
        goldens.prefix_sums.push_back(
            PrefixSums(meta.at(key).get<std::vector<int32_t>>()));
        (key[3] == 'q' ? golden.options.cu_seqlens_q
                       : golden.options.cu_seqlens_k) =
            goldens.prefix_sums.back().view;
      }
    }
    golden.lse = LseOf(entry("lse"), lse_rows);
    golden.forward_is_wrong = name == "c04" || name == "c05";
    golden.backward_is_wrong = golden.forward_is_wrong || name == "c08";
    goldens.cases.push_back(golden);
  }
  return goldens;
}

GoldenResults MakeResults(const Golden& golden, bool f64) {
  const auto make = [f64](const ConstTensorView& like) {
    if (!like.given()) return Tensor();
    return MakeTensor(f64 ? DType::kF64 : like.dtype, like.sizes);
  };
  GoldenResults results;
  results.out = make(golden.out);
  results.lse = make(golden.lse);
  results.dq = make(golden.dq);
  results.dk = make(golden.dk);
  results.dv = make(golden.dv);
  results.dbias = make(golden.dbias);
  return results;
}

AttentionForwardArgs ForwardArgs(const Golden& golden,
                                 const GoldenResults& results) {
  AttentionForwardArgs args;
  args.q = golden.q;
  args.k = golden.k;
  args.v = golden.v;
  args.options = golden.options;
  args.out = results.out.view;
  args.lse = results.lse.view;
  return args;
}

AttentionBackwardArgs BackwardArgs(const Golden& golden,
                                   const GoldenResults& results) {
  AttentionBackwardArgs args;
  args.dout = golden.dout;
  args.q = golden.q;
  args.k = golden.k;
  args.v = golden.v;
  args.out = results.out.view;
  args.lse = results.lse.view;
  args.options = golden.options;
  args.dq = results.dq.view;
  args.dk = results.dk.view;
  args.dv = results.dv.view;
  args.dbias = results.dbias.view;
  return args;
}

}  // namespace fa2::test
