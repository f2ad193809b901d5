// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/answer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <thread>

#include "fa2/reference.h"
#include "src/verify/cases/error.h"
#include "src/verify/model/parallel.h"

namespace fa2::verify {
namespace {

ConstTensorView Vector(const std::vector<int64_t>& values) {
  return Dense(static_cast<const void*>(values.data()), DType::kI64, 1, 1, 1,
               static_cast<int64_t>(values.size()));
}

ConstTensorView ViewOfFloats(const Array4<float>& array) {
  return {array.given() ? array.values.data() : nullptr, DType::kF32,
          array.sizes, DenseStrides(array.sizes)};
}

AttentionOptions OptionsOf(const Problem& problem) {
  AttentionOptions options;
  options.scale = problem.scale;
  options.causal = problem.options.causal;
  options.window_left = problem.options.window_left;
  options.window_right = problem.options.window_right;
  options.softcap = problem.options.softcap;
  options.bias = ViewOf(problem.bias);
  options.sinks = ViewOfFloats(problem.sinks);
  options.alibi_slopes = ViewOfFloats(problem.alibi_slopes);
  options.dropout_p = problem.options.dropout_p;
  options.philox_seed = problem.options.philox_seed.value_or(0);
  options.philox_offset = problem.options.philox_offset;
  if (problem.packed) {
    options.cu_seqlens_q = Vector(problem.cu_q);
    options.cu_seqlens_k = Vector(problem.cu_k);
  }
  return options;
}

void Require(const Problem& problem, const Status& status) {
  if (status.ok()) return;
  const std::string& name = problem.source.name;
  throw Error((name.empty() ? "" : name + ": ") + status.message());
}

void CallForward(const Problem& problem, bool plain, Context* context,
                 Answer* answer) {
  AttentionForwardArgs args;
  args.q = ViewOf(problem.q);
  args.k = ViewOf(problem.k);
  args.v = ViewOf(problem.v);
  args.options = OptionsOf(problem);
  args.out = ViewOf(answer->out);
  args.lse = ViewOf(answer->lse);
  Require(problem, plain ? AttentionReferenceForward(args)
                         : AttentionForward(args, context));
}

void CallBackward(const Problem& problem, const Array4<double>& out,
                  const Array4<double>& lse, bool plain, Context* context,
                  Answer* answer) {
  const auto zeros = [&problem](const char* name) {
    return Array4<double>(problem.SizesOf(name));
  };
  answer->dq = zeros("dq");
  answer->dk = zeros("dk");
  answer->dv = zeros("dv");
  AttentionBackwardArgs args;
  args.q = ViewOf(problem.q);
  args.k = ViewOf(problem.k);
  args.v = ViewOf(problem.v);
  args.dout = ViewOf(problem.dout);
  args.out = ViewOf(out);
  args.lse = ViewOf(lse);
  args.dlse = ViewOf(problem.dlse);
  args.options = OptionsOf(problem);
  args.dq = ViewOf(answer->dq);
  args.dk = ViewOf(answer->dk);
  args.dv = ViewOf(answer->dv);
  if (problem.bias.given() && !problem.bias_is_mask) {
    answer->dbias = zeros("dbias");
    args.dbias = ViewOf(answer->dbias);
  }
  // These two come out in f32.
  Array4<float> dsinks(problem.sinks.sizes);
  Array4<float> dalibi(problem.alibi_slopes.sizes);
  const auto view = [](Array4<float>* array) {
    return TensorView{array->given() ? array->values.data() : nullptr,
                      DType::kF32, array->sizes, DenseStrides(array->sizes)};
  };
  args.dsinks = view(&dsinks);
  args.dalibi_slopes = view(&dalibi);
  Require(problem, plain ? AttentionReferenceBackward(args)
                         : AttentionBackward(args, context));
  const auto widen = [](const Array4<float>& from, Array4<double>* to) {
    *to = Array4<double>(from.sizes);
    std::copy(from.values.begin(), from.values.end(), to->values.begin());
  };
  widen(dsinks, &answer->dsinks);
  widen(dalibi, &answer->dalibi_slopes);
}

// Adds one head's results to their places.
template <class T>
class Gatherer {
 public:
  Gatherer(const Problem& problem, const Model& model)
      : p_(problem), m_(model) {
    r_.out = Array4<T>(p_.SizesOf("out"));
    r_.lse = Array4<double>(p_.SizesOf("lse"));
    const bool gradients = m_.gradients && p_.dout.given();
    if (gradients) {
      r_.dq = Array4<T>(p_.SizesOf("dq"));
      r_.dk = Array4<T>(p_.SizesOf("dk"));
      r_.dv = Array4<T>(p_.SizesOf("dv"));
      if (p_.bias.given() && !p_.bias_is_mask) {
        r_.dbias = Array4<double>(p_.bias.sizes);
      }
      r_.dsinks = Array4<double>(p_.sinks.sizes);
      r_.dalibi_slopes = Array4<double>(p_.alibi_slopes.sizes);
    }
    if (m_.magnitudes) {
      const auto rows = [](Sizes n) { return Sizes{n[0], n[1], n[2], 1}; };
      r_.out_error = Array4<RowError>(rows(p_.SizesOf("out")));
      r_.dq_error = Array4<RowError>(rows(p_.SizesOf("dq")));
      r_.dk_error = Array4<RowError>(rows(p_.SizesOf("dk")));
      r_.dv_error = Array4<RowError>(rows(p_.SizesOf("dv")));
      if (r_.dbias.given()) {
        r_.dbias_error = Array4<RowError>(rows(p_.bias.sizes));
      }
      r_.dsinks_error = Array4<RowError>(p_.sinks.sizes);
      r_.dalibi_error = Array4<RowError>(p_.alibi_slopes.sizes);
    }
  }

