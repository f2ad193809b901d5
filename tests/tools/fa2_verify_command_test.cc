// SPDX-License-Identifier: Apache-2.0

// fa2 gen and fa2 verify.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/verify/cases/case_file.h"
#include "src/verify/model/generate.h"
#include "tests/tools/run_command.h"

namespace fa2::test {
namespace {

using verify::Array;
using verify::Case;

// A file with the right answers, of these options of gen.
std::string Good(const std::string& name,
                 const std::vector<std::string>& options) {
  const std::string path = TestPath(name + ".safetensors");
  std::vector<std::string> words = {"gen", path, "--answers", "--threads", "1"};
  words.insert(words.end(), options.begin(), options.end());
  const CommandResult made = RunFa2(words);
  EXPECT_EQ(made.exit_code, 0) << made.error;
  EXPECT_EQ(made.out, path + "\n");
  return path;
}

std::string Small(const std::string& name) {
  return Good(name, {"--shape", "1,4,2,40,56,16", "--causal", "bottom_right"});
}

CommandResult Verify(std::vector<std::string> words) {
  words.insert(words.begin(), "verify");
  words.insert(words.end(), {"--threads", "1"});
  return RunFa2(words);
}

// The file's case with a tensor's bf16 elements times a power of 2.
Case Scaled(const std::string& path, const std::string& tensor, int power) {
  Case c = verify::ReadCases(path)[0];
  const Array from = *c.Find(tensor);
  void* data = nullptr;
  c.tensors[tensor] = verify::MakeArray(from.dtype, from.shape, &data);
  const auto* bits = static_cast<const uint16_t*>(from.data);
  for (int64_t i = 0; i < from.elements(); ++i) {
    static_cast<uint16_t*>(data)[i] =
        static_cast<uint16_t>(bits[i] + (power << 7));
  }
  return c;
}

std::string Write(const std::string& name, const std::vector<Case>& cases) {
  const std::string path = TestPath(name + ".safetensors");
  verify::WriteCases(path, cases);
  return path;
}

TEST(Verify, ExitCodesAndReports) {
  const std::string good = Small("good");
  const CommandResult pass = Verify({good});
  EXPECT_EQ(pass.exit_code, 0) << pass.out << pass.error;
  EXPECT_EQ(pass.out.rfind("PASS", 0), 0u);
  EXPECT_EQ(Verify({good, "--plain", "--quiet"}).out, "");

  const std::string bad = Write("bad", {Scaled(good, "dq", 1)});
  const std::string json = TestPath("report.json"),
                    html = TestPath("report.html");
  const CommandResult fail = Verify({bad, "--json", json, "--html", html});
  EXPECT_EQ(fail.exit_code, 1);
  EXPECT_NE(fail.out.find("overcount"), std::string::npos);
  const auto report = nlohmann::json::parse(ReadText(json));
  EXPECT_EQ(report["cases"][0]["verdict"], "fail");
  EXPECT_EQ(report["cases"][0]["diagnosis"][0]["id"], "overcount");
  const std::string page = ReadText(html);
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_EQ(page.find("src="), std::string::npos);
  EXPECT_NE(page.find("\"overcount\""), std::string::npos);
  EXPECT_EQ(Verify({bad, "--no-diagnosis"}).out.find("=>"), std::string::npos);
}

// What examples/cuda_port left on a GPU.
TEST(Verify, OutputsOfAGpu) {
  const std::string data = FA2_TEST_DATA;
  const std::string input = data + "/cuda_port_case.safetensors";
  const std::string outputs = data + "/cuda_port_h100.safetensors";
  const CommandResult good = Verify({input, outputs});
  EXPECT_EQ(good.exit_code, 0) << good.out << good.error;
  const CommandResult otherwise =
      Verify({input, outputs, "--causal", "top_left"});
  EXPECT_EQ(otherwise.exit_code, 1);
  EXPECT_NE(otherwise.out.find("causal_bottom_right"), std::string::npos)
      << otherwise.out;
}

TEST(Verify, ASecondFileOfOutputs) {
  const std::string good = Small("good");
  Case outputs;
  for (const char* name : {"dq", "dk", "dv"}) {
    outputs.tensors[name] = *verify::ReadCases(good)[0].Find(name);
  }
  EXPECT_EQ(Verify({good, Write("outputs", {outputs})}).exit_code, 0);
  outputs.tensors["dk"] = *Scaled(good, "dk", 1).Find("dk");
  EXPECT_EQ(Verify({good, Write("wrong", {outputs})}).exit_code, 1);
  Case nothing;
  nothing.tensors["weights"] = outputs.tensors["dk"];
  EXPECT_TRUE(IsUsageError(Verify({good, Write("nothing", {nothing})}),
                           "nothing.safetensors"));
}

TEST(Verify, CasesOfAFile) {
  Case one = verify::ReadCases(Small("good"))[0];
  Case two = Scaled(Small("good"), "dv", 1);
  one.name = "one";
  two.name = "two";
  const std::string path = Write("both", {one, two});
  const CommandResult both = Verify({path});
  EXPECT_EQ(both.exit_code, 1);
  EXPECT_NE(both.out.find("1 of 2 cases pass"), std::string::npos);
  EXPECT_EQ(Verify({path, "--case", "one"}).exit_code, 0);
  EXPECT_EQ(Verify({path, "--case", "two"}).exit_code, 1);
  EXPECT_TRUE(IsUsageError(Verify({path, "--case", "three"}), "three"));
}

TEST(Verify, OtherNames) {
  Case c = verify::ReadCases(Small("good"))[0];
  Case renamed = c;
  renamed.tensors["mine"] = renamed.tensors["dq"];
  renamed.tensors.erase("dq");
  const std::string path = Write("renamed", {renamed});
  const std::string good = Small("good");
  const CommandResult without = Verify({path});
  EXPECT_NE(without.out.find("not checked, since the file has none: dq"),
            std::string::npos);
  const CommandResult with = Verify({path, "--map", "dq=mine"});
  EXPECT_EQ(with.exit_code, 0);
  EXPECT_EQ(with.out.find("not checked"), std::string::npos);
  // What a second file of outputs calls it.
  Case mine;
  mine.tensors["mine"] = renamed.tensors["mine"];
  const CommandResult second =
      Verify({good, Write("mine", {mine}), "--map", "dq=mine"});
  EXPECT_EQ(second.exit_code, 0) << second.error;
  EXPECT_NE(second.out.find("dq           pass"), std::string::npos);
  EXPECT_TRUE(IsUsageError(Verify({path, "--map", "dq=yours"}), "yours"));
  EXPECT_TRUE(IsUsageError(Verify({path, "--map", "weights=mine"}), "weights"));
  EXPECT_TRUE(IsUsageError(Verify({path, "--map", "dq"}), "--map"));
}

TEST(Verify, RunsThatMove) {
  const std::string good = Small("good");
  EXPECT_EQ(Verify({good, "--repeat", good, good}).exit_code, 0);
  Case moved = verify::ReadCases(good)[0];
  const Array from = *moved.Find("dk");
  void* data = nullptr;
  moved.tensors["dk"] = verify::MakeArray(from.dtype, from.shape, &data);
  std::memcpy(data, from.data, static_cast<size_t>(from.elements()) * 2);
  static_cast<uint16_t*>(data)[5] ^= 1;
  const CommandResult result =
      Verify({good, "--repeat", Write("moved", {moved})});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.out.find("dk moves from run to run: 1 of"),
            std::string::npos);
}

// A run of 2 ranks that cut the rows in 4, the first and last at rank 0.
std::vector<Case> Zigzag(const Case& whole) {
  std::vector<Case> ranks(2, whole);
  for (auto& [name, array] : whole.tensors) {
    const bool rows = name != "lse";
    const size_t dimension = rows ? 2 : array.shape.size() - 1;
    size_t inner = SizeOf(array.dtype), outer = 1;
    for (size_t d = 0; d < array.shape.size(); ++d) {
      if (d < dimension) outer *= static_cast<size_t>(array.shape[d]);
      if (d > dimension) inner *= static_cast<size_t>(array.shape[d]);
    }
    const auto size = static_cast<size_t>(array.shape[dimension]);
    const size_t run = size / 4 * inner;
    for (size_t r = 0; r < 2; ++r) {
      std::vector<int64_t> shape = array.shape;
      shape[dimension] /= 2;
      void* data = nullptr;
      ranks[r].tensors[name] = verify::MakeArray(array.dtype, shape, &data);
      auto* to = static_cast<uint8_t*>(data);
      for (size_t o = 0; o < outer; ++o) {
        for (const size_t part : {r, 3 - r}) {
          std::memcpy(to,
                      static_cast<const uint8_t*>(array.data) +
                          o * size * inner + part * run,
                      run);
          to += run;
        }
      }
    }
  }
  return ranks;
}

TEST(Verify, RanksOfARun) {
  const std::string good = Small("good");
  std::vector<Case> ranks = Zigzag(verify::ReadCases(good)[0]);
  const std::string zero = Write("rank0", {ranks[0]});
  const std::string one = Write("rank1", {ranks[1]});
  EXPECT_EQ(Verify({"--shards", zero, one, "--shard-by", "zigzag"}).exit_code,
            0);
  // Whole sequences in another order are another case.
  EXPECT_EQ(Verify({"--shards", zero, one}).exit_code, 1);
  ranks = Zigzag(Scaled(good, "dk", 1));
  const std::string wrong = Write("wrong0", {ranks[0]});
  const CommandResult result =
      Verify({"--shards", wrong, one, "--shard-by", "zigzag"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.out.find("dk: the error lies in ranks 0 of 2"),
            std::string::npos)
      << result.out;
  // The ranks' outputs for the inputs of FILE.
  EXPECT_EQ(
      Verify({good, "--shards", zero, one, "--shard-by", "zigzag"}).exit_code,
      0);
  EXPECT_EQ(
      Verify({good, "--shards", wrong, one, "--shard-by", "zigzag"}).exit_code,
      1);
  EXPECT_TRUE(IsUsageError(Verify({}), "FILE"));
  EXPECT_TRUE(IsUsageError(
      Verify({"--shards", zero, one, "--shard-by", "columns"}), "columns"));
  EXPECT_TRUE(IsUsageError(
      Verify({"--shards", zero, good, "--shard-by", "striped"}), "rank"));
  EXPECT_TRUE(IsUsageError(
      Verify({"--shards", zero, good, "--shard-by", "heads"}), "rank 1"));
}

struct Flag {
  std::vector<std::string> words;
  // What says something else of the same file.
  std::vector<std::string> other;
};

TEST(Verify, EachOption) {
  const std::vector<Flag> flags = {
      {{"--causal", "top_left"}, {"--causal", "bottom_right"}},
      {{"--causal", "bottom_right"}, {"--causal", "none"}},
      {{"--window", "9,4"}, {"--window", "9,-1"}},
      {{"--window", "-1,4"}, {"--window", "null,null"}},
      {{"--scale", "0.5"}, {"--scale", "0.25"}},
      {{"--softcap", "2"}, {"--softcap", "0"}},
      {{"--dropout_p", "0.2", "--philox_seed", "7", "--philox-offset", "12"},
       {"--philox_seed", "8"}},
      {{"--dropout-p", "0.2", "--philox-seed", "7", "--keep"},
       {"--dropout_p", "0.4"}},
      {{"--layout", "bshd"}, {}},
      {{"--lse_base", "2"}, {"--lse_base", "e"}},
      {{"--precision", "tf32", "--dtype", "f32"}, {}},
      {{"--bias", "1,2,40,1"}, {}},
      {{"--sinks", "--alibi", "--dlse"}, {}},
      {{"--lengths", "10,30", "--lengths-k", "26,30"}, {}},
      {{"--lengths", "10,30", "--lengths-k", "26,30", "--bias", "2,1,30,30"},
       {}}};
  for (size_t n = 0; n < flags.size(); ++n) {
    std::vector<std::string> words = {"--shape", "1,2,2,40,56,16"};
    words.insert(words.end(), flags[n].words.begin(), flags[n].words.end());
    const std::string path = Good("option" + std::to_string(n), words);
    const CommandResult same = Verify({path});
    EXPECT_EQ(same.exit_code, 0) << words[2] << "\n" << same.out << same.error;
    if (flags[n].other.empty()) continue;
    std::vector<std::string> overridden = flags[n].other;
    overridden.insert(overridden.begin(), path);
    overridden.push_back("--no-diagnosis");
    EXPECT_EQ(Verify(overridden).exit_code, 1) << words[2];
  }
}

TEST(Verify, ThePrecisionOfTheProducts) {
  const std::string path = Small("good");
  EXPECT_NE(Verify({path}).out.find("products in bf16"), std::string::npos);
  EXPECT_NE(Verify({path, "--precision", "f16"}).out.find("products in f16"),
            std::string::npos);
}

TEST(Verify, OptionsThatMeanNothing) {
  const std::string good = Small("good");
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"--layout", "bdsh"},
                                             {"--layout", "bshd"},
                                             {"--causal", "left"},
                                             {"--window", "3"},
                                             {"--window", "3,x"},
                                             {"--scale", "large"},
                                             {"--softcap", "-1"},
                                             {"--dropout_p", "1.5"},
                                             {"--dropout_p", "0.5"},
                                             {"--philox_seed", "x"},
                                             {"--lse_base", "10"},
                                             {"--precision", "f8"},
                                             {"--threads", "-1"},
                                             {"--speed", "1"}}) {
    const CommandResult result = Verify({good, words[0], words[1]});
    EXPECT_TRUE(IsUsageError(result, words[0].substr(2)) ||
                IsUsageError(result, "tensor k"))
        << words[0] << " " << words[1] << ": " << result.error;
  }
  EXPECT_TRUE(IsUsageError(RunFa2({}), "subcommand"));
  EXPECT_TRUE(IsUsageError(RunFa2({}), "verify"));
  EXPECT_TRUE(IsUsageError(RunFa2({"judge"}), "judge"));
  EXPECT_TRUE(IsUsageError(RunFa2({"judge"}), "verify"));
  EXPECT_TRUE(IsUsageError(RunFa2({"--judge", "x"}), "--judge"));
  EXPECT_TRUE(IsUsageError(Verify({}), "FILE"));
  EXPECT_TRUE(
      IsUsageError(Verify({good, "--json", TestPath("no/such/folder.json")}),
                   "folder.json"));
  EXPECT_EQ(RunFa2({"--help"}).exit_code, 0);
  EXPECT_EQ(RunFa2({"verify", "--help"}).exit_code, 0);
}

