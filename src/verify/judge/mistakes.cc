// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/mistakes.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace fa2::verify {
namespace {

struct Known {
  const char* id;
  const char* sentence;
};

// Best first: where two explain a case alike, the one above is named.
constexpr Known kKnown[] = {
    {"scale_missing",
     "dS (or S) is not multiplied by the softmax scale; look where dQ and dK "
     "leave their accumulators"},
    {"scale_twice",
     "the softmax scale is applied twice; look for a q scaled in advance and a "
     "scale at the end"},
    {"lse_base2",
     "lse is in base 2 without saying so, or the backward reads a natural one "
     "as base 2; look for exp2 and a missing log2(e)"},
    {"lse_without_max",
     "lse lacks the row's maximum: it is log(sum exp(S - max)) without + max"},
    {"p_unnormalised",
     "the backward's P is exp(S - max), not divided by the row's sum; it must "
     "be exp(S - lse)"},
    {"delta_missing",
     "delta is left out: dS must be P * (dP - delta), delta = sum O * dO of a "
     "row"},
    {"delta_without_out",
     "delta is the sum of dO alone; it must be the sum of O * dO of a row"},
    {"causal_top_left",
     "the causal diagonal starts top left; bottom right is declared: key <= "
     "query + Nk - Nq"},
    {"causal_bottom_right",
     "the causal diagonal ends bottom right; top left is declared: key <= "
     "query"},
    {"causal_off_by_one",
     "the causal diagonal is one key too far or too short; look at < and <= of "
     "the mask and of the last tile"},
    {"causal_missing", "the causal mask is not applied"},
    {"causal_undeclared",
     "a causal mask is applied that the file does not declare; look at the "
     "kernel's flags, or declare it"},
    {"window_off_by_one",
     "the window is one key too wide or too narrow; look at < and <= at its "
     "edges"},
    {"window_wrong_diagonal",
     "the window is counted from the wrong diagonal: bottom right is query + "
     "Nk - Nq"},
    {"last_key_tile_skipped",
     "the last keys, a partial tile, add nothing; look at the number of key "
     "tiles, rounded down"},
    {"last_query_tile_skipped",
     "the last queries, a partial tile, add nothing; look at the number of "
     "query tiles, rounded down"},
    {"key_tail_unmasked",
     "the zero keys that pad the last tile join the softmax; mask scores at "
     "key >= Nk"},
    {"head_map_modulo",
     "query head h reads kv head h % Hkv; it is h / (H / Hkv)"},
    {"kv_layout_swapped",
     "K or V is read with heads and rows exchanged: [B, N, H, D] where it is "
     "[B, H, N, D], or the reverse; look at its strides"},
    {"group_not_summed",
     "dK and dV are those of one query head; they must be summed over the "
     "group that shares the kv head"},
    {"dk_dv_swapped", "dK and dV are exchanged"},
    {"dv_from_dp", "dV is dP^T dO; it must be P^T dO"},
    {"softcap_derivative_missing",
     "dS lacks softcap's derivative, 1 - (S / softcap)^2"},
    {"dropout_scale_missing",
     "what dropout keeps is not multiplied by 1 / (1 - p)"},
    {"dropout_not_in_dp",
     "dP is not masked by dropout; it must be (dO V^T) * keep / (1 - p)"},
    {"dropout_mask_shifted",
     "the backward reads the dropout mask at a neighbouring row or column"},
    {"alibi_wrong_diagonal",
     "ALiBi's distance is |query - key|; it must be |query + Nk - Nq - key|"},
    {"sink_gradient_missing",
     "the sinks' gradient is missing, or the backward's P leaves the sink out"},
    {"dbias_not_reduced",
     "dbias is one slice; it must be summed over the dimensions that bias "
     "broadcasts"},
    {"dbias_scaled", "dbias carries the softmax scale; it is dS itself"},
    {"dq_overwritten",
     "dQ is what the last tile of keys adds; each tile must add to it"},
    {"overcount", "it is a whole multiple of the right gradient"},
    {"transposed", "each head's N x D matrix is written as D x N"},
    {"layout_swapped",
     "heads and rows are exchanged: [B, N, H, D] written where [B, H, N, D] is "
     "declared, or the reverse"},
    {"batch_mixed", "the batches' results are exchanged"},
    {"low_precision_accumulation",
     "the error is that of sums kept in 16 bits; accumulate in f32"},
    {"accumulated_into_garbage",
     "it is the right gradient plus what the buffer held; clear it, or "
     "overwrite"}};

// Tiles of the kernels in use, then others.
constexpr int64_t kTiles[] = {128, 64,  32,  16,  256, 96,  80, 48, 8,  512,
                              192, 160, 112, 144, 24,  40,  56, 72, 88, 104,
                              120, 4,   12,  20,  10,  100, 50, 25};
// How many of them are tried where trying one takes seconds.
constexpr size_t kUsualTiles = 9;
constexpr int64_t kManyPairs = int64_t{1} << 20;

// The tiles to try with so many pairs of a query and a key.
std::vector<int64_t> TilesFor(int64_t pairs) {
  const size_t n = pairs > kManyPairs ? kUsualTiles : std::size(kTiles);
  return {kTiles, kTiles + n};
}

// No edge: as many keys as there are.
constexpr int64_t kEverything = int64_t{1} << 40;

// Lengths of the last tile of n rows: of the partial one, where there is one;
// `known` first, where it is one.
std::vector<int64_t> LastTiles(int64_t n, int64_t known,
                               const std::vector<int64_t>& tiles) {
  std::vector<int64_t> lengths;
  std::set<int64_t> seen;
  if (known > 0 && known < n) {
    lengths.push_back(known);
    seen.insert(known);
  }
  for (const int64_t tile : tiles) {
    const int64_t last = n % tile;
    if (last != 0 && last < n && seen.insert(last).second) {
      lengths.push_back(last);
    }
  }
  for (const int64_t tile : tiles) {
    if (n % tile == 0 && tile < n && seen.insert(tile).second) {
      lengths.push_back(tile);
    }
  }
  return lengths;
}

class Lister {
 public:
  Lister(const Problem& problem, const Hints& hints)
      : p_(problem),
        hints_(hints),
        tiles_(TilesFor(problem.max_q * problem.max_k)),
        usual_tiles_(TilesFor(kManyPairs + 1)) {}

