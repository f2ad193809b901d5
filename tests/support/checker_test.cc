// SPDX-License-Identifier: Apache-2.0

// The checker of the attention suites, tested itself: it must pass results that
// are rounded as the contract allows, and fail each of the mistakes that
// attention kernels make.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "fa2/reference.h"
#include "tests/support/attention_case.h"
#include "tests/support/attention_check.h"
#include "tests/support/case_generator.h"

namespace fa2::test {
namespace {

AttentionCase BaseCase(DType dtype, Precision precision) {
  AttentionCase c;
  c.dtype = dtype;
  c.precision = precision;
  c.batch = 1;
  c.heads = 4;
  c.kv_heads = 2;
  c.nq = 65;
  c.nk = 65;
  c.head_dim = 24;
  c.value_dim = 24;
  c.causal = Causal::kTopLeft;
  c.alibi = true;
  c.sinks = true;
  c.bias = DType::kF32;
  c.want_dbias = c.want_dalibi = c.want_dsinks = true;
  return c;
}

std::vector<AttentionCase> Cases() {
  return {BaseCase(DType::kF32, Precision::kFast),
          BaseCase(DType::kF32, Precision::kHigh),
          BaseCase(DType::kBF16, Precision::kFast),
          BaseCase(DType::kBF16, Precision::kExact),
          BaseCase(DType::kF16, Precision::kFast),
          BaseCase(DType::kF64, Precision::kFast)};
}

// The oracle's results in the dtypes of a call.
AttentionOutputs RunOracle(const AttentionCase& c,
                           const AttentionInputs& inputs) {
  const AttentionOutputs outputs = MakeOutputs(c, inputs);
  Status status = AttentionReferenceForward(ForwardArgs(inputs, outputs));
  EXPECT_TRUE(status.ok()) << status.message();
  status = AttentionReferenceBackward(BackwardArgs(c, inputs, outputs));
  EXPECT_TRUE(status.ok()) << status.message();
  return outputs;
}

std::vector<std::string> CompareAll(const AttentionCase& c,
                                    const AttentionOutputs& actual,
                                    const ExpectedOutputs& expected) {
  std::vector<std::string> failures = CompareForward(c, actual, expected);
  for (const std::string& failure : CompareBackward(c, actual, expected, {})) {
    failures.push_back(failure);
  }
  return failures;
}

bool Blames(const std::vector<std::string>& failures,
            const std::string& output) {
  for (const std::string& failure : failures) {
    if (failure.rfind(output, 0) == 0) return true;
  }
  return false;
}

void Multiply(const Tensor& t, double factor) {
  ForEachIndex(t.view.sizes, [&](const Sizes& at) {
    Set(t.view, at, Get(t.view, at) * factor);
  });
}

TEST(Checker, PassesRoundedResults) {
  for (const AttentionCase& c : Cases()) {
    SCOPED_TRACE(Describe(c));
    const AttentionInputs inputs = MakeInputs(c);
    const auto failures =
        CompareAll(c, RunOracle(c, inputs), ComputeExpected(c, inputs));
    for (const std::string& failure : failures) ADD_FAILURE() << failure;
  }
}

TEST(Checker, PassesTheRandomCasesOfTheOracle) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    AttentionCase c = RandomCase(seed, CaseOptions());
    c.accumulate_dq = c.accumulate_dk = false;
    c.accumulate_dv = c.accumulate_dbias = false;
    SCOPED_TRACE(Describe(c));
    const AttentionInputs inputs = MakeInputs(c);
    const auto failures =
        CompareAll(c, RunOracle(c, inputs), ComputeExpected(c, inputs));
    for (const std::string& failure : failures) ADD_FAILURE() << failure;
  }
}

// A mutant changes results that were right; `blamed` must be found wrong.
struct Mutant {
  std::string name;
  std::vector<std::string> blamed;
  std::function<void(const AttentionCase&, const AttentionOutputs&)> change;
};

