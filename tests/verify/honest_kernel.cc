// SPDX-License-Identifier: Apache-2.0
#include "tests/verify/honest_kernel.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "src/verify/model/generate.h"
#include "src/verify/model/problem.h"
#include "src/verify/model/rounding.h"

namespace fa2::verify::test {
namespace {

constexpr float kInfinity = INFINITY;
constexpr float kLn2 = 0.69314718f;

using Rows = std::vector<float>;

class Kernel {
 public:
  Kernel(const Style& style, const Problem& problem)
      : style_(style),
        p_(problem),
        stored_(p_.source.Find("q")->dtype),
        scale_(static_cast<float>(p_.scale)) {
    out_ = Array4<float>(p_.SizesOf("out"));
    lse_ = Array4<float>(p_.SizesOf("lse"));
    dq_ = Array4<float>(p_.SizesOf("dq"));
    dk_ = Array4<float>(p_.SizesOf("dk"));
    dv_ = Array4<float>(p_.SizesOf("dv"));
  }

  void Run() {
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        Load(b, h);
        Forward();
        Backward();
        Store(b, h);
      }
    }
  }

  Array4<float> out_, lse_, dq_, dk_, dv_;

 private:
  float RoundOne(float x) const {
    RoundRow(p_.products, &x, 1);
    return x;
  }

  Rows Operand(const Array4<double>& from, int64_t b, int64_t h) const {
    const int64_t count = from.sizes[2] * from.sizes[3];
    const double* x = from.row(b, h, 0);
    Rows rows(x, x + count);
    RoundRow(p_.products, rows.data(), count);
    return rows;
  }

  void Load(int64_t b, int64_t h) {
    const int64_t g = h / p_.group();
    q_ = Operand(p_.q, b, h);
    k_ = Operand(p_.k, b, g);
    v_ = Operand(p_.v, b, g);
    dout_ = Operand(p_.dout, b, h);
    const auto rows = [](int64_t n, int64_t d) {
      return Rows(static_cast<size_t>(n * d));
    };
    scores_ = rows(p_.nq, p_.nk);
    exact_out_ = out_head_ = rows(p_.nq, p_.value_dim);
    lse_head_ = rows(p_.nq, 1);
    dq_head_ = rows(p_.nq, p_.head_dim);
    dk_head_ = rows(p_.nk, p_.head_dim);
    dv_head_ = rows(p_.nk, p_.value_dim);
  }

  static float Dot(const float* a, const float* b, int64_t n) {
    float sum = 0.0f;
    for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
    return sum;
  }
  static void AddTimes(float factor, const float* from, int64_t n, float* to) {
    for (int64_t d = 0; d < n; ++d) to[d] += factor * from[d];
  }

  // Keys that query i sees.
  int64_t KeysOf(int64_t i) const {
    switch (p_.options.causal) {
      case Causal::kTopLeft:
        return std::min(p_.nk, i + 1);
      case Causal::kBottomRight:
        return std::clamp<int64_t>(i + 1 + p_.nk - p_.nq, 0, p_.nk);
      default:
        return p_.nk;
    }
  }

  // Beginnings of the tiles of n rows, in the order of visits.
  std::vector<int64_t> Tiles(int64_t n) const {
    std::vector<int64_t> begins;
    for (int64_t j = 0; j < n; j += style_.key_tile) begins.push_back(j);
    if (style_.backwards) std::reverse(begins.begin(), begins.end());
    return begins;
  }

  void Forward() {
    for (int64_t i = 0; i < p_.nq; ++i) ForwardRow(i);
  }

  // What a row is multiplied with to be a score in base 2, rounded.
  Rows Scaled(const float* row) const {
    Rows scaled(row, row + p_.head_dim);
    for (float& x : scaled) x = RoundOne(x * (scale_ / kLn2));
    return scaled;
  }

  void Scores(int64_t i, bool scaled_q, bool scaled_k, float* s) const {
    const float* q = q_.data() + i * p_.head_dim;
    const Rows q_scaled = Scaled(q);
    for (int64_t j = 0; j < KeysOf(i); ++j) {
      const float* k = k_.data() + j * p_.head_dim;
      if (scaled_k) {
        s[j] = kLn2 * Dot(q, Scaled(k).data(), p_.head_dim);
      } else if (scaled_q) {
        s[j] = kLn2 * Dot(q_scaled.data(), k, p_.head_dim);
      } else {
        s[j] = scale_ * Dot(q, k, p_.head_dim);
      }
    }
  }

  void ForwardRow(int64_t i) {
    const int64_t keys = KeysOf(i), columns = p_.value_dim;
    float* s = scores_.data() + i * p_.nk;
    Scores(i, style_.scaled_q, false, s);
    Rows out(static_cast<size_t>(columns), 0.0f);
    float max = -kInfinity, sum = 0.0f;
    if (style_.normalised_p && keys > 0) {
      max = *std::max_element(s, s + keys);
      for (int64_t j = 0; j < keys; ++j) sum += std::exp(s[j] - max);
      for (int64_t j = 0; j < keys; ++j) {
        AddTimes(RoundOne(std::exp(s[j] - max) / sum), v_.data() + j * columns,
                 columns, out.data());
      }
    } else if (keys > 0) {
      for (const int64_t begin : Tiles(keys)) {
        const int64_t end = std::min(keys, begin + style_.key_tile);
        const float before = max;
        max = std::max(max, *std::max_element(s + begin, s + end));
        const float shrink = std::exp(before - max);
        sum *= shrink;
        for (float& x : out) x *= shrink;
        for (int64_t j = begin; j < end; ++j) {
          const float p = std::exp(s[j] - max);
          sum += p;
          AddTimes(RoundOne(p), v_.data() + j * columns, columns, out.data());
        }
      }
      for (float& x : out) x /= sum;
    }
    lse_head_[static_cast<size_t>(i)] = max + std::log(sum);
    for (int64_t c = 0; c < columns; ++c) {
      const auto at = static_cast<size_t>(i * columns + c);
      exact_out_[at] = out[static_cast<size_t>(c)];
      out_head_[at] = static_cast<float>(RoundStored(stored_, exact_out_[at]));
    }
  }

