// SPDX-License-Identifier: Apache-2.0
#include "src/verify/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/reference/tensor_access.h"
#include "src/verify/error.h"

namespace fa2::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.69314718055994530942;

std::string Text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

// The names of the dimensions of a layout, for sentences.
const char* Words(Layout layout) {
  switch (layout) {
    case Layout::kBhsd:
      return "[B, H, N, D]";
    case Layout::kBshd:
      return "[B, N, H, D]";
    case Layout::kThd:
      return "[total, H, D]";
  }
  return "";
}

class Builder {
 public:
  explicit Builder(const Case& source) { p_.source = source; }

  Problem Build() {
    p_.options = p_.source.options;
    for (const char* name : {"q", "k", "v"}) {
      if (p_.source.Find(name) == nullptr) {
        throw Error(Named(name) + " is missing");
      }
    }
    ReadInputs();
    ReadSequences();
    ReadBias();
    ReadPerHead();
    ReadDropout();
    ReadOutputs();
    ChooseProducts();
    return std::move(p_);
  }

 private:
  std::string Named(const std::string& name) const {
    const std::string& c = p_.source.name;
    return (c.empty() ? "" : c + ": ") + "tensor " + name;
  }

  [[noreturn]] void WrongShape(const std::string& name,
                               const std::string& must) const {
    throw Error(Named(name) + " has shape " +
                Text(p_.source.Find(name)->shape) + ", it must be " + must);
  }

  void RequireFloat(const std::string& name) const {
    const DType t = p_.source.Find(name)->dtype;
    if (t != DType::kF32 && t != DType::kBF16 && t != DType::kF16 &&
        t != DType::kF64) {
      throw Error(Named(name) + " has dtype " + fa2::NameOf(t) +
                  ", it must be f32, bf16, f16 or f64");
    }
  }

  // Sets a logical dimension for each of the file's.
  static LogicalTensor Arrange(const Array& array,
                               const std::vector<int>& logical) {
    LogicalTensor tensor;
    tensor.rank = array.shape.size();
    tensor.view.data = array.data;
    tensor.view.dtype = array.dtype;
    tensor.view.sizes = {1, 1, 1, 1};
    int64_t stride = 1;
    for (size_t d = array.shape.size(); d-- > 0;) {
      const auto l = static_cast<size_t>(logical[d]);
      tensor.view.sizes[l] = array.shape[d];
      tensor.view.strides[l] = stride;
      tensor.file_dimension[l] = static_cast<int>(d);
      stride *= array.shape[d];
    }
    return tensor;
  }

  // q, k, v, dout, out and their gradients. Fewer dimensions lack the leading
  // ones, of size 1.
  LogicalTensor Rows(const std::string& name) const {
    const Array& array = *p_.source.Find(name);
    RequireFloat(name);
    std::vector<int> dims = {0, 1, 2, 3};
    if (p_.options.layout != Layout::kBhsd) dims = {0, 2, 1, 3};
    const size_t rank = array.shape.size();
    if (rank < 2 || rank > 4) WrongShape(name, Words(p_.options.layout));
    if (rank == 2) return Arrange(array, {2, 3});
    if (rank == 3) dims.erase(dims.begin());
    LogicalTensor tensor = Arrange(array, dims);
    if (p_.options.layout == Layout::kThd && tensor.view.sizes[0] != 1) {
      WrongShape(name, Words(p_.options.layout));
    }
    return tensor;
  }

  static Array4<double> Load(const LogicalTensor& tensor) {
    const ConstTensorView& view = tensor.view;
    Array4<double> array(view.sizes);
    double* to = array.values.data();
    for (int64_t a = 0; a < view.sizes[0]; ++a) {
      for (int64_t b = 0; b < view.sizes[1]; ++b) {
        for (int64_t c = 0; c < view.sizes[2]; ++c) {
          const int64_t offset = reference::OffsetOf(view, a, b, c, 0);
          const int64_t step = view.sizes[3] == 1 ? 0 : view.strides[3];
          for (int64_t d = 0; d < view.sizes[3]; ++d) {
            *to++ = reference::LoadAt(view.data, view.dtype, offset + d * step);
          }
        }
      }
    }
    return array;
  }

