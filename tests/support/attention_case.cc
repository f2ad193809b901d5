// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_case.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "fa2/reference.h"

namespace fa2::test {
namespace {

int64_t Total(const std::vector<int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

int64_t Longest(const std::vector<int64_t>& lengths) {
  return lengths.empty() ? 0
                         : *std::max_element(lengths.begin(), lengths.end());
}

// Sizes of the tensors of a case: packed sequences follow each other in one
// batch.
struct Shape {
  explicit Shape(const AttentionCase& c) {
    batch = c.varlen() ? 1 : c.batch;
    rows_q = c.varlen() ? Total(c.lengths_q) : c.nq;
    rows_k = c.varlen() ? Total(c.lengths_k) : c.nk;
    sequences = c.varlen() ? static_cast<int64_t>(c.lengths_q.size()) : c.batch;
    q = {batch, c.heads, rows_q, c.head_dim};
    k = {batch, c.kv_heads, rows_k, c.head_dim};
    v = {batch, c.kv_heads, rows_k, c.value_dim};
    out = {batch, c.heads, rows_q, c.value_dim};
    statistic = {batch, c.heads, rows_q, 1};
    if (c.padded_lse) {
      statistic = {sequences, c.heads, Longest(c.lengths_q) + 3, 1};
    }
  }
  int64_t batch, rows_q, rows_k, sequences;
  Sizes q, k, v, out, statistic;
};

struct Qkv {
  Tensor q, k, v;
};

Qkv MakeQkv(const AttentionCase& c, const Shape& shape, DType dtype,
            Layout layout) {
  Qkv t;
  if (c.packing == Packing::kQkv) {
    const std::vector<Tensor> packed =
        MakePacked(dtype, shape.batch, {c.heads, c.kv_heads, c.kv_heads},
                   shape.rows_q, c.head_dim);
    return {packed[0], packed[1], packed[2]};
  }
  t.q = MakeTensor(dtype, shape.q, layout);
  if (c.packing == Packing::kKv) {
    const std::vector<Tensor> packed = MakePacked(
        dtype, shape.batch, {c.kv_heads, c.kv_heads}, shape.rows_k, c.head_dim);
    t.k = packed[0];
    t.v = packed[1];
    return t;
  }
  t.k = MakeTensor(dtype, shape.k, layout);
  t.v = MakeTensor(dtype, shape.v, layout);
  return t;
}

Tensor MakePrefixSums(DType dtype, const std::vector<int64_t>& lengths) {
  Tensor sums =
      MakeTensor(dtype, {1, 1, 1, static_cast<int64_t>(lengths.size()) + 1});
  // Strides of one element count for nothing.
  for (int d = 0; d < 3; ++d) sums.view.strides[d] = int64_t{1} << (40 + d);
  int64_t sum = 0;
  Set(sums.view, {0, 0, 0, 0}, 0.0);
  for (size_t n = 0; n < lengths.size(); ++n) {
    sum += lengths[n];
    Set(sums.view, {0, 0, 0, static_cast<int64_t>(n) + 1},
        static_cast<double>(sum));
  }
  return sums;
}

// Lists of random blocks. What follows a row's blocks is no column.
void MakeBlockMask(const AttentionCase& c, const Shape& shape, Random& random,
                   AttentionInputs* inputs) {
  const auto blocks = [](int64_t rows, int64_t size) {
    return (rows + size - 1) / size;
  };
  const int64_t rows = blocks(shape.rows_q, c.block_size[0]);
  const int64_t columns = blocks(shape.rows_k, c.block_size[1]);
  const int64_t batch = c.block_broadcast[0] ? 1 : shape.batch;
  const int64_t heads = c.block_broadcast[1] ? 1 : c.heads;
  const auto make = [&](int64_t last) {
    const Tensor made = MakeTensor(DType::kI32, {batch, heads, rows, last},
                                   Layout::kPaddedRows);
    Fill(made.view, -7);
    return made;
  };
  inputs->kv_num_blocks = make(1);
  inputs->kv_indices = make(columns);
  const bool full = c.blocks_full > 0.0;
  if (full) {
    inputs->full_kv_num_blocks = make(1);
    inputs->full_kv_indices = make(columns);
  }
  int64_t partial_blocks = 0;
  ForEachIndex({batch, heads, rows, 1}, [&](const Sizes& index) {
    int64_t counts[2] = {};
    for (int64_t column = 0; column < columns; ++column) {
      const double draw = random.Uniform(0.0, 1.0);
      if (draw >= c.blocks_partial + c.blocks_full) continue;
      const bool partial = draw < c.blocks_partial;
      Sizes at = index;
      at[3] = counts[partial ? 0 : 1]++;
      Set((partial ? inputs->kv_indices : inputs->full_kv_indices).view, at,
          static_cast<double>(column));
      partial_blocks += partial ? 1 : 0;
    }
    Set(inputs->kv_num_blocks.view, index, static_cast<double>(counts[0]));
    if (full) {
      Set(inputs->full_kv_num_blocks.view, index,
          static_cast<double>(counts[1]));
    }
  });
  const auto mask = std::make_shared<BlockMask>();
  mask->block_q = c.block_size[0];
  mask->block_k = c.block_size[1];
  mask->kv_num_blocks = inputs->kv_num_blocks.view;
  mask->kv_indices = inputs->kv_indices.view;
  mask->full_kv_num_blocks = inputs->full_kv_num_blocks.view;
  mask->full_kv_indices = inputs->full_kv_indices.view;
  if (c.block_bits) {
    inputs->bits = MakeTensor(
        DType::kU8,
        {1, 1, partial_blocks, c.block_size[0] * c.block_size[1] / 8},
        Layout::kPaddedRows);
    double shown = 0.0;
    ForEachIndex(inputs->bits.view.sizes, [&](const Sizes& index) {
      if (index[3] == 0) shown = random.Pick<double>({0.0, 0.3, 0.9, 1.0});
      int byte = 0;
      for (int bit = 0; bit < 8; ++bit) {
        byte |= (random.Chance(shown) ? 1 : 0) << bit;
      }
      Set(inputs->bits.view, index, byte);
    });
    mask->bits = inputs->bits.view;
  }
  inputs->block_mask = mask;
  inputs->options.block_mask = mask.get();
}

void MakeOptions(const AttentionCase& c, const Shape& shape, Random& random,
                 AttentionInputs* inputs) {
  AttentionOptions& options = inputs->options;
  options.scale = c.scale;
  options.causal = c.causal;
  options.window_left = c.window_left;
  options.window_right = c.window_right;
  options.softcap = c.softcap;
  options.precision = c.precision;
  options.dropout_p = c.dropout_p;
  options.philox_seed = c.philox_seed;
  options.philox_offset = c.philox_offset;
  if (c.bias.has_value()) {
    const bool boolean = *c.bias == DType::kBool;
    Sizes sizes = {shape.batch, c.heads, shape.rows_q, shape.rows_k};
    for (size_t i = 0; i < 4; ++i) {
      if (c.bias_broadcast[i]) sizes[i] = 1;
    }
    inputs->bias = MakeTensor(*c.bias, sizes, Layout::kPaddedRows);
    ForEachIndex(sizes, [&](const Sizes& index) {
      const bool masked = random.Chance(c.bias_masked);
      const double value =
          masked ? -std::numeric_limits<double>::infinity() : random.Normal();
      Set(inputs->bias.view, index, boolean ? !masked : value);
    });
    options.bias = inputs->bias.view;
  }
  if (c.alibi) {
    inputs->alibi_slopes = MakeTensor(
        DType::kF32, {c.alibi_per_batch ? shape.sequences : 1, c.heads, 1, 1});
    ForEachIndex(inputs->alibi_slopes.view.sizes, [&](const Sizes& index) {
      Set(inputs->alibi_slopes.view, index, random.Uniform(0.01, 0.3));
    });
    options.alibi_slopes = inputs->alibi_slopes.view;
  }
  if (c.sinks) {
    inputs->sinks = MakeTensor(DType::kF32, {1, c.heads, 1, 1});
    FillNormal(inputs->sinks.view, random);
    options.sinks = inputs->sinks.view;
  }
  if (c.varlen()) {
    inputs->cu_seqlens_q = MakePrefixSums(c.prefix_dtype, c.lengths_q);
    inputs->cu_seqlens_k = MakePrefixSums(c.prefix_dtype, c.lengths_k);
    options.cu_seqlens_q = inputs->cu_seqlens_q.view;
    options.cu_seqlens_k = inputs->cu_seqlens_k.view;
  }
  if (c.block_size[0] > 0) MakeBlockMask(c, shape, random, inputs);
  if (c.spare_max_seqlen > 0) {
    options.max_seqlen_q =
        (c.varlen() ? Longest(c.lengths_q) : c.nq) + c.spare_max_seqlen;
    options.max_seqlen_k =
        (c.varlen() ? Longest(c.lengths_k) : c.nk) + c.spare_max_seqlen;
  }
}

// The oracle's out and lse, and from them delta, as a caller would hold them.
void MakeStatistics(const AttentionCase& c, const Shape& shape,
                    AttentionInputs* inputs) {
  inputs->out = MakeTensor(c.dtype, shape.out, c.layout);
  inputs->lse =
      MakeTensor(c.statistics_dtype(), shape.statistic, Layout::kPaddedRows);
  AttentionForwardArgs args;
  args.q = inputs->q.view;
  args.k = inputs->k.view;
  args.v = inputs->v.view;
  args.options = inputs->options;
  args.out = inputs->out.view;
  args.lse = inputs->lse.view;
  const Status status = AttentionReferenceForward(args);
  if (!status.ok()) throw std::logic_error(status.message());
  if (!c.delta) return;
  inputs->delta =
      MakeTensor(c.statistics_dtype(), {shape.batch, c.heads, shape.rows_q, 1});
  ForEachIndex(inputs->delta.view.sizes, [&](const Sizes& index) {
    double sum = 0.0;
    for (int64_t d = 0; d < c.value_dim; ++d) {
      const Sizes at = {index[0], index[1], index[2], d};
      sum += Get(inputs->out.view, at) * Get(inputs->dout.view, at);
    }
    Set(inputs->delta.view, index, sum);
  });
  inputs->out = Tensor();
}

}  // namespace

std::string Describe(const AttentionCase& c) {
  std::string text =
      std::string(NameOf(c.dtype)) + " seed " + std::to_string(c.seed) + " B" +
      std::to_string(c.batch) + " H" + std::to_string(c.heads) + "/" +
      std::to_string(c.kv_heads) + " N" + std::to_string(c.nq) + "x" +
      std::to_string(c.nk) + " D" + std::to_string(c.head_dim) + "/" +
      std::to_string(c.value_dim) + " " + NameOf(c.layout);
  const auto add = [&text](const std::string& word) { text += " " + word; };
  const auto flag = [&add](bool on, const char* word) {
    if (on) add(word);
  };
  const auto broadcast = [](const std::array<bool, 4>& dims) {
    std::string letters;
    for (size_t i = 0; i < 4; ++i) letters += dims[i] ? '1' : 'n';
    return letters;
  };
  const auto list = [](const std::vector<int64_t>& lengths) {
    std::string words;
    for (const int64_t n : lengths) words += std::to_string(n) + ",";
    return words;
  };
  flag(c.packing == Packing::kQkv, "packed_qkv");
  flag(c.packing == Packing::kKv, "packed_kv");
  if (c.dout_broadcast != std::array<bool, 4>{}) {
    add("dout_" + broadcast(c.dout_broadcast));
  }
  if (c.scale.has_value()) add("scale " + std::to_string(*c.scale));
  flag(c.causal == Causal::kTopLeft, "top_left");
  flag(c.causal == Causal::kBottomRight, "bottom_right");
  if (c.window_left >= 0 || c.window_right >= 0) {
    add("window " + std::to_string(c.window_left) + "," +
        std::to_string(c.window_right));
  }
  if (c.softcap > 0.0) add("softcap " + std::to_string(c.softcap));
  flag(c.precision == Precision::kHigh, "high");
  flag(c.precision == Precision::kExact, "exact");
  if (c.bias.has_value()) {
    add(std::string("bias_") + NameOf(*c.bias) + "_" +
        broadcast(c.bias_broadcast) + " masked " +
        std::to_string(c.bias_masked));
  }
  if (c.block_size[0] > 0) {
    add("blocks " + std::to_string(c.block_size[0]) + "x" +
        std::to_string(c.block_size[1]) + "_" +
        broadcast({c.block_broadcast[0], c.block_broadcast[1], false, false}) +
        " partial " + std::to_string(c.blocks_partial) + " full " +
        std::to_string(c.blocks_full) + (c.block_bits ? " bits" : ""));
  }
  flag(c.alibi, c.alibi_per_batch ? "alibi_per_batch" : "alibi");
  flag(c.sinks, "sinks");
  if (c.dropout_p > 0.0) {
    add("dropout " + std::to_string(c.dropout_p) + " offset " +
        std::to_string(c.philox_offset));
  }
  if (c.varlen()) {
    add(std::string("varlen ") + NameOf(c.prefix_dtype) + " q " +
        list(c.lengths_q) + " k " + list(c.lengths_k));
    flag(c.padded_lse, "padded_lse");
    flag(c.spare_max_seqlen > 0, "max_seqlen_given");
  }
  flag(c.keys_broadcast, "keys_broadcast");
  flag(c.dlse, "dlse");
  flag(c.delta, "delta");
  add(std::string("grads ") + NameOf(c.grad_layout) + " " +
      NameOf(c.grad_dtype.value_or(c.dtype)) + " ");
  const auto wanted = [&text](bool want, bool accumulate, const char* name) {
    if (want) text += std::string(name) + (accumulate ? "+" : "") + ",";
  };
  wanted(c.want_dq, c.accumulate_dq, "dq");
  wanted(c.want_dk, c.accumulate_dk, "dk");
  wanted(c.want_dv, c.accumulate_dv, "dv");
  wanted(c.want_dbias, c.accumulate_dbias, "dbias");
  wanted(c.want_dalibi, false, "dalibi");
  wanted(c.want_dsinks, false, "dsinks");
  return text;
}

std::vector<std::shared_ptr<Buffer>> AttentionInputs::Buffers() const {
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (const Tensor* t :
       {&q, &k, &v, &dout, &bias, &alibi_slopes, &sinks, &cu_seqlens_q,
        &cu_seqlens_k, &kv_num_blocks, &kv_indices, &full_kv_num_blocks,
        &full_kv_indices, &bits, &dlse, &out, &lse, &delta}) {
    if (t->given() &&
        std::find(buffers.begin(), buffers.end(), t->buffer) == buffers.end()) {
      buffers.push_back(t->buffer);
    }
  }
  return buffers;
}

AttentionInputs MakeInputs(
    const AttentionCase& c,
    const std::function<void(AttentionInputs*)>& change) {
  const Shape shape(c);
  Random random(c.seed);
  AttentionInputs inputs;
  const Qkv qkv = MakeQkv(c, shape, c.dtype, c.layout);
  inputs.q = qkv.q;
  inputs.k = qkv.k;
  inputs.v = qkv.v;
  if (c.keys_broadcast) {
    constexpr std::array<bool, 4> kRows = {false, false, true, false};
    inputs.k = MakeTensor(c.dtype, shape.k, c.layout, kRows);
    inputs.v = MakeTensor(c.dtype, shape.v, c.layout, kRows);
  }
  inputs.dout = MakeTensor(c.dtype, shape.out, c.layout, c.dout_broadcast);
  FillNormal(inputs.q.view, random, c.q_sigma);
  FillNormal(inputs.k.view, random);
  FillNormal(inputs.v.view, random);
  FillNormal(inputs.dout.view, random);
  MakeOptions(c, shape, random, &inputs);
  if (c.dlse) {
    inputs.dlse = MakeTensor(c.statistics_dtype(),
                             {shape.batch, c.heads, shape.rows_q, 1});
    FillNormal(inputs.dlse.view, random);
  }
  if (change) change(&inputs);
  MakeStatistics(c, shape, &inputs);
  return inputs;
}

AttentionOutputs MakeOutputs(const AttentionCase& c,
                             const AttentionInputs& inputs) {
  const Shape shape(c);
  const DType grad_dtype = c.grad_dtype.value_or(c.dtype);
  Random random(c.seed + 1);
  AttentionOutputs outputs;
  outputs.out =
      MakeTensor(c.out_dtype.value_or(c.dtype), shape.out, c.grad_layout);
  outputs.lse =
      MakeTensor(c.statistics_dtype(), shape.statistic, c.grad_layout);
  const Qkv grads = MakeQkv(c, shape, grad_dtype, c.grad_layout);
  const auto take = [&random](bool want, bool accumulate, const Tensor& made,
                              Tensor* output) {
    if (!want) return;
    *output = made;
    if (accumulate) FillNormal(made.view, random);
  };
  take(c.want_dq, c.accumulate_dq, grads.q, &outputs.dq);
  take(c.want_dk, c.accumulate_dk, grads.k, &outputs.dk);
  take(c.want_dv, c.accumulate_dv, grads.v, &outputs.dv);
  if (c.want_dbias) {
    const DType dtype = c.grad_dtype.has_value() ? *c.grad_dtype : *c.bias;
    take(true, c.accumulate_dbias,
         MakeTensor(dtype, inputs.bias.view.sizes, Layout::kPaddedRows),
         &outputs.dbias);
  }
  if (c.want_dalibi) {
    outputs.dalibi = MakeTensor(DType::kF32, inputs.alibi_slopes.view.sizes);
  }
  if (c.want_dsinks) {
    outputs.dsinks = MakeTensor(DType::kF32, inputs.sinks.view.sizes);
  }
  return outputs;
}

AttentionForwardArgs ForwardArgs(const AttentionInputs& inputs,
                                 const AttentionOutputs& outputs) {
  AttentionForwardArgs args;
  args.q = inputs.q.view;
  args.k = inputs.k.view;
  args.v = inputs.v.view;
  args.options = inputs.options;
  args.out = outputs.out.view;
  args.lse = outputs.lse.view;
  return args;
}

AttentionBackwardArgs BackwardArgs(const AttentionCase& c,
                                   const AttentionInputs& inputs,
                                   const AttentionOutputs& outputs) {
  AttentionBackwardArgs args;
  args.dout = inputs.dout.view;
  args.q = inputs.q.view;
  args.k = inputs.k.view;
  args.v = inputs.v.view;
  args.out = inputs.out.view;
  args.lse = inputs.lse.view;
  args.dlse = inputs.dlse.view;
  args.delta = inputs.delta.view;
  args.options = inputs.options;
  args.dq = outputs.dq.view;
  args.dk = outputs.dk.view;
  args.dv = outputs.dv.view;
  args.dbias = outputs.dbias.view;
  args.dalibi_slopes = outputs.dalibi.view;
  args.dsinks = outputs.dsinks.view;
  args.accumulate_dq = c.accumulate_dq;
  args.accumulate_dk = c.accumulate_dk;
  args.accumulate_dv = c.accumulate_dv;
  args.accumulate_dbias = c.accumulate_dbias;
  return args;
}

}  // namespace fa2::test
