// SPDX-License-Identifier: Apache-2.0

// Files that come from anywhere, options, names, and the JSON report.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/cases/names.h"
#include "src/verify/cases/safetensors.h"
#include "src/verify/judge/check.h"
#include "src/verify/judge/report.h"
#include "src/verify/model/generate.h"
#include "tests/verify/safetensors_bytes.h"

namespace fa2::verify {
namespace {

std::string Path(const std::string& name) { return testing::TempDir() + name; }

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A file of this header and so many bytes of tensors.
std::string FileOf(const std::string& header, size_t data) {
  return SafetensorsBytes(header, std::string(data, '\0'));
}

// What is wrong, as the command would say it; empty where nothing is.
template <class F>
std::string ErrorOf(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Safetensors, ForgedHeadersAreRefused) {
  const std::string path = Path("forged.safetensors");
  for (const std::string& bytes :
       {std::string(), std::string("short"),
        std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), FileOf("{", 0),
        FileOf("[]", 0), FileOf("{\"q\":1}", 0),
        FileOf(R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 8),
        FileOf(R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 8),
        FileOf(R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
        FileOf(R"({"q":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
        FileOf(R"({"q":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})",
               8),
        FileOf(R"({"q":{"dtype":"ODD","shape":[2],"data_offsets":[0,8]}})", 8),
        FileOf(R"({"q":{"dtype":"F32","shape":[4294967296,4294967296,4],)"
               R"("data_offsets":[0,0]}})",
               8),
        FileOf(R"({"q":{"dtype":"F32","shape":"x","data_offsets":[0,8]}})", 8),
        FileOf(R"({"__metadata__":{"fa2":3}})", 0),
        FileOf(std::string(100000, '['), 0)}) {
    WriteBytes(path, bytes);
    const std::string error = ErrorOf([&] { ReadSafetensors(path); });
    EXPECT_NE(error.find(path), std::string::npos) << bytes.substr(0, 80);
    EXPECT_EQ(error.find('\n'), std::string::npos);
  }
  EXPECT_NE(ErrorOf([&] { ReadSafetensors(Path("missing")); }), "");
  EXPECT_NE(ErrorOf([&] { ReadSafetensors(testing::TempDir()); }), "");
}

// As in the format's description, whatever the byte order of this machine.
TEST(Safetensors, NumbersAreLittleEndian) {
  const std::string bytes = SafetensorsBytes(
      R"({"f":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("i":{"dtype":"I64","shape":[1],"data_offsets":[8,16]},)"
      R"("h":{"dtype":"BF16","shape":[1],"data_offsets":[16,18]}})",
      std::string("\0\0\x80\x3f\0\0\0\xc0"
                  "\x2\x1\0\0\0\0\0\0\x40\x3f",
                  18));
  const std::string path = Path("order.safetensors");
  WriteBytes(path, bytes);
  const SafetensorsFile file = ReadSafetensors(path);
  const auto at = [&](const char* name, void* to, size_t size) {
    std::memcpy(to, file.tensors.at(name).data, size);
  };
  float f[2];
  int64_t i;
  uint16_t h;
  at("f", f, sizeof(f));
  at("i", &i, sizeof(i));
  at("h", &h, sizeof(h));
  EXPECT_EQ(f[0], 1.0f);
  EXPECT_EQ(f[1], -2.0f);
  EXPECT_EQ(i, 258);
  EXPECT_EQ(h, 0x3f40);

  const std::string written = Path("written.safetensors");
  WriteSafetensors(written, {{"f", DType::kF32, {2}, f}}, {});
  std::ifstream stream(written, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(stream)),
                        std::istreambuf_iterator<char>());
  ASSERT_GT(all.size(), 16u);
  EXPECT_EQ(static_cast<size_t>(static_cast<unsigned char>(all[0])),
            all.size() - 16);
  EXPECT_EQ(all.substr(1, 7), std::string(7, '\0'));
  EXPECT_EQ(all.substr(all.size() - 8), bytes.substr(bytes.size() - 18, 8));
}

Case SmallCase() {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.nq = 20;
  o.nk = 30;
  o.head_dim = o.value_dim = 16;
  Case c = Generate(o);
  AddAnswers(&c, 1);
  return c;
}

CaseReport Judged(const Case& c) {
  CheckOptions options;
  options.threads = 1;
  return Check(c, options);
}

TEST(Cases, ComeBackAsTheyWereWritten) {
  const std::string path = Path("case.safetensors");
  Case c = SmallCase();
  c.options.causal = Causal::kBottomRight;
  c.options.window_left = 3;
  c.options.precision = Products::kTF32;
  WriteCases(path, {c});
  const std::vector<Case> cases = ReadCases(path);
  ASSERT_EQ(cases.size(), 1u);
  EXPECT_EQ(cases[0].name, "");
  EXPECT_EQ(cases[0].tensors.size(), c.tensors.size());
  EXPECT_EQ(WriteOptions(cases[0].options), WriteOptions(c.options));
  ReadOptionsOfFile overrides;
  overrides.overrides = R"({"window": [null, 2], "causal": null})";
  const Case other = ReadCases(path, overrides)[0];
  EXPECT_EQ(other.options.window_left, -1);
  EXPECT_EQ(other.options.window_right, 2);
  EXPECT_EQ(other.options.causal, Causal::kNone);
}

TEST(Cases, OtherNamesAreUnderstood) {
  EXPECT_EQ(CanonicalName("grad_query"), "dq");
  EXPECT_EQ(CanonicalName("softmax_lse"), "lse");
  EXPECT_EQ(CanonicalName("Query"), "q");
  EXPECT_EQ(CanonicalName("weights"), "");
  const std::string path = Path("names.safetensors");
  const Case c = SmallCase();
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, array] : c.tensors) {
    tensors.push_back({"case/" + (name == "q" ? "my_q" : name), array.dtype,
                       array.shape, array.data});
  }
  WriteSafetensors(path, tensors, {});
  EXPECT_NE(ErrorOf([&] { Judged(ReadCases(path)[0]); }).find("tensor q"),
            std::string::npos);
  ReadOptionsOfFile options;
  options.names["q"] = "my_q";
  const Case mapped = ReadCases(path, options)[0];
  EXPECT_EQ(mapped.name, "case");
  EXPECT_TRUE(Judged(mapped).pass);
  options.names["k"] = "nowhere";
  EXPECT_NE(ErrorOf([&] { ReadCases(path, options); }).find("nowhere"),
            std::string::npos);
}