TEST(Checker, FailsWrongResults) {
  const std::vector<Mutant> mutants = {
      {"zeros",
       {"out", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         for (const Tensor* t :
              {&o.out, &o.dq, &o.dk, &o.dv, &o.dbias, &o.dalibi, &o.dsinks}) {
           Fill(t->view, 0.0);
         }
       }},
      {"no scale in dQ and dK",
       {"dq", "dk"},
       [](const AttentionCase& c, const AttentionOutputs& o) {
         Multiply(o.dq, std::sqrt(static_cast<double>(c.head_dim)));
         Multiply(o.dk, std::sqrt(static_cast<double>(c.head_dim)));
       }},
      {"swapped dK and dV",
       {"dk", "dv"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         const Tensor held = MakeTensor(DType::kF64, o.dk.view.sizes);
         Copy(o.dk.view, held.view);
         Copy(o.dv.view, o.dk.view);
         Copy(held.view, o.dv.view);
       }},
      {"wrong sign of dQ",
       {"dq"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         Multiply(o.dq, -1.0);
       }},
      {"dK and dV four times too large",
       {"dk", "dv"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         Multiply(o.dk, 4.0);
         Multiply(o.dv, 4.0);
       }},
      {"one element of dQ not written",
       {"dq"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         Set(o.dq.view, {0, 3, 64, 23}, std::nan(""));
       }},
      {"dQ's last row zero",
       {"dq"},
       [](const AttentionCase& c, const AttentionOutputs& o) {
         for (int64_t d = 0; d < c.head_dim; ++d) {
           Set(o.dq.view, {0, 0, c.nq - 1, d}, 0.0);
         }
       }},
      {"two query heads swapped in out",
       {"out"},
       [](const AttentionCase& c, const AttentionOutputs& o) {
         for (int64_t d = 0; d < c.value_dim; ++d) {
           const Sizes a = {0, 0, 40, d};
           const Sizes b = {0, 1, 40, d};
           const double held = Get(o.out.view, a);
           Set(o.out.view, a, Get(o.out.view, b));
           Set(o.out.view, b, held);
         }
       }},
      {"lse in base 2",
       {"lse"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         Multiply(o.lse, 1.0 / std::log(2.0));
       }},
      {"dbias with the scale",
       {"dbias"},
       [](const AttentionCase& c, const AttentionOutputs& o) {
         Multiply(o.dbias, 1.0 / std::sqrt(static_cast<double>(c.head_dim)));
       }},
      {"dsinks and ALiBi's gradient with the wrong sign",
       {"dalibi_slopes", "dsinks"},
       [](const AttentionCase&, const AttentionOutputs& o) {
         Multiply(o.dalibi, -1.0);
         Multiply(o.dsinks, -1.0);
       }},
  };
  for (const AttentionCase& c : Cases()) {
    const AttentionInputs inputs = MakeInputs(c);
    const ExpectedOutputs expected = ComputeExpected(c, inputs);
    for (const Mutant& mutant : mutants) {
      SCOPED_TRACE(mutant.name + " | " + Describe(c));
      const AttentionOutputs outputs = RunOracle(c, inputs);
      mutant.change(c, outputs);
      const auto failures = CompareAll(c, outputs, expected);
      for (const std::string& output : mutant.blamed) {
        EXPECT_TRUE(Blames(failures, output)) << output << " passed";
      }
    }
  }
}

// A mutant computes something else; every output that depends on it must fail.
struct WrongCall {
  std::string name;
  std::vector<std::string> blamed;
  std::function<void(AttentionCase*, AttentionInputs*)> change;
};

