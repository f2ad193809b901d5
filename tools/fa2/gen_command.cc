// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/model/generate.h"
#include "tools/fa2/command.h"
#include "tools/fa2/option_flags.h"
#include "tools/fa2/shape.h"

namespace fa2::tool {
namespace {

using verify::Case;
using verify::Error;

struct Arguments {
  std::string out, suite, shape, dtype, json, inputs = "gaussian", bias;
  Shape sizes;  // flags of their own; 0: not given
  std::vector<int64_t> lengths_q, lengths_k;
  uint64_t seed = 0;
  bool answers = false, sinks = false, alibi = false, dlse = false,
       keep = false;
  int threads = 0;
  OptionFlags options;
};

DType DTypeNamed(const std::string& name) {
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    if (name == NameOf(dtype)) return dtype;
  }
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  if (name == "float64") return DType::kF64;
  throw Error("--dtype is " + name + ", it must be f32, bf16, f16 or f64");
}

verify::GenerateOptions Options(const Arguments& a) {
  verify::GenerateOptions o;
  o.inputs = verify::InputsNamed(a.inputs);
  verify::ReadOptions(a.options.Json(), "", &o.options);
  Shape shape = ParseShape(a.shape);
  shape.Override(a.sizes);
  if (o.inputs == verify::Inputs::kAdversarial && a.shape.empty()) {
    // No two sizes alike, none a multiple of a tile.
    Shape odd = {2, 6, 3, 77, 131, 40, 24, {}};
    odd.Override(a.sizes);
    shape = odd;
    const nlohmann::json given = nlohmann::json::parse(a.options.Json());
    if (!given.contains("causal")) o.options.causal = Causal::kBottomRight;
    if (!given.contains("window")) o.options.window_left = 50;
  }
  shape.Complete();
  o.batch = shape.batch;
  o.heads = shape.heads;
  o.kv_heads = shape.kv_heads;
  o.nq = shape.nq;
  o.nk = shape.nk;
  o.head_dim = shape.head_dim;
  o.value_dim = shape.value_dim;
  std::string dtype = !a.dtype.empty() ? a.dtype : shape.dtype;
  o.dtype = DTypeNamed(dtype.empty() ? "bf16" : dtype);
  o.seed = a.seed;
  o.sinks = a.sinks;
  o.alibi = a.alibi;
  o.dlse = a.dlse;
  o.keep = a.keep;
  o.lengths_q = a.lengths_q;
  o.lengths_k = a.lengths_k;
  if (!a.bias.empty()) o.bias = ParseNumbers("--bias", a.bias);
  return o;
}

int Run(const Arguments& a) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  const auto write = [&](const std::string& path, Case c) {
    if (a.answers) verify::AddAnswers(&c, a.threads);
    verify::WriteCases(path, {c});
    files.push_back(path);
  };
  if (a.suite.empty() == a.out.empty()) {
    throw Error("gen takes either OUT or --suite DIR");
  }
  if (!a.suite.empty()) {
    std::error_code error;
    std::filesystem::create_directories(a.suite, error);
    if (error) throw Error(a.suite + ": the folder cannot be made");
    for (Case c : verify::Suite()) {
      const std::string path = a.suite + "/" + c.name + ".safetensors";
      c.name.clear();
      write(path, std::move(c));
    }
  } else {
    write(a.out, verify::Generate(Options(a)));
  }
  if (!a.json.empty()) {
    WriteText(a.json, nlohmann::ordered_json{{"files", files}}.dump(1) + "\n");
  }
  for (const auto& path : files) fmt::print("{}\n", path.get<std::string>());
  return kGood;
}

}  // namespace

Command AddGen(CLI::App* app) {
  auto a = std::make_shared<Arguments>();
  app->add_option("OUT", a->out, "File to write");
  app->add_option("--suite", a->suite,
                  "Write the cases on which kernels were found wrong here");
  app->add_option("--shape", a->shape,
                  "B,H,Hkv,Nq,Nk,D,Dv, or B1/H8/KV2/N512x1024/D64x32/bf16");
  app->add_option("-B,--batch", a->sizes.batch, "Batch [1]");
  app->add_option("-H,--heads", a->sizes.heads, "Query heads [4]");
  app->add_option("--kv-heads,--kv_heads,--Hkv", a->sizes.kv_heads,
                  "Key and value heads [as many as query heads]");
  app->add_option("--nq,--Nq,--queries", a->sizes.nq, "Queries [128]");
  app->add_option("--nk,--Nk,--keys", a->sizes.nk, "Keys [as many as queries]");
  app->add_option("-D,--head-dim,--head_dim", a->sizes.head_dim,
                  "Columns of q and k [64]");
  app->add_option("--Dv,--value-dim,--value_dim", a->sizes.value_dim,
                  "Columns of v [as of q]");
  app->add_option("--dtype", a->dtype, "bf16, f16, f32 or f64 [bf16]");
  app->add_option("--seed", a->seed, "Of the inputs");
  app->add_option("--inputs", a->inputs,
                  "gaussian, outliers, peaked, long-tail or adversarial");
  app->add_option("--bias", a->bias,
                  "Sizes of a bias, e.g. 1,H,Nq,Nk as numbers");
  app->add_flag("--sinks", a->sinks, "With attention sinks");
  app->add_flag("--alibi", a->alibi, "With ALiBi");
  app->add_flag("--dlse", a->dlse, "With a gradient of lse");
  app->add_flag("--keep", a->keep, "Dropout's mask as a tensor");
  app->add_option("--lengths,--lengths-q", a->lengths_q,
                  "Lengths of packed sequences")
      ->allow_extra_args(false)
      ->delimiter(',');
  app->add_option("--lengths-k", a->lengths_k, "Where keys have others")
      ->allow_extra_args(false)
      ->delimiter(',');
  app->add_flag("--answers", a->answers, "Add the right outputs");
  app->add_option("--json", a->json, "Write what was made here");
  app->add_option("--threads", a->threads, "0: all cores")
      ->check(CLI::NonNegativeNumber);
  a->options.AddTo(app);
  return [a] { return Run(*a); };
}

}  // namespace fa2::tool
