// SPDX-License-Identifier: Apache-2.0

// The built command `fa2`, run with arguments.
#ifndef FA2_TESTS_TOOLS_RUN_COMMAND_H_
#define FA2_TESTS_TOOLS_RUN_COMMAND_H_

#include <string>
#include <vector>

namespace fa2::test {

struct CommandResult {
  int exit_code = -1;  // -1: it did not end by itself
  std::string out, error;
};

CommandResult RunFa2(const std::vector<std::string>& arguments);

// A file below the test's own folder, which is made.
std::string TestPath(const std::string& name);
std::string ReadText(const std::string& path);
void WriteBytes(const std::string& path, const std::string& bytes);

// Whether it ended with 2 and one line on stderr that holds the word.
bool IsUsageError(const CommandResult& result, const std::string& word);

}  // namespace fa2::test

#endif  // FA2_TESTS_TOOLS_RUN_COMMAND_H_
