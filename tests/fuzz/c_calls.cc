// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/c_calls.h"

#include <cstring>
#include <initializer_list>

namespace fa2::test {
namespace {

// As large as a struct may say it is; what no field holds is 0.
constexpr size_t kStructBytes = 65536;
alignas(64) char g_args[kStructBytes];
alignas(64) char g_options[kStructBytes];
alignas(64) char g_block_mask[kStructBytes];
alignas(64) uint8_t g_arena[kArenaBytes];

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 5, kKeys = 6;
constexpr int64_t kDim = 8, kRows = kBatch * kHeads * kQueries;

template <class Args>
Args* ClearedArgs() {
  std::memset(g_args, 0, kStructBytes);
  auto* const args = reinterpret_cast<Args*>(g_args);
  args->struct_size = sizeof(Args);
  return args;
}

// Gives tensors their slots and notes their fields.
class Filler {
 public:
  Filler(CCall* call, int32_t dtype) : call_(call), dtype_(dtype) {
    std::memset(g_arena, 0x3C, kArenaBytes);
  }

  template <class Tensor>
  void Fill(Tensor* t, bool output, int32_t dtype, int64_t a, int64_t b,
            int64_t c, int64_t d) {
    uint8_t* const data =
        g_arena + kSlotBytes * call_->tensors.size() + kSlotBytes / 2;
    const int64_t sizes[4] = {a, b, c, d};
    const int64_t strides[4] = {b * c * d, c * d, d, 1};
    t->data = data;
    t->dtype = dtype;
    t->reserved = 0;
    std::memcpy(t->sizes, sizes, sizeof sizes);
    std::memcpy(t->strides, strides, sizeof strides);
    // Both kinds of tensors are laid out alike.
    call_->tensors.push_back(
        {reinterpret_cast<uint8_t**>(const_cast<void**>(&ConstData(t))),
         &t->dtype, &t->reserved, t->sizes, t->strides, output});
  }
  void In(fa2_const_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
    Fill(t, false, dtype_, a, b, c, d);
  }
  void Out(fa2_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
    Fill(t, true, dtype_, a, b, c, d);
  }
  void Rows(fa2_const_tensor* t) { In(t, kBatch, kHeads, kQueries, kDim); }
  void Rows(fa2_tensor* t) { Out(t, kBatch, kHeads, kQueries, kDim); }
  // Of statistics, losses: f32, or f64 for f64.
  int32_t wide() const { return dtype_ == FA2_F64 ? FA2_F64 : FA2_F32; }
  void Integers(fa2_const_tensor* t, std::initializer_list<int32_t> values) {
    Fill(t, false, FA2_I32, 1, 1, 1, static_cast<int64_t>(values.size()));
    auto* const to = const_cast<void*>(t->data);
    std::memcpy(to, values.begin(), values.size() * sizeof(int32_t));
  }
  void Ids(fa2_const_tensor* t) {
    Fill(t, false, FA2_I32, 1, 1, 1, kRows);
    auto* const to = static_cast<int32_t*>(const_cast<void*>(t->data));
    for (int32_t i = 0; i < kRows; ++i) to[i] = i % kDim;
  }

 private:
  static void*& ConstData(fa2_tensor* t) { return t->data; }
  static void*& ConstData(fa2_const_tensor* t) {
    return const_cast<void*&>(t->data);
  }

