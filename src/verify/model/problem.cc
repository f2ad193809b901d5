// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/verify/cases/error.h"
#include "src/verify/model/case_tensors.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

Products ProductsOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Products::kBF16;
    case DType::kF16:
      return Products::kF16;
    case DType::kF64:
      return Products::kF64;
    default:
      return Products::kF32;
  }
}

class Builder {
 public:
  explicit Builder(const Case& source) : t_(source) {
    p_.source = source;
    p_.options = source.options;
  }

  Problem Build() {
    for (const char* name : {"q", "k", "v"}) {
      if (!t_.Has(name)) throw Error(t_.Named(name) + " is missing");
    }
    ReadInputs();
    ReadSequences();
    ReadBias();
    ReadPerHead();
    ReadDropout();
    ReadDlse();
    ReadOutputs();
    p_.products = p_.options.precision.value_or(ProductsOf(t_.DTypeOf("q")));
    return std::move(p_);
  }

 private:
  int64_t SequenceCount() const {
    return static_cast<int64_t>(p_.sequences.size());
  }

  void ReadInputs() {
    const LogicalTensor q = t_.Rows("q"), k = t_.Rows("k"), v = t_.Rows("v");
    p_.batch = q.view.sizes[0];
    p_.heads = q.view.sizes[1];
    p_.nq = q.view.sizes[2];
    p_.head_dim = q.view.sizes[3];
    p_.kv_heads = k.view.sizes[1];
    p_.nk = k.view.sizes[2];
    p_.value_dim = v.view.sizes[3];
    if (p_.batch < 1 || p_.heads < 1 || p_.nq < 1 || p_.nk < 1 ||
        p_.head_dim < 1 || p_.value_dim < 1 || p_.kv_heads < 1) {
      throw Error(t_.Named("q") + ", k or v is empty");
    }
    if (p_.heads % p_.kv_heads != 0) {
      t_.WrongShape("k", "of a number of heads that divides q's, " +
                             std::to_string(p_.heads) + ", in layout " +
                             NameOf(p_.options.layout));
    }
    p_.q = Load(q);
    p_.k = Load(t_.RowsOf("k", {p_.batch, p_.kv_heads, p_.nk, p_.head_dim}));
    p_.v = Load(t_.RowsOf("v", {p_.batch, p_.kv_heads, p_.nk, p_.value_dim}));
    if (t_.Has("dout")) p_.dout = Load(t_.RowsOf("dout", p_.SizesOf("out")));
    p_.scale = p_.options.scale.value_or(
        1.0 / std::sqrt(static_cast<double>(p_.head_dim)));
  }

  void ReadPrefixSums() {
    const bool has_k = t_.Has("cu_seqlens_k");
    if (!t_.Has("cu_seqlens_q")) {
      throw Error(t_.Named("cu_seqlens_q") + " is missing");
    }
    if (p_.batch != 1) t_.WrongShape("q", "of batch 1, since it is packed");
    p_.cu_q = t_.PrefixSums("cu_seqlens_q", p_.nq);
    if (!has_k && p_.nq != p_.nk) {
      throw Error(t_.Named("cu_seqlens_k") + " is missing");
    }
    p_.cu_k = has_k ? t_.PrefixSums("cu_seqlens_k", p_.nk) : p_.cu_q;
    if (p_.cu_k.size() != p_.cu_q.size()) {
      throw Error(t_.Named("cu_seqlens_k") + " has " +
                  std::to_string(p_.cu_k.size()) +
                  " elements, it must have as many as cu_seqlens_q, " +
                  std::to_string(p_.cu_q.size()));
    }
  }

  void ReadSequences() {
    p_.packed = t_.Has("cu_seqlens_q") || t_.Has("cu_seqlens_k");
    if (p_.options.layout == Layout::kThd && !t_.Has("cu_seqlens_q")) {
      throw Error(t_.Named("cu_seqlens_q") +
                  " is missing, which layout thd needs");
    }
    if (p_.packed) {
      ReadPrefixSums();
      for (size_t n = 0; n + 1 < p_.cu_q.size(); ++n) {
        p_.sequences.push_back({static_cast<int64_t>(n), 0, p_.cu_q[n],
                                p_.cu_k[n], p_.cu_q[n + 1] - p_.cu_q[n],
                                p_.cu_k[n + 1] - p_.cu_k[n]});
      }
    } else {
      for (int64_t b = 0; b < p_.batch; ++b) {
        p_.sequences.push_back({b, b, 0, 0, p_.nq, p_.nk});
      }
    }
    for (const Sequence& s : p_.sequences) {
      p_.max_q = std::max(p_.max_q, s.nq);
      p_.max_k = std::max(p_.max_k, s.nk);
    }
  }

  LogicalTensor Broadcast(const std::string& name) const {
    return t_.Broadcast(name, {SequenceCount(), p_.heads, p_.max_q, p_.max_k});
  }

  void ReadBias() {
    if (!t_.Has("bias")) return;
    const LogicalTensor bias = Broadcast("bias");
    if (bias.view.dtype == DType::kI32 || bias.view.dtype == DType::kI64) {
      throw Error(t_.Named("bias") + " has dtype " +
                  fa2::NameOf(bias.view.dtype) +
                  ", it must be a float type, or bool for a mask");
    }
    p_.bias = Load(bias);
    p_.bias_is_mask = bias.view.dtype == DType::kBool;
    if (p_.bias_is_mask) {
      for (double& x : p_.bias.values) x = x != 0.0 ? 0.0 : -kInfinity;
    }
  }

