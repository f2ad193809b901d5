// SPDX-License-Identifier: Apache-2.0

// C structs to their C++ twins.
#ifndef FA2_SRC_C_API_CONVERT_H_
#define FA2_SRC_C_API_CONVERT_H_

#include <cstdint>
#include <initializer_list>

#include "fa2/attention.h"
#include "fa2/fa2_c.h"
#include "fa2/status.h"
#include "fa2/types.h"

namespace fa2::c_api {

// Each fails for a NULL argument, a dtype that is none, and a reserved field
// that is not 0; `name` is how the sentence calls the tensor.
Status Convert(const char* name, const fa2_const_tensor* from,
               ConstTensorView* to);
Status Convert(const char* name, const fa2_tensor* from, TensorView* to);

// Of the struct fields of one call; the first that fails ends it.
struct InputField {
  const char* name;
  const fa2_const_tensor& from;
  ConstTensorView* to;
};
struct OutputField {
  const char* name;
  const fa2_tensor& from;
  TensorView* to;
};
Status ConvertInputs(std::initializer_list<InputField> fields);
Status ConvertOutputs(std::initializer_list<OutputField> fields);

Status ConvertPrecision(int32_t from, Precision* to);

// `block_mask` is what the options' one becomes, and must outlive them.
Status Convert(const fa2_attention_forward_args* from, BlockMask* block_mask,
               AttentionForwardArgs* to);
Status Convert(const fa2_attention_backward_args* from, BlockMask* block_mask,
               AttentionBackwardArgs* to);

}  // namespace fa2::c_api

#endif  // FA2_SRC_C_API_CONVERT_H_