  CCall* const call_;
  const int32_t dtype_;
};

// One block, partial by its bits.
const fa2_block_mask* BlockMask(Filler& fill, CCall* call) {
  std::memset(g_block_mask, 0, kStructBytes);
  auto* const m = reinterpret_cast<fa2_block_mask*>(g_block_mask);
  m->struct_size = sizeof *m;
  m->block_q = m->block_k = 16;
  call->struct_sizes.push_back(&m->struct_size);
  call->longs.insert(call->longs.end(), {&m->block_q, &m->block_k});
  fill.Integers(&m->kv_num_blocks, {1});
  fill.Integers(&m->kv_indices, {0});
  fill.Integers(&m->full_kv_num_blocks, {0});
  fill.Integers(&m->full_kv_indices, {0});
  fill.Fill(&m->bits, false, FA2_U8, 1, 1, 1, 16 * 16 / 8);
  return m;
}

const fa2_attention_options* Options(Filler& fill, CCall* call, bool packed) {
  std::memset(g_options, 0, kStructBytes);
  auto* const o = reinterpret_cast<fa2_attention_options*>(g_options);
  o->struct_size = sizeof *o;
  o->causal = FA2_CAUSAL_BOTTOM_RIGHT;
  o->window_left = 3;
  o->window_right = 2;
  o->dropout_p = 0.25;
  call->struct_sizes.push_back(&o->struct_size);
  call->ints.insert(call->ints.end(),
                    {&o->has_scale, &o->causal, &o->has_window, &o->precision});
  call->longs.insert(call->longs.end(), {&o->window_left, &o->window_right,
                                         &o->max_seqlen_q, &o->max_seqlen_k});
  call->doubles.insert(call->doubles.end(),
                       {&o->scale, &o->softcap, &o->dropout_p});
  if (packed) {
    fill.Integers(&o->cu_seqlens_q, {0, 2, 5});
    fill.Integers(&o->cu_seqlens_k, {0, 4, 6});
  } else {
    fill.Fill(&o->bias, false, FA2_F32, kBatch, kHeads, kQueries, kKeys);
  }
  fill.Fill(&o->alibi_slopes, false, FA2_F32, 1, kHeads, 1, 1);
  fill.Fill(&o->sinks, false, FA2_F32, 1, kHeads, 1, 1);
  o->block_mask = BlockMask(fill, call);
  return o;
}

void Forward(Filler& fill, CCall* call, bool packed) {
  auto* const a = ClearedArgs<fa2_attention_forward_args>();
  const int64_t batch = packed ? 1 : kBatch;
  call->struct_sizes.push_back(&a->struct_size);
  fill.In(&a->q, batch, kHeads, kQueries, kDim);
  fill.In(&a->k, batch, kKvHeads, kKeys, kDim);
  fill.In(&a->v, batch, kKvHeads, kKeys, kDim);
  fill.Out(&a->out, batch, kHeads, kQueries, kDim);
  fill.Fill(&a->lse, true, fill.wide(), batch, kHeads, kQueries, 1);
  a->options = Options(fill, call, packed);
  call->run = [a](fa2_context* c) { return fa2_attention_forward(a, c); };
}

void Backward(Filler& fill, CCall* call, bool packed) {
  auto* const a = ClearedArgs<fa2_attention_backward_args>();
  const int64_t batch = packed ? 1 : kBatch;
  call->struct_sizes.push_back(&a->struct_size);
  call->ints.insert(call->ints.end(),
                    {&a->accumulate_dq, &a->accumulate_dk, &a->accumulate_dv,
                     &a->accumulate_dbias});
  fill.In(&a->dout, batch, kHeads, kQueries, kDim);
  fill.In(&a->q, batch, kHeads, kQueries, kDim);
  fill.In(&a->k, batch, kKvHeads, kKeys, kDim);
  fill.In(&a->v, batch, kKvHeads, kKeys, kDim);
  fill.In(&a->out, batch, kHeads, kQueries, kDim);
  for (fa2_const_tensor* t : {&a->lse, &a->dlse, &a->delta}) {
    fill.Fill(t, false, fill.wide(), batch, kHeads, kQueries, 1);
  }
  fill.Out(&a->dq, batch, kHeads, kQueries, kDim);
  fill.Out(&a->dk, batch, kKvHeads, kKeys, kDim);
  fill.Out(&a->dv, batch, kKvHeads, kKeys, kDim);
  if (!packed) {
    fill.Fill(&a->dbias, true, FA2_F32, kBatch, kHeads, kQueries, kKeys);
  }
  fill.Fill(&a->dalibi_slopes, true, FA2_F32, 1, kHeads, 1, 1);
  fill.Fill(&a->dsinks, true, FA2_F32, 1, kHeads, 1, 1);
  a->options = Options(fill, call, packed);
  call->run = [a](fa2_context* c) { return fa2_attention_backward(a, c); };
}

void RmsNormBackward(Filler& fill, CCall* call) {
  auto* const a = ClearedArgs<fa2_rms_norm_backward_args>();
  a->eps = 1e-5;
  call->struct_sizes.push_back(&a->struct_size);
  call->ints = {&a->accumulate_dweight, &a->reserved};
  call->doubles = {&a->eps};
  fill.Rows(&a->dy);
  fill.Rows(&a->x);
  fill.In(&a->weight, 1, 1, 1, kDim);
  fill.Rows(&a->dx);
  fill.Out(&a->dweight, 1, 1, 1, kDim);
  call->run = [a](fa2_context* c) { return fa2_rms_norm_backward(a, c); };
}

template <class Args>
Args* Rotary(Filler& fill, CCall* call, fa2_const_tensor Args::*in,
             fa2_tensor Args::*out) {
  auto* const a = ClearedArgs<Args>();
  call->struct_sizes.push_back(&a->struct_size);
  call->ints = {&a->interleaved, &a->reserved};
  fill.Rows(&(a->*in));
  fill.In(&a->cos, 1, 1, kQueries, kDim / 2);
  fill.In(&a->sin, 1, 1, kQueries, kDim / 2);
  fill.Rows(&(a->*out));
  return a;
}

void SwiGluBackward(Filler& fill, CCall* call) {
  auto* const a = ClearedArgs<fa2_swiglu_backward_args>();
  call->struct_sizes.push_back(&a->struct_size);
  fill.Rows(&a->dy);
  fill.Rows(&a->gate);
  fill.Rows(&a->up);
  fill.Rows(&a->dgate);
  fill.Rows(&a->dup);
  call->run = [a](fa2_context* c) { return fa2_swiglu_backward(a, c); };
}

void EmbeddingBackward(Filler& fill, CCall* call) {
  auto* const a = ClearedArgs<fa2_embedding_backward_args>();
  call->struct_sizes.push_back(&a->struct_size);
  call->ints = {&a->accumulate_dweight, &a->reserved};
  fill.Rows(&a->dy);
  fill.Ids(&a->ids);
  fill.Out(&a->dweight, 1, 1, kDim + 3, kDim);
  call->run = [a](fa2_context* c) { return fa2_embedding_backward(a, c); };
}

void CrossEntropy(Filler& fill, CCall* call) {
  auto* const a = ClearedArgs<fa2_cross_entropy_args>();
  a->label_smoothing = 0.1;
  call->struct_sizes.push_back(&a->struct_size);
  call->ints = {&a->has_ignore_index, &a->has_count, &a->accumulate_loss,
                &a->reserved};
  call->longs = {&a->ignore_index, &a->count};
  call->doubles = {&a->label_smoothing, &a->z_loss};
  fill.Rows(&a->logits);
  fill.Ids(&a->targets);
  fill.Fill(&a->loss, true, FA2_F32, 1, 1, 1, 1);
  fill.Rows(&a->dlogits);
  fill.Fill(&a->weights, false, FA2_F32, 1, 1, 1, kRows);
  fill.Fill(&a->losses, true, FA2_F64, 1, 1, 1, kRows);
  fill.Fill(&a->z_loss_part, true, FA2_F32, 1, 1, 1, 1);
  call->run = [a](fa2_context* c) { return fa2_cross_entropy(a, c); };
}

// Functions of tensors alone.
struct Tensors {
  fa2_const_tensor in[3];
  fa2_tensor out;
  double number;
};

Tensors* ClearedTensors() {
  std::memset(g_args, 0, sizeof(Tensors));
  return reinterpret_cast<Tensors*>(g_args);
}

}  // namespace

uint8_t* Arena() { return g_arena; }

CCall MakeCCall(int64_t which, int32_t dtype, bool packed_sequences) {
  CCall call;
  Filler fill(&call, dtype);
  switch (which) {
    case 0:
      call.name = "attention_forward";
      Forward(fill, &call, packed_sequences);
      break;
    case 1:
      call.name = "attention_backward";
      Backward(fill, &call, packed_sequences);
      break;
    case 2:
      call.name = "rms_norm_backward";
      RmsNormBackward(fill, &call);
      break;
    case 3: {
      using Args = fa2_rotary_embedding_args;
      call.name = "rotary_embedding";
      const Args* const a = Rotary(fill, &call, &Args::x, &Args::y);
      call.run = [a](fa2_context* c) { return fa2_rotary_embedding(a, c); };
      break;
    }
    case 4: {
      using Args = fa2_rotary_embedding_backward_args;
      call.name = "rotary_embedding_backward";
      const Args* const a = Rotary(fill, &call, &Args::dy, &Args::dx);
      call.run = [a](fa2_context* c) {
        return fa2_rotary_embedding_backward(a, c);
      };
      break;
    }
    case 5:
      call.name = "swiglu_backward";
      SwiGluBackward(fill, &call);
      break;
    case 6:
      call.name = "embedding_backward";
      EmbeddingBackward(fill, &call);
      break;
    case 7:
      call.name = "cross_entropy";
      CrossEntropy(fill, &call);
      break;
    case 8: {
      call.name = "transpose_2d";
      Tensors* const t = ClearedTensors();
      fill.Rows(&t->in[0]);
      fill.Out(&t->out, kBatch, kHeads, kDim, kQueries);
      call.run = [t](fa2_context* c) {
        return fa2_transpose_2d(&t->in[0], &t->out, c);
      };
      break;
    }
    case 9: {
      call.name = "softmax";
      Tensors* const t = ClearedTensors();
      fill.Rows(&t->in[0]);
      fill.Rows(&t->out);
      call.run = [t](fa2_context* c) {
        return fa2_softmax(&t->in[0], &t->out, c);
      };
      break;
    }
    case 10: {
      call.name = "rms_norm";
      Tensors* const t = ClearedTensors();
      t->number = 1e-5;
      call.doubles = {&t->number};
      fill.Rows(&t->in[0]);
      fill.In(&t->in[1], 1, 1, 1, kDim);
      fill.Rows(&t->out);
      call.run = [t](fa2_context* c) {
        return fa2_rms_norm(&t->in[0], &t->in[1], t->number, &t->out, c);
      };
      break;
    }
    case 11: {
      call.name = "attention_delta";
      Tensors* const t = ClearedTensors();
      fill.Rows(&t->in[0]);
      fill.Rows(&t->in[1]);
      fill.Fill(&t->out, true, fill.wide(), kBatch, kHeads, kQueries, 1);
      call.run = [t](fa2_context* c) {
        return fa2_attention_delta(&t->in[0], &t->in[1], &t->out, c);
      };
      break;
    }
    default: {
      call.name = "softmax_backward";
      Tensors* const t = ClearedTensors();
      fill.Rows(&t->in[0]);
      fill.Rows(&t->in[1]);
      fill.Rows(&t->out);
      call.run = [t](fa2_context* c) {
        return fa2_softmax_backward(&t->in[0], &t->in[1], &t->out, c);
      };
    }
  }
  return call;
}

}  // namespace fa2::test
