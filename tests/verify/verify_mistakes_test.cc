// SPDX-License-Identifier: Apache-2.0

// Kernels with one mistake each: all are rejected, and nearly all mistakes are
// named.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "src/verify/judge/check.h"
#include "src/verify/judge/mistakes.h"
#include "src/verify/model/generate.h"
#include "tests/verify/wrong_kernel.h"

namespace fa2::verify {
namespace {

struct Trial {
  std::string fault;
  DType dtype = DType::kBF16;
  std::function<void(GenerateOptions*)> set = nullptr;
};

std::string IdOf(const std::string& fault) {
  return fault.substr(0, fault.find(':'));
}

// Grouped heads, and sizes that are multiples of no tile.
GenerateOptions Base(DType dtype) {
  GenerateOptions o;
  o.batch = 2;
  o.heads = 4;
  o.kv_heads = 2;
  o.nq = 51;
  o.nk = 75;
  o.head_dim = 32;
  o.value_dim = 24;
  o.dtype = dtype;
  o.seed = 5;
  return o;
}

void BottomRight(GenerateOptions* o) {
  o->options.causal = Causal::kBottomRight;
}
void TopLeft(GenerateOptions* o) { o->options.causal = Causal::kTopLeft; }
void Outliers(GenerateOptions* o) { o->inputs = Inputs::kOutliers; }
void Window(GenerateOptions* o) {
  o->options.causal = Causal::kBottomRight;
  o->options.window_left = 20;
}
void BothSides(GenerateOptions* o) {
  o->options.window_left = 16;
  o->options.window_right = 9;
}
void Dropout(GenerateOptions* o) {
  o->options.dropout_p = 0.25;
  o->options.philox_seed = 3;
}
void Softcap(GenerateOptions* o) { o->options.softcap = 1.5; }
void BiasOfHeads(GenerateOptions* o) { o->bias = {2, 1, 51, 75}; }
void BiasOfAll(GenerateOptions* o) { o->bias = {1, 1, 51, 75}; }
void Alibi(GenerateOptions* o) { o->alibi = true; }
void Sinks(GenerateOptions* o) { o->sinks = true; }
void Square(GenerateOptions* o) { o->value_dim = o->head_dim; }
void ManyKeys(GenerateOptions* o) {
  o->batch = 1;
  o->heads = o->kv_heads = 2;
  o->nq = 60;
  o->nk = 400;
}

std::vector<Trial> Trials() {
  const DType bf16 = DType::kBF16, f16 = DType::kF16, f32 = DType::kF32;
  return {{"scale_missing", bf16},
          {"scale_missing", f32, Outliers},
          {"scale_twice", f16},
          {"lse_base2", bf16},
          {"lse_base2:backward", f32},
          {"lse_without_max", f16},
          {"lse_without_max:backward", f32},
          {"delta_missing", bf16, BottomRight},
          {"delta_missing", f32},
          {"delta_without_out", f16},
          {"causal_top_left", bf16, BottomRight},
          {"causal_top_left:backward", f32, BottomRight},
          {"causal_bottom_right", f16, TopLeft},
          {"causal_off_by_one", bf16, BottomRight},
          {"causal_off_by_one:short", f32, TopLeft},
          {"causal_off_by_one:backward", bf16, BottomRight},
          {"causal_missing", f32, TopLeft},
          {"causal_undeclared", bf16},
          {"causal_undeclared:bottom_right", f32},
          {"causal_undeclared:backward", f16},
          {"kv_layout_swapped", bf16},
          {"kv_layout_swapped:backward", f32},
          {"kv_layout_swapped:v", f16, BottomRight},
          {"kv_layout_swapped:written", bf16, BottomRight},
          {"kv_layout_swapped:written", f32},
          {"window_off_by_one", bf16, Window},
          {"window_off_by_one:right", f16, BothSides},
          {"window_wrong_diagonal", bf16, Window},
          {"window_wrong_diagonal:backward", f32, BothSides},
          {"last_key_tile_skipped", bf16},
          {"last_key_tile_skipped:backward", f32, Outliers},
          {"last_query_tile_skipped", f16},
          {"key_tail_unmasked", bf16},
          {"key_tail_unmasked", f32},
          {"head_map_modulo", bf16},
          {"head_map_modulo:backward", f32},
          {"group_not_summed", bf16, Outliers},
          {"dk_dv_swapped", f32, Square},
          {"dv_from_dp", f16},
          {"dv_from_dp:masked", bf16, BottomRight},
          {"p_unnormalised", bf16},
          {"softcap_derivative_missing", bf16, Softcap},
          {"dropout_scale_missing", bf16, Dropout},
          {"dropout_not_in_dp", f32, Dropout},
          {"dropout_not_in_dp:scaled", bf16, Dropout},
          {"dropout_mask_shifted:head", bf16, Dropout},
          {"dropout_mask_shifted", bf16, Dropout},
          {"dropout_mask_shifted:row", f32, Dropout},
          {"overcount", bf16, Outliers},
          {"overcount:dv", f16},
          {"accumulated_into_garbage", bf16},
          {"accumulated_into_garbage:constant", f32},
          {"accumulated_into_garbage:small", bf16},
          {"dq_overwritten", bf16},
          {"dq_overwritten", f32},
          {"dq_overwritten:row", bf16, BottomRight},
          {"transposed", f16},
          {"layout_swapped", bf16},
          {"dbias_scaled", f32, BiasOfHeads},
          {"dbias_not_reduced", bf16, BiasOfHeads},
          {"dbias_not_reduced:all", bf16, BiasOfAll},
          {"alibi_wrong_diagonal", bf16, Alibi},
          {"alibi_wrong_diagonal:backward", f32, Alibi},
          {"sink_gradient_missing", bf16, Sinks},
          {"low_precision_accumulation", bf16, ManyKeys},
          {"low_precision_accumulation", f32, ManyKeys},
          {"low_precision_accumulation", f16, ManyKeys},
          {"batch_mixed", bf16},
          {"batch_mixed:read", bf16},
          {"batch_mixed", f32}};
}

Case CaseOf(const Trial& trial) {
  GenerateOptions o = Base(trial.dtype);
  if (trial.set) trial.set(&o);
  return Generate(o);
}

std::string NameOf(const Trial& trial, const CaseReport& report) {
  return trial.fault + " (" + report.what + ")";
}

TEST(Mistakes, AreCaughtAndNamed) {
  std::vector<std::string> unnamed;
  std::set<std::string> ids;
  CheckOptions options;
  options.threads = 1;
  const std::vector<Trial> trials = Trials();
  ASSERT_GE(trials.size(), 45u);
  for (const Trial& trial : trials) {
    Case c = CaseOf(trial);
    test::RunWrongKernel(trial.fault, &c);
    const CaseReport report = Check(c, options);
    EXPECT_FALSE(report.pass) << NameOf(trial, report);
    EXPECT_LE(report.diagnosis.size(), 3u);
    ids.insert(IdOf(trial.fault));
    bool named = false;
    std::string others;
    for (const Diagnosis& d : report.diagnosis) {
      named |= d.id == IdOf(trial.fault);
      if (trial.fault == "kv_layout_swapped:written") {
        EXPECT_EQ(d.tensors.size(), report.tensors.size())
            << NameOf(trial, report);
      }
      others += " " + d.id;
    }
    if (!named) unnamed.push_back(NameOf(trial, report) + ":" + others);
  }
  std::string list;
  for (const std::string& line : unnamed) list += "\n  " + line;
  EXPECT_LE(unnamed.size() * 10, trials.size()) << "not named:" << list;
  RecordProperty("unnamed", static_cast<int>(unnamed.size()));
  RecordProperty("not_named", list);
  // Every mistake has a kernel that makes it.
  for (int rank = 0;; ++rank) {
    const std::string id = IdOfRank(rank);
    if (id.empty()) break;
    EXPECT_EQ(ids.count(id), 1u) << id;
  }
}

// The same kernel without a mistake, on the same inputs.
TEST(Mistakes, TheKernelWithoutOnePasses) {
  CheckOptions options;
  options.threads = 1;
  std::set<std::string> seen;
  for (const Trial& trial : Trials()) {
    Case c = CaseOf(trial);
    std::string inputs = WriteOptions(c.options);
    for (const auto& [name, array] : c.tensors) {
      inputs += " " + name + fa2::NameOf(array.dtype);
      for (const int64_t n : array.shape) inputs += " " + std::to_string(n);
    }
    if (!seen.insert(inputs).second) continue;
    test::RunWrongKernel("", &c);
    options.diagnose = false;
    const CaseReport report = Check(c, options);
    for (const TensorVerdict& t : report.tensors) {
      EXPECT_TRUE(t.pass) << report.what << " " << t.name << " errs by "
                          << t.relative_l2.value_or(0.0) << ", the bound is "
                          << t.bound;
      EXPECT_TRUE(t.own.value_or(true)) << report.what << " " << t.name;
    }
  }
}

}  // namespace
}  // namespace fa2::verify
