// SPDX-License-Identifier: Apache-2.0
#include "src/attention/call/sequences.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "src/checks/views.h"

namespace fa2::attention {
namespace {

using checks::CheckDType;
using checks::CheckView;
using checks::NamedView;
using checks::ShapeText;

int64_t PrefixSum(const ConstTensorView& view, int64_t index) {
  const char* address = At(view, 0, 0, 0, index);
  if (view.dtype == DType::kI64) {
    int64_t value;
    memcpy(&value, address, sizeof(value));
    return value;
  }
  int32_t value;
  memcpy(&value, address, sizeof(value));
  return value;
}

Status CheckPrefixSums(const NamedView& tensor, int64_t total,
                       const char* rows) {
  FA2_RETURN_IF_ERROR(CheckView(tensor));
  FA2_RETURN_IF_ERROR(
      CheckDType(tensor, {DType::kI32, DType::kI64}, "prefix sums of lengths"));
  const ConstTensorView& view = tensor.view;
  const std::string name = tensor.name;
  if (view.sizes[0] != 1 || view.sizes[1] != 1 || view.sizes[2] != 1 ||
      view.sizes[3] < 1) {
    return Status::InvalidArgument(name + " has shape " +
                                   ShapeText(view.sizes) +
                                   "; it must be [1, 1, 1, sequences + 1]");
  }
  int64_t previous = 0;
  for (int64_t i = 0; i < view.sizes[3]; ++i) {
    const int64_t value = PrefixSum(view, i);
    if (i == 0 ? value != 0 : value < previous) {
      return Status::InvalidArgument(
          name + "[" + std::to_string(i) + "] is " + std::to_string(value) +
          (i == 0 ? "; the first prefix sum must be 0"
                  : "; prefix sums must not fall, and the one before is " +
                        std::to_string(previous)));
    }
    previous = value;
  }
  if (previous != total) {
    return Status::InvalidArgument(
        name + " ends at " + std::to_string(previous) + "; it must end at " +
        std::to_string(total) + ", the rows of " + rows);
  }
  return Status::Ok();
}

// Replaces the longest lengths, by which dropout counts, by those given.
Status ApplyGivenExtents(Problem* p) {
  const AttentionOptions& o = p->options;
  for (const auto& [name, given, longest] :
       {std::tuple<const char*, int64_t, int64_t*>{"max_seqlen_q",
                                                   o.max_seqlen_q, &p->max_nq},
        std::tuple<const char*, int64_t, int64_t*>{
            "max_seqlen_k", o.max_seqlen_k, &p->max_nk}}) {
    if (given == 0) continue;
    if (given < *longest) {
      return Status::InvalidArgument(
          std::string(name) + " is " + std::to_string(given) +
          "; it must be 0 or at least the longest sequence, " +
          std::to_string(*longest));
    }
    *longest = given;
  }
  return Status::Ok();
}

}  // namespace

Status FindSequences(Problem* p) {
  const AttentionOptions& o = p->options;
  p->sequences.clear();
  p->variable_length = o.cu_seqlens_q.given() || o.cu_seqlens_k.given();
  if (!p->variable_length) {
    p->max_nq = p->q.sizes[2];
    p->max_nk = p->k.sizes[2];
    const Mask mask(o, p->max_nq, p->max_nk);
    for (int64_t b = 0; b < p->q.sizes[0]; ++b) {
      p->sequences.push_back({b, 0, 0, mask});
    }
    return ApplyGivenExtents(p);
  }
  if (o.cu_seqlens_q.given() != o.cu_seqlens_k.given()) {
    return Status::InvalidArgument(
        std::string(o.cu_seqlens_q.given() ? "cu_seqlens_k" : "cu_seqlens_q") +
        " is not given; cu_seqlens_q and cu_seqlens_k must be given together");
  }
  if (p->q.sizes[0] != 1) {
    return Status::InvalidArgument(
        "q has shape " + ShapeText(p->q.sizes) +
        "; with cu_seqlens_q its batch must be 1 (rows of all sequences are "
        "packed)");
  }
  if (o.bias.given()) {
    return Status::InvalidArgument(
        "bias is given together with cu_seqlens_q; packed sequences take no "
        "bias");
  }
  FA2_RETURN_IF_ERROR(
      CheckPrefixSums({"cu_seqlens_q", o.cu_seqlens_q}, p->q.sizes[2], "q"));
  FA2_RETURN_IF_ERROR(
      CheckPrefixSums({"cu_seqlens_k", o.cu_seqlens_k}, p->k.sizes[2], "k"));
  const int64_t count = o.cu_seqlens_q.sizes[3] - 1;
  if (o.cu_seqlens_k.sizes[3] != count + 1) {
    return Status::InvalidArgument(
        "cu_seqlens_k has " + std::to_string(o.cu_seqlens_k.sizes[3]) +
        " prefix sums; it must have " + std::to_string(count + 1) +
        ", as many as cu_seqlens_q");
  }
  p->max_nq = 0;
  p->max_nk = 0;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t q_begin = PrefixSum(o.cu_seqlens_q, s);
    const int64_t k_begin = PrefixSum(o.cu_seqlens_k, s);
    const int64_t nq = PrefixSum(o.cu_seqlens_q, s + 1) - q_begin;
    const int64_t nk = PrefixSum(o.cu_seqlens_k, s + 1) - k_begin;
    p->max_nq = std::max(p->max_nq, nq);
    p->max_nk = std::max(p->max_nk, nk);
    p->sequences.push_back({0, q_begin, k_begin, Mask(o, nq, nk)});
  }
  return ApplyGivenExtents(p);
}

}  // namespace fa2::attention