  void ReadInputs() {
    const LogicalTensor q = Rows("q"), k = Rows("k"), v = Rows("v");
    p_.batch = q.view.sizes[0];
    p_.heads = q.view.sizes[1];
    p_.nq = q.view.sizes[2];
    p_.head_dim = q.view.sizes[3];
    p_.kv_heads = k.view.sizes[1];
    p_.nk = k.view.sizes[2];
    p_.value_dim = v.view.sizes[3];
    if (p_.batch < 1 || p_.heads < 1 || p_.nq < 1 || p_.nk < 1 ||
        p_.head_dim < 1 || p_.value_dim < 1 || p_.kv_heads < 1) {
      throw Error(Named("q") + ", k or v is empty");
    }
    if (p_.heads % p_.kv_heads != 0) {
      WrongShape("k", "of a number of heads that divides q's, " +
                          std::to_string(p_.heads) + ", in layout " +
                          NameOf(p_.options.layout));
    }
    const auto expect = [&](const std::string& name, const LogicalTensor& t,
                            const Sizes& sizes) {
      if (t.view.sizes != sizes) {
        WrongShape(name, "logically [B, H, N, D] = " +
                             Text({sizes[0], sizes[1], sizes[2], sizes[3]}) +
                             " in layout " + NameOf(p_.options.layout));
      }
    };
    expect("k", k, {p_.batch, p_.kv_heads, p_.nk, p_.head_dim});
    expect("v", v, {p_.batch, p_.kv_heads, p_.nk, p_.value_dim});
    p_.q = Load(q);
    p_.k = Load(k);
    p_.v = Load(v);
    if (p_.source.Find("dout") != nullptr) {
      const LogicalTensor dout = Rows("dout");
      expect("dout", dout, {p_.batch, p_.heads, p_.nq, p_.value_dim});
      p_.dout = Load(dout);
    }
    p_.scale = p_.options.scale.value_or(
        1.0 / std::sqrt(static_cast<double>(p_.head_dim)));
  }

  std::vector<int64_t> PrefixSums(const std::string& name, int64_t total) {
    const Array& array = *p_.source.Find(name);
    if (array.dtype != DType::kI32 && array.dtype != DType::kI64) {
      throw Error(Named(name) + " has dtype " + fa2::NameOf(array.dtype) +
                  ", it must be i32 or i64");
    }
    std::vector<int64_t> sums;
    for (int64_t i = 0; i < array.elements(); ++i) {
      sums.push_back(array.dtype == DType::kI32
                         ? reference::ElementAs<int32_t>(array.data, i)
                         : reference::ElementAs<int64_t>(array.data, i));
    }
    bool good = sums.size() >= 2 && sums.front() == 0 && sums.back() <= total;
    for (size_t i = 1; i < sums.size(); ++i) good &= sums[i - 1] <= sums[i];
    if (!good) {
      throw Error(Named(name) +
                  " must rise from 0 to at most the number of "
                  "rows, " +
                  std::to_string(total));
    }
    return sums;
  }

