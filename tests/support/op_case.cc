// SPDX-License-Identifier: Apache-2.0
#include "tests/support/op_case.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "fa2/training_ops.h"

namespace fa2::test {
namespace {

// About a vector and a block of rows, primes, 0 and 1.
const std::vector<int64_t> kRows = {0, 1, 1, 2, 3, 5, 8, 17, 40};
const std::vector<int64_t> kDims = {1,  2,  3,  7,  8,   15,  16,  17, 31,
                                    33, 64, 65, 96, 127, 200, 257, 300};
const std::vector<DType> kFloats = {DType::kF32, DType::kF32, DType::kBF16,
                                    DType::kF16, DType::kF64};

// What is drawn for a call, and the case that is made of it.
class Maker {
 public:
  explicit Maker(const Random& random)
      : random_(random), dtype_(random_.Pick(kFloats)) {
    sizes_ = {random_.Integer(1, 3), random_.Integer(1, 2), random_.Pick(kRows),
              random_.Pick(kDims)};
  }

  OpCase Make(int64_t op);

 private:
  using Value = std::function<double(const Sizes&)>;

  int64_t dim() const { return sizes_[3]; }
  int64_t rows() const { return sizes_[0] * sizes_[1] * sizes_[2]; }
  // Number of a row among all.
  int64_t RowOf(const Sizes& at) const {
    return (at[0] * sizes_[1] + at[1]) * sizes_[2] + at[2];
  }
  // Rounding error of an operation in the type that a kernel computes in.
  double Eps() const { return dtype_ == DType::kF64 ? 0x1p-53 : 0x1p-24; }
  // Of a sum of n terms of this total size, and functions of it.
  double SumEps(int64_t n) const {
    return Eps() * (16.0 + 4.0 * std::sqrt(static_cast<double>(n)));
  }
  DType TypeOrF32() { return random_.Chance(0.4) ? DType::kF32 : dtype_; }

  Tensor Input(const Sizes& sizes, DType dtype, bool vector = false);
  Tensor Rows() { return Input(sizes_, dtype_); }
  Tensor Vector(int64_t n, DType dtype) {
    return Input({1, 1, 1, n}, dtype, true);
  }
  // In [0, limit); `ignored` now and then where it is not 0.
  Tensor Ids(int64_t n, int64_t limit, int64_t ignored);
  // An output. With `accumulate` it holds numbers, which are part of `value`
  // and `bound` then.
  Tensor Output(const char* name, const Sizes& sizes, DType dtype,
                bool accumulate, const Value& value, const Value& bound);
  Tensor RowsOutput(const char* name, const Value& value, const Value& bound) {
    return Output(name, sizes_, dtype_, false, value, bound);
  }

  void Transpose();
  void Softmax();
  void SoftmaxBackward();
  void RmsNorm();
  void RmsNormBackward();
  void Rotary(bool backward);
  void SwiGlu();
  void SwiGluBackward();
  void Embedding();
  void CrossEntropy();

