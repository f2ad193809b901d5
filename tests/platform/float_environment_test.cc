// SPDX-License-Identifier: Apache-2.0

// Whatever a thread has set its floating-point unit to, calls give the bits
// that they give with the default, and leave the settings and flags alone.
#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "fa2/fa2.h"
#include "tests/support/attention_case.h"
#include "tests/support/tensor.h"

namespace fa2::test {
namespace {

struct Setting {
  std::string name;
  std::function<void()> set;
};

void SetRounding(int mode) { ASSERT_EQ(std::fesetround(mode), 0); }

#if defined(__SSE2__)

void AddToMxcsr(unsigned bits) { _mm_setcsr(_mm_getcsr() | bits); }

std::vector<Setting> OfThisCpu() {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  return {
      {"flush", [] { AddToMxcsr(kFlushToZero | kDenormalsAreZero); }},
      {"traps",
       [] {
         constexpr unsigned kMasks = 0x1F80;
         _mm_setcsr(_mm_getcsr() & ~kMasks);
       }},
      {"x87 in single precision, upwards",
       [] {
         const uint16_t word = 0x087F;
         __asm__ volatile("fldcw %0" : : "m"(word));
       }},
      {"flush and flags", [] { AddToMxcsr(kFlushToZero | 0x15); }},
  };
}

std::vector<uint64_t> State() {
  uint16_t x87;
  __asm__ volatile("fnstcw %0" : "=m"(x87));
  return {_mm_getcsr(), x87};
}

#elif defined(__aarch64__)

void AddToFpcr(uint64_t bits) {
  uint64_t value;
  __asm__ volatile("mrs %0, fpcr" : "=r"(value));
  __asm__ volatile("msr fpcr, %0" : : "r"(value | bits));
}

std::vector<Setting> OfThisCpu() {
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  constexpr uint64_t kFlushF16 = uint64_t{1} << 19;
  constexpr uint64_t kDefaultNan = uint64_t{1} << 25;
  return {{"flush", [] { AddToFpcr(kFlushToZero | kFlushF16); }},
          {"default NaN", [] { AddToFpcr(kDefaultNan); }}};
}

std::vector<uint64_t> State() {
  uint64_t fpcr, fpsr;
  __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
  __asm__ volatile("mrs %0, fpsr" : "=r"(fpsr));
  return {fpcr, fpsr};
}

#else

std::vector<Setting> OfThisCpu() { return {}; }

std::vector<uint64_t> State() {
  return {static_cast<uint64_t>(std::fegetround()),
          static_cast<uint64_t>(std::fetestexcept(FE_ALL_EXCEPT))};
}

#endif

std::vector<Setting> Settings() {
  std::vector<Setting> all = OfThisCpu();
#ifdef FE_UPWARD
  all.push_back({"upwards", [] { SetRounding(FE_UPWARD); }});
#endif
#ifdef FE_DOWNWARD
  all.push_back({"downwards", [] { SetRounding(FE_DOWNWARD); }});
#endif
#ifdef FE_TOWARDZERO
  all.push_back({"towards zero", [] { SetRounding(FE_TOWARDZERO); }});
#endif
  return all;
}

// Inputs, made once: subnormal numbers are among them, and sums that round.
struct Problem {
  AttentionCase attention;
  AttentionInputs inputs;
  Tensor x = MakeTensor(DType::kF32, {1, 1, kRows, kDim});
  Tensor weight = MakeTensor(DType::kF32, {1, 1, 1, kDim});
  Tensor ids = MakeTensor(DType::kI64, {1, 1, 1, kRows});

  static constexpr int64_t kRows = 131, kDim = 70;

  static AttentionCase CaseOf(DType dtype) {
    AttentionCase c;
    c.dtype = dtype;
    c.heads = 4;
    c.kv_heads = 2;
    c.nq = c.nk = 150;
    c.head_dim = c.value_dim = 33;
    c.causal = Causal::kBottomRight;
    c.softcap = 20.0;
    return c;
  }