TEST(Verify, FilesThatCannotBeRead) {
  const std::string good = ReadText(Small("good"));
  const std::string path = TestPath("broken.safetensors");
  std::string flipped = good;
  flipped[9] = '!';
  std::string forged = good;
  forged[6] = '\x7f';
  for (const std::string& bytes :
       {std::string(), std::string("no"), good.substr(0, 40),
        good.substr(0, good.size() - 1), flipped, forged,
        std::string(1000, '\0'), std::string(1000, '[')}) {
    WriteBytes(path, bytes);
    const CommandResult result = Verify({path});
    EXPECT_TRUE(IsUsageError(result, "broken.safetensors")) << result.error;
  }
  EXPECT_TRUE(IsUsageError(Verify({TestPath("none")}), "none"));
  EXPECT_TRUE(IsUsageError(Verify({"\nno\nne\r"}), " no ne "));
  const std::string folder = std::filesystem::path(path).parent_path().string();
  EXPECT_TRUE(IsUsageError(Verify({folder}), "read"));
}

TEST(Gen, InputsAndSuite) {
  for (const char* inputs :
       {"gaussian", "outliers", "peaked", "long-tail", "adversarial"}) {
    const std::string path =
        Good(inputs,
             {"--inputs", inputs, "-B",     "1",  "-H", "2",  "--kv-heads", "1",
              "--nq",     "30",   "--nk",   "45", "-D", "24", "--Dv",       "8",
              "--dtype",  "f16",  "--seed", "3"});
    const CommandResult result = Verify({path});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.error;
    EXPECT_NE(result.out.find("f16 B1 H2/1 30x45 D24/8"), std::string::npos);
  }
  const std::string folder = TestPath("suite");
  const CommandResult suite = RunFa2({"gen", "--suite", folder});
  EXPECT_EQ(suite.exit_code, 0) << suite.error;
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files += 1;
    // Inputs alone: there is nothing to judge.
    EXPECT_TRUE(IsUsageError(Verify({entry.path().string()}), "nothing"));
  }
  EXPECT_GE(files, 7u);
  EXPECT_TRUE(IsUsageError(RunFa2({"gen"}), "OUT"));
  const std::string out = TestPath("x.safetensors");
  EXPECT_TRUE(IsUsageError(RunFa2({"gen", out, "--shape", "1,2"}), "--shape"));
  EXPECT_TRUE(IsUsageError(RunFa2({"gen", out, "--dtype", "f8"}), "--dtype"));
  EXPECT_TRUE(IsUsageError(RunFa2({"gen", out, "--inputs", "zeros"}), "zeros"));
}

}  // namespace
}  // namespace fa2::test
