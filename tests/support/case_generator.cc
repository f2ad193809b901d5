// SPDX-License-Identifier: Apache-2.0
#include "tests/support/case_generator.h"

#include <algorithm>

namespace fa2::test {
namespace {

// Sizes around the tile of 32 queries x 16 keys, primes, 0 and 1.
const std::vector<int64_t> kRows = {0,  1,  2,  3,  7,  15, 16, 17, 31, 32,
                                    33, 37, 47, 48, 49, 61, 63, 64, 65, 97};
const std::vector<int64_t> kDims = {1,  2,  3,  7,  8,  15, 16, 17, 24, 31,
                                    32, 33, 40, 47, 48, 64, 65, 72, 96};

// More than a block, whole blocks and tails; every kind of loop over the head
// dim.
const std::vector<int64_t> kManyRows = {64,  129, 192, 257, 320,
                                        411, 512, 600, 703};
const std::vector<int64_t> kLargeDims = {40, 64, 64, 128, 128, 192, 256, 256};

// Of every number of queries and keys from 1 to 256, also of few beside many.
void DrawShortHeads(Random& r, AttentionCase* c) {
  const std::vector<int64_t> dims = {8, 16, 24, 25, 32, 32, 40, 48, 64, 64, 80};
  const auto length = [&] {
    return r.Chance(0.6) ? r.Integer(1, 80) : r.Integer(81, 256);
  };
  c->nq = length();
  c->nk = r.Chance(0.7) ? c->nq : length();
  // Long ones make few cases a minute.
  const bool few = c->nq * c->nk > 10000;
  c->batch = r.Integer(1, few ? 3 : 9);
  c->kv_heads = r.Integer(1, few ? 3 : 6);
  c->heads = c->kv_heads * (r.Chance(0.8) ? 1 : r.Integer(2, 3));
  c->head_dim = r.Pick(dims);
  c->value_dim = r.Chance(0.9) ? c->head_dim : r.Pick(dims);
}

void DrawShape(Random& r, bool large, AttentionCase* c) {
  const std::vector<int64_t> groups = {1, 1, 2, 3, 4};
  const std::vector<int64_t>& rows = large ? kManyRows : kRows;
  const std::vector<int64_t>& dims = large ? kLargeDims : kDims;
  c->batch = r.Integer(1, large ? 2 : 3);
  c->kv_heads = r.Integer(1, large ? 2 : 3);
  c->heads = c->kv_heads * r.Pick(groups);
  c->nq = r.Pick(rows);
  c->nk = r.Chance(0.3) ? c->nq : r.Pick(rows);
  c->head_dim = r.Pick(dims);
  c->value_dim = r.Chance(large ? 0.9 : 0.6) ? c->head_dim : r.Pick(dims);
}

// Blocks of 64 keys, parts of 256, and tails of both.
void DrawFewQueries(Random& r, AttentionCase* c) {
  const std::vector<int64_t> keys = {0,  1,   3,   5,   8,   16,  25,   63,  64,
                                     65, 129, 255, 256, 257, 512, 1000, 1537};
  c->kv_heads = r.Integer(1, 3);
  const int64_t group = r.Pick<int64_t>({1, 1, 2, 4, 5, 8, 32});
  c->heads = c->kv_heads * group;
  c->nk = r.Pick(keys);
  c->nq = r.Integer(1, group == 32 ? 4 : c->nk <= 25 || c->nk > 256 ? 24 : 12);
}

void DrawLayout(Random& r, AttentionCase* c) {
  const std::vector<Layout> layouts = {Layout::kBhsd, Layout::kBshd,
                                       Layout::kPaddedRows, Layout::kReversed,
                                       Layout::kStridedLast};
  c->layout = r.Pick(layouts);
  c->grad_layout = r.Pick(layouts);
  if (c->value_dim == c->head_dim && r.Chance(0.3)) {
    c->packing = c->nq == c->nk && r.Chance(0.7) ? Packing::kQkv : Packing::kKv;
  }
  if (r.Chance(0.15)) {
    for (bool& dimension : c->dout_broadcast) dimension = r.Chance(0.5);
  }
}

void DrawMask(Random& r, AttentionCase* c) {
  c->causal = r.Pick<Causal>(
      {Causal::kNone, Causal::kNone, Causal::kTopLeft, Causal::kBottomRight});
  if (r.Chance(0.3)) {
    const int64_t reach = std::max<int64_t>(1, std::max(c->nq, c->nk));
    c->window_left = r.Chance(0.3) ? -1 : r.Integer(0, reach);
    c->window_right = r.Chance(0.4) ? -1 : r.Integer(0, reach);
  }
  if (r.Chance(0.3)) c->scale = r.Uniform(0.5, 1.5) / 8.0;
}

void DrawGradients(Random& r, AttentionCase* c) {
  c->want_dq = !r.Chance(0.1);
  c->want_dk = !r.Chance(0.1);
  c->want_dv = !r.Chance(0.1);
  c->accumulate_dq = c->want_dq && r.Chance(0.15);
  c->accumulate_dk = c->want_dk && r.Chance(0.15);
  c->accumulate_dv = c->want_dv && r.Chance(0.15);
  c->delta = r.Chance(0.2);
  const bool wide = c->dtype == DType::kF64 || c->dtype == DType::kF32;
  if (!wide && r.Chance(0.5)) c->grad_dtype = DType::kF32;
  if (!wide && r.Chance(0.2)) c->out_dtype = DType::kF32;
}

void DrawVarlen(Random& r, const CaseOptions& options, AttentionCase* c) {
  const int64_t sequences = r.Integer(1, options.large ? 3 : 5);
  const bool few = options.few_queries;
  const auto length = [&] {
    return r.Pick((options.large || few) && r.Chance(0.6) ? kManyRows : kRows);
  };
  for (int64_t n = 0; n < sequences; ++n) {
    c->lengths_q.push_back(few ? r.Integer(0, c->nq) : length());
    c->lengths_k.push_back(c->packing == Packing::kQkv || r.Chance(0.4)
                               ? c->lengths_q.back()
                               : length());
  }
  c->prefix_dtype = r.Chance(0.5) ? DType::kI32 : DType::kI64;
  c->padded_lse = r.Chance(0.4);
  if (r.Chance(0.4)) c->spare_max_seqlen = r.Integer(1, 9);
}

void DrawBias(Random& r, AttentionCase* c) {
  c->bias = r.Pick<DType>({DType::kF32, DType::kF32, DType::kBF16, DType::kF16,
                           DType::kBool, DType::kBool});
  const double wide = c->dtype == DType::kF64 ? 0.5 : 0.1;
  if (r.Chance(wide)) c->bias = DType::kF64;
  for (bool& dimension : c->bias_broadcast) dimension = r.Chance(0.35);
  c->bias_masked = r.Pick<double>({0.0, 0.0, 0.3, 0.95});
  c->want_dbias = *c->bias != DType::kBool && r.Chance(0.7);
  c->accumulate_dbias = c->want_dbias && r.Chance(0.15);
}

void DrawExtras(Random& r, const CaseOptions& options, AttentionCase* c) {
  if (r.Chance(0.3)) {
    DrawVarlen(r, options, c);
  } else if (r.Chance(0.4)) {
    DrawBias(r, c);
  }
  if (r.Chance(0.25)) {
    c->dropout_p = r.Pick<double>({0.1, 0.3, 0.5, 0.9});
    c->philox_seed = r.Bits();
    c->philox_offset = r.Chance(0.5) ? r.Bits() >> 8 : r.Bits() % 16;
    if (!c->varlen() && r.Chance(0.3)) c->spare_max_seqlen = r.Integer(1, 9);
  }
  if (r.Chance(0.2)) c->softcap = r.Uniform(1.0, 30.0);
  if (r.Chance(0.2)) {
    c->alibi = true;
    c->alibi_per_batch = !c->varlen() && r.Chance(0.5);
    c->want_dalibi = r.Chance(0.7);
  }
  if (r.Chance(0.2)) {
    c->sinks = true;
    c->want_dsinks = r.Chance(0.7);
  }
  c->dlse = r.Chance(0.2);
}

void DrawBlockMask(Random& r, const CaseOptions& options, AttentionCase* c) {
  const std::vector<int64_t> sizes =
      options.large ? std::vector<int64_t>{16, 64, 128, 128, 208}
                    : std::vector<int64_t>{16, 16, 32, 48, 64};
  c->block_size = {r.Pick(sizes), r.Pick(sizes)};
  c->block_broadcast = {r.Chance(0.5), r.Chance(0.5)};
  c->blocks_partial = r.Pick<double>({0.0, 0.1, 0.3, 0.6});
  c->blocks_full = r.Pick<double>({0.0, 0.1, 0.4});
  c->block_bits = r.Chance(0.7);
}

int64_t Work(const AttentionCase& c) {
  int64_t pairs = c.batch * c.nq * c.nk;
  if (c.varlen()) {
    pairs = 0;
    for (size_t n = 0; n < c.lengths_q.size(); ++n) {
      pairs += c.lengths_q[n] * c.lengths_k[n];
    }
  }
  return pairs * c.heads * (c.head_dim + c.value_dim + 64);
}

// Takes away first what repeats: batch elements, groups of heads, heads of a
// group; rows last.
void Bound(int64_t most, AttentionCase* c) {
  while (Work(*c) > most) {
    const int64_t group = c->heads / c->kv_heads;
    if (c->varlen() && c->lengths_q.size() > 1) {
      c->lengths_q.pop_back();
      c->lengths_k.pop_back();
    } else if (!c->varlen() && c->batch > 1) {
      --c->batch;
    } else if (c->kv_heads > 1) {
      --c->kv_heads;
      c->heads = c->kv_heads * group;
    } else if (c->heads > 1) {
      --c->heads;
    } else {
      int64_t& nq = c->varlen() ? c->lengths_q[0] : c->nq;
      int64_t& nk = c->varlen() ? c->lengths_k[0] : c->nk;
      const bool both = nq == nk;  // as packed ones must stay
      int64_t& longer = nq > nk ? nq : nk;
      longer -= (longer + 7) / 8;
      if (both) nq = nk;
    }
  }
}

}  // namespace

AttentionCase RandomCase(uint64_t seed, const CaseOptions& options) {
  Random random(seed);
  AttentionCase c = RandomCase(random, options);
  c.seed = seed;
  return c;
}

AttentionCase RandomCase(Random& r, const CaseOptions& options) {
  AttentionCase c;
  c.dtype = r.Pick<DType>(
      {DType::kF32, DType::kF32, DType::kBF16, DType::kBF16, DType::kF16});
  if (options.f64 && r.Chance(0.1)) c.dtype = DType::kF64;
  c.precision = r.Pick<Precision>({Precision::kFast, Precision::kFast,
                                   Precision::kHigh, Precision::kExact});
  // What two bf16 terms lose in scores of many dims is not in the bounds.
  if (options.large && c.precision == Precision::kHigh) {
    c.precision = Precision::kFast;
  }
  if (options.short_heads) {
    DrawShortHeads(r, &c);
  } else {
    DrawShape(r, options.large, &c);
  }
  if (options.few_queries) DrawFewQueries(r, &c);
  DrawLayout(r, &c);
  DrawMask(r, &c);
  DrawGradients(r, &c);
  if (options.extras) DrawExtras(r, options, &c);
  if (options.extras && r.Chance(0.2)) DrawBlockMask(r, options, &c);
  // The bias of each head that windows share, with its gradient or not.
  if (options.short_heads && c.bias.has_value() && r.Chance(0.5)) {
    c.bias_broadcast = {true, false, false, false};
  }
  if (options.most_work.has_value()) Bound(*options.most_work, &c);
  return c;
}

}  // namespace fa2::test
