// SPDX-License-Identifier: Apache-2.0
#include "tests/verify/wrong_kernel.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "src/common/philox.h"
#include "src/verify/model/generate.h"
#include "src/verify/model/problem.h"
#include "src/verify/model/rounding.h"

namespace fa2::verify::test {
namespace {

constexpr float kInfinity = INFINITY;
constexpr float kLn2 = 0.69314718f;

class Kernel {
 public:
  Kernel(const std::string& fault, const Problem& problem)
      : fault_(fault), p_(problem) {
    out_ = Array4<float>(p_.SizesOf("out"));
    lse_ = Array4<float>(p_.SizesOf("lse"));
    dq_ = Array4<float>(p_.SizesOf("dq"));
    dk_ = Array4<float>(p_.SizesOf("dk"));
    dv_ = Array4<float>(p_.SizesOf("dv"));
    if (p_.bias.given()) dbias_ = Array4<float>(p_.bias.sizes);
    if (p_.sinks.given()) dsinks_ = Array4<float>(p_.sinks.sizes);
  }

  void Run() {
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) RunHead(b, h);
    }
    After();
  }

  Array4<float> out_, lse_, dq_, dk_, dv_, dbias_, dsinks_;

 private:
  bool Is(const char* fault) const { return fault_ == fault; }
  // In any of its variants.
  bool IdIs(const char* id) const {
    return fault_.substr(0, fault_.find(':')) == id;
  }
  // In both passes, or in the backward alone.
  bool In(const char* id, bool backward) const {
    return fault_ == id ||
           (backward && fault_ == std::string(id) + ":backward");
  }

  float Round(float x) const {
    RoundRow(p_.products, &x, 1);
    return x;
  }
  // A sum that is kept in 16 bits.
  float Sum(float x) const {
    if (Is("low_precision_accumulation")) {
      RoundRow(p_.products == Products::kF16 ? Products::kF16 : Products::kBF16,
               &x, 1);
    }
    return x;
  }

  bool Visible(int64_t i, int64_t j, bool backward) const {
    const int64_t nq = p_.nq, nk = p_.nk;
    const int64_t bottom_right = i + nk - nq;
    Causal causal = p_.options.causal;
    int64_t shift = 0;
    if (In("causal_top_left", backward)) causal = Causal::kTopLeft;
    if (In("causal_bottom_right", backward)) causal = Causal::kBottomRight;
    if (In("causal_missing", backward)) causal = Causal::kNone;
    if (In("causal_undeclared", backward)) causal = Causal::kTopLeft;
    if (Is("causal_undeclared:bottom_right")) causal = Causal::kBottomRight;
    if (In("causal_off_by_one", backward)) shift = 1;
    if (Is("causal_off_by_one:short")) shift = -1;
    if (causal == Causal::kTopLeft && j > i + shift) return false;
    if (causal == Causal::kBottomRight && j > bottom_right + shift)
      return false;
    int64_t left = p_.options.window_left, right = p_.options.window_right;
    if (In("window_off_by_one", backward) && left >= 0) ++left;
    if (Is("window_off_by_one:right") && right >= 0) --right;
    int64_t diagonal = p_.options.causal == Causal::kTopLeft ? i : bottom_right;
    if (In("window_wrong_diagonal", backward)) diagonal = i;
    if (left >= 0 && diagonal - j > left) return false;
    if (right >= 0 && j - diagonal > right) return false;
    if (In("last_key_tile_skipped", backward) && j >= nk / kTile * kTile) {
      return false;
    }
    return true;
  }

  float Keep(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const double p = p_.options.dropout_p;
    if (p == 0.0) return 1.0f;
    const auto n =
        static_cast<uint64_t>(((b * p_.heads + h) * p_.nq + i) * p_.nk + j);
    return PhiloxKeep(p, *p_.options.philox_seed, n) ? 1.0f : 0.0f;
  }

