// SPDX-License-Identifier: Apache-2.0

// The arguments of `fa2` read, and the command that they name run.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "src/verify/cases/error.h"
#include "tools/fa2/command.h"

namespace fa2::tool {

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) throw verify::Error(path + ": the file cannot be written");
}

namespace {

// An error is one line, whatever the names in it are: what is no character of
// one is a space.
std::string OneLine(std::string text) {
  for (char& c : text) {
    if (c >= 0 && c < ' ') c = ' ';
  }
  return text;
}

// What is wrong with a command line. Where no command is named CLI11 says so
// without the word that stands in its place.
std::string Explain(const CLI::App& app, const CLI::ParseError& error) {
  if (!app.get_subcommands().empty() || error.get_name() != "RequiredError") {
    return error.what();
  }
  std::string names;
  for (const CLI::App* command : app.get_subcommands({})) {
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  const std::vector<std::string> rest = app.remaining();
  return rest.empty()
             ? fmt::format("a subcommand is required, one of {}", names)
             : fmt::format("there is no subcommand {}; it must be one of {}",
                           rest.front(), names);
}

}  // namespace

int RunCommand(int argc, const char* const* argv) {
  CLI::App app(
      "FlashAttention-2 on CPUs: check a kernel's gradients, measure fa2",
      "fa2");
  app.set_version_flag("--version", FA2_VERSION);
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, Command>> commands;
  const auto add = [&](const char* name, const char* what, auto adder) {
    CLI::App* command = app.add_subcommand(name, what);
    commands.emplace_back(command, adder(command));
  };
  add("verify", "Judge a kernel's outputs and gradients", AddVerify);
  add("gen", "Make a case to run a kernel on", AddGen);
  add("bench", "Measure fa2's speed as a share of this machine's limits",
      AddBench);
  add("compare", "Whether one result of bench is slower than another",
      AddCompare);
  add("info", "What this machine computes with", AddInfo);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "fa2: {}\n", OneLine(Explain(app, error)));
    return kUsage;
  }
  try {
    for (const auto& [command, run] : commands) {
      if (command->parsed()) return run();
    }
  } catch (const verify::Error& error) {
    fmt::print(stderr, "fa2: {}\n", OneLine(error.what()));
    return kUsage;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "fa2: there is not enough memory\n");
    return kUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "fa2: {}\n", OneLine(error.what()));
    return kUsage;
  }
  return kGood;
}

}  // namespace fa2::tool
