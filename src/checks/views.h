// SPDX-License-Identifier: Apache-2.0

// Checks of the tensors of a call, with the sentences that a caller gets to
// see. The float64 reference shares none of them.
#ifndef FA2_SRC_CHECKS_VIEWS_H_
#define FA2_SRC_CHECKS_VIEWS_H_

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string>

#include "fa2/status.h"
#include "fa2/types.h"
#include "src/checks/return_if_error.h"

namespace fa2::checks {

// "[2, 4, 128, 64]"
std::string ShapeText(const std::array<int64_t, 4>& sizes);

// A tensor as an error names it.
struct NamedView {
  const char* name;
  ConstTensorView view;
};

// The tensors of a call, without memory from the heap: a short call would
// notice it.
class NamedViews {
 public:
  NamedViews() = default;
  NamedViews(std::initializer_list<NamedView> views) {
    for (const NamedView& view : views) Add(view);
  }
  // Those that are not given are left out.
  void Add(const NamedView& view) {
    if (view.view.given()) views_[static_cast<size_t>(size_++)] = view;
  }
  const NamedView* begin() const { return views_.data(); }
  const NamedView* end() const { return views_.data() + size_; }

 private:
  // A backward call has 18 inputs and 6 outputs.
  std::array<NamedView, 20> views_;
  int size_ = 0;
};

// A known dtype, sizes not negative, the span of its elements within 2^62
// bytes, data given unless there are no elements, data on an element's
// boundary.
Status CheckView(const NamedView& tensor);

// `why` ends the sentence, e.g. "as q has"; may be empty.
Status CheckDType(const NamedView& tensor, std::initializer_list<DType> allowed,
                  const char* why);

// `meaning` says what the shape must be, e.g. "[B, Hq, Nq, D] of q".
Status CheckShape(const NamedView& tensor,
                  const std::array<int64_t, 4>& expected, const char* meaning);

// For row statistics, [B, H, N] with a last size of 1: the sentence shows three
// sizes, and four where the last one is wrong.
Status CheckStatisticsShape(const NamedView& tensor,
                            const std::array<int64_t, 3>& expected,
                            const char* meaning);

// No two elements of one output in one place; no output in the place of another
// output or of an input. Views that interleave (slices of one packed buffer)
// are told apart.
Status CheckOverlap(const NamedViews& outputs, const NamedViews& inputs);

}  // namespace fa2::checks

#endif  // FA2_SRC_CHECKS_VIEWS_H_