  explicit Problem(DType dtype)
      : attention(CaseOf(dtype)),
        inputs(MakeInputs(attention, [](AttentionInputs* in) {
          for (int64_t i = 0; i < 150; ++i) {
            Set(in->v.view, {0, 0, i, 3}, 1e-39);
            Set(in->dout.view, {0, 1, i, 5}, -3e-40);
          }
        })) {
    Random random(7);
    FillNormal(x.view, random);
    FillNormal(weight.view, random);
    for (int64_t i = 0; i < kRows; ++i) {
      Set(x.view, {0, 0, i, i % kDim}, 1e-40);
      Set(ids.view, {0, 0, 0, i}, static_cast<double>(i * i % kDim));
    }
    Set(weight.view, {0, 0, 0, 5}, 2e-39);
  }
};

struct Results {
  AttentionOutputs attention, reference;
  Tensor softmax, norm, dlogits, loss, dx;
};

Results MakeResults(const Problem& p) {
  const Sizes sizes = {1, 1, Problem::kRows, Problem::kDim};
  return {
      MakeOutputs(p.attention, p.inputs), MakeOutputs(p.attention, p.inputs),
      MakeTensor(DType::kF32, sizes),     MakeTensor(DType::kF32, sizes),
      MakeTensor(DType::kF32, sizes),     MakeTensor(DType::kF32, {1, 1, 1, 1}),
      MakeTensor(DType::kF32, sizes)};
}

// The statuses, in order. Nothing but calls of fa2, since it may run with any
// setting.
std::vector<Status> Calls(const Problem& p, const Results& r,
                          Context* context) {
  RmsNormBackwardArgs norm;
  norm.dy = p.x.view;
  norm.x = r.norm.view;
  norm.weight = p.weight.view;
  norm.dx = r.dx.view;
  CrossEntropyArgs loss;
  loss.logits = p.x.view;
  loss.targets = p.ids.view;
  loss.loss = r.loss.view;
  loss.dlogits = r.dlogits.view;
  const auto backward = BackwardArgs(p.attention, p.inputs, r.attention);
  return {AttentionForward(ForwardArgs(p.inputs, r.attention), context),
          AttentionBackward(backward, context),
          Softmax(p.x.view, r.softmax.view, context),
          RmsNorm(p.x.view, p.weight.view, 1e-5, r.norm.view, context),
          RmsNormBackward(norm, context),
          CrossEntropy(loss, context),
          AttentionReferenceForward(ForwardArgs(p.inputs, r.reference)),
          AttentionReferenceBackward(
              BackwardArgs(p.attention, p.inputs, r.reference))};
}

void ExpectSame(const Results& a, const Results& b) {
  const auto list = [](const Results& r) {
    return std::vector<const Tensor*>{&r.attention.out, &r.attention.lse,
                                      &r.attention.dq,  &r.attention.dk,
                                      &r.attention.dv,  &r.reference.out,
                                      &r.reference.dq,  &r.reference.dk,
                                      &r.reference.dv,  &r.softmax,
                                      &r.norm,          &r.dlogits,
                                      &r.loss,          &r.dx};
  };
  const auto left = list(a), right = list(b);
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(SameBits(left[i]->view, right[i]->view)) << "output " << i;
  }
}

// Threads that have a setting of their own, and look afterwards.
struct SetThreads {
  std::function<void()> set = [] {};
  std::atomic<int> changed{0};

  static void Run(void* opaque, int workers,
                  void (*worker)(void* argument, int index), void* argument) {
    auto* const self = static_cast<SetThreads*>(opaque);
    const auto work = [=](int index) {
      self->set();
      const std::vector<uint64_t> before = State();
      worker(argument, index);
      if (State() != before) self->changed.fetch_add(1);
    };
    std::vector<std::thread> threads;
    for (int index = 1; index < workers; ++index) {
      threads.emplace_back(work, index);
    }
    worker(argument, 0);
    for (std::thread& thread : threads) thread.join();
  }
};

// On each target of the CPU, with one thread, several of TBB's, and several of
// the program's that have the setting too.
TEST(FloatEnvironment, CallsDoNotSeeTheCallersAndLeaveIt) {
  ASSERT_FALSE(Settings().empty());
  Context* made = nullptr;
  ASSERT_TRUE(Context::Default(&made).ok());
  for (const std::string& target : made->Info().targets) {
    SetThreads pool;
    std::vector<std::unique_ptr<Context>> contexts(3);
    for (size_t n = 0; n < contexts.size(); ++n) {
      ContextOptions options;
      options.max_target = target;
      options.num_threads = n == 0 ? 1 : 3;
      if (n == 2) options.thread_pool = {SetThreads::Run, &pool};
      ASSERT_TRUE(Context::Create(options, &contexts[n]).ok());
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Problem problem(dtype);
      const Results expected = MakeResults(problem);
      for (const Status& status : Calls(problem, expected, contexts[0].get())) {
        ASSERT_TRUE(status.ok()) << status.message();
      }
      for (const Setting& setting : Settings()) {
        for (size_t n = 0; n < contexts.size(); ++n) {
          SCOPED_TRACE(target + ", " + NameOf(dtype) + ", " + setting.name +
                       ", context " + std::to_string(n));
          const Results results = MakeResults(problem);
          pool.set = setting.set;
          std::fenv_t kept;
          std::fegetenv(&kept);
          setting.set();
          const std::vector<uint64_t> before = State();
          const std::vector<Status> statuses =
              Calls(problem, results, contexts[n].get());
          const std::vector<uint64_t> after = State();
          std::fesetenv(&kept);
          EXPECT_EQ(before, after);
          EXPECT_EQ(pool.changed.exchange(0), 0);
          for (const Status& status : statuses) {
            EXPECT_TRUE(status.ok()) << status.message();
          }
          ExpectSame(expected, results);
        }
      }
    }
  }
}

// What the test above stands on: without fa2 the settings do change results.
TEST(FloatEnvironment, SettingsChangeSums) {
  for (const Setting& setting : Settings()) {
    if (setting.name.find("wards") == std::string::npos ||
        setting.name.find("x87") != std::string::npos) {
      continue;
    }
    volatile double one = 1.0;
    volatile double negative = -1.0;
    const volatile double up = one / 10.0, down = negative / 10.0;
    std::fenv_t kept;
    std::fegetenv(&kept);
    setting.set();
    const volatile double set_up = one / 10.0, set_down = negative / 10.0;
    std::fesetenv(&kept);
    EXPECT_TRUE(set_up != up || set_down != down) << setting.name;
  }
}

}  // namespace
}  // namespace fa2::test
