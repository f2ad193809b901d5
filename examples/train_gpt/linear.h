// SPDX-License-Identifier: Apache-2.0

// Linear layers: products of row-major f32 matrices by OpenBLAS, and the
// threads that share them.
#ifndef FA2_EXAMPLES_TRAIN_GPT_LINEAR_H_
#define FA2_EXAMPLES_TRAIN_GPT_LINEAR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace train_gpt {

// OpenBLAS itself runs on one thread: how it splits a product, and so the order
// of its sums, would depend on their number. Here products are cut into blocks
// of rows of a fixed height, which the threads take in turn.
class Workers {
 public:
  explicit Workers(int num_threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls body(first, last) for pieces of `step` of [0, count).
  void For(int64_t count, int64_t step,
           const std::function<void(int64_t, int64_t)>& body) const;

  // The processor that OpenBLAS takes this one for.
  std::string BlasName() const;

 private:
  class Arena;
  std::unique_ptr<Arena> arena_;
};

// y [rows, out] = x [rows, in] * w [in, out].
void LinearForward(const Workers& workers, int64_t rows, int64_t in,
                   int64_t out, const float* x, const float* w, float* y);

// dx [rows, in] = dy * w^T, and dw [in, out] += x^T * dy.
void LinearBackward(const Workers& workers, int64_t rows, int64_t in,
                    int64_t out, const float* x, const float* w,
                    const float* dy, float* dx, float* dw);

}  // namespace train_gpt

#endif  // FA2_EXAMPLES_TRAIN_GPT_LINEAR_H_