  void ReadSequences() {
    const bool has_q = p_.source.Find("cu_seqlens_q") != nullptr;
    const bool has_k = p_.source.Find("cu_seqlens_k") != nullptr;
    if (p_.options.layout == Layout::kThd && !has_q) {
      throw Error(Named("cu_seqlens_q") +
                  " is missing, which layout thd needs");
    }
    p_.packed = has_q || has_k;
    if (p_.packed) {
      if (!has_q) throw Error(Named("cu_seqlens_q") + " is missing");
      if (p_.batch != 1) WrongShape("q", "of batch 1, since it is packed");
      p_.cu_q = PrefixSums("cu_seqlens_q", p_.nq);
      if (!has_k && p_.nq != p_.nk) {
        throw Error(Named("cu_seqlens_k") + " is missing");
      }
      p_.cu_k = has_k ? PrefixSums("cu_seqlens_k", p_.nk) : p_.cu_q;
      if (p_.cu_k.size() != p_.cu_q.size()) {
        throw Error(Named("cu_seqlens_k") + " has " +
                    std::to_string(p_.cu_k.size()) +
                    " elements, it must have "
                    "as many as cu_seqlens_q, " +
                    std::to_string(p_.cu_q.size()));
      }
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

  // [B or 1, H or 1, Nq or 1, Nk or 1] with leading ones left out or not.
  LogicalTensor Broadcast(const std::string& name) const {
    const Array& array = *p_.source.Find(name);
    const size_t rank = array.shape.size();
    const Sizes full = {static_cast<int64_t>(p_.sequences.size()), p_.heads,
                        p_.max_q, p_.max_k};
    const std::string must =
        "[B or 1, H or 1, Nq or 1, Nk or 1] of B, H, Nq, Nk = " +
        Text({full[0], full[1], full[2], full[3]});
    if (rank > 4) WrongShape(name, must);
    std::vector<int> dims;
    for (size_t d = 0; d < rank; ++d) {
      dims.push_back(static_cast<int>(4 - rank + d));
    }
    LogicalTensor tensor = Arrange(array, dims);
    for (size_t d = 0; d < 4; ++d) {
      const int64_t n = tensor.view.sizes[d];
      if (n != 1 && n != full[d]) WrongShape(name, must);
    }
    return tensor;
  }

  void ReadBias() {
    if (p_.source.Find("bias") == nullptr) return;
    const LogicalTensor bias = Broadcast("bias");
    if (bias.view.dtype == DType::kI32 || bias.view.dtype == DType::kI64) {
      throw Error(Named("bias") + " has dtype " + fa2::NameOf(bias.view.dtype) +
                  ", it must be a float type, or bool for a mask");
    }
    p_.bias = Load(bias);
    p_.bias_is_mask = bias.view.dtype == DType::kBool;
    if (p_.bias_is_mask) {
      for (double& x : p_.bias.values) x = x != 0.0 ? 0.0 : -kInfinity;
    }
  }

  // [H] or, where `batched`, [B, H]; ones around them may stand in the file.
  LogicalTensor PerHead(const std::string& name, bool batched) const {
    const Array& array = *p_.source.Find(name);
    RequireFloat(name);
    Array squeezed = array;
    const auto sequences = static_cast<int64_t>(p_.sequences.size());
    const int64_t n = array.elements();
    LogicalTensor tensor;
    if (n == p_.heads) {
      tensor.view.sizes = {1, p_.heads, 1, 1};
    } else if (batched && n == sequences * p_.heads) {
      tensor.view.sizes = {sequences, p_.heads, 1, 1};
    } else {
      WrongShape(name, batched ? "[H] or [B, H]" : "[H]");
    }
    tensor.view.data = array.data;
    tensor.view.dtype = array.dtype;
    tensor.view.strides = DenseStrides(tensor.view.sizes);
    tensor.rank = array.shape.size();
    // The dimensions that are not 1, in order: [B,] H.
    int last = -1, before = -1;
    for (size_t d = 0; d < tensor.rank; ++d) {
      if (array.shape[d] == 1) continue;
      before = last;
      last = static_cast<int>(d);
    }
    if (p_.heads > 1) {
      tensor.file_dimension[1] = last;
      tensor.file_dimension[0] = before;
    } else {
      tensor.file_dimension[0] = last;
    }
    return tensor;
  }

  void ReadPerHead() {
    const auto load = [](const LogicalTensor& tensor) {
      const Array4<double> wide = Load(tensor);
      Array4<float> array(wide.sizes);
      for (size_t i = 0; i < wide.values.size(); ++i) {
        array.values[i] = static_cast<float>(wide.values[i]);
      }
      return array;
    };
    if (p_.source.Find("sinks") != nullptr) {
      p_.sinks = load(PerHead("sinks", false));
    }
    if (p_.source.Find("alibi_slopes") != nullptr) {
      p_.alibi_slopes = load(PerHead("alibi_slopes", true));
    }
  }

  void ReadDropout() {
    if (p_.source.Find("keep") != nullptr) p_.keep = Broadcast("keep");
    if (p_.options.dropout_p > 0.0 && !p_.keep.given() &&
        !p_.options.philox_seed) {
      throw Error((p_.source.name.empty() ? "" : p_.source.name + ": ") +
                  std::string("dropout_p is ") +
                  std::to_string(p_.options.dropout_p) +
                  ", so the file must hold a tensor keep or the option "
                  "philox_seed");
    }
  }

  // [B, H, N], [B, H, N, 1], packed [H, total] or padded [sequences, H, >= N].
  LogicalTensor Statistic(const std::string& name) const {
    const Array& array = *p_.source.Find(name);
    RequireFloat(name);
    std::vector<int64_t> shape = array.shape;
    if (shape.size() > 3 && shape.back() == 1) shape.pop_back();
    LogicalTensor tensor;
    Array plain = array;
    plain.shape = shape;
    if (shape.size() == 3) {
      tensor = Arrange(plain, {0, 1, 2});
    } else if (shape.size() == 2) {
      tensor = Arrange(plain, {1, 2});
    } else if (shape.size() == 1) {
      tensor = Arrange(plain, {2});
    } else {
      WrongShape(name, "[B, H, N]");
    }
    tensor.rank = array.shape.size();
    const Sizes& n = tensor.view.sizes;
    const auto sequences = static_cast<int64_t>(p_.sequences.size());
    if (p_.packed) {
      const bool flat = n[0] == 1 && n[1] == p_.heads && n[2] >= p_.nq;
      const bool padded =
          n[0] == sequences && n[1] == p_.heads && n[2] >= p_.max_q;
      if (!flat && !padded) WrongShape(name, "[H, total] of a packed case");
    } else if (n[0] != p_.batch || n[1] != p_.heads || n[2] < p_.nq) {
      WrongShape(name, "[B, H, N] = " + Text({p_.batch, p_.heads, p_.nq}));
    }
    return tensor;
  }

  void ReadDlse() {
    if (p_.source.Find("dlse") == nullptr) return;
    const LogicalTensor dlse = Statistic("dlse");
    p_.dlse = Array4<double>({p_.batch, p_.heads, p_.nq, 1});
    for (const Sequence& s : p_.sequences) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        for (int64_t i = 0; i < s.nq; ++i) {
          const bool padded = p_.packed && dlse.view.sizes[0] > 1;
          const Sizes at = {padded ? s.index : s.batch, h,
                            padded ? i : s.q_begin + i, 0};
          *p_.dlse.row(s.batch, h, s.q_begin + i) = Get(dlse.view, at);
        }
      }
    }
  }