  void ReadPerHead() {
    const auto load = [this](const char* name, int64_t batch) {
      if (!t_.Has(name)) return Array4<float>();
      const Array4<double> wide = Load(t_.PerHead(name, p_.heads, batch));
      Array4<float> array(wide.sizes);
      std::transform(wide.values.begin(), wide.values.end(),
                     array.values.begin(),
                     [](double x) { return static_cast<float>(x); });
      return array;
    };
    p_.sinks = load("sinks", 0);
    p_.alibi_slopes = load("alibi_slopes", SequenceCount());
  }

  void ReadDropout() {
    if (t_.Has("keep")) p_.keep = Broadcast("keep");
    if (p_.options.dropout_p > 0.0 && !p_.keep.given() &&
        !p_.options.philox_seed) {
      throw Error(t_.Where() + "dropout_p is " +
                  std::to_string(p_.options.dropout_p) +
                  ", so the file must hold a tensor keep or the option "
                  "philox_seed");
    }
  }

  // [B, H, N], packed [H, total] or padded [sequences, H, >= N].
  LogicalTensor Statistic(const std::string& name) const {
    LogicalTensor tensor = t_.Statistic(name);
    const Sizes& n = tensor.view.sizes;
    if (p_.packed) {
      const bool flat = n[0] == 1 && n[1] == p_.heads && n[2] >= p_.nq;
      const bool padded =
          n[0] == SequenceCount() && n[1] == p_.heads && n[2] >= p_.max_q;
      if (!flat && !padded) t_.WrongShape(name, "[H, total] of a packed case");
    } else if (n[0] != p_.batch || n[1] != p_.heads || n[2] < p_.nq) {
      t_.WrongShape(name, "[B, H, N] = " + Text(std::vector<int64_t>{
                                               p_.batch, p_.heads, p_.nq}));
    }
    return tensor;
  }

  void ReadDlse() {
    if (!t_.Has("dlse")) return;
    const LogicalTensor dlse = Statistic("dlse");
    p_.dlse = Array4<double>(p_.SizesOf("lse"));
    for (const Sequence& s : p_.sequences) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t i = 0; i < s.nq; ++i) {
          *p_.dlse.row(s.batch, h, s.q_begin + i) =
              Get(dlse.view, p_.StatisticIndex(dlse, s, h, i));
        }
      }
    }
  }

  template <class F>
  void TakeOutput(const std::string& name, const F& read) {
    const bool forward = name == "out" || name == "lse";
    if (t_.Has(name) && (forward || p_.dout.given())) {
      p_.outputs[name] = read(name);
    } else {
      p_.unchecked.push_back(name);
    }
  }

  void ReadOutputs() {
    const auto rows = [this](const std::string& name) {
      return t_.RowsOf(name, p_.SizesOf(name));
    };
    TakeOutput("out", rows);
    TakeOutput("lse", [this](const std::string& n) { return Statistic(n); });
    for (const char* name : {"dq", "dk", "dv"}) TakeOutput(name, rows);
    if (p_.bias.given() && !p_.bias_is_mask) {
      TakeOutput("dbias", [this](const std::string& name) {
        t_.RequireFloat(name);
        LogicalTensor tensor = Broadcast(name);
        if (tensor.view.sizes != p_.bias.sizes) {
          t_.WrongShape(name, "bias's, " + Text(p_.bias.sizes) +
                                  ": summed over what bias broadcasts");
        }
        return tensor;
      });
    }
    if (p_.sinks.given()) {
      TakeOutput("dsinks", [this](const std::string& name) {
        return t_.PerHead(name, p_.heads, 0);
      });
    }
    if (p_.alibi_slopes.given()) {
      TakeOutput("dalibi_slopes", [this](const std::string& name) {
        LogicalTensor tensor = t_.PerHead(name, p_.heads, SequenceCount());
        if (tensor.view.sizes != p_.alibi_slopes.sizes) {
          t_.WrongShape(name, "that of alibi_slopes");
        }
        return tensor;
      });
    }
    if (p_.outputs.empty()) {
      throw Error(
          t_.Where() +
          "there is nothing to check: no tensor out, lse, dq, dk or dv" +
          (p_.dout.given() ? "" : " that needs no dout, which is missing"));
    }
  }

  CaseTensors t_;
  Problem p_;
};

}  // namespace

const LogicalTensor* Problem::Output(const std::string& name) const {
  const auto found = outputs.find(name);
  return found == outputs.end() ? nullptr : &found->second;
}

Sizes Problem::SizesOf(const std::string& name) const {
  if (name == "out") return {batch, heads, nq, value_dim};
  if (name == "lse") return {batch, heads, nq, 1};
  if (name == "dq") return {batch, heads, nq, head_dim};
  if (name == "dk") return {batch, kv_heads, nk, head_dim};
  if (name == "dv") return {batch, kv_heads, nk, value_dim};
  if (name == "dbias") return bias.sizes;
  if (name == "dsinks") return {1, heads, 1, 1};
  return alibi_slopes.sizes;
}

Sizes Problem::StatisticIndex(const LogicalTensor& statistic, const Sequence& s,
                              int64_t h, int64_t i) const {
  const bool padded = packed && statistic.view.sizes[0] > 1;
  return {padded ? s.index : s.batch, h, padded ? i : s.q_begin + i, 0};
}

Sizes Problem::LseIndex(const Sequence& s, int64_t h, int64_t i) const {
  return StatisticIndex(*Output("lse"), s, h, i);
}

double Problem::CandidateLse(const Sequence& s, int64_t h, int64_t i) const {
  const double lse = Get(Output("lse")->view, LseIndex(s, h, i));
  return options.lse_base2 ? lse * kLn2 : lse;
}

Problem MakeProblem(const Case& source) { return Builder(source).Build(); }

}  // namespace fa2::verify