TEST(Cases, WhatDoesNotFitIsNamed) {
  const auto error_with = [](const std::string& options) {
    Case c = SmallCase();
    return ErrorOf([&] {
      ReadOptions(options, "", &c.options);
      Judged(c);
    });
  };
  EXPECT_EQ(error_with("{}"), "");
  for (const char* options :
       {R"({"causal": "left"})", R"({"window": [1]})", R"({"window": [-2, 0]})",
        R"({"scale": "x"})", R"({"softcap": -1})", R"({"dropout_p": 1})",
        R"({"dropout_p": 0.1})", R"({"lse_base": 10})",
        R"({"precision": "f8"})", R"({"layout": "bdsh"})",
        R"({"layout": "bshd"})", R"({"layout": "thd"})", "[]", "{"}) {
    EXPECT_NE(error_with(options), "") << options;
  }
  for (const char* name : {"q", "k", "v"}) {
    Case c = SmallCase();
    c.tensors.erase(name);
    EXPECT_NE(ErrorOf([&] { Judged(c); }).find(name), std::string::npos);
  }
  // A dbias of another shape than bias's.
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.bias = {1, 1, 128, 128};
  Case c = Generate(o);
  AddAnswers(&c, 1);
  void* data = nullptr;
  c.tensors["dbias"] = MakeArray(DType::kBF16, {1, 2, 128, 128}, &data);
  EXPECT_NE(ErrorOf([&] { Judged(c); }).find("dbias"), std::string::npos);
}