  Random random_;
  DType dtype_;
  Sizes sizes_;
  OpCase case_;
};

Tensor Maker::Input(const Sizes& sizes, DType dtype, bool vector) {
  const Layout layout =
      vector
          ? Layout::kBhsd
          : random_.Pick<Layout>({Layout::kBhsd, Layout::kBhsd, Layout::kBshd,
                                  Layout::kPaddedRows, Layout::kReversed});
  const bool broadcast = !vector && random_.Chance(0.1);
  Tensor t = MakeTensor(dtype, sizes, layout,
                        {broadcast, false, broadcast && random_.Chance(0.5)});
  FillNormal(t.view, random_, random_.Pick<double>({1.0, 1.0, 4.0}));
  case_.inputs.push_back(t);
  return t;
}

Tensor Maker::Ids(int64_t n, int64_t limit, int64_t ignored) {
  const DType dtype = random_.Chance(0.5) ? DType::kI32 : DType::kI64;
  Tensor t =
      MakeTensor(dtype, {1, 1, 1, n},
                 random_.Chance(0.3) ? Layout::kStridedLast : Layout::kBhsd);
  for (int64_t i = 0; i < n; ++i) {
    const bool ignore = ignored != 0 && random_.Chance(0.2);
    Set(t.view, {0, 0, 0, i},
        static_cast<double>(ignore ? ignored : random_.Integer(0, limit - 1)));
  }
  case_.inputs.push_back(t);
  return t;
}

Tensor Maker::Output(const char* name, const Sizes& sizes, DType dtype,
                     bool accumulate, const Value& value, const Value& bound) {
  const bool rows = sizes[2] > 1;
  OpOutput out;
  out.name = name;
  out.actual =
      MakeTensor(dtype, sizes,
                 rows ? random_.Pick<Layout>(
                            {Layout::kBhsd, Layout::kBshd, Layout::kPaddedRows})
                      : Layout::kBhsd);
  out.value = MakeTensor(DType::kF64, sizes);
  out.bound = MakeTensor(DType::kF64, sizes);
  if (accumulate) FillNormal(out.actual.view, random_);
  ForEachIndex(sizes, [&](const Sizes& at) {
    const double held = accumulate ? Get(out.actual.view, at) : 0.0;
    Set(out.value.view, at, value(at) + held);
    Set(out.bound.view, at, bound(at) + 2.0 * Eps() * std::abs(held));
  });
  case_.outputs.push_back(out);
  return out.actual;
}

void Maker::Transpose() {
  const Tensor in = Rows();
  const Sizes turned = {sizes_[0], sizes_[1], sizes_[3], sizes_[2]};
  const Tensor out = Output(
      "out", turned, dtype_, false,
      [&](const Sizes& at) {
        return Get(in.view, {at[0], at[1], at[3], at[2]});
      },
      [](const Sizes&) { return 0.0; });
  case_.run = [=](Context* c) { return Transpose2d(in.view, out.view, c); };
}

// exp(x - max) / sum, with max, sum and log(sum) + max, of the row of `at`.
struct RowSoftmax {
  RowSoftmax(const ConstTensorView& x, Sizes at) {
    const int64_t n = x.sizes[3];
    for (at[3] = 0; at[3] < n; ++at[3]) {
      max = std::max(max, Get(x, at));
      largest = std::max(largest, std::abs(Get(x, at)));
    }
    for (at[3] = 0; at[3] < n; ++at[3]) sum += std::exp(Get(x, at) - max);
    lse = max + std::log(sum);
  }
  // Not by lse, which is off by half a unit of its own size: 8 roundings of P
  // where a score is 10.
  double P(double x) const { return std::exp(x - max) / sum; }

