// SPDX-License-Identifier: Apache-2.0
// A line a call on stderr where the environment variable FA2_VERBOSE is 1, so
// that one sees whether and how fa2 runs.
#ifndef FA2_SRC_CONTEXT_CALL_LOG_H_
#define FA2_SRC_CONTEXT_CALL_LOG_H_

#include <chrono>
#include <string>

namespace fa2 {

// What a line says. Fields hold no comma.
struct CallRecord {
  const char* what;   // "attention_forward"
  std::string shape;  // "B2 Hq4 Hkv2 Nq128 Nk128 D64 Dv64", "2x8x1024x64"
  const char* dtype;
  std::string engine;  // or the instruction set of a kernel without engines
  int threads;
  const char* pool;  // whose threads
  double flops;      // a multiply-add counts two; 0: no rate is given
};

class CallLog {
 public:
  // Starts the clock. The environment is read once in a process.
  CallLog();

  bool on() const { return on_; }
  // fa2,what,shape,dtype,engine,threads,pool,ms,GFLOP/s
  void Write(const CallRecord& record) const;

 private:
  bool on_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace fa2

#endif  // FA2_SRC_CONTEXT_CALL_LOG_H_
