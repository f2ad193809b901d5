// SPDX-License-Identifier: Apache-2.0

// Other processes on the same cores.
#ifndef FA2_TESTS_SOAK_LOAD_H_
#define FA2_TESTS_SOAK_LOAD_H_

#include <sys/types.h>

#include <vector>

namespace fa2::test {

// One process pinned to each core that this one may use, which works and
// sleeps by turns, so that threads are stopped and moved at any point.
class Load {
 public:
  Load();
  ~Load();
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

  size_t processes() const { return children_.size(); }

 private:
  std::vector<pid_t> children_;
};

}  // namespace fa2::test

#endif  // FA2_TESTS_SOAK_LOAD_H_
