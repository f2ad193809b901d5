// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/generate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "src/common/half.h"
#include "src/common/philox.h"
#include "src/verify/cases/error.h"
#include "src/verify/model/answer.h"
#include "src/verify/model/problem.h"

namespace fa2::verify {
namespace {

// The standard fixes mt19937_64's bits but not its distributions' results.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  double Uniform() {
    return (static_cast<double>(bits_() >> 11) + 0.5) * 0x1p-53;
  }
  double Normal() {
    return std::sqrt(-2.0 * std::log(Uniform())) *
           std::cos(6.283185307179586 * Uniform());
  }
  uint64_t Below(uint64_t n) { return bits_() % n; }

 private:
  std::mt19937_64 bits_;
};

// One draw of an element of [B, H, N, D].
using Draw = std::function<double(Random&, const Sizes& at)>;

class Generator {
 public:
  explicit Generator(const GenerateOptions& o) : o_(o), random_(o.seed) {}

  Case Make() {
    Check();
    c_.options = o_.options;
    const bool packed = !o_.lengths_q.empty();
    if (packed) {
      c_.options.layout = Layout::kThd;
      o_.batch = 1;
      o_.nq = Sum(o_.lengths_q);
      o_.nk = Sum(lengths_k());
      AddPrefixSums("cu_seqlens_q", o_.lengths_q);
      AddPrefixSums("cu_seqlens_k", lengths_k());
    } else if (o_.options.layout == Layout::kThd) {
      throw Error("layout thd needs the sequences' lengths (--lengths)");
    }
    AddRows("q", o_.heads, o_.nq, o_.head_dim, Scores(0));
    AddRows("k", o_.kv_heads, o_.nk, o_.head_dim, Scores(1));
    AddRows("v", o_.kv_heads, o_.nk, o_.value_dim, Values());
    AddRows("dout", o_.heads, o_.nq, o_.value_dim, Values());
    const int64_t max_q = packed ? Max(o_.lengths_q) : o_.nq;
    const int64_t max_k = packed ? Max(lengths_k()) : o_.nk;
    const auto sequences =
        packed ? static_cast<int64_t>(o_.lengths_q.size()) : o_.batch;
    if (!o_.bias.empty()) AddBias(sequences, max_q, max_k);
    if (o_.sinks) AddVector("sinks", DType::kF32, {o_.heads});
    if (o_.alibi) AddSlopes();
    if (o_.dlse) {
      AddVector("dlse", o_.dtype == DType::kF64 ? DType::kF64 : DType::kF32,
                packed ? std::vector<int64_t>{o_.heads, o_.nq}
                       : std::vector<int64_t>{o_.batch, o_.heads, o_.nq});
    }
    if (o_.options.dropout_p > 0.0 && !o_.options.philox_seed) {
      c_.options.philox_seed = o_.seed;
    }
    if (o_.keep) AddKeep(sequences, max_q, max_k);
    return std::move(c_);
  }

 private:
  const std::vector<int64_t>& lengths_k() const {
    return o_.lengths_k.empty() ? o_.lengths_q : o_.lengths_k;
  }
  static int64_t Sum(const std::vector<int64_t>& x) {
    int64_t sum = 0;
    for (const int64_t n : x) sum += n;
    return sum;
  }
  static int64_t Max(const std::vector<int64_t>& x) {
    return *std::max_element(x.begin(), x.end());
  }

  void Check() const {
    const auto positive = [](const char* name, int64_t n) {
      if (n < 1) {
        throw Error(std::string(name) + " is " + std::to_string(n) +
                    ", it must be at least 1");
      }
    };
    positive("batch", o_.batch);
    positive("heads", o_.heads);
    positive("kv_heads", o_.kv_heads);
    positive("nq", o_.nq);
    positive("nk", o_.nk);
    positive("head_dim", o_.head_dim);
    positive("value_dim", o_.value_dim);
    for (const int64_t n : o_.lengths_q) positive("a length", n);
    for (const int64_t n : o_.lengths_k) positive("a length", n);
    if (o_.heads % o_.kv_heads != 0) {
      throw Error("kv_heads is " + std::to_string(o_.kv_heads) +
                  ", it must divide heads, " + std::to_string(o_.heads));
    }
    if (!o_.lengths_k.empty() && o_.lengths_k.size() != o_.lengths_q.size()) {
      throw Error("there are other numbers of lengths for q and for k");
    }
    // Offsets over 2^31 elements work; a wish past the memory of any machine
    // is a slip of the pen.
    if (static_cast<double>(o_.batch) * static_cast<double>(o_.heads) *
            static_cast<double>(std::max(o_.nq, o_.nk)) *
            static_cast<double>(std::max(o_.head_dim, o_.value_dim)) >
        1e11) {
      throw Error("the shape has more than 1e11 elements");
    }
  }

