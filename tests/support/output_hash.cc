// SPDX-License-Identifier: Apache-2.0
#include "tests/support/output_hash.h"

#include <cstring>

namespace fa2::test {
namespace {

// FNV-1a over the bits of every element.
uint64_t Hash(uint64_t hash, const ConstTensorView& view) {
  if (!view.given()) return hash;
  ForEachIndex({view.sizes[0], view.sizes[1], view.sizes[2], view.sizes[3]},
               [&](const Sizes& index) {
                 double value = Get(view, index);
                 if (value != value) value = 0x1p1023;
                 uint64_t bits;
                 std::memcpy(&bits, &value, sizeof(bits));
                 for (int i = 0; i < 64; i += 8) {
                   hash = (hash ^ (bits >> i & 0xFF)) * 0x100000001B3;
                 }
               });
  return hash;
}

uint64_t HashOf(const AttentionCase& c, const AttentionOutputs& o) {
  uint64_t hash = 0xCBF29CE484222325;
  hash = Hash(hash, o.out.view);
  if (!c.padded_lse) hash = Hash(hash, o.lse.view);
  for (const Tensor* t :
       {&o.dq, &o.dk, &o.dv, &o.dbias, &o.dalibi, &o.dsinks}) {
    hash = Hash(hash, t->view);
  }
  return hash;
}

}  // namespace

Status HashOfCall(const AttentionCase& c, const AttentionInputs& inputs,
                  Context* context, uint64_t* hash) {
  *hash = 0;
  const AttentionOutputs o = MakeOutputs(c, inputs);
  Status status = AttentionForward(ForwardArgs(inputs, o), context);
  if (status.ok()) {
    status = AttentionBackward(BackwardArgs(c, inputs, o), context);
  }
  if (status.ok()) *hash = HashOf(c, o);
  return status;
}

}  // namespace fa2::test
