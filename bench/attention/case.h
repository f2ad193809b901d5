// SPDX-License-Identifier: Apache-2.0

// One attention benchmark as data, and the lists of them.
#ifndef FA2_BENCH_ATTENTION_CASE_H_
#define FA2_BENCH_ATTENTION_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fa2/attention.h"

namespace fa2::bench {

enum class Pass { kForward, kBackward, kBoth };

struct AttentionCase {
  Pass pass = Pass::kBackward;
  DType dtype = DType::kBF16;
  int64_t batch = 1;
  int64_t heads = 8;
  int64_t kv_heads = 8;
  int64_t queries = 2048;
  int64_t keys = 2048;
  int64_t head_dim = 128;
  bool causal = false;  // from the top left
  int threads = 1;
  Precision precision = Precision::kFast;
  int64_t window = 0;  // > 0: with causal, a query sees that many keys
  // Lengths of the sequences of one packed batch, instead of batch, queries and
  // keys: of both queries and keys.
  std::vector<int64_t> packed;
  bool bias = false;   // [1, heads, queries, keys]
  bool dbias = false;  // and its gradient
  DType bias_dtype = DType::kF32;
  bool mask = false;  // boolean [1, 1, queries, keys], all visible
  // > 0: with mask, of documents: so many positions see one another.
  int64_t document = 0;
  std::string blocks;  // a block mask: BlockPattern's name; "": none
  bool dropout = false;
  bool softcap = false;
  bool alibi = false;
  bool sinks = false;

  // Multiply-adds count two: 4 (forward) and 10 (backward) times visible
  // (query, key) pairs times head_dim; a causal triangle counts as half of the
  // square, and pairs that ALiBi leaves out as all others.
  double Flops() const;
  int64_t TotalQueries() const;  // of an element of the batch, or packed
  int64_t TotalKeys() const;
  // "backward/bf16/B1/H8/KV8/N2048/D128/causal/T1", options behind; queries and
  // keys that differ as "N512x1024"; "packed700-20x3" is four sequences;
  // "bias_bf16" is one of another dtype than f32.
  std::string Name() const;
};

// Reads Name()'s format: parts in any order, those left out keep the defaults
// above (KV: as H), T0 is all cores. False, and a sentence in *error, for a
// part that has no meaning.
bool ParseCase(const std::string& name, AttentionCase* result,
               std::string* error);

// "default": under two minutes; "full": all dtypes, head dims and lengths;
// "fa2-paper": the setting of the FlashAttention-2 paper; "options": what each
// option costs. Empty for another name.
std::vector<AttentionCase> Suite(const std::string& name);

}  // namespace fa2::bench

#endif  // FA2_BENCH_ATTENTION_CASE_H_
