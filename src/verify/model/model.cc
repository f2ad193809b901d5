// SPDX-License-Identifier: Apache-2.0
#include "src/verify/model/model.h"

#include <algorithm>
#include <utility>

#include "src/verify/model/head_block.h"

namespace fa2::verify {
namespace {

// Queries of a block: its four arrays of scores stay in L2 up to some 4,096
// keys of f32.
constexpr int64_t kRows = 32;

template <class T>
HeadResults<T> Empty(const HeadOperands<T>& h) {
  const Problem& p = h.problem;
  const Sequence& s = h.sequence;
  const auto size = [](int64_t rows, int64_t columns) {
    return static_cast<size_t>(rows * columns);
  };
  HeadResults<T> r;
  r.out.resize(size(s.nq, h.value_depth));
  r.lse.resize(size(s.nq, 1));
  r.stored_lse.resize(size(s.nq, 1));
  if (h.gradients) {
    r.dq.resize(size(s.nq, h.depth));
    r.dk.resize(size(s.nk, h.depth));
    r.dv.resize(size(s.nk, h.value_depth));
    if (p.bias.given() && !p.bias_is_mask) {
      r.dbias.resize(size(p.bias.sizes[2], p.bias.sizes[3]));
    }
  }
  if (h.model.magnitudes) {
    r.out_error.resize(size(s.nq, 1));
    r.dq_error.resize(size(s.nq, 1));
    r.dk_error.resize(size(s.nk, 1));
    r.dv_error.resize(size(s.nk, 1));
    if (!r.dbias.empty()) r.dbias_error.resize(size(p.bias.sizes[2], 1));
  }
  return r;
}

// The candidate's out and lse stand for what a forward gives.
template <class T>
void CopyForward(const HeadOperands<T>& h, const Forward& forward,
                 const Block<T>& block, HeadResults<T>* results) {
  const Sequence& s = h.sequence;
  for (int64_t i = block.begin; i < block.begin + block.rows; ++i) {
    const double* out = forward.out.row(s.batch, h.head, s.q_begin + i);
    std::transform(out, out + h.value_depth,
                   results->out.begin() + i * h.value_depth,
                   [](double x) { return static_cast<T>(x); });
    results->lse[static_cast<size_t>(i)] =
        *forward.lse.row(s.batch, h.head, s.q_begin + i);
  }
}

// The passes over one head; a mistake may be in one of them alone.
template <class T>
class HeadRun {
 public:
  HeadRun(const Forward* forward, HeadOperands<T>* operands,
          HeadResults<T>* results)
      : forward_(forward), h_(*operands), r_(*results) {
    const Faults& all = h_.model.faults;
    alike_ = all.in_forward == all.in_backward;
    if (all.in_forward) in_forward_ = all;
    if (all.in_backward) in_backward_ = all;
  }

  // One pass after the other where they read keys differently.
  void Run() {
    const bool swapped =
        in_forward_.k_layout_swapped != in_backward_.k_layout_swapped ||
        in_forward_.v_layout_swapped != in_backward_.v_layout_swapped ||
        in_forward_.key_batch_shift != in_backward_.key_batch_shift ||
        in_forward_.head_map_modulo != in_backward_.head_map_modulo;
    h_.LoadKeys(in_forward_);
    ForEachBlock(true, !swapped);
    if (!swapped || !h_.gradients) return;
    h_.LoadKeys(in_backward_);
    ForEachBlock(false, true);
  }

 private:
  void ForEachBlock(bool forward, bool backward) {
    const int64_t tile = h_.model.faults.rounded_tile;
    const int64_t rows = tile > 0 ? std::min(kRows, tile) : kRows;
    const int64_t nq = h_.sequence.nq;
    for (block_.begin = 0; block_.begin < nq; block_.begin += rows) {
      block_.rows = std::min(rows, nq - block_.begin);
      if (forward) RunForward();
      if (backward && h_.gradients) RunBackward(forward && alike_);
    }
  }

  void RunForward() {
    if (h_.model.given) {
      CopyForward(h_, *forward_, block_, &r_);
      if (alike_) ComputeScores(h_, in_forward_, &block_);
      return;
    }
    ComputeScores(h_, in_forward_, &block_);
    if (h_.dropout) ReadKeep(h_, in_forward_, &block_);
    ForwardBlock(h_, in_forward_, &block_, &r_);
  }

  void RunBackward(bool has_scores) {
    if (!has_scores) ComputeScores(h_, in_backward_, &block_);
    if (h_.dropout) ReadKeep(h_, in_backward_, &block_);
    BackwardBlock(h_, in_backward_, &block_, &r_);
  }

  const Forward* forward_;
  HeadOperands<T>& h_;
  HeadResults<T>& r_;
  Faults in_forward_, in_backward_;
  bool alike_ = true;
  Block<T> block_;
};

}  // namespace

Forward CandidateForward(const Problem& problem) {
  Forward forward;
  forward.out = Load(*problem.Output("out"));
  forward.lse = Array4<double>(problem.SizesOf("lse"));
  for (const Sequence& s : problem.sequences) {
    for (int64_t h = 0; h < problem.heads; ++h) {
      for (int64_t i = 0; i < s.nq; ++i) {
        *forward.lse.row(s.batch, h, s.q_begin + i) =
            problem.CandidateLse(s, h, i);
      }
    }
  }
  return forward;
}

template <class T>
HeadResults<T> RunHead(const Problem& problem, const Model& model,
                       const Forward* forward, const Sequence& sequence,
                       int64_t head, int64_t kv_head) {
  HeadOperands<T> operands(problem, model, sequence, head, kv_head);
  HeadResults<T> results = Empty(operands);
  HeadRun<T>(forward, &operands, &results).Run();
  if (model.magnitudes && operands.gradients && problem.group() > 1) {
    AddShareMagnitudes(operands, &results);
  }
  return results;
}

template HeadResults<float> RunHead(const Problem&, const Model&,
                                    const Forward*, const Sequence&, int64_t,
                                    int64_t);
template HeadResults<double> RunHead(const Problem&, const Model&,
                                     const Forward*, const Sequence&, int64_t,
                                     int64_t);

}  // namespace fa2::verify