  std::vector<Mistake> List() {
    const bool dropout = p_.options.dropout_p > 0.0 || p_.keep.given();
    Arithmetic();
    Masks();
    Tails();
    DqTiles();
    Heads();
    Batches();
    if (dropout) Dropout();
    if (p_.options.softcap > 0.0) {
      Add("softcap_derivative_missing",
          [](Faults* f) { f->softcap_slope_missing = true; });
    }
    if (p_.alibi_slopes.given() && Oblong()) {
      InAnyPass("alibi_wrong_diagonal",
                [](Faults* f) { f->alibi_from_top_left = true; });
    }
    if (p_.sinks.given()) {
      Add("sink_gradient_missing",
          [](Faults* f) { f->lse = LseUse::kWithoutSink; });
    }
    if (p_.bias.given() && !p_.bias_is_mask) Bias();
    return std::move(list_);
  }

 private:
  template <class F>
  void Add(const char* id, const F& set) {
    Mistake m;
    m.id = id;
    set(&m.faults);
    list_.push_back(m);
  }

  // In the backward alone, in the forward alone, and in both.
  template <class F>
  void InAnyPass(const char* id, const F& set) {
    for (const auto& [forward, backward] :
         {std::pair(true, true), std::pair(false, true),
          std::pair(true, false)}) {
      Add(id, [&set, f = forward, b = backward](Faults* faults) {
        faults->in_forward = f;
        faults->in_backward = b;
        set(faults);
      });
      list_.back().same_given = !forward;
    }
  }