  float Bias(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!p_.bias.given()) return 0.0f;
    const Sizes& n = p_.bias.sizes;
    return static_cast<float>(
        p_.bias.row(n[0] == 1 ? 0 : b, n[1] == 1 ? 0 : h,
                    n[2] == 1 ? 0 : i)[n[3] == 1 ? 0 : j]);
  }

  // Row j of kv head g of K or V; [B, H, N, D] is taken for [B, N, H, D].
  const double* KeyRow(const Array4<double>& x, int64_t b, int64_t g, int64_t j,
                       bool backward) const {
    if (Is("batch_mixed:read")) b = (b + 1) % p_.batch;
    const bool only_v = Is("kv_layout_swapped:v") && &x == &p_.v;
    if (!In("kv_layout_swapped", backward) && !only_v &&
        !Is("kv_layout_swapped:written")) {
      return x.row(b, g, j);
    }
    const int64_t flat = j * p_.kv_heads + g;
    return x.row(b, flat / p_.nk, flat % p_.nk);
  }

  // The same row of dK or dV.
  float* KeyGradient(Array4<float>* x, int64_t b, int64_t g, int64_t j) const {
    if (!Is("kv_layout_swapped:written")) return x->row(b, g, j);
    const int64_t flat = j * p_.kv_heads + g;
    return x->row(b, flat / p_.nk, flat % p_.nk);
  }

  float Dot(const double* a, const double* b, int64_t n) const {
    float sum = 0.0f;
    for (int64_t d = 0; d < n; ++d) {
      sum += Round(static_cast<float>(a[d])) * Round(static_cast<float>(b[d]));
    }
    return sum;
  }

  // Score without the mask, and what softcap's derivative is there.
  float Score(int64_t b, int64_t h, int64_t g, int64_t i, int64_t j,
              bool backward, float* slope) const {
    float s =
        static_cast<float>(p_.scale) *
        Dot(p_.q.row(b, h, i), KeyRow(p_.k, b, g, j, backward), p_.head_dim);
    *slope = 1.0f;
    if (p_.options.softcap > 0.0) {
      const auto cap = static_cast<float>(p_.options.softcap);
      const float t = std::tanh(s / cap);
      s = cap * t;
      if (!Is("softcap_derivative_missing")) *slope = 1.0f - t * t;
    }
    s += Bias(b, h, i, j);
    if (p_.alibi_slopes.given()) {
      const int64_t diagonal =
          In("alibi_wrong_diagonal", backward) ? i : i + p_.nk - p_.nq;
      s -= *p_.alibi_slopes.row(0, h, 0) *
           std::abs(static_cast<float>(diagonal - j));
    }
    return s;
  }

  int64_t KvHead(int64_t h, bool backward) const {
    return In("head_map_modulo", backward) ? h % p_.kv_heads : h / p_.group();
  }

  void RunHead(int64_t b, int64_t h) {
    std::vector<float> maxima(static_cast<size_t>(p_.nq));
    for (int64_t i = 0; i < p_.nq; ++i) {
      maxima[static_cast<size_t>(i)] = ForwardRow(b, h, i);
    }
    for (int64_t i = 0; i < p_.nq; ++i) {
      BackwardRow(b, h, i, maxima[static_cast<size_t>(i)]);
    }
  }

  float ForwardRow(int64_t b, int64_t h, int64_t i) {
    const int64_t g = KvHead(h, false);
    std::vector<float> s(static_cast<size_t>(p_.nk), -kInfinity);
    float max = p_.sinks.given() ? *p_.sinks.row(0, h, 0) : -kInfinity;
    float slope;
    for (int64_t j = 0; j < p_.nk; ++j) {
      if (!Visible(i, j, false)) continue;
      s[static_cast<size_t>(j)] = Score(b, h, g, i, j, false, &slope);
      max = std::max(max, s[static_cast<size_t>(j)]);
    }
    const int64_t padded =
        Is("key_tail_unmasked") ? (kTile - p_.nk % kTile) % kTile : 0;
    if (padded > 0) max = std::max(max, 0.0f);
    float* out = out_.row(b, h, i);
    if (max == -kInfinity) {
      *lse_.row(b, h, i) = -kInfinity;
      return max;
    }
    float sum =
        p_.sinks.given() ? std::exp(*p_.sinks.row(0, h, 0) - max) : 0.0f;
    sum += static_cast<float>(padded) * std::exp(-max);
    const auto keep_scale =
        static_cast<float>(1.0 / (1.0 - p_.options.dropout_p));
    for (int64_t j = 0; j < p_.nk; ++j) {
      float e = std::exp(s[static_cast<size_t>(j)] - max);
      sum += e;
      e = Round(e * Keep(b, h, i, j));
      if (e == 0.0f) continue;
      const double* v = KeyRow(p_.v, b, g, j, false);
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        out[c] += e * Round(static_cast<float>(v[c]));
      }
    }
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      out[c] /= sum;
      if (!Is("dropout_scale_missing")) out[c] *= keep_scale;
      out[c] =
          static_cast<float>(RoundStored(p_.source.Find("q")->dtype, out[c]));
    }
    *lse_.row(b, h, i) = max + std::log(sum);
    if (Is("lse_without_max")) *lse_.row(b, h, i) = std::log(sum);
    return max;
  }

  float LseFor(int64_t b, int64_t h, int64_t i, float max) const {
    const float lse = *lse_.row(b, h, i);
    if (Is("lse_base2:backward")) return lse * kLn2;
    if (Is("p_unnormalised")) return max;
    if (Is("lse_without_max:backward")) return lse - max;
    return lse;
  }

  float Delta(int64_t b, int64_t h, int64_t i) const {
    if (Is("delta_missing")) return 0.0f;
    float delta = 0.0f;
    const double* dout = p_.dout.row(b, h, i);
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      const float o = Is("delta_without_out") ? 1.0f : out_.row(b, h, i)[c];
      delta += o * static_cast<float>(dout[c]);
    }
    return delta;
  }

  float ShiftedKeep(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (Is("dropout_mask_shifted")) return Keep(b, h, i, j + 1);
    if (Is("dropout_mask_shifted:row")) {
      return Keep(b, h, (i + 1) % p_.nq, j);
    }
    if (Is("dropout_mask_shifted:head")) {
      return Keep(b, (h + 1) % p_.heads, i, j);
    }
    return Keep(b, h, i, j);
  }

  void BackwardRow(int64_t b, int64_t h, int64_t i, float max) {
    if (max == -kInfinity) return;
    const int64_t g = KvHead(h, true);
    const float lse = LseFor(b, h, i, max);
    const float delta = Delta(b, h, i);
    const auto scale = static_cast<float>(p_.scale);
    float factor = scale;
    if (Is("scale_missing")) factor = 1.0f;
    if (Is("scale_twice")) factor = scale * scale;
    const auto keep_scale =
        static_cast<float>(1.0 / (1.0 - p_.options.dropout_p));
    const float dp_scale = Is("dropout_scale_missing") ? 1.0f : keep_scale;
    const double* q = p_.q.row(b, h, i);
    const double* dout = p_.dout.row(b, h, i);
    float* dq = dq_.row(b, h, i);
    // The last member of the group overwrites what the others added.
    const bool alone =
        !Is("group_not_summed") || h % p_.group() == p_.group() - 1;
    const bool query_skipped =
        Is("last_query_tile_skipped") && i >= p_.nq / kTile * kTile;
    int64_t last_tile = (p_.nk - 1) / kTile * kTile;
    if (Is("dq_overwritten:row")) {
      int64_t last = p_.nk - 1;
      while (last > 0 && !Visible(i, last, true)) --last;
      last_tile = last / kTile * kTile;
    }
    for (int64_t j = 0; j < p_.nk; ++j) {
      if (!Visible(i, j, true)) {
        if (Is("dv_from_dp:masked")) AddMaskedDp(b, h, g, i, j);
        continue;
      }
      float slope = 1.0f;
      const float s = Score(b, h, g, i, j, true, &slope);
      const float p = std::exp(s - lse);
      const float keep = ShiftedKeep(b, h, i, j);
      float dp = Dot(dout, KeyRow(p_.v, b, g, j, true), p_.value_dim);
      if (Is("dropout_not_in_dp:scaled")) {
        dp *= dp_scale;
      } else if (!Is("dropout_not_in_dp")) {
        dp *= keep * dp_scale;
      }
      float ds = p * (dp - delta);
      AddBias(b, h, i, j, ds);
      ds = Round(ds * slope);
      float weight = Round(p * keep * dp_scale);
      if (IdIs("dv_from_dp")) weight = Round(dp);
      if (IdIs("dq_overwritten") && j < last_tile) {
        // Overwritten by a later tile.
      } else {
        const double* k = KeyRow(p_.k, b, g, j, true);
        for (int64_t d = 0; d < p_.head_dim; ++d) {
          dq[d] = Sum(dq[d] + factor * ds * Round(static_cast<float>(k[d])));
        }
      }
      if (!alone || query_skipped) continue;
      float* dk = KeyGradient(&dk_, b, g, j);
      float* dv = KeyGradient(&dv_, b, g, j);
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        dk[d] = Sum(dk[d] + factor * ds * Round(static_cast<float>(q[d])));
      }
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        dv[c] = Sum(dv[c] + weight * Round(static_cast<float>(dout[c])));
      }
    }
    if (p_.sinks.given() && !Is("sink_gradient_missing")) {
      *dsinks_.row(0, h, 0) -= std::exp(*p_.sinks.row(0, h, 0) - lse) * delta;
    }
  }

  // What a masked pair adds to dV where P's place holds dP.
  void AddMaskedDp(int64_t b, int64_t h, int64_t g, int64_t i, int64_t j) {
    const double* dout = p_.dout.row(b, h, i);
    const float dp =
        Round(Dot(dout, KeyRow(p_.v, b, g, j, true), p_.value_dim));
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      dv_.row(b, g, j)[c] += dp * Round(static_cast<float>(dout[c]));
    }
  }

  void AddBias(int64_t b, int64_t h, int64_t i, int64_t j, float ds) {
    if (!p_.bias.given()) return;
    const Sizes& n = p_.bias.sizes;
    if (Is("dbias_not_reduced") && n[1] == 1 && h != p_.heads - 1) return;
    if (Is("dbias_not_reduced:all") && (b != 0 || h != 0)) return;
    if (Is("dbias_scaled")) ds *= static_cast<float>(p_.scale);
    dbias_.row(n[0] == 1 ? 0 : b, n[1] == 1 ? 0 : h,
               n[2] == 1 ? 0 : i)[n[3] == 1 ? 0 : j] += ds;
  }

  static void Multiply(float factor, Array4<float>* x) {
    for (float& value : x->values) value *= factor;
  }

  // Mistakes made after the sums.
  void After() {
    if (Is("lse_base2")) Multiply(1.0f / kLn2, &lse_);
    if (Is("overcount")) Multiply(5.0f, &dq_);
    if (Is("overcount:dv")) Multiply(2.0f, &dv_);
    if (Is("dk_dv_swapped")) std::swap(dk_.values, dv_.values);
    if (Is("accumulated_into_garbage") ||
        Is("accumulated_into_garbage:small")) {
      GenerateOptions o;
      o.batch = p_.batch;
      o.heads = o.kv_heads = p_.heads;
      o.nq = o.nk = p_.nq;
      o.head_dim = o.value_dim = p_.head_dim;
      o.dtype = DType::kF32;
      o.seed = 99;
      const Case garbage = Generate(o);
      const auto* from = static_cast<const float*>(garbage.Find("q")->data);
      double size2 = 0.0;
      for (const float x : dq_.values) size2 += x * x;
      const double rms = std::sqrt(size2 / double(dq_.values.size()));
      const auto factor = static_cast<float>(
          Is("accumulated_into_garbage:small") ? 0.1 * rms : 1.0);
      for (size_t i = 0; i < dq_.values.size(); ++i) {
        dq_.values[i] += factor * from[i];
      }
    }
    if (Is("accumulated_into_garbage:constant")) {
      for (float& x : dk_.values) x += 1.0f;
    }
    if (Is("transposed")) Rearrange(&dk_, true);
    if (Is("layout_swapped")) Rearrange(&dq_, false);
    if (Is("batch_mixed")) {
      const auto half = static_cast<ptrdiff_t>(dv_.values.size()) / p_.batch;
      std::rotate(dv_.values.begin(), dv_.values.begin() + half,
                  dv_.values.end());
    }
  }

  // Each head as D x N, or heads and rows exchanged.
  static void Rearrange(Array4<float>* x, bool transpose) {
    const Array4<float> from = *x;
    const Sizes& n = from.sizes;
    for (int64_t a = 0; a < n[0]; ++a) {
      float* to = x->row(a, 0, 0);
      for (int64_t b = 0; b < n[1]; ++b) {
        for (int64_t c = 0; c < n[2]; ++c) {
          for (int64_t d = 0; d < n[3]; ++d) {
            const int64_t at = transpose ? (b * n[3] + d) * n[2] + c
                                         : (c * n[1] + b) * n[3] + d;
            to[at] = from.row(a, b, c)[d];
          }
        }
      }
    }
  }

  std::string fault_;
  const Problem& p_;
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

