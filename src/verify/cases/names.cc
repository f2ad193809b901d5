// SPDX-License-Identifier: Apache-2.0
#include "src/verify/cases/names.h"

#include <algorithm>
#include <cctype>

namespace fa2::verify {
namespace {

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

}  // namespace

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

}  // namespace fa2::verify