  bool Oblong() const {
    return std::any_of(p_.sequences.begin(), p_.sequences.end(),
                       [](const Sequence& s) { return s.nq != s.nk; });
  }
  bool Masked() const {
    return p_.options.causal != Causal::kNone || p_.options.window_left >= 0 ||
           p_.options.window_right >= 0;
  }

  void Arithmetic() {
    Add("scale_missing", [](Faults* f) { f->scale_power = 0; });
    Add("scale_twice", [](Faults* f) { f->scale_power = 2; });
    InAnyPass("scale_missing", [](Faults* f) { f->score_scale_power = 0; });
    InAnyPass("scale_twice", [](Faults* f) { f->score_scale_power = 2; });
    Add("lse_base2", [](Faults* f) { f->lse = LseUse::kTimesLn2; });
    Add("lse_base2", [](Faults* f) { f->lse = LseUse::kOverLn2; });
    Add("lse_without_max", [](Faults* f) { f->lse = LseUse::kWithoutMax; });
    Add("p_unnormalised", [](Faults* f) { f->lse = LseUse::kMax; });
    Add("delta_missing", [](Faults* f) { f->delta = DeltaUse::kZero; });
    Add("delta_without_out",
        [](Faults* f) { f->delta = DeltaUse::kSumOfDout; });
    if (!hints_.Fails("dv")) return;
    Add("dv_from_dp", [](Faults* f) { f->dv_from_dp = true; });
    if (!Masked()) return;
    // Of all keys: the mask is in P alone.
    Add("dv_from_dp", [](Faults* f) {
      f->in_forward = false;
      f->dv_from_dp = f->dv_from_masked_dp = true;
      f->causal = Causal::kNone;
      f->left_shift = f->right_shift = kEverything;
    });
  }

  void Masks() {
    const Options& o = p_.options;
    const bool oblong = Oblong();
    if (o.causal == Causal::kBottomRight && oblong) {
      InAnyPass("causal_top_left",
                [](Faults* f) { f->causal = Causal::kTopLeft; });
      InAnyPass("causal_top_left", [](Faults* f) {
        f->causal = Causal::kTopLeft;
        f->window_from_other_diagonal = true;
      });
    }
    if (o.causal == Causal::kTopLeft && oblong) {
      InAnyPass("causal_bottom_right",
                [](Faults* f) { f->causal = Causal::kBottomRight; });
      InAnyPass("causal_bottom_right", [](Faults* f) {
        f->causal = Causal::kBottomRight;
        f->window_from_other_diagonal = true;
      });
    }
    if (o.causal == Causal::kNone) {
      InAnyPass("causal_undeclared",
                [](Faults* f) { f->causal = Causal::kTopLeft; });
      if (oblong) {
        InAnyPass("causal_undeclared",
                  [](Faults* f) { f->causal = Causal::kBottomRight; });
      }
    } else {
      for (const int64_t shift : {1, -1}) {
        InAnyPass("causal_off_by_one",
                  [shift](Faults* f) { f->causal_shift = shift; });
      }
      InAnyPass("causal_missing", [](Faults* f) { f->causal = Causal::kNone; });
    }
    if (o.window_left >= 0 || o.window_right >= 0) Window(oblong);
  }

  void Window(bool oblong) {
    const Options& o = p_.options;
    for (const int64_t shift : {1, -1}) {
      if (o.window_left >= 0) {
        InAnyPass("window_off_by_one",
                  [shift](Faults* f) { f->left_shift = shift; });
      }
      if (o.window_right >= 0) {
        InAnyPass("window_off_by_one",
                  [shift](Faults* f) { f->right_shift = shift; });
      }
      if (o.window_left >= 0 && o.window_right >= 0) {
        InAnyPass("window_off_by_one", [shift](Faults* f) {
          f->left_shift = f->right_shift = shift;
        });
      }
    }
    if (!oblong) return;
    InAnyPass("window_wrong_diagonal",
              [](Faults* f) { f->window_from_other_diagonal = true; });
    if (o.window_left >= 0) {
      for (const int64_t block : {64, 128, 32}) {
        InAnyPass("window_wrong_diagonal", [block](Faults* f) {
          f->window_from_other_diagonal = true;
          f->window_block = block;
        });
      }
    }
  }

