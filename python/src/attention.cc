// SPDX-License-Identifier: Apache-2.0

// fa2::AttentionForward and AttentionBackward, and the reference with the same
// arguments, over arrays that the Python side allocated.
#include "fa2/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>

#include "fa2/reference.h"
#include "python/src/array.h"
#include "python/src/call.h"

namespace fa2::python {
namespace {

Causal ParseCausal(const std::optional<std::string>& causal) {
  if (!causal.has_value()) return Causal::kNone;
  if (*causal == "top_left") return Causal::kTopLeft;
  if (*causal == "bottom_right") return Causal::kBottomRight;
  throw nb::value_error(
      ("causal is \"" + *causal +
       "\"; it must be None, \"top_left\" or \"bottom_right\"")
          .c_str());
}

// A block mask: None, or a sequence of both block sizes, both lists of blocks
// and bits, as fa2_cpu.BlockMask has them.
class BlockMaskArgument {
 public:
  explicit BlockMaskArgument(nb::handle given)
      : given_(!given.is_none()),
        counts_("block_mask.kv_num_blocks", Item(given, 2)),
        indices_("block_mask.kv_indices", Item(given, 3)),
        full_counts_("block_mask.full_kv_num_blocks", Item(given, 4)),
        full_indices_("block_mask.full_kv_indices", Item(given, 5)),
        bits_("block_mask.bits", Item(given, 6)) {
    if (!given_) return;
    mask_.block_q = nb::cast<int64_t>(Item(given, 0));
    mask_.block_k = nb::cast<int64_t>(Item(given, 1));
    mask_.kv_num_blocks = counts_.RowValues(Layout::kBHSD);
    mask_.kv_indices = indices_.Leading();
    mask_.full_kv_num_blocks = full_counts_.RowValues(Layout::kBHSD);
    mask_.full_kv_indices = full_indices_.Leading();
    mask_.bits = bits_.Leading();
  }
  BlockMaskArgument(const BlockMaskArgument&) = delete;
  BlockMaskArgument& operator=(const BlockMaskArgument&) = delete;

  const BlockMask* get() const { return given_ ? &mask_ : nullptr; }

 private:
  static nb::object Item(nb::handle given, int index) {
    return given.is_none() ? nb::none() : nb::object(given[index]);
  }

  bool given_;
  InputArray counts_, indices_, full_counts_, full_indices_, bits_;
  BlockMask mask_;
};

// The keyword arguments that forward and backward share.
class Options {
 public:
  Options(const std::string& layout, std::optional<double> scale,
          const std::optional<std::string>& causal,
          std::tuple<int64_t, int64_t> window, nb::handle bias, double softcap,
          nb::handle alibi_slopes, nb::handle sinks, double dropout_p,
          uint64_t philox_seed, uint64_t philox_offset, nb::handle cu_seqlens_q,
          nb::handle cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
          const std::string& precision, nb::handle block_mask)
      : layout_(ParseLayout(layout)),
        bias_("bias", bias),
        alibi_slopes_("alibi_slopes", alibi_slopes),
        sinks_("sinks", sinks),
        cu_seqlens_q_("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_k_("cu_seqlens_k", cu_seqlens_k),
        block_mask_(block_mask) {
    options_.scale = scale;
    options_.causal = ParseCausal(causal);
    options_.window_left = std::get<0>(window);
    options_.window_right = std::get<1>(window);
    options_.softcap = softcap;
    options_.bias = bias_.Leading();
    options_.block_mask = block_mask_.get();
    options_.alibi_slopes = alibi_slopes_.PerHead();
    options_.sinks = sinks_.PerHead();
    options_.dropout_p = dropout_p;
    options_.philox_seed = philox_seed;
    options_.philox_offset = philox_offset;
    options_.cu_seqlens_q = cu_seqlens_q_.Vector();
    options_.cu_seqlens_k = cu_seqlens_k_.Vector();
    options_.max_seqlen_q = max_seqlen_q;
    options_.max_seqlen_k = max_seqlen_k;
    options_.precision = ParsePrecision(precision);
  }

  Layout layout() const { return layout_; }
  const AttentionOptions& get() const { return options_; }

 private:
  Layout layout_;
  InputArray bias_, alibi_slopes_, sinks_, cu_seqlens_q_, cu_seqlens_k_;
  BlockMaskArgument block_mask_;
  AttentionOptions options_;
};

void Forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out,
             nb::handle lse, const std::string& layout,
             std::optional<double> scale,
             const std::optional<std::string>& causal,
             std::tuple<int64_t, int64_t> window, nb::handle bias,
             double softcap, nb::handle alibi_slopes, nb::handle sinks,
             double dropout_p, uint64_t philox_seed, uint64_t philox_offset,
             nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
             int64_t max_seqlen_q, int64_t max_seqlen_k,
             const std::string& precision, std::optional<int> num_threads,
             const std::optional<std::string>& pool, bool reference,
             nb::handle block_mask) {
  const Options options(layout, scale, causal, window, bias, softcap,
                        alibi_slopes, sinks, dropout_p, philox_seed,
                        philox_offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                        max_seqlen_k, precision, block_mask);
  const InputArray q_array("q", q), k_array("k", k), v_array("v", v);
  const OutputArray out_array("out", out), lse_array("lse", lse);
  AttentionForwardArgs args;
  args.q = q_array.Tensor(options.layout());
  args.k = k_array.Tensor(options.layout());
  args.v = v_array.Tensor(options.layout());
  args.options = options.get();
  args.out = out_array.Tensor(options.layout());
  args.lse = lse_array.RowValues(options.layout());
  Context* const context = reference ? nullptr : ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return reference ? AttentionReferenceForward(args)
                     : AttentionForward(args, context);
  });
}

