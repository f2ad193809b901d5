// SPDX-License-Identifier: Apache-2.0
#include "tests/tools/run_command.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace fa2::test {
namespace {

std::string Quoted(const std::string& word) {
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

}  // namespace

std::string TestPath(const std::string& name) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) /
      (std::string("fa2-") + info->test_suite_name() + "-" + info->name());
  std::filesystem::create_directories(folder);
  return (folder / name).string();
}

std::string ReadText(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

CommandResult RunFa2(const std::vector<std::string>& arguments) {
  const std::string out = TestPath("stdout"), error = TestPath("stderr");
  std::string line = FA2_COMMAND;
  for (const std::string& word : arguments) line += " " + Quoted(word);
  line += " >" + Quoted(out) + " 2>" + Quoted(error);
  const int status = std::system(line.c_str());
  CommandResult result;
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  result.out = ReadText(out);
  result.error = ReadText(error);
  return result;
}

bool IsUsageError(const CommandResult& result, const std::string& word) {
  const auto lines = std::count(result.error.begin(), result.error.end(), '\n');
  return result.exit_code == 2 && lines == 1 &&
         result.error.find(word) != std::string::npos;
}

}  // namespace fa2::test