  void Tails() {
    if (p_.packed) return PackedTails();
    for (const int64_t n : LastTiles(p_.nk, hints_.zero_keys, tiles_)) {
      for (const auto& [forward, backward] :
           {std::pair(true, true), std::pair(false, true),
            std::pair(true, false)}) {
        // What is not added leaves zeros.
        if (backward && !hints_.MaySkipKeys(n)) continue;
        Add("last_key_tile_skipped", [&, f = forward, b = backward](Faults* x) {
          x->in_forward = f;
          x->in_backward = b;
          x->keys_cut = n;
        });
      }
    }
    for (const int64_t n : LastTiles(p_.nq, hints_.zero_queries, tiles_)) {
      Add("last_query_tile_skipped", [n](Faults* f) { f->queries_cut = n; });
    }
    KeyTails();
  }

  // A backward reads what the forward left in lse: it adds nothing of its own.
  void KeyTails() {
    std::set<int64_t> lengths;
    if (hints_.more_keys > 0) {
      lengths.insert(hints_.more_keys);
    } else if (!hints_.Fails("lse") || p_.options.softcap > 0.0) {
      for (const int64_t tile : usual_tiles_) {
        lengths.insert((tile - p_.nk % tile) % tile);
      }
    }
    for (const int64_t padded : lengths) {
      if (padded == 0) continue;
      Add("key_tail_unmasked",
          [padded](Faults* f) { f->padded_keys = padded; });
    }
  }

  void DqTiles() {
    if (!hints_.Fails("dq")) return;
    std::set<int64_t> begins;
    for (const int64_t tile : tiles_) {
      if (!p_.packed && tile >= p_.nk) continue;
      const int64_t begin = (p_.max_k - 1) / tile * tile;
      if (p_.packed || begins.insert(begin).second) {
        Add("dq_overwritten", [tile](Faults* f) { f->dq_tile = tile; });
      }
      if (!p_.packed && !Masked()) continue;
      for (const bool alone : {false, true}) {
        Add("dq_overwritten", [tile, alone](Faults* f) {
          f->dq_tile = tile;
          f->dq_tile_of_row = true;
          f->dq_row_alone = alone;
        });
      }
    }
  }

  // Tiles begin anew in each sequence, whose tails differ.
  void PackedTails() {
    for (const int64_t tile : tiles_) {
      InAnyPass("last_key_tile_skipped",
                [tile](Faults* f) { f->key_tile_cut = tile; });
      Add("last_query_tile_skipped",
          [tile](Faults* f) { f->query_tile_cut = tile; });
      Add("key_tail_unmasked", [tile](Faults* f) { f->padded_tile = tile; });
    }
  }

  void Heads() {
    const int64_t group = p_.group();
    if (p_.kv_heads > 1 && p_.nk > 1) {
      for (const auto& [k, v] : {std::pair(true, true), std::pair(true, false),
                                 std::pair(false, true)}) {
        for (const bool gradients : {false, true}) {
          InAnyPass("kv_layout_swapped", [k = k, v = v, gradients](Faults* f) {
            f->k_layout_swapped = k;
            f->v_layout_swapped = v;
            f->kv_gradients_swapped = gradients;
          });
        }
      }
    }
    if (group == 1) return;
    if (p_.kv_heads > 1) {
      InAnyPass("head_map_modulo",
                [](Faults* f) { f->head_map_modulo = true; });
    }
    if (!hints_.Fails("dk") && !hints_.Fails("dv")) return;
    for (int64_t member = 0; member < group; ++member) {
      if (member > 0 && member < group - 1 && group > 8) continue;
      Add("group_not_summed",
          [member](Faults* f) { f->group_member = static_cast<int>(member); });
    }
  }