void Backward(nb::handle dout, nb::handle q, nb::handle k, nb::handle v,
              nb::handle out, nb::handle lse, nb::handle dlse, nb::handle delta,
              nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dbias,
              nb::handle dalibi_slopes, nb::handle dsinks,
              const std::string& layout, std::optional<double> scale,
              const std::optional<std::string>& causal,
              std::tuple<int64_t, int64_t> window, nb::handle bias,
              double softcap, nb::handle alibi_slopes, nb::handle sinks,
              double dropout_p, uint64_t philox_seed, uint64_t philox_offset,
              nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
              int64_t max_seqlen_q, int64_t max_seqlen_k,
              const std::string& precision, std::optional<int> num_threads,
              const std::optional<std::string>& pool, bool reference,
              bool accumulate, nb::handle block_mask) {
  const Options options(layout, scale, causal, window, bias, softcap,
                        alibi_slopes, sinks, dropout_p, philox_seed,
                        philox_offset, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                        max_seqlen_k, precision, block_mask);
  const InputArray dout_array("dout", dout), q_array("q", q), k_array("k", k),
      v_array("v", v), out_array("out", out), lse_array("lse", lse),
      dlse_array("dlse", dlse), delta_array("delta", delta);
  const OutputArray dq_array("dq", dq), dk_array("dk", dk), dv_array("dv", dv),
      dbias_array("dbias", dbias),
      dalibi_slopes_array("dalibi_slopes", dalibi_slopes),
      dsinks_array("dsinks", dsinks);
  AttentionBackwardArgs args;
  args.dout = dout_array.Tensor(options.layout());
  args.q = q_array.Tensor(options.layout());
  args.k = k_array.Tensor(options.layout());
  args.v = v_array.Tensor(options.layout());
  args.out = out_array.Tensor(options.layout());
  args.lse = lse_array.RowValues(options.layout());
  args.dlse = dlse_array.RowValues(options.layout());
  args.delta = delta_array.RowValues(options.layout());
  args.options = options.get();
  args.dq = dq_array.Tensor(options.layout());
  args.dk = dk_array.Tensor(options.layout());
  args.dv = dv_array.Tensor(options.layout());
  args.dbias = dbias_array.Leading();
  args.dalibi_slopes = dalibi_slopes_array.PerHead();
  args.dsinks = dsinks_array.PerHead();
  args.accumulate_dq = args.accumulate_dk = args.accumulate_dv = accumulate;
  args.accumulate_dbias = accumulate;
  Context* const context = reference ? nullptr : ContextFor(num_threads, pool);
  RunWithoutGil([&] {
    return reference ? AttentionReferenceBackward(args)
                     : AttentionBackward(args, context);
  });
}

void KeepMask(nb::handle keep, double dropout_p, uint64_t seed,
              uint64_t offset) {
  const OutputArray keep_array("keep", keep);
  const TensorView view = keep_array.Leading();
  Context* const context = ContextFor(std::nullopt);
  RunWithoutGil(
      [&] { return PhiloxKeepMask(dropout_p, seed, offset, view, context); });
}

}  // namespace

void BindAttention(nb::module_& module) {
  using namespace nb::literals;  // NOLINT: the argument names
  module.def("attention_forward", &Forward, "q"_a, "k"_a, "v"_a, "out"_a.none(),
             "lse"_a.none(), "layout"_a = "bhsd", "scale"_a = nb::none(),
             "causal"_a = nb::none(),
             "window"_a = std::make_tuple(int64_t{-1}, int64_t{-1}),
             "bias"_a = nb::none(), "softcap"_a = 0.0,
             "alibi_slopes"_a = nb::none(), "sinks"_a = nb::none(),
             "dropout_p"_a = 0.0, "philox_seed"_a = 0, "philox_offset"_a = 0,
             "cu_seqlens_q"_a = nb::none(), "cu_seqlens_k"_a = nb::none(),
             "max_seqlen_q"_a = 0, "max_seqlen_k"_a = 0, "precision"_a = "fast",
             "num_threads"_a = nb::none(), "pool"_a = nb::none(),
             "reference"_a = false, "block_mask"_a = nb::none(),
             "Writes out and lse (see fa2_cpu.attention_forward).");
  module.def("attention_backward", &Backward, "dout"_a, "q"_a, "k"_a, "v"_a,
             "out"_a.none(), "lse"_a, "dlse"_a.none(), "delta"_a.none(),
             "dq"_a.none(), "dk"_a.none(), "dv"_a.none(), "dbias"_a.none(),
             "dalibi_slopes"_a.none(), "dsinks"_a.none(), "layout"_a = "bhsd",
             "scale"_a = nb::none(), "causal"_a = nb::none(),
             "window"_a = std::make_tuple(int64_t{-1}, int64_t{-1}),
             "bias"_a = nb::none(), "softcap"_a = 0.0,
             "alibi_slopes"_a = nb::none(), "sinks"_a = nb::none(),
             "dropout_p"_a = 0.0, "philox_seed"_a = 0, "philox_offset"_a = 0,
             "cu_seqlens_q"_a = nb::none(), "cu_seqlens_k"_a = nb::none(),
             "max_seqlen_q"_a = 0, "max_seqlen_k"_a = 0, "precision"_a = "fast",
             "num_threads"_a = nb::none(), "pool"_a = nb::none(),
             "reference"_a = false, "accumulate"_a = false,
             "block_mask"_a = nb::none(),
             "Writes the gradients that are not None (see "
             "fa2_cpu.attention_backward); accumulate adds dq, dk, dv and "
             "dbias to what their arrays hold.");
  module.def("philox_keep_mask", &KeepMask, "keep"_a, "dropout_p"_a, "seed"_a,
             "offset"_a, "Writes the bool array keep.");
}

}  // namespace fa2::python