TEST(Cases, WhatIsMissingIsNotChecked) {
  Case c = SmallCase();
  c.tensors.erase("lse");
  c.tensors.erase("dk");
  const CaseReport report = Judged(c);
  EXPECT_TRUE(report.pass);
  EXPECT_EQ(report.unchecked, (std::vector<std::string>{"lse", "dk"}));
  for (const TensorVerdict& t : report.tensors) EXPECT_FALSE(t.own.has_value());
  for (const char* name : {"out", "dq", "dv"}) c.tensors.erase(name);
  EXPECT_NE(ErrorOf([&] { Judged(c); }), "");
}

TEST(Report, HasTheKeysThatItPromises) {
  Case c = SmallCase();
  const CaseReport good = Judged(c);
  void* data = nullptr;
  const Array dq = *c.Find("dq");
  c.tensors["dq"] = MakeArray(dq.dtype, dq.shape, &data);
  std::memcpy(data, dq.data, static_cast<size_t>(dq.elements()) * 2);
  static_cast<uint16_t*>(data)[7] = 0x7FC0;  // NaN
  c.name = "bad";
  const CaseReport bad = Judged(c);
  EXPECT_TRUE(good.pass);
  EXPECT_FALSE(bad.pass);
  const auto json = nlohmann::json::parse(ReportJson({good, bad}));
  ASSERT_EQ(json.at("cases").size(), 2u);
  EXPECT_EQ(json["cases"][0]["name"], "");
  EXPECT_EQ(json["cases"][0]["verdict"], "pass");
  EXPECT_EQ(json["cases"][1]["verdict"], "fail");
  EXPECT_TRUE(json["cases"][0]["unchecked"].is_array());
  EXPECT_TRUE(json["cases"][0]["diagnosis"].is_array());
  for (const auto& tensor : json["cases"][1]["tensors"]) {
    for (const char* key : {"name", "verdict", "relative_l2", "bound",
                            "twin_relative_l2", "worst", "own"}) {
      EXPECT_TRUE(tensor.contains(key)) << key;
    }
    if (tensor["name"] != "dq") continue;
    EXPECT_EQ(tensor["verdict"], "fail");
    EXPECT_EQ(tensor["own"], "fail");
    EXPECT_EQ(tensor["worst"]["index"], (std::vector<int64_t>{0, 0, 0, 7}));
    EXPECT_TRUE(tensor["worst"]["got"].is_null());
  }
}

TEST(Cases, TensorsOfUnknownNamesAreListed) {
  Case c = SmallCase();
  c.tensors["gq"] = *c.Find("dq");
  c.tensors.erase("dq");
  const std::string path = Path("unread.safetensors");
  WriteCases(path, {c});
  const CaseReport report = Judged(ReadCases(path).front());
  EXPECT_EQ(report.unread, std::vector<std::string>{"gq"});
  EXPECT_NE(ReportText(report).find("gq"), std::string::npos);
}

TEST(Runs, ThatMoveAreNamed) {
  const Case c = SmallCase();
  CaseReport report = Judged(c);
  CompareRuns(c, c, "again", &report);
  EXPECT_TRUE(report.pass);
  Case moved = c;
  void* data = nullptr;
  const Array dk = *c.Find("dk");
  moved.tensors["dk"] = MakeArray(dk.dtype, dk.shape, &data);
  std::memcpy(data, dk.data, static_cast<size_t>(dk.elements()) * 2);
  static_cast<uint16_t*>(data)[0] ^= 1;
  CompareRuns(c, moved, "again", &report);
  EXPECT_FALSE(report.pass);
  ASSERT_EQ(report.moved.size(), 1u);
  EXPECT_NE(report.moved[0].find("dk"), std::string::npos);
}

}  // namespace
}  // namespace fa2::verify
