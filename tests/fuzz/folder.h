// SPDX-License-Identifier: Apache-2.0

// A folder for the files of a fuzz target that reads and writes some.
#ifndef FA2_TESTS_FUZZ_FOLDER_H_
#define FA2_TESTS_FUZZ_FOLDER_H_

#include <stdlib.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/fuzz/fuzz.h"

namespace fa2::test {

// A new one, removed with all that is in it when the process ends well.
class Folder {
 public:
  Folder() {
    path_ = std::filesystem::temp_directory_path() / "fa2_fuzz_XXXXXX";
    std::string name = path_.string();
    if (mkdtemp(name.data()) == nullptr) Fail(name + ": no folder was made");
    path_ = name;
  }
  ~Folder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string Path(const std::string& name) const {
    return (path_ / name).string();
  }
  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream stream(Path(name), std::ios::binary);
    stream << bytes;
    stream.close();
    if (!stream) Fail(Path(name) + ": the file cannot be written");
  }

 private:
  std::filesystem::path path_;
};

}  // namespace fa2::test

#endif  // FA2_TESTS_FUZZ_FOLDER_H_
