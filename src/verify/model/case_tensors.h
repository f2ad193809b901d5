// SPDX-License-Identifier: Apache-2.0

// The tensors of a case, each read in its logical place, with an Error that
// names the one that does not fit.
#ifndef FA2_SRC_VERIFY_MODEL_CASE_TENSORS_H_
#define FA2_SRC_VERIFY_MODEL_CASE_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/verify/cases/case.h"
#include "src/verify/model/logical_tensor.h"

namespace fa2::verify {

class CaseTensors {
 public:
  // The case must outlive this.
  explicit CaseTensors(const Case& source) : case_(source) {}

  bool Has(const std::string& name) const {
    return case_.Find(name) != nullptr;
  }
  DType DTypeOf(const std::string& name) const {
    return case_.Find(name)->dtype;
  }
  // "CASE: " or nothing, and the same with "tensor NAME" behind: how a
  // sentence begins.
  std::string Where() const;
  std::string Named(const std::string& name) const;
  [[noreturn]] void WrongShape(const std::string& name,
                               const std::string& must) const;
  void RequireFloat(const std::string& name) const;

  // q, k, v, dout, out and their gradients. Fewer dimensions lack the leading
  // ones, of size 1.
  LogicalTensor Rows(const std::string& name) const;
  // The same, of these logical sizes.
  LogicalTensor RowsOf(const std::string& name, const Sizes& sizes) const;
  // [B or 1, H or 1, Nq or 1, Nk or 1] of `full`, leading ones left out or not.
  LogicalTensor Broadcast(const std::string& name, const Sizes& full) const;
  // [H] or, where batch > 0, [batch, H]; ones around them may stand in the
  // file.
  LogicalTensor PerHead(const std::string& name, int64_t heads,
                        int64_t batch) const;
  // lse and dlse: [B, H, N], [B, H, N, 1], or with fewer leading dimensions.
  LogicalTensor Statistic(const std::string& name) const;
  // Rising from 0 to at most `total`.
  std::vector<int64_t> PrefixSums(const std::string& name, int64_t total) const;

 private:
  const Case& case_;
};

// "[1, 2, 3]".
std::string Text(const std::vector<int64_t>& shape);
std::string Text(const Sizes& sizes);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_MODEL_CASE_TENSORS_H_
