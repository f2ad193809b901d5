// SPDX-License-Identifier: Apache-2.0

// System calls that the kernel refuses, as under a container's seccomp profile:
// huge pages, the permission to use AMX's tiles, the list of cores. Calls take
// another way, with the bits that this way has where nothing is refused.
#include <errno.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "fa2/context.h"
#include "tests/support/attention_case.h"
#include "tests/support/output_hash.h"

namespace fa2::test {
namespace {

constexpr uint32_t kAny = 0xffffffff;
constexpr uint32_t kArchReqXcompPerm = 0x1023;

struct RefusedCall {
  std::string name;
  uint32_t number;
  uint32_t first_argument;  // kAny: whatever it is
  uint32_t error;
};

void PrintTo(const RefusedCall& call, std::ostream* out) { *out << call.name; }

// From now on and in all threads to come. Returns whether it is so: an emulator
// of processors may have no filters of system calls.
bool Refuse(const RefusedCall& call) {
  const auto stop = [](uint32_t answer) {
    return sock_filter(BPF_STMT(BPF_RET | BPF_K, answer));
  };
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.number, 1, 0),
      stop(SECCOMP_RET_ALLOW)};
  if (call.first_argument != kAny) {
    // The low half, on little-endian processors.
    program.push_back(
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)));
    program.push_back(
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.first_argument, 1, 0));
    program.push_back(stop(SECCOMP_RET_ALLOW));
  }
  program.push_back(stop(SECCOMP_RET_ERRNO | call.error));
  sock_fprog filter = {static_cast<unsigned short>(program.size()),
                       program.data()};
  const uint32_t first = call.first_argument == kAny ? 0 : call.first_argument;
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0 &&
         syscall(call.number, first, 0, 0) == -1 &&
         errno == static_cast<int>(call.error);
}

// What a process found, of bytes alone: it comes through a pipe.
struct Findings {
  bool refused = false;
  bool has_amx = false;
  char engine[32] = "";
  uint64_t hash[2] = {0, 0};  // on one thread and on three; 0: a call failed
};

uint64_t HashOn(int threads, const char* engine, Findings* findings) {
  ContextOptions options;
  options.num_threads = threads;
  options.engine = engine;
  std::unique_ptr<Context> context;
  if (!Context::Create(options, &context).ok()) return 0;
  const ContextInfo info = context->Info();
  std::strncpy(findings->engine, info.engine.c_str(),
               sizeof(findings->engine) - 1);
  findings->has_amx = std::find(info.engines.begin(), info.engines.end(),
                                "amx") != info.engines.end();
  AttentionCase c;
  c.dtype = DType::kBF16;
  c.heads = c.kv_heads = 6;
  c.nq = c.nk = 300;
  c.head_dim = c.value_dim = 64;
  c.causal = Causal::kBottomRight;
  uint64_t hash;
  (void)HashOfCall(c, MakeInputs(c), context.get(), &hash);
  return hash;
}

// In a process of its own, which refuses the call where one is given.
Findings FindInChild(const RefusedCall* call, const char* engine) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    Findings findings;
    findings.refused = call != nullptr && Refuse(*call);
    findings.hash[0] = HashOn(1, engine, &findings);
    findings.hash[1] = HashOn(3, engine, &findings);
    const ssize_t written = write(ends[1], &findings, sizeof(findings));
    _exit(written == sizeof(findings) ? 0 : 1);
  }
  close(ends[1]);
  Findings findings;
  EXPECT_EQ(read(ends[0], &findings, sizeof(findings)),
            static_cast<ssize_t>(sizeof(findings)));
  close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return findings;
}

class RefusedCalls : public testing::TestWithParam<RefusedCall> {};

TEST_P(RefusedCalls, AnotherWayIsTaken) {
  const Findings found = FindInChild(&GetParam(), "");
  if (!found.refused) GTEST_SKIP() << "no filters of system calls here";
  if (GetParam().first_argument == kArchReqXcompPerm) {
    EXPECT_FALSE(found.has_amx);
  }
  EXPECT_NE(found.hash[0], 0u);
  EXPECT_EQ(found.hash[1], found.hash[0]);
  const Findings free = FindInChild(nullptr, found.engine);
  EXPECT_STREQ(free.engine, found.engine);
  EXPECT_EQ(free.hash[0], found.hash[0]);
}

const RefusedCall kCalls[] = {
    {"madvise", SYS_madvise, kAny, EINVAL},
    {"sched_getaffinity", SYS_sched_getaffinity, kAny, EPERM},
#ifdef SYS_arch_prctl
    {"arch_prctl_ARCH_REQ_XCOMP_PERM", SYS_arch_prctl, kArchReqXcompPerm,
     EPERM},
#endif
};
INSTANTIATE_TEST_SUITE_P(Refusals, RefusedCalls, testing::ValuesIn(kCalls),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fa2::test
