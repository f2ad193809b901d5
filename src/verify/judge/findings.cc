// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/findings.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace fa2::verify {
namespace {

// "0, 3, 5 and 4 more".
std::string List(const std::vector<int64_t>& numbers) {
  std::string text;
  constexpr size_t kShown = 6;
  for (size_t i = 0; i < std::min(kShown, numbers.size()); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  }
  if (numbers.size() > kShown) {
    text += " and " + std::to_string(numbers.size() - kShown) + " more";
  }
  return text;
}

bool SameValues(const double* a, const double* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(double)) == 0;
}

bool AllZero(const double* x, int64_t n) {
  return std::all_of(x, x + n, [](double value) { return value == 0.0; });
}

bool AllNotFinite(const double* x, int64_t n) {
  return std::none_of(x, x + n, [](double v) { return std::isfinite(v); });
}

// Heads that fit f, over all batches: index b * H + h.
template <class F>
std::vector<int64_t> HeadsWhere(const Array4<double>& x, const F& f) {
  std::vector<int64_t> heads;
  const Sizes& n = x.sizes;
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      if (f(a, b)) heads.push_back(a * n[1] + b);
    }
  }
  return heads;
}

// Errors of the slices along one dimension.
struct Profile {
  std::vector<double> error2;
};

// `most`: the share of slices that may be wrong for it to be worth a sentence.
void AddShareOf(const Profile& profile, const char* what, double most,
                std::vector<std::string>* findings) {
  // Slices that hold an error of their own size, while others are right.
  double total = 0.0;
  for (const double e : profile.error2) total += e;
  if (total == 0.0 || profile.error2.size() < 2) return;
  std::vector<int64_t> wrong;
  double share = 0.0;
  for (size_t i = 0; i < profile.error2.size(); ++i) {
    const double mean = total / static_cast<double>(profile.error2.size());
    if (profile.error2[i] > 0.25 * mean) {
      wrong.push_back(static_cast<int64_t>(i));
      share += profile.error2[i];
    }
  }
  const auto all = static_cast<double>(profile.error2.size());
  if (static_cast<double>(wrong.size()) > most * all || share < 0.9 * total) {
    return;
  }
  std::string text =
      "the error lies in " + std::string(what) + " " + List(wrong);
  const int64_t first = wrong.front(), last = wrong.back();
  if (last - first + 1 == static_cast<int64_t>(wrong.size()) &&
      wrong.size() > 3) {
    text = "the error lies in " + std::string(what) + " " +
           std::to_string(first) + " to " + std::to_string(last);
  }
  findings->push_back(text + " of " + std::to_string(profile.error2.size()));
}

void AddParity(const Profile& profile, const char* what,
               std::vector<std::string>* findings) {
  for (const size_t step : {2, 4, 8, 16}) {
    if (profile.error2.size() < 4 * step) return;
    std::vector<double> sums(step, 0.0);
    double total = 0.0;
    for (size_t i = 0; i < profile.error2.size(); ++i) {
      sums[i % step] += profile.error2[i];
      total += profile.error2[i];
    }
    for (size_t r = 0; r < step; ++r) {
      if (total > 0.0 && sums[r] > 0.95 * total) {
        findings->push_back("the error lies in " + std::string(what) +
                            " whose index is " + std::to_string(r) +
                            " modulo " + std::to_string(step));
        return;
      }
    }
  }
}

}  // namespace

