// SPDX-License-Identifier: Apache-2.0

// A file of any bytes, read as `fa2 verify` reads it, and judged where it holds
// a small case. What is wrong is an Error of one line; nothing else is thrown.
#include <cstring>
#include <string>

#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/judge/check.h"
#include "src/verify/judge/report.h"
#include "tests/fuzz/folder.h"
#include "tests/fuzz/fuzz.h"

namespace fa2::test {
namespace {

// Tensors as a header may describe them have so many bytes.
constexpr size_t kTensorBytes = 8192;

// The input itself, or a file whose header is the input up to its first 0, with
// the right length before it, and whose tensors are the rest again and again:
// so a change of the header's size is not the end of the file.
std::string FileOf(const uint8_t* data, size_t size) {
  if (size == 0 || data[0] % 2 == 0) {
    return TextOf(data, size);
  }
  const std::string input = TextOf(data + 1, size - 1);
  const size_t end = std::min(input.find('\0'), input.size());
  const std::string header = input.substr(0, end);
  const std::string seed = end < input.size() ? input.substr(end + 1) : "";
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  file += header;
  for (size_t n = 0; n < kTensorBytes; ++n) {
    file += seed.empty() ? '\x3C' : seed[n % seed.size()];
  }
  return file;
}

int64_t ElementsOf(const verify::Case& c, const char* name) {
  const verify::Array* const array = c.Find(name);
  return array == nullptr ? 0 : array->elements();
}

// Work is the product of the queries and keys.
bool IsSmall(const verify::Case& c) {
  return ElementsOf(c, "q") * ElementsOf(c, "k") <= int64_t{1} << 18;
}

}  // namespace
}  // namespace fa2::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fa2;
  static const test::Folder folder;
  const std::string path = folder.Path("case.safetensors");
  folder.Write("case.safetensors", test::FileOf(data, size));
  try {
    const std::vector<verify::Case> cases = verify::ReadCases(path);
    verify::CheckOptions options;
    options.threads = 1;
    std::vector<verify::CaseReport> reports;
    for (const verify::Case& c : cases) {
      if (!test::IsSmall(c)) continue;
      reports.push_back(verify::Check(c, options));
      (void)verify::ReportText(reports.back());
    }
    (void)verify::ReportJson(reports);
    (void)verify::ReportHtml(reports);
  } catch (const verify::Error& error) {
    const std::string sentence = error.what();
    if (sentence.size() < 10) test::Fail("no sentence: '" + sentence + "'");
  }
  return 0;
}
