// SPDX-License-Identifier: Apache-2.0

// Flags of the same names as the options of a case's metadata.
#ifndef FA2_TOOLS_FA2_OPTION_FLAGS_H_
#define FA2_TOOLS_FA2_OPTION_FLAGS_H_

#include <CLI/CLI.hpp>
#include <map>
#include <string>

namespace fa2::tool {

class OptionFlags {
 public:
  void AddTo(CLI::App* app);
  // Those that were given, as a JSON object.
  std::string Json() const;

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace fa2::tool

#endif  // FA2_TOOLS_FA2_OPTION_FLAGS_H_