  double max = -INFINITY;
  double largest = 0.0;  // of |x|
  double sum = 0.0;
  double lse = 0.0;
};

// Of each row of x, in order.
std::vector<RowSoftmax> RowSoftmaxes(const ConstTensorView& x) {
  std::vector<RowSoftmax> rows;
  ForEachIndex({x.sizes[0], x.sizes[1], x.sizes[2], 1},
               [&](const Sizes& row) { rows.emplace_back(x, row); });
  return rows;
}

void Maker::Softmax() {
  const Tensor x = Rows();
  const std::vector<RowSoftmax> all = RowSoftmaxes(x.view);
  const auto softmax = [&](const Sizes& at) {
    return all[static_cast<size_t>(RowOf(at))];
  };
  const auto value = [&](const Sizes& at) {
    return softmax(at).P(Get(x.view, at));
  };
  const Tensor y = RowsOutput("y", value, [&](const Sizes& at) {
    const double reach = softmax(at).max - Get(x.view, at);
    return value(at) * (SumEps(dim()) + 4.0 * Eps() * reach);
  });
  case_.run = [=](Context* c) { return fa2::Softmax(x.view, y.view, c); };
}

void Maker::SoftmaxBackward() {
  const Tensor dy = Rows(), y = Rows();
  const auto sum = [&](Sizes at, bool sizes) {
    double s = 0.0;
    for (at[3] = 0; at[3] < dim(); ++at[3]) {
      const double term = Get(y.view, at) * Get(dy.view, at);
      s += sizes ? std::abs(term) : term;
    }
    return s;
  };
  const Tensor dx = RowsOutput(
      "dx",
      [&](const Sizes& at) {
        return Get(y.view, at) * (Get(dy.view, at) - sum(at, false));
      },
      [&](const Sizes& at) {
        return SumEps(dim()) * std::abs(Get(y.view, at)) *
               (std::abs(Get(dy.view, at)) + sum(at, true));
      });
  case_.run = [=](Context* c) {
    return fa2::SoftmaxBackward(dy.view, y.view, dx.view, c);
  };
}

// 1 / sqrt(mean(x^2) + eps) of each row.
std::vector<double> RmsFactors(const ConstTensorView& x, double eps) {
  std::vector<double> factors;
  ForEachIndex({x.sizes[0], x.sizes[1], x.sizes[2], 1}, [&](Sizes at) {
    double squares = 0.0;
    for (at[3] = 0; at[3] < x.sizes[3]; ++at[3]) {
      squares += Get(x, at) * Get(x, at);
    }
    const double mean = squares / static_cast<double>(x.sizes[3]);
    factors.push_back(1.0 / std::sqrt(mean + eps));
  });
  return factors;
}

void Maker::RmsNorm() {
  const double eps = random_.Pick<double>({1e-5, 1e-6, 0.25});
  const Tensor x = Rows(), w = Vector(dim(), TypeOrF32());
  const std::vector<double> factors = RmsFactors(x.view, eps);
  const auto value = [&](const Sizes& at) {
    return Get(x.view, at) * factors[static_cast<size_t>(RowOf(at))] *
           Get(w.view, {0, 0, 0, at[3]});
  };
  const Tensor y = RowsOutput("y", value, [&](const Sizes& at) {
    return SumEps(dim()) * std::abs(value(at));
  });
  case_.run = [=](Context* c) {
    return fa2::RmsNorm(x.view, w.view, eps, y.view, c);
  };
}

void Maker::RmsNormBackward() {
  RmsNormBackwardArgs args;
  args.eps = random_.Pick<double>({1e-5, 1e-6, 0.25});
  const Tensor dy = Rows(), x = Rows(), w = Vector(dim(), TypeOrF32());
  args.dy = dy.view;
  args.x = x.view;
  args.weight = w.view;
  const std::vector<double> factors = RmsFactors(x.view, args.eps);
  const auto weight = [&](int64_t i) { return Get(w.view, {0, 0, 0, i}); };
  const auto dx = [&](const Sizes& at, bool sizes) {
    const double r = factors[static_cast<size_t>(RowOf(at))];
    double sum = 0.0;
    Sizes i = at;
    for (i[3] = 0; i[3] < dim(); ++i[3]) {
      const double term = Get(x.view, i) * weight(i[3]) * Get(dy.view, i);
      sum += sizes ? std::abs(term) : term;
    }
    const double direct = weight(at[3]) * r * Get(dy.view, at);
    const double shared =
        Get(x.view, at) * r * r * r / static_cast<double>(dim()) * sum;
    return sizes ? std::abs(direct) + std::abs(shared) : direct - shared;
  };
  const auto dweight = [&](int64_t i, bool sizes) {
    double sum = 0.0;
    ForEachIndex({sizes_[0], sizes_[1], sizes_[2], 1}, [&](const Sizes& row) {
      const Sizes at = {row[0], row[1], row[2], i};
      const double term = Get(x.view, at) *
                          factors[static_cast<size_t>(RowOf(at))] *
                          Get(dy.view, at);
      sum += sizes ? std::abs(term) : term;
    });
    return sum;
  };
  if (random_.Chance(0.85)) {
    args.dx = RowsOutput(
                  "dx", [&](const Sizes& at) { return dx(at, false); },
                  [&](const Sizes& at) { return SumEps(dim()) * dx(at, true); })
                  .view;
  }
  if (random_.Chance(0.85)) {
    args.accumulate_dweight = random_.Chance(0.4);
    args.dweight =
        Output(
            "dweight", {1, 1, 1, dim()}, TypeOrF32(), args.accumulate_dweight,
            [&](const Sizes& at) { return dweight(at[3], false); },
            [&](const Sizes& at) {
              return (SumEps(rows()) + SumEps(dim())) * dweight(at[3], true);
            })
            .view;
  }
  case_.run = [=](Context* c) { return fa2::RmsNormBackward(args, c); };
}

void Maker::Rotary(bool backward) {
  const Tensor x = Rows();
  const int64_t half =
      random_.Chance(0.5) ? dim() / 2 : random_.Integer(0, dim() / 2);
  const Sizes angles = {random_.Chance(0.5) ? 1 : sizes_[0], 1, sizes_[2],
                        half};
  const DType dtype = TypeOrF32();
  const auto table = [&] {
    Tensor t = MakeTensor(dtype, angles);
    FillNormal(t.view, random_, 0.7);
    case_.inputs.push_back(t);
    return t;
  };
  const Tensor cos = table(), sin = table();
  const bool interleaved = random_.Chance(0.5);
  const auto turned = [&](const Sizes& at, bool sizes) {
    if (at[3] >= 2 * half) return sizes ? 0.0 : Get(x.view, at);
    const int64_t pair = interleaved ? at[3] / 2 : at[3] % half;
    const bool first = interleaved ? at[3] % 2 == 0 : at[3] < half;
    const int64_t step = interleaved ? 1 : half;
    Sizes partner = at;
    partner[3] += first ? step : -step;
    const Sizes angle = {angles[0] == 1 ? 0 : at[0], 0, at[2], pair};
    const double straight = Get(x.view, at) * Get(cos.view, angle);
    const double crossed = Get(x.view, partner) * Get(sin.view, angle);
    if (sizes) return std::abs(straight) + std::abs(crossed);
    return first != backward ? straight - crossed : straight + crossed;
  };
  const Tensor y = RowsOutput(
      backward ? "dx" : "y", [&](const Sizes& at) { return turned(at, false); },
      [&](const Sizes& at) { return 4.0 * Eps() * turned(at, true); });
  case_.run = [=](Context* c) {
    if (backward) {
      return RotaryEmbeddingBackward(
          {x.view, cos.view, sin.view, interleaved, y.view}, c);
    }
    return RotaryEmbedding({x.view, cos.view, sin.view, interleaved, y.view},
                           c);
  };
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void Maker::SwiGlu() {
  const Tensor gate = Rows(), up = Rows();
  const auto value = [&](const Sizes& at) {
    const double g = Get(gate.view, at);
    return g * Sigmoid(g) * Get(up.view, at);
  };
  const Tensor y = RowsOutput("y", value, [&](const Sizes& at) {
    return Eps() * (16.0 + 4.0 * std::abs(Get(gate.view, at))) *
           std::abs(value(at));
  });
  case_.run = [=](Context* c) {
    return fa2::SwiGlu(gate.view, up.view, y.view, c);
  };
}

void Maker::SwiGluBackward() {
  const Tensor dy = Rows(), gate = Rows(), up = Rows();
  SwiGluBackwardArgs args;
  args.dy = dy.view;
  args.gate = gate.view;
  args.up = up.view;
  const auto eps = [&](const Sizes& at) {
    return Eps() * (16.0 + 4.0 * std::abs(Get(gate.view, at)));
  };
  if (random_.Chance(0.85)) {
    const auto dgate = [&](const Sizes& at, bool sizes) {
      const double g = Get(gate.view, at), s = Sigmoid(g);
      const double outer = Get(dy.view, at) * Get(up.view, at) * s;
      if (sizes) return std::abs(outer) * (1.0 + std::abs(g) * (1.0 - s));
      return outer * (1.0 + g * (1.0 - s));
    };
    args.dgate = RowsOutput(
                     "dgate", [&](const Sizes& at) { return dgate(at, false); },
                     [&](const Sizes& at) { return eps(at) * dgate(at, true); })
                     .view;
  }
  if (random_.Chance(0.85)) {
    const auto dup = [&](const Sizes& at) {
      const double g = Get(gate.view, at);
      return Get(dy.view, at) * g * Sigmoid(g);
    };
    args.dup = RowsOutput("dup", dup, [&](const Sizes& at) {
                 return eps(at) * std::abs(dup(at));
               }).view;
  }
  case_.run = [=](Context* c) { return fa2::SwiGluBackward(args, c); };
}

void Maker::Embedding() {
  EmbeddingBackwardArgs args;
  const int64_t embeddings = random_.Pick<int64_t>({1, 3, 17, 400});
  const Tensor dy = Rows(), ids = Ids(rows(), embeddings, 0);
  args.dy = dy.view;
  args.ids = ids.view;
  args.accumulate_dweight = random_.Chance(0.4);
  const auto sum = [&](const Sizes& at, bool sizes) {
    double s = 0.0;
    ForEachIndex({sizes_[0], sizes_[1], sizes_[2], 1}, [&](const Sizes& row) {
      if (Get(ids.view, {0, 0, 0, RowOf(row)}) != static_cast<double>(at[2])) {
        return;
      }
      const double term = Get(dy.view, {row[0], row[1], row[2], at[3]});
      s += sizes ? std::abs(term) : term;
    });
    return s;
  };
  args.dweight =
      Output(
          "dweight", {1, 1, embeddings, dim()}, TypeOrF32(),
          args.accumulate_dweight,
          [&](const Sizes& at) { return sum(at, false); },
          [&](const Sizes& at) { return SumEps(rows()) * sum(at, true); })
          .view;
  case_.run = [=](Context* c) { return EmbeddingBackward(args, c); };
}

void Maker::CrossEntropy() {
  CrossEntropyArgs args;
  args.ignore_index = random_.Pick<int64_t>({-100, -1});
  const Tensor logits = Rows(), ids = Ids(rows(), dim(), args.ignore_index);
  args.logits = logits.view;
  args.targets = ids.view;
  args.label_smoothing = random_.Pick<double>({0.0, 0.0, 0.1, 1.0});
  args.z_loss = random_.Pick<double>({0.0, 0.0, 1e-3, 0.5});
  const double smoothing = args.label_smoothing, z = args.z_loss;
  const auto wide = [&] {
    return random_.Chance(0.5) ? DType::kF32 : DType::kF64;
  };
  Tensor weights;
  if (random_.Chance(0.3)) {
    weights = Vector(rows(), wide());
    args.weights = weights.view;
  }
  const auto target = [&](int64_t row) {
    return static_cast<int64_t>(Get(ids.view, {0, 0, 0, row}));
  };
  int64_t counted = 0;
  for (int64_t row = 0; row < rows(); ++row) {
    counted += target(row) != args.ignore_index ? 1 : 0;
  }
  if (random_.Chance(0.3)) args.count = random_.Integer(1, 50);
  const auto count = static_cast<double>(args.count.value_or(counted));
  const auto weight = [&](int64_t row) {
    return weights.given() ? Get(weights.view, {0, 0, 0, row}) : 1.0;
  };
  // A position's loss, its part by z_loss, and the sizes of the terms.
  struct Loss {
    double value = 0.0, z_part = 0.0, size = 0.0;
  };
  std::vector<Loss> losses;
  const std::vector<RowSoftmax> all = RowSoftmaxes(logits.view);
  ForEachIndex({sizes_[0], sizes_[1], sizes_[2], 1}, [&](const Sizes& row) {
    const int64_t id = target(RowOf(row)), n = dim();
    Loss loss;
    if (id != args.ignore_index) {
      const RowSoftmax& p = all[static_cast<size_t>(RowOf(row))];
      double mean = 0.0;
      Sizes at = row;
      for (at[3] = 0; at[3] < n; ++at[3]) {
        mean += Get(logits.view, at) / static_cast<double>(n);
      }
      at[3] = id;
      const double w = weight(RowOf(row)), x = Get(logits.view, at);
      loss.z_part = w * z * p.lse * p.lse;
      loss.value =
          w * (p.lse - (1.0 - smoothing) * x - smoothing * mean) + loss.z_part;
      // log(sum) is off by about eps where the sum is near 1.
      const double size = p.largest + std::log(p.sum) + 1.0;
      loss.size = std::abs(w) * (3.0 * size + 2.0 * z * size * size);
    }
    losses.push_back(loss);
  });
  const auto total = [&](double Loss::*member) {
    double sum = 0.0;
    for (const Loss& loss : losses) sum += loss.*member;
    return count > 0.0 ? sum / count : 0.0;
  };
  const auto bound = [&](const Sizes&) {
    return (SumEps(dim()) + SumEps(rows())) * total(&Loss::size);
  };
  const bool nothing_counts = !args.count.has_value() && counted == 0;
  args.accumulate_loss = random_.Chance(0.4);
  const Sizes one = {1, 1, 1, 1};
  // The mean over no position is the kernel's own affair.
  if (!nothing_counts && random_.Chance(0.8)) {
    args.loss = Output(
                    "loss", one, wide(), args.accumulate_loss,
                    [&](const Sizes&) { return total(&Loss::value); }, bound)
                    .view;
    if (random_.Chance(0.4)) {
      args.z_loss_part =
          Output(
              "z_loss_part", one, wide(), args.accumulate_loss,
              [&](const Sizes&) { return total(&Loss::z_part); }, bound)
              .view;
    }
  }
  if (random_.Chance(0.4)) {
    const auto loss = [&](const Sizes& at) {
      return losses[static_cast<size_t>(at[3])];
    };
    args.losses =
        Output(
            "losses", {1, 1, 1, rows()}, wide(), false,
            [&](const Sizes& at) { return loss(at).value; },
            [&](const Sizes& at) { return SumEps(dim()) * loss(at).size; })
            .view;
  }
  if (random_.Chance(0.8)) {
    const auto gradient = [&](const Sizes& at, bool sizes) {
      const int64_t row = RowOf(at);
      if (target(row) == args.ignore_index) return 0.0;
      const RowSoftmax& softmax = all[static_cast<size_t>(row)];
      const double p = softmax.P(Get(logits.view, at));
      const double aim = smoothing / static_cast<double>(dim()) +
                         (at[3] == target(row) ? 1.0 - smoothing : 0.0);
      const double factor = weight(row) / count;
      if (sizes) {
        const double reach =
            1.0 + softmax.max - Get(logits.view, at) + softmax.largest;
        return std::abs(factor) *
               (p * (1.0 + 2.0 * z * (softmax.largest + 8.0)) * reach + aim);
      }
      return factor * (p * (1.0 + 2.0 * z * softmax.lse) - aim);
    };
    args.dlogits =
        RowsOutput(
            "dlogits", [&](const Sizes& at) { return gradient(at, false); },
            [&](const Sizes& at) { return SumEps(dim()) * gradient(at, true); })
            .view;
  }
  case_.run = [=](Context* c) { return fa2::CrossEntropy(args, c); };
}

OpCase Maker::Make(int64_t op) {
  constexpr const char* kNames[kOps] = {"transpose",
                                        "softmax",
                                        "softmax_backward",
                                        "rms_norm",
                                        "rms_norm_backward",
                                        "rotary_embedding",
                                        "rotary_embedding_backward",
                                        "swiglu",
                                        "swiglu_backward",
                                        "embedding_backward",
                                        "cross_entropy"};
  switch (op) {
    case 0:
      Transpose();
      break;
    case 1:
      Softmax();
      break;
    case 2:
      SoftmaxBackward();
      break;
    case 3:
      RmsNorm();
      break;
    case 4:
      RmsNormBackward();
      break;
    case 5:
    case 6:
      Rotary(op == 6);
      break;
    case 7:
      SwiGlu();
      break;
    case 8:
      SwiGluBackward();
      break;
    case 9:
      Embedding();
      break;
    default:
      CrossEntropy();
  }
  case_.text =
      std::string(kNames[op]) + " " + NameOf(dtype_) + " " + Text(sizes_);
  return std::move(case_);
}

}  // namespace

OpCase RandomOpCase(uint64_t seed) {
  return RandomOpCase(static_cast<int64_t>(seed % kOps), Random(seed));
}

OpCase RandomOpCase(int64_t op, const Random& random) {
  return Maker(random).Make(op);
}

}  // namespace fa2::test
