// SPDX-License-Identifier: Apache-2.0

// The cases of a safetensors file.
#ifndef FA2_SRC_VERIFY_CASES_CASE_FILE_H_
#define FA2_SRC_VERIFY_CASES_CASE_FILE_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "src/verify/cases/case.h"

namespace fa2::verify {

struct ReadOptionsOfFile {
  // Canonical name -> the file's own, behind CASE/ where there are cases.
  std::map<std::string, std::string> names;
  // Where it is given, a name of `names` may be missing: those that are there
  // are added to it, as canonical ones.
  std::set<std::string>* found = nullptr;
  // A JSON object of options that overrides the metadata.
  std::string overrides = "{}";
};

// All cases, by name. Tensors are named NAME or CASE/NAME, NAME canonical or a
// synonym; others are left alone. Options are the JSON under the case's name in
// the metadata, or under "fa2" where there is one case. A prefix sum that the
// options hold as a list ("cu_q") becomes a tensor. Throws Error.
std::vector<Case> ReadCases(const std::string& path,
                            const ReadOptionsOfFile& options = {});

// Writes cases so that ReadCases reads them back.
void WriteCases(const std::string& path, const std::vector<Case>& cases);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_CASE_FILE_H_
