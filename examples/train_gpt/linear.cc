// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/linear.h"

#include <cblas.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>

namespace train_gpt {
namespace {

// Rows of a block: high enough for OpenBLAS to reach most of its speed, low
// enough for several blocks in a batch of a thousand tokens.
constexpr int64_t kBlockRows = 64;

blasint Size(int64_t n) { return static_cast<blasint>(n); }

}  // namespace

class Workers::Arena {
 public:
  explicit Arena(int num_threads) : arena(num_threads) {}
  tbb::task_arena arena;
};

Workers::Workers(int num_threads) : arena_(new Arena(num_threads)) {
  openblas_set_num_threads(1);
}

Workers::~Workers() = default;

void Workers::For(int64_t count, int64_t step,
                  const std::function<void(int64_t, int64_t)>& body) const {
  const int64_t pieces = (count + step - 1) / step;
  arena_->arena.execute([&] {
    tbb::parallel_for(
        int64_t{0}, pieces,
        [&](int64_t i) { body(i * step, std::min(count, (i + 1) * step)); },
        tbb::simple_partitioner());
  });
}

std::string Workers::BlasName() const { return openblas_get_corename(); }

void LinearForward(const Workers& workers, int64_t rows, int64_t in,
                   int64_t out, const float* x, const float* w, float* y) {
  workers.For(rows, kBlockRows, [=](int64_t first, int64_t last) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, Size(last - first),
                Size(out), Size(in), 1.0f, x + first * in, Size(in), w,
                Size(out), 0.0f, y + first * out, Size(out));
  });
}

void LinearBackward(const Workers& workers, int64_t rows, int64_t in,
                    int64_t out, const float* x, const float* w,
                    const float* dy, float* dx, float* dw) {
  workers.For(rows, kBlockRows, [=](int64_t first, int64_t last) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, Size(last - first),
                Size(in), Size(out), 1.0f, dy + first * out, Size(out), w,
                Size(out), 0.0f, dx + first * in, Size(in));
  });
  workers.For(in, kBlockRows, [=](int64_t first, int64_t last) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, Size(last - first),
                Size(out), Size(rows), 1.0f, x + first, Size(in), dy, Size(out),
                1.0f, dw + first * out, Size(out));
  });
}

}  // namespace train_gpt