  // Of q (side 0) and k (side 1).
  Draw Scores(int side) {
    switch (o_.inputs) {
      case Inputs::kGaussian:
        return [](Random& r, const Sizes&) { return r.Normal(); };
      case Inputs::kOutliers: {
        // One channel in 32, of q and k alike, as activations before a rotary
        // embedding have them; half of them large in q and half in k, so that
        // the scores stay those of a trained model.
        std::vector<char> large(static_cast<size_t>(o_.head_dim), 0);
        const int64_t count = std::max<int64_t>(2, o_.head_dim / 32);
        for (int64_t n = 0; n < count; ++n) {
          const int64_t d = (n * 37 + 5) % o_.head_dim;
          if (n % 2 == side) large[static_cast<size_t>(d)] = 1;
        }
        return [large](Random& r, const Sizes& at) {
          return r.Normal() * (large[static_cast<size_t>(at[3])] ? 50.0 : 1.0);
        };
      }
      case Inputs::kPeaked:
        return [](Random& r, const Sizes&) { return 3.0 * r.Normal(); };
      case Inputs::kLongTail:
        return LongTail();
      case Inputs::kAdversarial:
        return Adversarial();
    }
    return nullptr;
  }

  Draw Values() {
    if (o_.inputs == Inputs::kLongTail) return LongTail();
    if (o_.inputs == Inputs::kAdversarial) return Adversarial();
    return [](Random& r, const Sizes&) { return r.Normal(); };
  }

  static Draw LongTail() {
    return [](Random& r, const Sizes&) {
      double chi2 = 0.0;
      for (int n = 0; n < 3; ++n) {
        const double x = r.Normal();
        chi2 += x * x;
      }
      return r.Normal() / std::sqrt(std::max(chi2, 1e-6) / 3.0);
    };
  }

  // Nothing is like its neighbour: heads, batches and ends of sequences are of
  // other sizes and means.
  static Draw Adversarial() {
    return [](Random& r, const Sizes& at) {
      const double size =
          1.0 + 0.25 * static_cast<double>((at[1] * 3 + at[0]) % 4);
      const double mean = 0.125 * static_cast<double>(at[2] % 5) - 0.25;
      return size * r.Normal() + mean;
    };
  }

  void AddRows(const std::string& name, int64_t heads, int64_t rows,
               int64_t depth, const Draw& draw) {
    const Layout layout = c_.options.layout;
    std::vector<int64_t> shape = {o_.batch, heads, rows, depth};
    if (layout == Layout::kBshd) shape = {o_.batch, rows, heads, depth};
    if (layout == Layout::kThd) shape = {rows, heads, depth};
    void* data = nullptr;
    c_.tensors[name] = MakeArray(o_.dtype, shape, &data);
    for (int64_t b = 0; b < o_.batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t row = layout == Layout::kBhsd
                                  ? (b * heads + h) * rows + i
                                  : (b * rows + i) * heads + h;
          for (int64_t d = 0; d < depth; ++d) {
            StoreElement(o_.dtype, data, row * depth + d,
                         draw(random_, {b, h, i, d}));
          }
        }
      }
    }
  }

  void AddVector(const std::string& name, DType dtype,
                 const std::vector<int64_t>& shape) {
    void* data = nullptr;
    c_.tensors[name] = MakeArray(dtype, shape, &data);
    for (int64_t i = 0; i < c_.tensors[name].elements(); ++i) {
      StoreElement(dtype, data, i, random_.Normal());
    }
  }

  void AddBias(int64_t sequences, int64_t max_q, int64_t max_k) {
    const std::vector<int64_t> full = {sequences, o_.heads, max_q, max_k};
    bool fits = o_.bias.size() == 4;
    for (size_t d = 0; fits && d < 4; ++d) {
      fits = o_.bias[d] == 1 || o_.bias[d] == full[d];
    }
    if (!fits) {
      throw Error("bias must be [B or 1, H or 1, Nq or 1, Nk or 1]");
    }
    AddVector("bias", o_.dtype, o_.bias);
  }

  void AddSlopes() {
    void* data = nullptr;
    c_.tensors["alibi_slopes"] = MakeArray(DType::kF32, {o_.heads}, &data);
    for (int64_t h = 0; h < o_.heads; ++h) {
      StoreElement(DType::kF32, data, h,
                   std::exp2(-8.0 * static_cast<double>(h + 1) /
                             static_cast<double>(o_.heads)));
    }
  }

  void AddKeep(int64_t sequences, int64_t max_q, int64_t max_k) {
    const double p = o_.options.dropout_p;
    if (p <= 0.0) throw Error("a mask of dropout needs dropout_p above 0");
    void* data = nullptr;
    c_.tensors["keep"] =
        MakeArray(DType::kBool, {sequences, o_.heads, max_q, max_k}, &data);
    for (int64_t i = 0; i < c_.tensors["keep"].elements(); ++i) {
      static_cast<uint8_t*>(data)[i] =
          PhiloxKeep(p, *c_.options.philox_seed,
                     c_.options.philox_offset + static_cast<uint64_t>(i));
    }
  }

  void AddPrefixSums(const std::string& name,
                     const std::vector<int64_t>& lengths) {
    void* data = nullptr;
    c_.tensors[name] = MakeArray(
        DType::kI32, {static_cast<int64_t>(lengths.size()) + 1}, &data);
    int32_t sum = 0;
    for (size_t n = 0; n <= lengths.size(); ++n) {
      static_cast<int32_t*>(data)[n] = sum;
      if (n < lengths.size()) sum += static_cast<int32_t>(lengths[n]);
    }
  }

  GenerateOptions o_;
  Random random_;
  Case c_;
};

