// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/rearranged.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace fa2::verify {
namespace {

// An honest kernel's error is random; of what it is a multiple of, as much.
constexpr double kSlack = 1.5;

using At = std::function<double(int64_t a, int64_t b, int64_t c, int64_t d)>;

// Relative L2 error of x against what `expected` says; infinite where x holds
// what is not finite.
double ErrorOf(const Array4<double>& x, const At& expected) {
  double error2 = 0.0, size2 = 0.0;
  const Sizes& n = x.sizes;
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      for (int64_t c = 0; c < n[2]; ++c) {
        const double* row = x.row(a, b, c);
        for (int64_t d = 0; d < n[3]; ++d) {
          const double e = expected(a, b, c, d);
          error2 += (row[d] - e) * (row[d] - e);
          size2 += e * e;
        }
      }
    }
  }
  const double error = std::sqrt(error2 / size2);
  return std::isfinite(error) ? error : HUGE_VAL;
}

class Finder {
 public:
  Finder(const Problem& problem, const Answer& answer,
         const std::map<std::string, Array4<double>>& candidates)
      : p_(problem), answer_(answer), candidates_(candidates) {}

  void Try(const TensorVerdict& v) {
    name_ = v.name;
    bound_ = kSlack * v.bound;
    x_ = &candidates_.at(name_);
    e_ = MemberOf(answer_, name_);
    if (name_ == "lse") return;
    Multiple();
    if (name_ == "dsinks") {
      if (std::all_of(x_->values.begin(), x_->values.end(),
                      [](double value) { return value == 0.0; })) {
        found_.push_back({"sink_gradient_missing", name_, 0.0, ""});
      }
      return;
    }
    if (name_ == "dalibi_slopes") return;
    Batches();
    if (name_ == "dbias") return;
    Transposed();
    LayoutSwapped();
    if (name_ == "dk" || name_ == "dv") Swapped();
  }

  std::vector<Explained> found() { return std::move(found_); }

 private:
  void Add(const char* id, double error, const std::string& detail = "") {
    if (error <= bound_) found_.push_back({id, name_, error, detail});
  }

  double E(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return e_->row(a, b, c)[d];
  }

  void Multiple() {
    double xe = 0.0, ee = 0.0;
    for (size_t i = 0; i < x_->values.size(); ++i) {
      xe += x_->values[i] * e_->values[i];
      ee += e_->values[i] * e_->values[i];
    }
    if (!(ee > 0.0) || !std::isfinite(xe)) return;
    const double k = xe / ee;
    const auto times = [&](double factor) {
      return ErrorOf(*x_, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
        return factor * E(a, b, c, d);
      });
    };
    if (name_ == "dbias") {
      for (const double factor : {p_.scale, 1.0 / p_.scale}) {
        if (std::abs(k / factor - 1.0) < 0.1 && std::abs(factor - 1) > 0.01) {
          Add("dbias_scaled", times(factor));
        }
      }
    }
    const double whole = std::round(k);
    // A scale that dQ or dK lacks is another mistake.
    const bool scale =
        (name_ == "dq" || name_ == "dk") &&
        std::abs(k * p_.scale - 1.0) <= std::abs(k / whole - 1.0) + 1e-6;
    if (whole >= 2.0 && !scale) {
      Add("overcount", times(whole),
          "it is " + std::to_string(static_cast<int64_t>(whole)) +
              " times what it must be");
    }
  }

  void Batches() {
    const int64_t batch = x_->sizes[0];
    if (batch < 2) return;
    // Each batch's nearest answer.
    double error2 = 0.0, size2 = 0.0;
    bool moved = false;
    const int64_t n = x_->sizes[1] * x_->sizes[2] * x_->sizes[3];
    for (int64_t b = 0; b < batch; ++b) {
      double best = HUGE_VAL, best_size = 0.0;
      int64_t from = b;
      for (int64_t other = 0; other < batch; ++other) {
        double error = 0.0, size = 0.0;
        const double* x = x_->row(b, 0, 0);
        const double* e = e_->row(other, 0, 0);
        for (int64_t i = 0; i < n; ++i) {
          error += (x[i] - e[i]) * (x[i] - e[i]);
          size += e[i] * e[i];
        }
        if (error < best) {
          best = error;
          best_size = size;
          from = other;
        }
      }
      moved |= from != b;
      error2 += best;
      size2 += best_size;
    }
    if (moved && size2 > 0.0) Add("batch_mixed", std::sqrt(error2 / size2));
  }

  void Transposed() {
    const Sizes& n = x_->sizes;
    if (n[2] < 2 || n[3] < 2) return;
    Add("transposed",
        ErrorOf(*x_, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
          const int64_t flat = c * n[3] + d;  // of a D x N matrix
          return E(a, b, flat % n[2], flat / n[2]);
        }));
    if (p_.options.layout == Layout::kBhsd || n[1] < 2) return;
    // [D, H, N] written where [N, H, D] is declared.
    Add("transposed",
        ErrorOf(*x_, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
          const int64_t flat = (c * n[1] + b) * n[3] + d;
          return E(a, flat / n[2] % n[1], flat % n[2], flat / n[2] / n[1]);
        }));
  }

  void LayoutSwapped() {
    const Sizes& n = x_->sizes;
    if (n[1] < 2 || n[2] < 2) return;
    const bool by_heads = p_.options.layout == Layout::kBhsd;
    Add("layout_swapped",
        ErrorOf(*x_, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
          // Where (b, c) lies in memory, and what the other order puts there.
          const int64_t flat = by_heads ? b * n[2] + c : c * n[1] + b;
          return by_heads ? E(a, flat % n[1], flat / n[1], d)
                          : E(a, flat / n[2], flat % n[2], d);
        }));
  }

  void Swapped() {
    const Array4<double>* other =
        MemberOf(answer_, name_ == "dk" ? "dv" : "dk");
    if (other == nullptr || other->sizes != x_->sizes) return;
    Add("dk_dv_swapped",
        ErrorOf(*x_, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
          return other->row(a, b, c)[d];
        }));
  }

  const Problem& p_;
  const Answer& answer_;
  const std::map<std::string, Array4<double>>& candidates_;
  std::string name_;
  double bound_ = 0.0;
  const Array4<double>* x_ = nullptr;
  const Array4<double>* e_ = nullptr;
  std::vector<Explained> found_;
};

}  // namespace

const Array4<double>* MemberOf(const Answer& answer, const std::string& name) {
  if (name == "out") return &answer.out;
  if (name == "lse") return &answer.lse;
  if (name == "dq") return &answer.dq;
  if (name == "dk") return &answer.dk;
  if (name == "dv") return &answer.dv;
  if (name == "dbias") return &answer.dbias;
  if (name == "dsinks") return &answer.dsinks;
  if (name == "dalibi_slopes") return &answer.dalibi_slopes;
  return nullptr;
}

std::vector<Explained> FindRearranged(
    const Problem& problem, const Answer& answer,
    const std::map<std::string, Array4<double>>& candidates,
    const std::vector<TensorVerdict>& verdicts) {
  Finder finder(problem, answer, candidates);
  for (const TensorVerdict& v : verdicts) {
    if (!v.pass) finder.Try(v);
  }
  return finder.found();
}

}  // namespace fa2::verify