  void Backward() {
    for (const int64_t begin : Tiles(p_.nq)) {
      const int64_t end = std::min(p_.nq, begin + style_.key_tile);
      for (int64_t i = begin; i < end; ++i) BackwardRow(i);
    }
    if (style_.scaled_ds) return;
    for (float& x : dq_head_) x *= scale_;
    for (float& x : dk_head_) x *= scale_;
  }

  void BackwardRow(int64_t i) {
    const int64_t keys = KeysOf(i), columns = p_.value_dim, depth = p_.head_dim;
    if (keys == 0) return;
    float* s = scores_.data() + i * p_.nk;
    if (style_.scaled_k_in_backward) Scores(i, false, true, s);
    const float* dout = dout_.data() + i * columns;
    const float lse = lse_head_[static_cast<size_t>(i)];
    const Rows& out = style_.delta_of_exact_out ? exact_out_ : out_head_;
    const float delta = Dot(out.data() + i * columns, dout, columns);
    for (const int64_t begin : Tiles(keys)) {
      const int64_t end = std::min(keys, begin + style_.key_tile);
      for (int64_t j = begin; j < end; ++j) {
        const float p = std::exp(s[j] - lse);
        const float rounded = RoundOne(p);
        float ds = (style_.rounded_p_in_ds ? rounded : p) *
                   (Dot(dout, v_.data() + j * columns, columns) - delta);
        if (style_.scaled_ds) ds *= scale_;
        ds = RoundOne(ds);
        AddTimes(ds, k_.data() + j * depth, depth, dq_head_.data() + i * depth);
        AddTimes(ds, q_.data() + i * depth, depth, dk_head_.data() + j * depth);
        AddTimes(rounded, dout, columns, dv_head_.data() + j * columns);
      }
    }
  }

  void Store(int64_t b, int64_t h) {
    std::copy(out_head_.begin(), out_head_.end(), out_.row(b, h, 0));
    std::copy(lse_head_.begin(), lse_head_.end(), lse_.row(b, h, 0));
    std::copy(dq_head_.begin(), dq_head_.end(), dq_.row(b, h, 0));
    const auto add = [&](Rows* share, Array4<float>* to) {
      float* sum = to->row(b, h / p_.group(), 0);
      for (size_t n = 0; n < share->size(); ++n) {
        float x = (*share)[n];
        if (style_.stored_shares) {
          x = static_cast<float>(RoundStored(stored_, x));
        }
        sum[n] += x;
      }
    };
    add(&dk_head_, &dk_);
    add(&dv_head_, &dv_);
  }

  const Style style_;
  const Problem& p_;
  const DType stored_;
  const float scale_;
  Rows q_, k_, v_, dout_, scores_, exact_out_, out_head_, lse_head_, dq_head_,
      dk_head_, dv_head_;
};

Array Stored(const Array4<float>& from, DType dtype,
             const std::vector<int64_t>& shape) {
  void* data = nullptr;
  Array array = MakeArray(dtype, shape, &data);
  for (size_t i = 0; i < from.values.size(); ++i) {
    StoreElement(dtype, data, static_cast<int64_t>(i), from.values[i]);
  }
  return array;
}

}  // namespace

std::vector<Style> HonestStyles() {
  std::vector<Style> styles;
  const auto add = [&styles](const char* name, auto set) {
    Style style;
    style.name = name;
    set(&style);
    styles.push_back(style);
  };
  // PyTorch's: flash, then memory-efficient, then the plain one.
  add("flash", [](Style* s) {
    s->stored_shares = s->backwards = true;
    s->key_tile = 128;
  });
  add("memory-efficient",
      [](Style* s) { s->rounded_p_in_ds = s->scaled_ds = true; });
  add("normalised P", [](Style* s) { s->normalised_p = true; });
  add("P rounded, normalised, in dS", [](Style* s) {
    s->normalised_p = s->rounded_p_in_ds = s->scaled_ds = true;
  });
  add("tiles of 16, backwards", [](Style* s) {
    s->key_tile = 16;
    s->backwards = true;
  });
  add("delta of the exact out",
      [](Style* s) { s->delta_of_exact_out = s->rounded_p_in_ds = true; });
  add("stored shares, all early", [](Style* s) {
    s->stored_shares = s->rounded_p_in_ds = s->scaled_ds = true;
  });
  return styles;
}

void RunHonestKernel(const Style& style, Case* c) {
  Case probe = *c;
  const Array& q = *c->Find("q");
  const std::vector<int64_t> rows = {q.shape[0], q.shape[1], q.shape[2]};
  void* data = nullptr;
  probe.tensors["lse"] = MakeArray(DType::kF32, rows, &data);
  const Problem problem = MakeProblem(probe);
  Kernel kernel(style, problem);
  kernel.Run();
  const auto add = [&](const char* name, const char* like,
                       const Array4<float>& from) {
    c->tensors[name] = Stored(from, q.dtype, c->Find(like)->shape);
  };
  add("out", "dout", kernel.out_);
  add("dq", "q", kernel.dq_);
  add("dk", "k", kernel.dk_);
  add("dv", "v", kernel.dv_);
  c->tensors["lse"] = Stored(kernel.lse_, DType::kF32, rows);
}

}  // namespace fa2::verify::test