// Writes a dense [B, H, N, D] in the layout of a case.
Array Stored(const Case& c, const Array4<double>& from, DType dtype) {
  const Sizes& n = from.sizes;
  std::vector<int64_t> shape = {n[0], n[1], n[2], n[3]};
  const Layout layout = c.options.layout;
  if (layout == Layout::kBshd) shape = {n[0], n[2], n[1], n[3]};
  if (layout == Layout::kThd) shape = {n[2], n[1], n[3]};
  void* data = nullptr;
  Array array = MakeArray(dtype, shape, &data);
  for (int64_t b = 0; b < n[0]; ++b) {
    for (int64_t h = 0; h < n[1]; ++h) {
      for (int64_t i = 0; i < n[2]; ++i) {
        const int64_t row = layout == Layout::kBhsd ? (b * n[1] + h) * n[2] + i
                                                    : (b * n[2] + i) * n[1] + h;
        for (int64_t d = 0; d < n[3]; ++d) {
          StoreElement(dtype, data, row * n[3] + d, from.row(b, h, i)[d]);
        }
      }
    }
  }
  return array;
}

Array StoredFlat(const std::vector<double>& from, DType dtype,
                 const std::vector<int64_t>& shape) {
  void* data = nullptr;
  Array array = MakeArray(dtype, shape, &data);
  for (size_t i = 0; i < from.size(); ++i) {
    StoreElement(dtype, data, static_cast<int64_t>(i), from[i]);
  }
  return array;
}

}  // namespace

Array MakeArray(DType dtype, const std::vector<int64_t>& shape, void** data) {
  Array array;
  array.dtype = dtype;
  array.shape = shape;
  auto bytes = std::make_shared<std::vector<uint8_t>>(
      static_cast<size_t>(array.elements()) * SizeOf(dtype));
  *data = bytes->data();
  array.data = bytes->data();
  array.owner = bytes;
  return array;
}

void StoreElement(DType dtype, void* data, int64_t i, double value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case DType::kF64:
      static_cast<double*>(data)[i] = value;
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[i] = F64ToBf16(value);
      break;
    case DType::kF16:
      static_cast<uint16_t*>(data)[i] = F64ToF16(value);
      break;
    default:
      break;
  }
}

Inputs InputsNamed(const std::string& name) {
  if (name == "gaussian") return Inputs::kGaussian;
  if (name == "outliers") return Inputs::kOutliers;
  if (name == "peaked") return Inputs::kPeaked;
  if (name == "long-tail") return Inputs::kLongTail;
  if (name == "adversarial") return Inputs::kAdversarial;
  throw Error("inputs is " + name +
              ", it must be gaussian, outliers, peaked, "
              "long-tail or adversarial");
}

Case Generate(const GenerateOptions& options) {
  return Generator(options).Make();
}

void AddAnswers(Case* c, int threads) {
  // The problem asks for one output at least; lse is never missed.
  Case inputs = *c;
  const Array& q = *c->Find("q");
  const bool thd = c->options.layout == Layout::kThd;
  const bool bhsd = c->options.layout == Layout::kBhsd;
  const int64_t heads = q.shape[bhsd || thd ? 1 : 2];
  std::vector<int64_t> lse_shape =
      thd ? std::vector<int64_t>{heads, q.shape[0]}
          : std::vector<int64_t>{q.shape[0], heads, q.shape[bhsd ? 2 : 1]};
  const DType dtype = q.dtype;
  const DType statistic = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  void* data = nullptr;
  inputs.tensors["lse"] = MakeArray(statistic, lse_shape, &data);
  const Problem problem = MakeProblem(inputs);
  const Answer answer =
      ComputeAnswer(problem, nullptr, Method::kKernels, threads);
  c->tensors["out"] = Stored(*c, answer.out, dtype);
  std::vector<double> lse = answer.lse.values;
  if (c->options.lse_base2) {
    for (double& x : lse) x /= 0.69314718055994530942;
  }
  c->tensors["lse"] = StoredFlat(lse, statistic, lse_shape);
  if (!problem.dout.given()) return;
  c->tensors["dq"] = Stored(*c, answer.dq, dtype);
  c->tensors["dk"] = Stored(*c, answer.dk, dtype);
  c->tensors["dv"] = Stored(*c, answer.dv, dtype);
  if (answer.dbias.given()) {
    c->tensors["dbias"] = StoredFlat(
        answer.dbias.values, c->Find("bias")->dtype, c->Find("bias")->shape);
  }
  if (answer.dsinks.given()) {
    c->tensors["dsinks"] =
        StoredFlat(answer.dsinks.values, DType::kF32, c->Find("sinks")->shape);
  }
  if (answer.dalibi_slopes.given()) {
    c->tensors["dalibi_slopes"] =
        StoredFlat(answer.dalibi_slopes.values, DType::kF32,
                   c->Find("alibi_slopes")->shape);
  }
}

}  // namespace fa2::verify