  void ReadOutputs() {
    ReadDlse();
    const bool backward = p_.dout.given();
    const auto take = [&](const std::string& name, bool applies, auto read) {
      if (!applies) return;
      if (p_.source.Find(name) == nullptr) {
        p_.unchecked.push_back(name);
        return;
      }
      if (!backward && name != "out" && name != "lse") {
        p_.unchecked.push_back(name);
        return;
      }
      p_.outputs[name] = read(name);
    };
    const auto rows = [&](const std::string& name) {
      LogicalTensor tensor = Rows(name);
      const Sizes must = p_.SizesOf(name);
      if (tensor.view.sizes != must) {
        WrongShape(name, "logically [B, H, N, D] = " +
                             Text({must[0], must[1], must[2], must[3]}) +
                             " in layout " + NameOf(p_.options.layout));
      }
      return tensor;
    };
    take("out", true, rows);
    take("lse", true, [&](const std::string& n) { return Statistic(n); });
    take("dq", true, rows);
    take("dk", true, rows);
    take("dv", true, rows);
    take("dbias", p_.bias.given() && !p_.bias_is_mask,
         [&](const std::string& name) {
           RequireFloat(name);
           LogicalTensor tensor = Broadcast(name);
           if (tensor.view.sizes != p_.bias.sizes) {
             const Sizes& n = p_.bias.sizes;
             WrongShape(name, "bias's, " + Text({n[0], n[1], n[2], n[3]}) +
                                  ": summed over what bias broadcasts");
           }
           return tensor;
         });
    take("dsinks", p_.sinks.given(),
         [&](const std::string& n) { return PerHead(n, false); });
    take("dalibi_slopes", p_.alibi_slopes.given(),
         [&](const std::string& name) {
           LogicalTensor tensor = PerHead(name, true);
           if (tensor.view.sizes != p_.alibi_slopes.sizes) {
             WrongShape(name, "that of alibi_slopes");
           }
           return tensor;
         });
    if (p_.outputs.empty()) {
      throw Error((p_.source.name.empty() ? "" : p_.source.name + ": ") +
                  std::string("there is nothing to check: no tensor out, lse, "
                              "dq, dk or dv") +
                  (backward ? "" : " that needs no dout, which is missing"));
    }
  }

  void ChooseProducts() {
    if (p_.options.precision) {
      p_.products = *p_.options.precision;
      return;
    }
    switch (p_.source.Find("q")->dtype) {
      case DType::kBF16:
        p_.products = Products::kBF16;
        break;
      case DType::kF16:
        p_.products = Products::kF16;
        break;
      case DType::kF64:
        p_.products = Products::kF64;
        break;
      default:
        p_.products = Products::kF32;
    }
  }

  Problem p_;
};

}  // namespace

std::vector<int64_t> LogicalTensor::FileIndex(const Sizes& at) const {
  std::vector<int64_t> index(rank, 0);
  for (size_t l = 0; l < 4; ++l) {
    if (file_dimension[l] >= 0) {
      index[static_cast<size_t>(file_dimension[l])] = at[l];
    }
  }
  return index;
}

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

Sizes Problem::LseIndex(const Sequence& s, int64_t h, int64_t i) const {
  const LogicalTensor* lse = Output("lse");
  const bool padded = packed && lse->view.sizes[0] > 1;
  return {padded ? s.index : s.batch, h, padded ? i : s.q_begin + i, 0};
}

double Problem::CandidateLse(const Sequence& s, int64_t h, int64_t i) const {
  const double lse = Get(Output("lse")->view, LseIndex(s, h, i));
  return options.lse_base2 ? lse * kLn2 : lse;
}

Problem MakeProblem(const Case& source) { return Builder(source).Build(); }

double Get(const ConstTensorView& view, const Sizes& at) {
  return reference::Load(view, at[0], at[1], at[2], at[3]);
}

}  // namespace fa2::verify
