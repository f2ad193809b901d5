// SPDX-License-Identifier: Apache-2.0
#include "tests/simd/engine_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "tests/simd/block_problem.h"
#include "tests/simd/key_rows.h"

namespace fa2::simd {
namespace {

// Counts waits and releases of dQ, which must alternate.
struct CountingSemaphore {
  bool add;
  int waits = 0;
  int releases = 0;

  static bool Wait(void* state) {
    CountingSemaphore& self = *static_cast<CountingSemaphore*>(state);
    EXPECT_EQ(self.releases, self.waits);
    ++self.waits;
    return self.add;
  }
  static void Release(void* state) {
    ++static_cast<CountingSemaphore*>(state)->releases;
  }
};

// The problem through an engine's interface.
template <class T>
class BlockRun : BlockProblem<T> {
  using Problem = BlockProblem<T>;

 public:
  using Problem::Problem;

  BlockErrors Run() {
    BlockErrors errors;
    Backward(errors);
    Forward(errors);
    return errors;
  }

 private:
  using Problem::alibi_;
  using Problem::blocks_;
  using Problem::c_;
  using Problem::delta_;
  using Problem::dout_;
  using Problem::dq_;
  using Problem::e_;
  using Problem::lse_;
  using Problem::nq_;
  using Problem::out_;
  using Problem::padded_q_;
  using Problem::q_;
  using Problem::ref_dk_;
  using Problem::ref_ds_;
  using Problem::ref_dv_;
  using Problem::scale_;
  using Problem::Staged;
  using Problem::tile_stride_;

  Bytes PackRows(Role role, const Tensor& t, int64_t padded,
                 bool finite_only = false) const {
    Bytes packed(e_.packed_bytes(role, padded, t.View().depth));
    e_.pack(role, t.View(), padded, finite_only, packed.get());
    return packed;
  }

  void Describe(const KeyBlock<T>& b, Block& block,
                const Bytes& scratch) const {
    block.keys = b.padded;
    block.queries = padded_q_;
    block.used_keys = b.keys;
    block.used_queries = nq_;
    block.head_dim = c_.head_dim;
    block.value_dim = c_.value_dim;
    bool all = true;
    for (TileState s : b.tiles) all &= s == TileState::kVisible;
    if (!all) {
      block.tiles = b.tiles.data();
      block.tile_stride = tile_stride_;
      block.score.visible_begin = b.begin.data();
      block.score.visible_end = b.end.data();
    }
    block.score.scale = scale_;
    block.score.softcap = c_.softcap;
    block.score.alibi_slope = c_.alibi_slope;
    if (c_.alibi_slope != 0.0 || c_.want_ds) {
      block.score.query_position = b.position.data();
    }
    if (c_.bias) block.score.bias = b.bias.data();
    if (c_.dropout) {
      block.score.dropout = b.dropout.data();
      if (e_.dropout_bits) block.score.dropout = b.dropout_bits.data();
      block.score.dropout_scale = kKeptScale;
    }
    block.score.staged_key_rows = b.padded;
    block.scratch = scratch.get();
  }

  size_t ScratchBytes(Engine::ScratchBytes bytes) const {
    int64_t keys = 0;
    for (const KeyBlock<T>& b : blocks_) keys = std::max(keys, b.padded);
    return bytes({keys, padded_q_}, c_.head_dim, c_.value_dim);
  }