  // K and V of another batch.
  void Batches() {
    if (p_.packed || p_.batch == 1) return;
    for (const int64_t shift : {int64_t{1}, p_.batch - 1}) {
      if (shift == 1 || p_.batch > 2) {
        InAnyPass("batch_mixed",
                  [shift](Faults* f) { f->key_batch_shift = shift; });
      }
    }
  }

  void Dropout() {
    if (p_.options.dropout_p > 0.0) {
      InAnyPass("dropout_scale_missing", [](Faults* f) {
        f->keep_unscaled_out = f->keep_unscaled_dv = f->keep_unscaled_dp = true;
      });
      Add("dropout_scale_missing",
          [](Faults* f) { f->keep_unscaled_dv = true; });
      Add("dropout_scale_missing",
          [](Faults* f) { f->keep_unscaled_dp = true; });
      Add("dropout_not_in_dp",
          [](Faults* f) { f->keep_not_in_dp = f->keep_scale_in_dp = true; });
    }
    Add("dropout_not_in_dp", [](Faults* f) { f->keep_not_in_dp = true; });
    for (const int64_t shift : {1, -1}) {
      Add("dropout_mask_shifted", [shift](Faults* f) {
        f->in_forward = false;
        f->keep_head_shift = shift;
      });
    }
    for (const Edge edge : {Edge::kFlat, Edge::kWrapped, Edge::kClamped,
                            Edge::kDropped, Edge::kKept}) {
      for (const auto& [row, column] : {std::pair(0, 1), std::pair(0, -1),
                                        std::pair(1, 0), std::pair(-1, 0)}) {
        Add("dropout_mask_shifted",
            [edge, row = row, column = column](Faults* f) {
              f->in_forward = false;
              f->keep_row_shift = row;
              f->keep_column_shift = column;
              f->keep_edge = edge;
            });
      }
    }
  }

  void Bias() {
    if (!hints_.Fails("dbias")) return;
    const Sizes& n = p_.bias.sizes;
    const Sizes full = {static_cast<int64_t>(p_.sequences.size()), p_.heads,
                        p_.max_q, p_.max_k};
    // Any of the dimensions that bias broadcasts.
    for (unsigned set = 1; set < 16; ++set) {
      bool sums = true;
      for (size_t d = 0; d < 4; ++d) {
        sums &= (set >> d & 1) == 0 || (n[d] == 1 && full[d] > 1);
      }
      if (!sums) continue;
      for (const bool last : {true, false}) {
        Add("dbias_not_reduced", [&](Faults* f) {
          for (size_t d = 0; d < 4; ++d) {
            if ((set >> d & 1) != 0) f->bias_slice[d] = last ? full[d] - 1 : 0;
          }
        });
      }
    }
  }

  const Problem& p_;
  const Hints& hints_;
  const std::vector<int64_t> tiles_, usual_tiles_;
  std::vector<Mistake> list_;
};

}  // namespace

const char* SentenceOf(const std::string& id) {
  for (const Known& known : kKnown) {
    if (id == known.id) return known.sentence;
  }
  return "";
}

int RankOf(const std::string& id) {
  for (size_t i = 0; i < std::size(kKnown); ++i) {
    if (id == kKnown[i].id) return static_cast<int>(i);
  }
  return static_cast<int>(std::size(kKnown));
}

std::string IdOfRank(int rank) {
  const auto n = static_cast<size_t>(rank);
  return n < std::size(kKnown) ? kKnown[n].id : "";
}

std::vector<Mistake> MistakesFor(const Problem& problem, const Hints& hints) {
  return Lister(problem, hints).List();
}

}  // namespace fa2::verify