TEST(Checker, FailsWrongComputations) {
  const std::vector<WrongCall> calls = {
      {"the other diagonal",
       {"out", "lse", "dq", "dk", "dv", "dbias"},
       [](AttentionCase*, AttentionInputs* inputs) {
         inputs->options.causal = Causal::kNone;
         inputs->options.window_right = 1;
       }},
      {"causal without the diagonal itself",
       {"out", "dq", "dk", "dv"},
       [](AttentionCase*, AttentionInputs* inputs) {
         inputs->options.causal = Causal::kNone;
         inputs->options.window_right = 0;
         inputs->options.bias.data =
             static_cast<const float*>(inputs->options.bias.data) + 1;
       }},
      {"no delta",
       {"dq", "dk", "dbias"},
       [](AttentionCase*, AttentionInputs* inputs) {
         Fill(inputs->out.view, 0.0);
       }},
      {"no ALiBi",
       {"out", "lse", "dq", "dk", "dv"},
       [](AttentionCase*, AttentionInputs* inputs) {
         Fill(inputs->alibi_slopes.view, 0.0);
       }},
      {"no sinks",
       {"out", "lse"},
       [](AttentionCase*, AttentionInputs* inputs) {
         Fill(inputs->sinks.view, -1e30);
       }},
      {"a tile of 32 queries x 16 keys skipped",
       {"out", "dq", "dk", "dv", "dbias"},
       [](AttentionCase*, AttentionInputs* inputs) {
         for (int64_t i = 32; i < 64; ++i) {
           for (int64_t j = 16; j < 32; ++j) {
             Set(inputs->bias.view, {0, 3, i, j}, -INFINITY);
           }
         }
       }},
      {"dropout that was not asked for",
       {"out", "dq", "dk", "dv"},
       [](AttentionCase*, AttentionInputs* inputs) {
         inputs->options.dropout_p = 0.01;
       }},
      {"a scale that is 1% off",
       {"out", "lse", "dq", "dk", "dv"},
       [](AttentionCase*, AttentionInputs* inputs) {
         inputs->options.scale = 1.01 / std::sqrt(24.0);
       }},
  };
  for (const AttentionCase& c : Cases()) {
    const ExpectedOutputs expected = ComputeExpected(c, MakeInputs(c));
    for (const WrongCall& call : calls) {
      SCOPED_TRACE(call.name + " | " + Describe(c));
      AttentionCase wrong = c;
      AttentionInputs inputs = MakeInputs(c);
      call.change(&wrong, &inputs);
      const auto failures = CompareAll(c, RunOracle(wrong, inputs), expected);
      for (const std::string& output : call.blamed) {
        EXPECT_TRUE(Blames(failures, output)) << output << " passed";
      }
    }
  }
}

TEST(Checker, FailsWritesOutsideOfATensor) {
  const Tensor t = MakeTensor(DType::kF32, {1, 2, 3, 4}, Layout::kPaddedRows);
  t.buffer->Snapshot();
  Fill(t.view, 1.0);
  EXPECT_FALSE(t.buffer->ChangedOutside({t.view}));
  EXPECT_TRUE(t.buffer->ChangedOutside({}));
  static_cast<float*>(t.view.data)[4] = 0.0f;  // the gap after the first row
  EXPECT_TRUE(t.buffer->ChangedOutside({t.view}));
  t.buffer->Snapshot();
  t.buffer->data()[-1] = 0;
  EXPECT_TRUE(t.buffer->ChangedOutside({t.view}));
}

// The byte beyond an edge, and every byte once writing is forbidden.
TEST(Checker, EndsAtAByteBeyondAPage) {
  for (const bool end : {true, false}) {
    const PlacementOfBuffers placed(end ? Placement::kEndsAtPage
                                        : Placement::kBeginsAtPage);
    Tensor t = MakeTensor(DType::kBF16, {1, 2, 3, 5});
    volatile uint8_t* const data = t.buffer->data();
    const int64_t beyond = end ? 2 * 3 * 5 * 2 : -1;
    EXPECT_DEATH((void)data[beyond], "");
    EXPECT_DEATH(data[beyond] = 1, "");
    t.buffer->Snapshot();
    Fill(t.view, 1.0);
    EXPECT_FALSE(t.buffer->ChangedOutside({t.view}));
    EXPECT_TRUE(t.buffer->ChangedOutside({}));
    t.buffer->ForbidWriting();
    EXPECT_EQ(Get(t.view, {0, 1, 2, 4}), 1.0);
    EXPECT_DEATH(data[3] = 1, "");
  }
}

}  // namespace
}  // namespace fa2::test