  void Backward(BlockErrors& errors) {
    const int64_t dk = c_.head_dim, dv = c_.value_dim;
    const Bytes scratch(ScratchBytes(e_.backward_scratch_bytes));
    const Bytes q_score = PackRows(Role::kScoreRight, q_, padded_q_);
    const Bytes q_grad = PackRows(Role::kGradRight, q_, padded_q_);
    const Bytes o_score = PackRows(Role::kScoreRight, dout_, padded_q_);
    const Bytes o_grad = PackRows(Role::kGradRight, dout_, padded_q_);
    Array<T> lse(padded_q_, T{0}), delta(padded_q_, T{0});
    for (int64_t i = 0; i < nq_; ++i) {
      lse[i] = static_cast<T>(lse_[i]);
      delta[i] = static_cast<T>(delta_[i]);
    }
    const Bytes dq(e_.query_accumulator_bytes(padded_q_, dk));
    double alibi = 0.0;
    Errors ek, ev, es, eq;
    for (size_t n = 0; n < blocks_.size(); ++n) {
      KeyBlock<T>& b = blocks_[n];
      const Bytes k_score = PackRows(Role::kScoreLeft, b.k, b.padded);
      const Bytes v_score = PackRows(Role::kScoreLeft, b.v, b.padded);
      const Bytes k_grad =
          PackRows(Role::kGradLeft, b.k, b.padded, /*finite_only=*/true);
      const Bytes acc_k(e_.key_accumulator_bytes(b.padded, dk));
      const Bytes acc_v(e_.key_accumulator_bytes(b.padded, dv));
      BackwardBlock block;
      Describe(b, block, scratch);
      block.k_score = k_score.get();
      block.v_score = v_score.get();
      block.k_grad = k_grad.get();
      block.q_score = q_score.get();
      block.dout_score = o_score.get();
      block.q_grad = q_grad.get();
      block.dout_grad = o_grad.get();
      block.lse = lse.data();
      block.delta = delta.data();
      block.dv = acc_v.get();
      block.dk = acc_k.get();
      block.dq = dq.get();
      // Whether to add is told beforehand, or by the semaphore.
      CountingSemaphore semaphore{n > 0};
      const bool guarded = !c_.want_ds;
      if (guarded) {
        block.dq_semaphore = {&CountingSemaphore::Wait,
                              &CountingSemaphore::Release, &semaphore};
      } else {
        block.add_to_dq = n > 0;
      }
      if (c_.want_ds) {
        block.ds = b.ds.data();
        block.alibi_gradient = &alibi;
      }
      e_.backward(block);
      // A second time onto dK and dV alone: they double.
      const Array<T> ds = b.ds;
      block.dq = nullptr;
      block.ds = nullptr;
      block.alibi_gradient = nullptr;
      block.add_to_dk = block.add_to_dv = true;
      e_.backward(block);
      EXPECT_EQ(semaphore.waits, guarded ? 1 : 0);
      EXPECT_EQ(semaphore.releases, semaphore.waits);
      Array<T> rows(b.keys * std::max(dk, dv));
      KeyRows(e_, acc_k.get(), b.padded, dk, b.keys, rows.data());
      for (int64_t x = 0; x < b.keys * dk; ++x) {
        ek.Add(rows[x] / 2, ref_dk_[n][x]);
      }
      KeyRows(e_, acc_v.get(), b.padded, dv, b.keys, rows.data());
      for (int64_t x = 0; x < b.keys * dv; ++x) {
        ev.Add(rows[x] / 2, ref_dv_[n][x]);
      }
      for (int64_t j = 0; c_.want_ds && j < b.keys; ++j) {
        for (int64_t i = 0; i < nq_; ++i) {
          const double got = ds[Staged(b.padded, j, i)];
          const double want = ref_ds_[n][j * nq_ + i];
          if (!b.visible[j * nq_ + i] && got != 0.0) es.Add(kInfinity, 0.0);
          es.Add(got, want);
        }
      }
    }
    // In two parts, as the drivers do.
    const int64_t half = RoundUp(nq_ / 2, kTileKeys);
    Array<T> rows(nq_ * dk);
    e_.unpack_query_rows(dq.get(), padded_q_, dk, 0, std::min(half, nq_),
                         rows.data(), dk);
    if (half < nq_) {
      e_.unpack_query_rows(dq.get(), padded_q_, dk, half, nq_ - half,
                           rows.data() + half * dk, dk);
    }
    for (int64_t x = 0; x < nq_ * dk; ++x) eq.Add(rows[x], dq_[x]);
    errors.dq = eq.Relative();
    errors.dk = ek.Relative();
    errors.dv = ev.Relative();
    errors.ds = es.Relative();
    if (c_.want_ds) {
      // Sums of both signs: measured against the sum of magnitudes.
      double size = 0.0;
      for (const auto& ds : ref_ds_) {
        for (double x : ds) size += std::abs(x);
      }
      errors.alibi = size == 0.0 ? 0.0 : std::abs(alibi - alibi_) / (size * 32);
    }
  }

