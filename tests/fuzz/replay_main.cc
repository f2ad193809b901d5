// SPDX-License-Identifier: Apache-2.0

// Runs a fuzz target without libFuzzer: on the files of folders, then, for some
// seconds, on random changes of these.
//   NAME [--seconds=N] [--seed=N] [FILE or FOLDER]...
// The input that ends the process is left as crash-NAME in the working folder.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "tests/support/random.h"

namespace {

using Bytes = std::vector<uint8_t>;

const Bytes* g_input = nullptr;  // under way
std::string g_crash_name;

void KeepInput(int signal) {
  if (std::FILE* const file = std::fopen(g_crash_name.c_str(), "wb")) {
    std::fwrite(g_input->data(), 1, g_input->size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in %s\n", g_crash_name.c_str());
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void Run(const Bytes& input) {
  g_input = &input;
  (void)LLVMFuzzerTestOneInput(input.data(), input.size());
}

Bytes ReadFile(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
  return Bytes(bytes, bytes + text.size());
}

// Some bytes changed, added or cut off; now and then all of them.
Bytes Changed(Bytes bytes, fa2::test::Random& random) {
  if (random.Chance(0.3)) {
    bytes.resize(static_cast<size_t>(random.Integer(0, 200)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Bits());
  }
  for (int64_t n = random.Integer(1, 8); n > 0; --n) {
    const auto size = static_cast<int64_t>(bytes.size());
    const auto at = bytes.begin() + random.Integer(0, size);
    const auto value = static_cast<uint8_t>(random.Bits());
    switch (random.Integer(0, 3)) {
      case 0:
        bytes.insert(at, value);
        break;
      case 1:
        if (at != bytes.end()) bytes.erase(at);
        break;
      default:
        if (at != bytes.end()) *at = value;
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 0.0;
  uint64_t seed = 1;
  std::vector<Bytes> inputs;
  const std::filesystem::path self = argv[0];
  // Absolute: a target may enter a folder of its own.
  g_crash_name =
      std::filesystem::absolute("crash-" + self.filename().string()).string();
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--seconds=", 0) == 0) {
      seconds = std::stod(argument.substr(10));
    } else if (argument.rfind("--seed=", 0) == 0) {
      seed = std::stoull(argument.substr(7));
    } else if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) {
        inputs.push_back(ReadFile(entry.path()));
      }
    } else if (std::filesystem::exists(argument)) {
      inputs.push_back(ReadFile(argument));
    } else {
      std::fprintf(stderr, "%s: there is no such file\n", argv[i]);
      return 2;
    }
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    std::signal(signal, KeepInput);
  }
  for (const Bytes& input : inputs) Run(input);
  std::printf("%zu inputs replayed\n", inputs.size());
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin)
        .count();
  };
  fa2::test::Random random(seed);
  int64_t runs = 0;
  for (; elapsed() < seconds; ++runs) {
    Run(Changed(inputs.empty() ? Bytes() : random.Pick(inputs), random));
  }
  std::printf("%lld random executions\n", static_cast<long long>(runs));
  return 0;
}
