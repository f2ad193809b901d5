// SPDX-License-Identifier: Apache-2.0

// The n-th allocation of C++ memory fails, for every n of a call: each public
// function returns a status, throws nothing, and has written nothing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "fa2/fa2.h"

namespace {

// Allocations until one fails; negative: none does. Only the test's own thread
// counts, which does all the work of a context of one thread.
thread_local int64_t t_countdown = -1;

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (t_countdown == 0) throw std::bad_alloc();
  if (t_countdown > 0) --t_countdown;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0)
    throw std::bad_alloc();
  return memory;
}

constexpr std::size_t kAlignment = alignof(std::max_align_t);

// Not inlined: GCC would hold it against the operator new that it sees.
[[gnu::noinline]] void Release(void* memory) { std::free(memory); }

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes, kAlignment); }
void* operator new[](std::size_t bytes) { return Allocate(bytes, kAlignment); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete[](void* memory) noexcept { Release(memory); }
void operator delete(void* memory, std::size_t) noexcept { Release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { Release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept {
  Release(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
  Release(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  Release(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  Release(memory);
}

namespace fa2::test {
namespace {

constexpr int64_t kRows = 6, kDim = 16, kHeads = 2;
constexpr size_t kCount = 1 * kHeads * kRows * kDim;

struct Outputs {
  std::vector<float> a = std::vector<float>(kCount, 3.0f);
  std::vector<float> b = a, c = a, lse = a;
  bool operator==(const Outputs& o) const {
    return a == o.a && b == o.b && c == o.c && lse == o.lse;
  }
};

// `call` writes into the outputs. It is made again and again with a context of
// its own, one more allocation allowed each time, until it succeeds.
void FailEveryAllocation(
    const char* name, const std::function<Status(Context*, Outputs*)>& call) {
  int64_t failures = 0;
  for (int64_t allowed = 0; allowed < 10000; ++allowed) {
    ContextOptions options;
    options.num_threads = 1;
    std::unique_ptr<Context> context;
    ASSERT_TRUE(Context::Create(options, &context).ok());
    Outputs outputs;
    t_countdown = allowed;
    Status status;
    EXPECT_NO_THROW(status = call(context.get(), &outputs)) << name;
    t_countdown = -1;
    if (status.ok()) {
      EXPECT_GT(failures, 0) << name << " needs no memory";
      EXPECT_FALSE(outputs == Outputs()) << name;
      return;
    }
    ++failures;
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory)
        << name << ", allocation " << allowed << ": " << status.message();
    EXPECT_FALSE(status.message().empty());
    EXPECT_TRUE(outputs == Outputs())
        << name << " wrote, and failed at allocation " << allowed;
  }
  FAIL() << name << " never succeeded";
}

std::vector<float> Input(int seed) {
  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    values[i] =
        static_cast<float>((i * 37 + static_cast<size_t>(seed) * 11) % 101) /
            50.0f -
        1.0f;
  }
  return values;
}

class OutOfMemory : public ::testing::Test {
 protected:
  std::vector<float> x_ = Input(1), y_ = Input(2), z_ = Input(3), w_ = Input(4);
  std::vector<int64_t> ids_ = std::vector<int64_t>(kHeads * kRows, 1);

  ConstTensorView Rows(const std::vector<float>& v) const {
    return Dense(v.data(), DType::kF32, 1, 1, kHeads * kRows, kDim);
  }
  TensorView Rows(std::vector<float>* v) const {
    return Dense(v->data(), DType::kF32, 1, 1, kHeads * kRows, kDim);
  }
  ConstTensorView Heads(const std::vector<float>& v) const {
    return Dense(v.data(), DType::kF32, 1, kHeads, kRows, kDim);
  }
  TensorView Heads(std::vector<float>* v) const {
    return Dense(v->data(), DType::kF32, 1, kHeads, kRows, kDim);
  }
  ConstTensorView Ids() const {
    return Dense(ids_.data(), DType::kI64, 1, 1, 1, kHeads * kRows);
  }
  AttentionForwardArgs Forward(Outputs* o) const {
    AttentionForwardArgs args;
    args.q = Heads(x_);
    args.k = Heads(y_);
    args.v = Heads(z_);
    args.out = Heads(&o->a);
    args.lse = Dense(o->lse.data(), DType::kF32, 1, kHeads, kRows);
    return args;
  }
  AttentionBackwardArgs Backward(Outputs* o) const {
    AttentionBackwardArgs args;
    args.q = Heads(x_);
    args.k = Heads(y_);
    args.v = Heads(z_);
    args.out = args.dout = Heads(w_);
    args.lse = Dense(w_.data(), DType::kF32, 1, kHeads, kRows);
    args.dq = Heads(&o->a);
    args.dk = Heads(&o->b);
    args.dv = Heads(&o->c);
    return args;
  }
};

TEST_F(OutOfMemory, Attention) {
  FailEveryAllocation("forward", [&](Context* context, Outputs* o) {
    return AttentionForward(Forward(o), context);
  });
  FailEveryAllocation("backward", [&](Context* context, Outputs* o) {
    return AttentionBackward(Backward(o), context);
  });
}

TEST_F(OutOfMemory, Reference) {
  FailEveryAllocation("forward", [&](Context*, Outputs* o) {
    return AttentionReferenceForward(Forward(o));
  });
  FailEveryAllocation("backward", [&](Context*, Outputs* o) {
    return AttentionReferenceBackward(Backward(o));
  });
}

TEST_F(OutOfMemory, TrainingOps) {
  FailEveryAllocation("softmax", [&](Context* context, Outputs* o) {
    return Softmax(Rows(x_), Rows(&o->a), context);
  });
  FailEveryAllocation("rms_norm_backward", [&](Context* context, Outputs* o) {
    RmsNormBackwardArgs args;
    args.dy = Rows(x_);
    args.x = Rows(y_);
    args.weight = Dense(z_.data(), DType::kF32, 1, 1, 1, kDim);
    args.dx = Rows(&o->a);
    args.dweight = Dense(o->b.data(), DType::kF32, 1, 1, 1, kDim);
    return RmsNormBackward(args, context);
  });
  FailEveryAllocation("embedding_backward", [&](Context* context, Outputs* o) {
    EmbeddingBackwardArgs args;
    args.dy = Rows(x_);
    args.ids = Ids();
    args.dweight = Dense(o->a.data(), DType::kF32, 1, 1, 3, kDim);
    return EmbeddingBackward(args, context);
  });
  FailEveryAllocation("cross_entropy", [&](Context* context, Outputs* o) {
    CrossEntropyArgs args;
    args.logits = Rows(x_);
    args.targets = Ids();
    args.loss = Dense(o->b.data(), DType::kF32, 1, 1, 1, 1);
    args.dlogits = Rows(&o->a);
    return CrossEntropy(args, context);
  });
}

// Refusals make sentences, which take memory too.
TEST_F(OutOfMemory, Refusals) {
  for (int64_t allowed = 0; allowed < 100; ++allowed) {
    Outputs o;
    AttentionForwardArgs args = Forward(&o);
    args.k.sizes[3] = 7;
    Status status;
    t_countdown = allowed;
    EXPECT_NO_THROW(status = AttentionForward(args));
    t_countdown = -1;
    if (status.code() == StatusCode::kInvalidArgument) return;
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << status.message();
  }
  FAIL() << "the sentence never came";
}

TEST_F(OutOfMemory, ContextCreate) {
  for (int64_t allowed = 0; allowed < 1000; ++allowed) {
    ContextOptions options;
    options.num_threads = 1;
    std::unique_ptr<Context> context;
    Status status;
    t_countdown = allowed;
    EXPECT_NO_THROW(status = Context::Create(options, &context));
    t_countdown = -1;
    if (status.ok()) return;
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << status.message();
    EXPECT_EQ(context, nullptr);
  }
  FAIL() << "no context";
}

}  // namespace
}  // namespace fa2::test
