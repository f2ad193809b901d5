// SPDX-License-Identifier: Apache-2.0

// The commands of `fa2`: each adds itself to the parser and returns what runs
// it. Exit codes: 0 good, 1 a mismatch, 2 usage or what cannot be read.
#ifndef FA2_TOOLS_FA2_COMMAND_H_
#define FA2_TOOLS_FA2_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace fa2::tool {

constexpr int kGood = 0;
constexpr int kMismatch = 1;
constexpr int kUsage = 2;

using Command = std::function<int()>;

Command AddVerify(CLI::App* app);
Command AddGen(CLI::App* app);
Command AddBench(CLI::App* app);
Command AddCompare(CLI::App* app);
Command AddInfo(CLI::App* app);

// `fa2` with these arguments, argv[0] its name: the exit code. Throws nothing.
int RunCommand(int argc, const char* const* argv);

// Writes text to a file; throws verify::Error if it cannot.
void WriteText(const std::string& path, const std::string& text);

}  // namespace fa2::tool

#endif  // FA2_TOOLS_FA2_COMMAND_H_