  void Add(const Sequence& s, int64_t head, int64_t kv_head, int64_t member,
           const HeadResults<T>& h) {
    const auto add = [](const auto& from, auto* to) {
      for (size_t i = 0; i < from.size(); ++i) to[i] += from[i];
    };
    add(h.out, r_.out.row(s.batch, head, s.q_begin));
    add(h.lse, r_.lse.row(s.batch, head, s.q_begin));
    if (r_.dq.given()) {
      add(h.dq, r_.dq.row(s.batch, head, s.q_begin));
      if (m_.faults.group_member < 0 || m_.faults.group_member == member) {
        add(h.dk, r_.dk.row(s.batch, kv_head, s.k_begin));
        add(h.dv, r_.dv.row(s.batch, kv_head, s.k_begin));
      }
      if (r_.dbias.given()) AddBias(s, head, h);
      if (r_.dsinks.given()) *r_.dsinks.row(0, head, 0) += h.dsink;
      if (r_.dalibi_slopes.given()) {
        *r_.dalibi_slopes.row(SlopeBatch(s), head, 0) += h.dalibi;
      }
    }
    if (m_.magnitudes) AddErrors(s, head, kv_head, h);
  }

  Results<T> Finish() { return std::move(r_); }

 private:
  int64_t SlopeBatch(const Sequence& s) const {
    return p_.alibi_slopes.sizes[0] == 1 ? 0 : s.index;
  }

  void AddErrors(const Sequence& s, int64_t head, int64_t kv_head,
                 const HeadResults<T>& h) {
    const auto add = [](const std::vector<RowError>& from, RowError* to) {
      for (size_t i = 0; i < from.size(); ++i) {
        to[i].squares += from[i].squares;
        to[i].fourths += from[i].fourths;
        to[i].shared += from[i].shared;
      }
    };
    add(h.out_error, r_.out_error.row(s.batch, head, s.q_begin));
    if (!r_.dq.given()) return;
    add(h.dq_error, r_.dq_error.row(s.batch, head, s.q_begin));
    add(h.dk_error, r_.dk_error.row(s.batch, kv_head, s.k_begin));
    add(h.dv_error, r_.dv_error.row(s.batch, kv_head, s.k_begin));
    if (r_.dbias_error.given()) {
      const Sizes& n = p_.bias.sizes;
      add(h.dbias_error,
          r_.dbias_error.row(n[0] == 1 ? 0 : s.index, n[1] == 1 ? 0 : head, 0));
    }
    if (r_.dsinks_error.given()) {
      r_.dsinks_error.row(0, head, 0)->squares += h.dsink_squares;
    }
    if (r_.dalibi_error.given()) {
      r_.dalibi_error.row(SlopeBatch(s), head, 0)->squares += h.dalibi_squares;
    }
  }

