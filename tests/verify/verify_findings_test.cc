// SPDX-License-Identifier: Apache-2.0

// What is said of wrong results beside their distance: where they lie, whose
// bits they are, what moves; on cases of every kind.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "src/verify/cases/error.h"
#include "src/verify/judge/check.h"
#include "src/verify/judge/report.h"
#include "src/verify/model/generate.h"

namespace fa2::verify {
namespace {

Case Right(const std::function<void(GenerateOptions*)>& set = nullptr) {
  GenerateOptions o;
  o.batch = 2;
  o.heads = o.kv_heads = 8;
  o.nq = 40;
  o.nk = 48;
  o.head_dim = o.value_dim = 16;
  o.dtype = DType::kF32;
  if (set) set(&o);
  Case c = Generate(o);
  AddAnswers(&c, 1);
  return c;
}

// Changes the elements of an f32 output [B, H, N, D], by their index.
using Change =
    std::function<float(float, int64_t b, int64_t h, int64_t n, int64_t d)>;
void ChangeElements(Case* c, const std::string& name, const Change& change) {
  const Array from = *c->Find(name);
  void* data = nullptr;
  c->tensors[name] = MakeArray(from.dtype, from.shape, &data);
  const auto* in = static_cast<const float*>(from.data);
  auto* out = static_cast<float*>(data);
  const std::vector<int64_t>& n = from.shape;
  for (int64_t i = 0; i < from.elements(); ++i) {
    out[i] = change(in[i], i / n[3] / n[2] / n[1], i / n[3] / n[2] % n[1],
                    i / n[3] % n[2], i % n[3]);
  }
}

CaseReport Judged(const Case& c, bool diagnose = false) {
  CheckOptions options;
  options.threads = 1;
  options.diagnose = diagnose;
  return Check(c, options);
}

// The tensor fails, and this is said of it.
void ExpectSaid(const Case& c, const std::string& name,
                const std::string& sentence) {
  const CaseReport report = Judged(c);
  std::string all;
  for (const TensorVerdict& t : report.tensors) {
    EXPECT_EQ(t.pass, t.name != name) << t.name;
    for (const std::string& finding : t.findings) all += "\n  " + finding;
    for (const std::string& finding : t.findings) {
      if (t.name == name && finding == sentence) return;
    }
  }
  ADD_FAILURE() << "not said: " << sentence << all;
}

TEST(Findings, HeadsThatNobodyWrote) {
  const Case right = Right();
  Case c = right;
  ChangeElements(&c, "dq", [](float, auto...) { return 0.0f; });
  ExpectSaid(c, "dq", "it is all zeros: nobody wrote it");
  c = right;
  ChangeElements(&c, "dq", [](float x, int64_t b, int64_t h, auto...) {
    return b == 1 && h == 2 ? 0.0f : x;
  });
  ExpectSaid(c, "dq", "heads 10 (batch * heads + head) are all zeros");
  ChangeElements(&c, "dq", [](float x, int64_t, int64_t h, auto...) {
    return h % 2 == 0 ? 0.0f : x;
  });
  ExpectSaid(c, "dq",
             "heads 0, 2, 4, 6, 8, 10 and 2 more (batch * heads + head) are "
             "all zeros");
  ExpectSaid(c, "dq", "the error lies in heads 0, 2, 4, 6 of 8");
  c = right;
  ChangeElements(&c, "dk", [](float x, int64_t, int64_t h, auto...) {
    return h == 5 ? std::nanf("") : x;
  });
  ExpectSaid(c, "dk",
             "heads 5, 13 (batch * heads + head) hold no finite number, as a "
             "buffer that nobody wrote");
}

TEST(Findings, BitsOfAnother) {
  const Case right = Right();
  Case c = right;
  c.tensors["dk"] = *right.Find("dv");
  ExpectSaid(c, "dk",
             "it holds the bits of dv: a stale buffer, or one passed twice");
  // A head in another's place.
  c = right;
  const auto* dv = static_cast<const float*>(right.Find("dv")->data);
  ChangeElements(&c, "dv",
                 [&](float x, int64_t b, int64_t h, int64_t n, int64_t d) {
                   return b == 1 && h == 3 ? dv[(4 * 48 + n) * 16 + d] : x;
                 });
  ExpectSaid(c, "dv", "head 3 of batch 1 holds the bits of head 4 of batch 0");
}

// Heads whose inputs are the same have the same results.
TEST(Findings, EqualHeadsMayBeEqual) {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.nq = o.nk = 16;
  o.head_dim = o.value_dim = 16;
  o.dtype = DType::kF32;
  Case c = Generate(o);
  for (const char* name : {"q", "k", "v", "dout"}) {
    const Array all = *c.Find(name);
    const auto* first = static_cast<const float*>(all.data);
    ChangeElements(&c, name,
                   [&](float, int64_t, int64_t, int64_t n, int64_t d) {
                     return first[n * 16 + d];
                   });
  }
  AddAnswers(&c, 1);
  EXPECT_TRUE(Judged(c).pass);
}

TEST(Findings, WhereTheErrorLies) {
  const Case right = Right();
  const auto wrong = [&](const std::function<bool(int64_t, int64_t, int64_t,
                                                  int64_t)>& where) {
    Case c = right;
    ChangeElements(&c, "dq",
                   [&](float x, int64_t b, int64_t h, int64_t n, int64_t d) {
                     return where(b, h, n, d) ? 2.0f * x : x;
                   });
    return c;
  };
  ExpectSaid(wrong([](int64_t, int64_t, int64_t n, int64_t) {
               return n >= 3 && n < 9;
             }),
             "dq", "the error lies in rows 3 to 8 of 40");
  ExpectSaid(wrong([](int64_t, int64_t, int64_t n, int64_t) {
               return n == 3 || n == 30;
             }),
             "dq", "the error lies in rows 3, 30 of 40");
  ExpectSaid(
      wrong([](int64_t, int64_t, int64_t n, int64_t) { return n % 2 == 1; }),
      "dq", "the error lies in rows whose index is 1 modulo 2");
  ExpectSaid(wrong([](int64_t b, int64_t, int64_t, int64_t) { return b == 1; }),
             "dq", "the error lies in batches 1 of 2");
  ExpectSaid(wrong([](int64_t, int64_t, int64_t, int64_t d) { return d > 12; }),
             "dq", "the error lies in columns 13, 14, 15 of 16");
}

TEST(Findings, TheRanksOfARun) {
  Case c = Right();
  ChangeElements(&c, "dq", [](float x, int64_t b, int64_t h, auto...) {
    return b == 1 && h >= 4 ? 2.0f * x : x;
  });
  c.shards = {ShardBy::kHeads, 2, {}};
  ExpectSaid(c, "dq", "the error lies in ranks 1 of 2");
  c.shards = {ShardBy::kBatch, 2, {}};
  ExpectSaid(c, "dq", "the error lies in ranks 1 of 2");
}

TEST(Findings, OneElementIsFoundAmongMany) {
  for (const float value :
       {std::nanf(""), std::numeric_limits<float>::infinity(), 50.0f}) {
    Case c = Right();
    ChangeElements(&c, "dv",
                   [&](float x, int64_t b, int64_t h, int64_t n, int64_t d) {
                     return b == 1 && h == 7 && n == 40 && d == 9 ? value : x;
                   });
    const CaseReport report = Judged(c);
    EXPECT_FALSE(report.pass);
    for (const TensorVerdict& t : report.tensors) {
      EXPECT_EQ(t.pass, t.name != "dv");
      if (t.pass) continue;
      EXPECT_EQ(t.worst.index, (std::vector<int64_t>{1, 7, 40, 9}));
      EXPECT_EQ(t.bad, std::isfinite(value) ? 0 : 1);
    }
  }
}

// Everything that a case may have, said in a few words.
TEST(Reports, SayWhatTheCaseIs) {
  std::vector<std::string> progress;
  CheckOptions options;  // of all cores
  options.diagnose = false;
  options.progress = [&](const std::string& text) { progress.push_back(text); };
  const auto what = [&](const std::function<void(GenerateOptions*)>& set) {
    const CaseReport report = Check(Right(set), options);
    EXPECT_TRUE(report.pass) << report.what;
    return report.what;
  };
  using O = GenerateOptions;
  EXPECT_EQ(what([](O* o) {
              o->heads = 16;
              o->value_dim = 8;
            }),
            "f32 B2 H16/8 40x48 D16/8");
  EXPECT_EQ(what([](O* o) {
              o->options.causal = Causal::kBottomRight;
              o->options.window_left = 9;
              o->options.softcap = 5.0;
              o->sinks = true;
            }),
            "f32 B2 H8 40x48 D16 causal bottom-right window 9,-1 softcap "
            "sinks");
  EXPECT_EQ(what([](O* o) {
              o->options.causal = Causal::kTopLeft;
              o->options.window_right = 0;
              o->bias = {1, 8, 40, 48};
              o->alibi = true;
            }),
            "f32 B2 H8 40x48 D16 causal top-left window -1,0 bias ALiBi");
  EXPECT_EQ(what([](O* o) {
              o->options.dropout_p = 0.3;
              o->keep = true;
            }),
            "f32 B2 H8 40x48 D16 dropout");
  EXPECT_EQ(what([](O* o) {
              o->lengths_q = {10, 30};
            }),
            "f32 B1 H8 40x40 D16 2 sequences");
  EXPECT_EQ(progress.front(), "the answer in f64 and the rounding twin");
}

// A boolean mask and what no backward was recorded of.
TEST(Reports, OfAMaskAndOfTheForwardAlone) {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.nq = 20;
  o.nk = 24;
  o.head_dim = o.value_dim = 16;
  o.dtype = DType::kF32;
  Case c = Generate(o);
  void* data = nullptr;
  c.tensors["bias"] = MakeArray(DType::kBool, {1, 1, 20, 24}, &data);
  for (int i = 0; i < 20 * 24; ++i) {
    static_cast<uint8_t*>(data)[i] = i % 5 != 0;
  }
  Case forward = c;
  AddAnswers(&c, 1);
  const CaseReport report = Judged(c);
  EXPECT_TRUE(report.pass);
  EXPECT_EQ(report.what, "f32 B1 H2 20x24 D16 mask");
  forward.tensors.erase("dout");
  AddAnswers(&forward, 1);
  EXPECT_EQ(forward.Find("dq"), nullptr);
  const CaseReport alone = Judged(forward);
  EXPECT_TRUE(alone.pass);
  EXPECT_EQ(alone.tensors.size(), 2u);
  EXPECT_EQ(alone.unchecked, (std::vector<std::string>{"dq", "dk", "dv"}));
}

// Twice the gradient of q is found out whatever else is known of the case.
TEST(Reports, AMistakeIsFoundInEveryKindOfCase) {
  using O = GenerateOptions;
  const std::vector<std::function<void(O*)>> kinds = {
      [](O*) {},
      [](O* o) { o->options.lse_base2 = true; },
      [](O* o) { o->options.causal = Causal::kBottomRight; },
      [](O* o) {
        o->options.window_left = 20;
        o->options.window_right = 3;
      },
      [](O* o) { o->options.precision = Products::kTF32; },
      [](O* o) {
        o->bias = {2, 8, 40, 48};
        o->sinks = o->alibi = o->dlse = true;
      },
      [](O* o) { o->options.dropout_p = 0.3; }};
  for (size_t n = 0; n < kinds.size(); ++n) {
    for (const bool with_lse : {true, false}) {
      Case c = Right(kinds[n]);
      ChangeElements(&c, "dq", [](float x, auto...) { return 2.0f * x; });
      // Without lse there is no forward of the candidate's own.
      if (!with_lse) c.tensors.erase("lse");
      const CaseReport report = Judged(c, true);
      EXPECT_FALSE(report.pass);
      ASSERT_FALSE(report.diagnosis.empty()) << n;
      EXPECT_EQ(report.diagnosis.front().tensors,
                std::vector<std::string>{"dq"})
          << n << ": " << report.diagnosis.front().id;
      EXPECT_NE(ReportText(report).find("=> "), std::string::npos);
      EXPECT_NE(ReportHtml({report}).find("<!doctype html>"),
                std::string::npos);
    }
  }
}

TEST(Reports, NamesFromFilesAreEscaped) {
  Case c = Right();
  c.name = "a<b&c";
  const std::string page = ReportHtml({Judged(c)});
  EXPECT_EQ(page.find("a<b"), std::string::npos);
  EXPECT_NE(page.find("a\\u003cb&c"), std::string::npos);
}

TEST(Runs, OfOtherShapesAreRefused) {
  const Case first = Right();
  CaseReport report = Judged(first);
  const auto error_of = [&](const std::function<void(Case*)>& change) {
    Case other = first;
    change(&other);
    try {
      CompareRuns(first, other, "again", &report);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string sentence =
      "again: tensor dq has another shape or dtype than in the first run";
  EXPECT_EQ(error_of([](Case* c) { c->tensors["dq"].shape[2] = 20; }),
            sentence);
  EXPECT_EQ(error_of([](Case* c) { c->tensors["dq"].dtype = DType::kBF16; }),
            sentence);
  EXPECT_EQ(error_of([](Case* c) { c->tensors.erase("dq"); }), "");
  EXPECT_TRUE(report.moved.empty());
  error_of([](Case* c) {
    ChangeElements(c, "dq",
                   [](float x, int64_t, int64_t, int64_t n, int64_t d) {
                     return n == 1 && d < 2 ? -x : x;
                   });
  });
  ASSERT_EQ(report.moved.size(), 1u);
  EXPECT_EQ(report.moved[0],
            "dq moves from run to run: 32 of 10240 elements differ in again, "
            "from [0, 0, 1, 0] to [1, 7, 1, 1]: a race, or atomics");
}

}  // namespace
}  // namespace fa2::verify
