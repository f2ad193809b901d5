// SPDX-License-Identifier: Apache-2.0

// A command line of `fa2`: subcommand, options, values and files drawn from
// lists, some changed. It ends with 0, 1 or 2, and with 2 it has said one line.
// What measures (bench, info) is only parsed.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/model/generate.h"
#include "tests/fuzz/folder.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/random.h"
#include "tools/fa2/command.h"

namespace fa2::test {
namespace {

using Words = std::vector<std::string>;

const Words kOptions = {"--shards",
                        "--shard-by",
                        "--case",
                        "--map",
                        "--repeat",
                        "--json",
                        "--html",
                        "--plain",
                        "--no-diagnosis",
                        "--quiet",
                        "--threads",
                        "--layout",
                        "--causal",
                        "--window",
                        "--scale",
                        "--softcap",
                        "--dropout_p",
                        "--philox-seed",
                        "--philox_offset",
                        "--lse-base",
                        "--precision",
                        "--shape",
                        "-B",
                        "--heads",
                        "--kv-heads",
                        "--nq",
                        "--nk",
                        "-D",
                        "--Dv",
                        "--dtype",
                        "--seed",
                        "--inputs",
                        "--bias",
                        "--sinks",
                        "--alibi",
                        "--dlse",
                        "--keep",
                        "--lengths",
                        "--lengths-k",
                        "--answers",
                        "--threshold",
                        "--help",
                        "--version",
                        "--nonsense",
                        "--"};

// Sizes stay small, so that a call is short; what is larger does not fit.
const Words kValues = {"0",
                       "1",
                       "2",
                       "3",
                       "7",
                       "17",
                       "-1",
                       "-7",
                       "0.5",
                       "1e-3",
                       "nan",
                       "inf",
                       "1e999",
                       "99999999999999999999",
                       "",
                       "bf16",
                       "f16",
                       "f32",
                       "f64",
                       "tf32",
                       "e",
                       "2,3",
                       "5,-1",
                       "null,4",
                       "[1,2]",
                       "bhsd",
                       "bshd",
                       "thd",
                       "none",
                       "top_left",
                       "bottom_right",
                       "gaussian",
                       "outliers",
                       "peaked",
                       "long-tail",
                       "adversarial",
                       "sequence",
                       "zigzag",
                       "striped",
                       "heads",
                       "batch",
                       "q=q",
                       "q=dq",
                       "k=nowhere",
                       "=",
                       "1,2,2,9,11,8,8",
                       "2,2,9,8",
                       "B1/H4/KV2/N9x11/D8x4/f16",
                       "N17/D3",
                       "B/H",
                       "1,1,9,11",
                       "3,4,2",
                       "{}"};

const Words kFiles = {"good.safetensors",
                      "wrong.safetensors",
                      "inputs.safetensors",
                      "fast.json",
                      "slow.json",
                      "broken",
                      "missing",
                      ".",
                      "written"};

std::string Result(const char* rates) {
  return std::string(R"({"cpu":"x","revision":"y","cases":[{"name":"a",)") +
         R"("rounds":)" + rates + R"(,"peak_rounds":[9,9,9]}]})";
}

void MakeFiles(const Folder& folder) {
  verify::GenerateOptions options;
  options.heads = 2;
  options.kv_heads = 1;
  options.nq = 9;
  options.nk = 11;
  options.head_dim = options.value_dim = 8;
  verify::Case c = verify::Generate(options);
  verify::WriteCases(folder.Path("inputs.safetensors"), {c});
  verify::AddAnswers(&c, 1);
  verify::WriteCases(folder.Path("good.safetensors"), {c});
  c.tensors["dq"] = c.tensors["q"];
  c.tensors["dk"].shape.push_back(1);
  verify::WriteCases(folder.Path("wrong.safetensors"), {c});
  folder.Write("fast.json", Result("[5,5.1,5.2,5]"));
  folder.Write("slow.json", Result("[4,4.1,4.2,4]"));
}

std::string Word(Random& random) {
  std::string word = random.Pick(random.Chance(0.4)   ? kOptions
                                 : random.Chance(0.3) ? kFiles
                                                      : kValues);
  // A character that makes no number larger, and no path of another folder.
  if (random.Chance(0.1) && !word.empty()) {
    const auto c = static_cast<char>(random.Integer(1, 255));
    if (c != '/' && (c < '0' || c > '9')) {
      word[static_cast<size_t>(
          random.Integer(0, static_cast<int64_t>(word.size()) - 1))] = c;
    }
  }
  return word;
}

Words CommandLine(Random& random) {
  Words words = {"fa2", random.Pick<std::string>({"verify", "verify", "verify",
                                                  "gen", "gen", "compare",
                                                  "bench", "info", "other"})};
  if (words[1] == "verify" && random.Chance(0.7)) {
    words.push_back(kFiles[static_cast<size_t>(random.Integer(0, 2))]);
  } else if (words[1] == "gen" && random.Chance(0.7)) {
    words.insert(words.end(), {"written", "--shape", "2,2,9,8"});
  } else if (words[1] == "compare" && random.Chance(0.7)) {
    words.insert(words.end(), {"fast.json", "slow.json"});
  }
  for (int64_t n = random.Integer(0, 6); n > 0; --n) {
    words.push_back(Word(random));
  }
  if (words[1] == "bench" || words[1] == "info") {
    words.insert(words.begin() + 2, "--nonsense");
  }
  return words;
}

// File descriptor `fd` leads into a file until the end of its life.
class Redirected {
 public:
  Redirected(int fd, const std::string& path) : fd_(fd), kept_(dup(fd)) {
    const int to = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (kept_ < 0 || to < 0 || dup2(to, fd) < 0)
      Fail(path + ": no redirection");
    close(to);
  }
  ~Redirected() {
    dup2(kept_, fd_);
    close(kept_);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;

 private:
  const int fd_, kept_;
};

std::string Contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

}  // namespace
}  // namespace fa2::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fa2::test;
  static const Folder folder;
  static const bool made = [] {
    MakeFiles(folder);
    // Names of files are relative to it.
    return chdir(folder.Path("").c_str()) == 0;
  }();
  if (!made) Fail("the folder cannot be entered");
  Random random(data, size);
  folder.Write("broken", TextOf(data, std::min<size_t>(size, 100)));
  const Words words = CommandLine(random);
  std::vector<const char*> arguments;
  std::string line;
  for (const std::string& word : words) {
    arguments.push_back(word.c_str());
    line += " '" + word + "'";
  }
  int code;
  std::fflush(stdout);
  {
    const Redirected out(STDOUT_FILENO, "/dev/null");
    const Redirected error(STDERR_FILENO, folder.Path("stderr"));
    code = fa2::tool::RunCommand(static_cast<int>(arguments.size()),
                                 arguments.data());
    std::fflush(stdout);
    std::fflush(stderr);
  }
  const std::string said = Contents(folder.Path("stderr"));
  const bool one_line = said.size() > 10 && said.find('\n') == said.size() - 1;
  if (code < 0 || code > 2 || one_line != (code == 2) ||
      said.empty() != (code != 2)) {
    Fail("exit code " + std::to_string(code) + ", said '" + said + "':" + line);
  }
  return 0;
}
