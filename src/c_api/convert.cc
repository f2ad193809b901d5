// SPDX-License-Identifier: Apache-2.0
#include "src/c_api/convert.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>

#include "src/c_api/boundary.h"

namespace fa2::c_api {

static_assert(static_cast<int>(DType::kF32) == FA2_F32);
static_assert(static_cast<int>(DType::kBF16) == FA2_BF16);
static_assert(static_cast<int>(DType::kF16) == FA2_F16);
static_assert(static_cast<int>(DType::kF64) == FA2_F64);
static_assert(static_cast<int>(DType::kBool) == FA2_BOOL);
static_assert(static_cast<int>(DType::kI32) == FA2_I32);
static_assert(static_cast<int>(DType::kI64) == FA2_I64);
static_assert(static_cast<int>(DType::kU8) == FA2_U8);
static_assert(static_cast<int>(Causal::kNone) == FA2_CAUSAL_NONE);
static_assert(static_cast<int>(Causal::kTopLeft) == FA2_CAUSAL_TOP_LEFT);
static_assert(static_cast<int>(Causal::kBottomRight) ==
              FA2_CAUSAL_BOTTOM_RIGHT);
static_assert(static_cast<int>(Precision::kFast) == FA2_PRECISION_FAST);
static_assert(static_cast<int>(Precision::kHigh) == FA2_PRECISION_HIGH);
static_assert(static_cast<int>(Precision::kExact) == FA2_PRECISION_EXACT);

namespace {

template <class From, class To>
Status ConvertTensor(const char* name, const From& from, To* to) {
  *to = To();
  if (SizeOf(static_cast<DType>(from.dtype)) == 0) {
    return Status::InvalidArgument(std::string(name) + ".dtype is " +
                                   std::to_string(from.dtype) +
                                   "; it must be FA2_F32 (0) to FA2_U8 (7)");
  }
  if (from.reserved != 0) {
    return Status::InvalidArgument(std::string(name) + ".reserved is " +
                                   std::to_string(from.reserved) +
                                   "; it must be 0");
  }
  to->data = from.data;
  to->dtype = static_cast<DType>(from.dtype);
  std::copy(from.sizes, from.sizes + 4, to->sizes.begin());
  std::copy(from.strides, from.strides + 4, to->strides.begin());
  return Status::Ok();
}

Status NullTensor(const char* name) {
  return Status::InvalidArgument(std::string(name) +
                                 " is NULL; it must point to a tensor");
}

template <class Enum>
Status ConvertEnum(const char* name, int32_t from, int32_t last, Enum* to) {
  if (from < 0 || from > last) {
    return Status::InvalidArgument(std::string(name) + " is " +
                                   std::to_string(from) + "; it must be 0 to " +
                                   std::to_string(last));
  }
  *to = static_cast<Enum>(from);
  return Status::Ok();
}

Status ConvertBlockMask(const fa2_block_mask* given, BlockMask* to) {
  *to = BlockMask();
  fa2_block_mask from = {};
  Status status = ReadStruct(
      "block_mask", given, offsetof(fa2_block_mask, full_kv_num_blocks), &from);
  if (!status.ok()) return status;
  if (from.block_q != 0) to->block_q = from.block_q;
  if (from.block_k != 0) to->block_k = from.block_k;
  return ConvertInputs(
      {{"block_mask.kv_num_blocks", from.kv_num_blocks, &to->kv_num_blocks},
       {"block_mask.kv_indices", from.kv_indices, &to->kv_indices},
       {"block_mask.full_kv_num_blocks", from.full_kv_num_blocks,
        &to->full_kv_num_blocks},
       {"block_mask.full_kv_indices", from.full_kv_indices,
        &to->full_kv_indices},
       {"block_mask.bits", from.bits, &to->bits}});
}

// `block_mask`: what options.block_mask becomes, if it is given.
Status ConvertOptions(const fa2_attention_options* given, BlockMask* block_mask,
                      AttentionOptions* to) {
  *to = AttentionOptions();
  if (given == nullptr) return Status::Ok();
  fa2_attention_options from = {};
  Status status = ReadStruct("options", given, sizeof(size_t), &from);
  if (status.ok())
    status = ConvertEnum("causal", from.causal, FA2_CAUSAL_BOTTOM_RIGHT,
                         &to->causal);
  if (status.ok()) status = ConvertPrecision(from.precision, &to->precision);
  if (status.ok()) {
    status =
        ConvertInputs({{"bias", from.bias, &to->bias},
                       {"alibi_slopes", from.alibi_slopes, &to->alibi_slopes},
                       {"sinks", from.sinks, &to->sinks},
                       {"cu_seqlens_q", from.cu_seqlens_q, &to->cu_seqlens_q},
                       {"cu_seqlens_k", from.cu_seqlens_k, &to->cu_seqlens_k}});
  }
  if (status.ok() && from.block_mask != nullptr) {
    status = ConvertBlockMask(from.block_mask, block_mask);
    to->block_mask = block_mask;
  }
  if (!status.ok()) return status;
  if (from.has_scale != 0) to->scale = from.scale;
  if (from.has_window != 0) {
    to->window_left = from.window_left;
    to->window_right = from.window_right;
  }
  to->softcap = from.softcap;
  to->dropout_p = from.dropout_p;
  to->philox_seed = from.philox_seed;
  to->philox_offset = from.philox_offset;
  to->max_seqlen_q = from.max_seqlen_q;
  to->max_seqlen_k = from.max_seqlen_k;
  return Status::Ok();
}

}  // namespace

Status Convert(const char* name, const fa2_const_tensor* from,
               ConstTensorView* to) {
  return from == nullptr ? NullTensor(name) : ConvertTensor(name, *from, to);
}
Status Convert(const char* name, const fa2_tensor* from, TensorView* to) {
  return from == nullptr ? NullTensor(name) : ConvertTensor(name, *from, to);
}

Status ConvertInputs(std::initializer_list<InputField> fields) {
  for (const InputField& field : fields) {
    Status status = ConvertTensor(field.name, field.from, field.to);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status ConvertOutputs(std::initializer_list<OutputField> fields) {
  for (const OutputField& field : fields) {
    Status status = ConvertTensor(field.name, field.from, field.to);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status ConvertPrecision(int32_t from, Precision* to) {
  return ConvertEnum("precision", from, FA2_PRECISION_EXACT, to);
}

Status Convert(const fa2_attention_forward_args* given, BlockMask* block_mask,
               AttentionForwardArgs* to) {
  *to = AttentionForwardArgs();
  fa2_attention_forward_args from = {};
  Status status = ReadStruct("args", given,
                             offsetof(fa2_attention_forward_args, lse), &from);
  if (status.ok())
    status = ConvertOptions(from.options, block_mask, &to->options);
  if (status.ok()) {
    status = ConvertInputs(
        {{"q", from.q, &to->q}, {"k", from.k, &to->k}, {"v", from.v, &to->v}});
  }
  if (status.ok()) {
    status = ConvertOutputs(
        {{"out", from.out, &to->out}, {"lse", from.lse, &to->lse}});
  }
  return status;
}

Status Convert(const fa2_attention_backward_args* given, BlockMask* block_mask,
               AttentionBackwardArgs* to) {
  *to = AttentionBackwardArgs();
  fa2_attention_backward_args from = {};
  Status status = ReadStruct(
      "args", given, offsetof(fa2_attention_backward_args, dbias), &from);
  if (status.ok())
    status = ConvertOptions(from.options, block_mask, &to->options);
  if (status.ok()) {
    status = ConvertInputs({{"dout", from.dout, &to->dout},
                            {"q", from.q, &to->q},
                            {"k", from.k, &to->k},
                            {"v", from.v, &to->v},
                            {"out", from.out, &to->out},
                            {"lse", from.lse, &to->lse},
                            {"dlse", from.dlse, &to->dlse},
                            {"delta", from.delta, &to->delta}});
  }
  if (status.ok()) {
    status = ConvertOutputs(
        {{"dq", from.dq, &to->dq},
         {"dk", from.dk, &to->dk},
         {"dv", from.dv, &to->dv},
         {"dbias", from.dbias, &to->dbias},
         {"dalibi_slopes", from.dalibi_slopes, &to->dalibi_slopes},
         {"dsinks", from.dsinks, &to->dsinks}});
  }
  to->accumulate_dq = from.accumulate_dq != 0;
  to->accumulate_dk = from.accumulate_dk != 0;
  to->accumulate_dv = from.accumulate_dv != 0;
  to->accumulate_dbias = from.accumulate_dbias != 0;
  return status;
}

}  // namespace fa2::c_api