  void AddBias(const Sequence& s, int64_t head, const HeadResults<T>& h) {
    const auto& slice = m_.faults.bias_slice;
    if (slice[0] >= 0 && s.index != slice[0]) return;
    if (slice[1] >= 0 && head != slice[1]) return;
    const Sizes& n = p_.bias.sizes;
    double* to = r_.dbias.row(n[0] == 1 ? 0 : s.index, n[1] == 1 ? 0 : head, 0);
    for (size_t i = 0; i < h.dbias.size(); ++i) to[i] += h.dbias[i];
  }

  const Problem& p_;
  const Model& m_;
  Results<T> r_;
};

}  // namespace

int64_t KvHead(const Problem& problem, const Faults& faults, int64_t head) {
  return faults.head_map_modulo ? head % problem.kv_heads
                                : head / problem.group();
}

std::vector<int64_t> QueryHeads(const Problem& problem, const Faults& faults,
                                int64_t kv_head) {
  std::vector<int64_t> heads;
  for (int64_t h = 0; h < problem.heads; ++h) {
    if (KvHead(problem, faults, h) == kv_head) heads.push_back(h);
  }
  return heads;
}

template <class T>
Results<T> RunAll(const Problem& problem, const Model& model,
                  const Forward* forward, int threads) {
  Gatherer<T> gatherer(problem, model);
  struct Job {
    const Sequence* sequence;
    int64_t head, kv_head, member;
  };
  std::vector<Job> jobs;
  for (const Sequence& s : problem.sequences) {
    for (int64_t g = 0; g < problem.kv_heads; ++g) {
      int64_t member = 0;
      for (const int64_t h : QueryHeads(problem, model.faults, g)) {
        jobs.push_back({&s, h, g, member++});
      }
    }
  }
  if (threads <= 0) {
    threads =
        std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  // Waves of heads side by side, added up in order: the same sums whatever the
  // number of threads.
  const size_t wave = static_cast<size_t>(threads) * 2;
  std::vector<HeadResults<T>> results(wave);
  for (size_t begin = 0; begin < jobs.size(); begin += wave) {
    const size_t end = std::min(jobs.size(), begin + wave);
    ForEach(static_cast<int64_t>(end - begin), threads, [&](int64_t n) {
      const Job& job = jobs[begin + static_cast<size_t>(n)];
      results[static_cast<size_t>(n)] = RunHead<T>(
          problem, model, forward, *job.sequence, job.head, job.kv_head);
    });
    for (size_t n = begin; n < end; ++n) {
      gatherer.Add(*jobs[n].sequence, jobs[n].head, jobs[n].kv_head,
                   jobs[n].member, results[n - begin]);
    }
  }
  return gatherer.Finish();
}

template Results<float> RunAll(const Problem&, const Model&, const Forward*,
                               int);
template Results<double> RunAll(const Problem&, const Model&, const Forward*,
                                int);

bool NeedsModel(const Problem& problem) {
  return problem.keep.given() || (problem.packed && problem.bias.given());
}

Answer ComputeAnswer(const Problem& problem, const Forward* forward,
                     Method method, int threads) {
  if (method == Method::kModel || NeedsModel(problem)) {
    Model model;
    model.given = forward != nullptr;
    return RunAll<double>(problem, model, forward, threads);
  }
  const bool plain = method == Method::kPlain;
  std::unique_ptr<Context> context;
  if (!plain) {
    ContextOptions options;
    options.num_threads = std::max(0, threads);
    Require(problem, Context::Create(options, &context));
  }
  Answer answer;
  if (forward == nullptr) {
    answer.out = Array4<double>(problem.SizesOf("out"));
    answer.lse = Array4<double>(problem.SizesOf("lse"));
    CallForward(problem, plain, context.get(), &answer);
  }
  if (problem.dout.given()) {
    CallBackward(problem, forward != nullptr ? forward->out : answer.out,
                 forward != nullptr ? forward->lse : answer.lse, plain,
                 context.get(), &answer);
  }
  return answer;
}

Model TwinModel(const Problem& problem) {
  Model model;
  model.products = problem.products;
  const LogicalTensor* out = problem.Output("out");
  model.out =
      out != nullptr ? out->view.dtype : problem.source.Find("q")->dtype;
  model.f32_lse = problem.products != Products::kF64;
  model.magnitudes = true;
  return model;
}

}  // namespace fa2::verify