void RunWrongKernel(const std::string& fault, Case* c) {
  Case probe = *c;
  const Array& q = *c->Find("q");
  void* data = nullptr;
  probe.tensors["lse"] =
      MakeArray(DType::kF32, {q.shape[0], q.shape[1], q.shape[2]}, &data);
  const Problem problem = MakeProblem(probe);
  Kernel kernel(fault, problem);
  kernel.Run();
  const auto like = [&](const char* name) -> const std::vector<int64_t>& {
    return c->Find(name)->shape;
  };
  c->tensors["out"] = Stored(kernel.out_, q.dtype, like("dout"));
  c->tensors["lse"] =
      Stored(kernel.lse_, DType::kF32, {q.shape[0], q.shape[1], q.shape[2]});
  c->tensors["dq"] = Stored(kernel.dq_, q.dtype, like("q"));
  c->tensors["dk"] = Stored(kernel.dk_, q.dtype, like("k"));
  c->tensors["dv"] = Stored(kernel.dv_, q.dtype, like("v"));
  if (problem.bias.given()) {
    c->tensors["dbias"] = Stored(kernel.dbias_, q.dtype, like("bias"));
  }
  if (problem.sinks.given()) {
    c->tensors["dsinks"] = Stored(kernel.dsinks_, DType::kF32, like("sinks"));
  }
}

}  // namespace fa2::verify::test