  void Forward(BlockErrors& errors) {
    const int64_t dv = c_.value_dim;
    const Bytes scratch(ScratchBytes(e_.forward_scratch_bytes));
    const Bytes q_score = PackRows(Role::kScoreRight, q_, padded_q_);
    Array<T> m(padded_q_, static_cast<T>(-kInfinity));
    Array<T> l(padded_q_, T{0}), weight(padded_q_, T{0});
    const Bytes acc(e_.query_accumulator_bytes(padded_q_, dv));
    bool first = true;
    for (const KeyBlock<T>& b : blocks_) {
      const Bytes k_score = PackRows(Role::kScoreLeft, b.k, b.padded);
      const Bytes v_grad =
          PackRows(Role::kGradLeft, b.v, b.padded, /*finite_only=*/true);
      ForwardBlock block;
      Describe(b, block, scratch);
      block.q_score = q_score.get();
      block.k_score = k_score.get();
      block.v_grad = v_grad.get();
      block.row_max = m.data();
      block.row_sum = l.data();
      if (e_.rounds_probabilities) block.row_weight = weight.data();
      block.out = acc.get();
      block.first = first;
      first = false;
      e_.forward(block);
    }
    Array<T> rows(nq_ * dv);
    e_.unpack_query_rows(acc.get(), padded_q_, dv, 0, nq_, rows.data(), dv);
    Errors eo;
    for (int64_t i = 0; i < nq_; ++i) {
      const double sum = static_cast<double>(l[i]);
      const double divisor =
          e_.rounds_probabilities ? static_cast<double>(weight[i]) : sum;
      for (int64_t d = 0; d < dv; ++d) {
        double x = rows[i * dv + d];
        if (c_.dropout && e_.dropout_bits) x *= kKeptScale;
        eo.Add(sum == 0.0 ? x : x / divisor, out_[i * dv + d]);
      }
      if (lse_[i] == -kInfinity) {
        if (sum != 0.0) errors.lse = kInfinity;
      } else {
        const double lse = static_cast<double>(m[i]) + std::log(sum);
        const double e = std::abs(lse - lse_[i]);
        errors.lse = std::isnan(e) ? kInfinity : std::max(errors.lse, e);
      }
    }
    errors.out = eo.Relative();
  }
};

}  // namespace

std::string BlockCase::Name() const {
  std::string name =
      "d" + std::to_string(head_dim) + "_dv" + std::to_string(value_dim) +
      "_q" + std::to_string(queries) + "_k" + std::to_string(keys[0]) + "+" +
      std::to_string(keys[1]) + "_mask" +
      std::to_string(static_cast<int>(mask)) + "_" + NameOf(dtype);
  if (softcap != 0.0) name += "_softcap";
  if (alibi_slope != 0.0) name += "_alibi";
  if (bias) name += "_bias";
  if (dropout) name += "_dropout";
  if (want_ds) name += "_ds";
  if (nan_in_masked) name += "_nan";
  if (equal_values) name += "_equal";
  return name;
}

double BlockErrors::Largest() const {
  return std::max({dq, dk, dv, ds, alibi, out});
}

BlockErrors RunBlockCase(const Engine& engine, const BlockCase& c) {
  return engine.accumulator == DType::kF64 ? BlockRun<double>(engine, c).Run()
                                           : BlockRun<float>(engine, c).Run();
}

}  // namespace fa2::simd