void FindPatterns(const std::map<std::string, Array4<double>>& candidates,
                  const Array4<double>& answer, TensorVerdict* v) {
  const Array4<double>& x = candidates.at(v->name);
  const Sizes& n = x.sizes;
  const int64_t per_head = n[2] * n[3];
  const auto zeros = HeadsWhere(x, [&](int64_t a, int64_t b) {
    return AllZero(x.row(a, b, 0), per_head) &&
           !AllZero(answer.row(a, b, 0), per_head);
  });
  const auto heads = static_cast<size_t>(n[0] * n[1]);
  if (!v->pass && zeros.size() == heads) {
    v->findings.push_back("it is all zeros: nobody wrote it");
  } else if (!v->pass && !zeros.empty()) {
    v->findings.push_back("heads " + List(zeros) +
                          " (batch * heads + head) are all zeros");
  }
  const auto unwritten = HeadsWhere(x, [&](int64_t a, int64_t b) {
    return AllNotFinite(x.row(a, b, 0), per_head) &&
           !AllNotFinite(answer.row(a, b, 0), per_head);
  });
  if (!v->pass && !unwritten.empty()) {
    v->findings.push_back("heads " + List(unwritten) +
                          " (batch * heads + head) hold no finite number, as a "
                          "buffer that nobody wrote");
  }
  if (v->name == "lse" || per_head < 8) return;
  // One head's bits in another's place.
  for (int64_t one = 0; one < n[0] * n[1]; ++one) {
    const double* a = x.row(one / n[1], one % n[1], 0);
    if (AllZero(a, per_head) || AllNotFinite(a, per_head)) continue;
    for (int64_t two = 0; two < one; ++two) {
      const double* b = x.row(two / n[1], two % n[1], 0);
      if (a[0] != b[0] || !SameValues(a, b, per_head)) continue;
      const double* e = answer.row(one / n[1], one % n[1], 0);
      const double* f = answer.row(two / n[1], two % n[1], 0);
      if (SameValues(e, f, per_head)) continue;
      double differ = 0.0, size = 0.0;
      for (int64_t i = 0; i < per_head; ++i) {
        differ += (e[i] - f[i]) * (e[i] - f[i]);
        size += e[i] * e[i];
      }
      if (!(differ > 0.01 * size)) continue;
      v->pass = false;
      v->findings.push_back("head " + std::to_string(one % n[1]) +
                            " of batch " + std::to_string(one / n[1]) +
                            " holds the bits of head " +
                            std::to_string(two % n[1]) + " of batch " +
                            std::to_string(two / n[1]));
      return;
    }
  }
  if (v->pass) return;
  for (const auto& [name, other] : candidates) {
    if (name == v->name || other.values.size() != x.values.size()) continue;
    if (!AllZero(x.values.data(), static_cast<int64_t>(x.values.size())) &&
        SameValues(x.values.data(), other.values.data(),
                   static_cast<int64_t>(x.values.size()))) {
      v->findings.push_back("it holds the bits of " + name +
                            ": a stale buffer, or one passed twice");
    }
  }
}

void FindPlaces(const Array4<double>& x, const Array4<double>& answer,
                const Shards& shards, TensorVerdict* v) {
  const Sizes& n = x.sizes;
  const auto profile = [](int64_t size) {
    Profile p;
    p.error2.assign(static_cast<size_t>(size), 0.0);
    return p;
  };
  Profile batches = profile(n[0]), heads = profile(n[1]), rows = profile(n[2]);
  Profile columns = profile(n[3]);
  for (int64_t a = 0; a < n[0]; ++a) {
    for (int64_t b = 0; b < n[1]; ++b) {
      for (int64_t c = 0; c < n[2]; ++c) {
        const double* got = x.row(a, b, c);
        const double* expected = answer.row(a, b, c);
        for (int64_t d = 0; d < n[3]; ++d) {
          double e = got[d] - expected[d];
          if (std::isfinite(got[d]) != std::isfinite(expected[d])) e = 1.0;
          if (!std::isfinite(e)) continue;
          const double e2 = e * e;
          batches.error2[static_cast<size_t>(a)] += e2;
          heads.error2[static_cast<size_t>(b)] += e2;
          rows.error2[static_cast<size_t>(c)] += e2;
          columns.error2[static_cast<size_t>(d)] += e2;
        }
      }
    }
  }
  if (shards.ranks > 1) {
    const bool by_heads = shards.by == ShardBy::kHeads;
    const bool by_batch = shards.by == ShardBy::kBatch && n[0] > 1;
    const Profile& cut = by_heads ? heads : by_batch ? batches : rows;
    Profile ranks = profile(shards.ranks);
    const auto size = static_cast<int64_t>(cut.error2.size());
    for (int64_t i = 0; i < size; ++i) {
      ranks.error2[static_cast<size_t>(shards.RankOf(i, size))] +=
          cut.error2[static_cast<size_t>(i)];
    }
    // Any rank that is right tells something.
    AddShareOf(ranks, "ranks", 0.99, &v->findings);
  }
  AddShareOf(batches, "batches", 0.5, &v->findings);
  AddShareOf(heads, "heads", 0.5, &v->findings);
  AddShareOf(rows, "rows", 0.5, &v->findings);
  AddShareOf(columns, "columns", 0.5, &v->findings);
  AddParity(heads, "heads", &v->findings);
  AddParity(rows, "rows", &v->findings);
  AddParity(columns, "columns", &v->findings);
}

}  // namespace fa2::verify
