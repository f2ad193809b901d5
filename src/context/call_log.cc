// SPDX-License-Identifier: Apache-2.0
#include "src/context/call_log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fa2 {
namespace {

bool Wanted() {
  const char* const value = std::getenv("FA2_VERBOSE");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

CallLog::CallLog() {
  static const bool wanted = Wanted();
  on_ = wanted;
  if (on_) start_ = std::chrono::steady_clock::now();
}

void CallLog::Write(const CallRecord& record) const {
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start_;
  char rate[32] = "";
  if (record.flops > 0 && seconds.count() > 0) {
    std::snprintf(rate, sizeof rate, "%.2f",
                  record.flops / seconds.count() * 1e-9);
  }
  // One call of fprintf, so that lines of several threads do not mix.
  std::fprintf(stderr, "fa2,%s,%s,%s,%s,%d,%s,%.4f,%s\n", record.what,
               record.shape.c_str(), record.dtype, record.engine.c_str(),
               record.threads, record.pool, seconds.count() * 1e3, rate);
}

}  // namespace fa2
