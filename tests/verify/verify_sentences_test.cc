// SPDX-License-Identifier: Apache-2.0

// What a case, its options and its file may say: each wrong word is named in a
// sentence, each right one is understood.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "src/verify/cases/case_file.h"
#include "src/verify/cases/error.h"
#include "src/verify/cases/safetensors.h"
#include "src/verify/judge/check.h"
#include "src/verify/model/generate.h"
#include "src/verify/model/problem.h"
#include "tests/verify/safetensors_bytes.h"

namespace fa2::verify {
namespace {

std::string Path(const std::string& name) { return testing::TempDir() + name; }

template <class F>
std::string ErrorOf(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void ExpectWords(const std::string& error, const std::string& words) {
  EXPECT_NE(error.find(words), std::string::npos)
      << "no '" << words << "' in: " << error;
}

Options Read(const std::string& json) {
  Options options;
  ReadOptions(json, "", &options);
  return options;
}

TEST(Options, WrongValuesAreNamed) {
  struct Wrong {
    const char* json;
    const char* words;
  };
  for (const Wrong& wrong : std::vector<Wrong>{
           {R"({"layout": 3})", "layout is 3, it must be \"bhsd\""},
           {R"({"causal": true})", "causal is true, it must be \"none\""},
           {R"({"window": 5})", "window is 5, it must be [left, right]"},
           {R"({"window": [1, 2, 3]})", "it must be [left, right]"},
           {R"({"window": [1.5, 2]})", "window is 1.5, it must be whole"},
           {R"({"window": [0, -3]})", "window is -3, it must be at least 0"},
           {R"({"scale": "wide"})", "scale is \"wide\", it must be a number"},
           {R"({"scale": 1e999})", ""},
           {R"({"softcap": "x"})", "softcap is \"x\", it must be a number"},
           {R"({"dropout_p": -0.5})", "dropout_p is -0.5"},
           {R"({"philox_seed": 1.5})", "philox_seed is 1.5"},
           {R"({"philox_offset": "x"})", "philox_offset is \"x\""},
           {R"({"lse_base": 3})", "lse_base is 3, it must be \"e\" or 2"},
           {R"({"precision": 8})", "precision is 8, it must be \"bf16\""},
           {R"({"custom_mask_type": 3})", "it must be 0, 1 or 2"},
           {"7", "no JSON object"}}) {
    const std::string error = ErrorOf([&] { Read(wrong.json); });
    EXPECT_NE(error, "") << wrong.json;
    ExpectWords(error, wrong.words);
  }
}

TEST(Options, NullMeansWhatIsUsual) {
  const Options options = Read(
      R"({"window": null, "scale": null, "softcap": null, "dropout_p": null,
          "philox_seed": null, "philox_offset": null, "precision": null,
          "causal": false, "speed": "fast"})");
  EXPECT_EQ(WriteOptions(options), WriteOptions(Options()));
}

TEST(Options, WordsAreReadWhateverTheirCaseAndForm) {
  EXPECT_EQ(Read(R"({"layout": "BSHD"})").layout, Layout::kBshd);
  EXPECT_EQ(Read(R"({"precision": "TF32"})").precision, Products::kTF32);
  EXPECT_TRUE(Read(R"({"lse_base": "2"})").lse_base2);
  EXPECT_TRUE(Read(R"({"lse_base": 2})").lse_base2);
  EXPECT_FALSE(Read(R"({"lse_base": "e"})").lse_base2);
  EXPECT_EQ(Read(R"({"window": [-1, null]})").window_left, -1);
  // Frameworks print seeds signed.
  EXPECT_EQ(*Read(R"({"philox_seed": -1})").philox_seed, ~uint64_t{0});
}

TEST(Options, ComeBackAsTheyWereWritten) {
  Options options;
  options.layout = Layout::kThd;
  options.causal = Causal::kTopLeft;
  options.window_left = 4;
  options.window_right = 0;
  options.scale = 0.5;
  options.softcap = 30.0;
  options.dropout_p = 0.25;
  options.philox_seed = 7;
  options.philox_offset = 12;
  options.lse_base2 = true;
  options.precision = Products::kF64;
  const Options same = Read(WriteOptions(options));
  EXPECT_EQ(WriteOptions(same), WriteOptions(options));
  EXPECT_EQ(same.scale, 0.5);
  EXPECT_EQ(same.philox_offset, 12u);
  EXPECT_EQ(same.precision, Products::kF64);
}

// The memory-efficient CUDA kernel's own names.
TEST(Options, OfTheMemoryEfficientKernel) {
  Options options = Read(R"({"custom_mask_type": 0})");
  EXPECT_EQ(options.causal, Causal::kNone);
  EXPECT_EQ(options.layout, Layout::kBshd);
  options = Read(R"({"custom_mask_type": 1, "window_size": 5})");
  EXPECT_EQ(options.causal, Causal::kTopLeft);
  EXPECT_EQ(options.window_left, 4);
  for (const char* none : {"0", "null"}) {
    options = Read(std::string(R"({"custom_mask_type": 2, "layout": "bhsd",)") +
                   R"("window_size": )" + none + "}");
    EXPECT_EQ(options.causal, Causal::kBottomRight);
    EXPECT_EQ(options.layout, Layout::kBhsd);
    EXPECT_EQ(options.window_left, -1);
  }
}

TEST(Safetensors, HeadersThatDoNotFitAreNamed) {
  const std::string path = Path("header.safetensors");
  const auto error_of = [&](const std::string& entry, size_t data) {
    const std::string header = "{\"q\":{\"dtype\":\"F32\"," + entry + "}}";
    std::ofstream(path, std::ios::binary)
        << SafetensorsBytes(header, std::string(data, '\0'));
    return ErrorOf([&] { ReadSafetensors(path); });
  };
  ExpectWords(error_of(R"("shape":[2],"data_offsets":7)", 8),
              "tensor q has no proper shape or data_offsets");
  ExpectWords(error_of(R"("shape":[2],"data_offsets":[0,4,8])", 8),
              "tensor q has no proper shape or data_offsets");
  std::string many = "1";
  for (int n = 0; n < 32; ++n) many += ",1";
  ExpectWords(error_of("\"shape\":[" + many + "],\"data_offsets\":[0,4]", 4),
              "tensor q has no proper shape or data_offsets");
  ExpectWords(
      error_of(R"("shape":[18446744073709551615],"data_offsets":[0,4])", 4),
      "tensor q has a size past 2^63");
  ExpectWords(error_of(R"("shape":[3],"data_offsets":[0,8])", 8),
              "tensor q is larger than the file");
  ExpectWords(error_of(R"("shape":[2],"data_offsets":[0,-8])", 8),
              "not a whole number");
  // A size of 0 makes whatever stands beside it nothing.
  EXPECT_EQ(
      error_of(R"("shape":[0,9223372036854775807],"data_offsets":[4,4])", 4),
      "");
  // More tensors than bytes: they must share some.
  ExpectWords(
      error_of(R"("shape":[2],"data_offsets":[0,8]},"k":{"dtype":"F32",)"
               R"("shape":[1],"data_offsets":[4,8])",
               8),
      "shares bytes with another");
  // A header longer than the format allows.
  std::string huge(9, '\x01');
  std::ofstream(path, std::ios::binary) << huge;
  ExpectWords(ErrorOf([&] { ReadSafetensors(path); }), "header is cut off");
}

TEST(Safetensors, WhatCannotBeWrittenIsNamed) {
  const std::vector<uint8_t> data(4);
  ExpectWords(ErrorOf([&] {
                WriteSafetensors(Path("no/such/folder.safetensors"),
                                 {{"q", DType::kF32, {1}, data.data()}}, {});
              }),
              "cannot be written");
  ExpectWords(ErrorOf([&] {
                WriteSafetensors(Path("type.safetensors"),
                                 {{"q", DType::kU8, {4}, data.data()}}, {});
              }),
              "a dtype that safetensors lacks");
}

Case SmallCase() {
  GenerateOptions o;
  o.heads = 4;
  o.kv_heads = 2;
  o.nq = 20;
  o.nk = 30;
  o.head_dim = o.value_dim = 16;
  Case c = Generate(o);
  AddAnswers(&c, 1);
  return c;
}

Case PackedCase() {
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.head_dim = o.value_dim = 16;
  o.lengths_q = {3, 7};
  o.lengths_k = {4, 10};
  Case c = Generate(o);
  AddAnswers(&c, 1);
  return c;
}

SafetensorsTensor Named(const std::string& name, const Array& array) {
  return {name, array.dtype, array.shape, array.data};
}

TEST(Files, TwoNamesOfOneTensor) {
  const Case c = SmallCase();
  const std::string path = Path("synonyms.safetensors");
  // The canonical name wins, whichever comes first.
  for (const char* synonym : {"a/QUERY", "a/query"}) {
    WriteSafetensors(path,
                     {Named("a/q", *c.Find("q")), Named(synonym, *c.Find("k")),
                      Named("a/k", *c.Find("k"))},
                     {});
    EXPECT_EQ(ReadCases(path)[0].Find("q")->shape, c.Find("q")->shape);
  }
  WriteSafetensors(
      path, {Named("query", *c.Find("q")), Named("queries", *c.Find("q"))}, {});
  ExpectWords(ErrorOf([&] { ReadCases(path); }),
              "tensors queries and query both mean q; say which with --map");
  // A mapped name stands alone.
  ReadOptionsOfFile options;
  options.names["q"] = "queries";
  EXPECT_NE(ReadCases(path, options)[0].Find("q"), nullptr);
  // Or the whole name, with what stands before the slash.
  WriteSafetensors(path, {Named("model/x/mine", *c.Find("q"))}, {});
  options.names["q"] = "model/x/mine";
  EXPECT_EQ(ReadCases(path, options)[0].name, "");
}

TEST(Files, DTypesThatAreNotRead) {
  const std::string path = Path("dtype.safetensors");
  const std::string header =
      R"({"a/q":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}})";
  std::ofstream(path, std::ios::binary) << SafetensorsBytes(header, "xx");
  ExpectWords(ErrorOf([&] { ReadCases(path); }),
              "tensor a/q has dtype I8, it must be F32");
}

TEST(Files, CasesHaveTheirOwnOptionsAndNames) {
  const Case c = SmallCase();
  const std::string path = Path("several.safetensors");
  const auto write = [&](const std::map<std::string, std::string>& metadata) {
    WriteSafetensors(
        path,
        {Named("one/q", *c.Find("q")), Named("two/q", *c.Find("q")),
         Named("two/weights", *c.Find("q")),
         Named("three/weights", *c.Find("q"))},
        metadata);
    return ReadCases(path);
  };
  std::vector<Case> cases =
      write({{"one", R"({"softcap": 3})"}, {"fa2", R"({"softcap": 5})"}});
  ASSERT_EQ(cases.size(), 2u);
  EXPECT_EQ(cases[0].options.softcap, 3.0);
  // "fa2" is of a file of one case.
  EXPECT_EQ(cases[1].options.softcap, 0.0);
  EXPECT_EQ(cases[1].unread, std::vector<std::string>{"two/weights"});
  ExpectWords(ErrorOf([&] {
                write({{"two", R"({"softcap": -3})"}});
              }),
              "two: option softcap is -3");
}

TEST(Files, PrefixSumsOfTheOptions) {
  const Case c = PackedCase();
  const std::string path = Path("sums.safetensors");
  const auto read = [&](const std::string& sums) {
    std::vector<SafetensorsTensor> tensors;
    for (const char* name : {"q", "k", "v", "out"}) {
      tensors.push_back(Named(name, *c.Find(name)));
    }
    WriteSafetensors(path, tensors,
                     {{"fa2", "{\"layout\": \"thd\", " + sums + "}"}});
    return ReadCases(path)[0];
  };
  const Case lists = read(R"("cu_q": [0, 3, 10], "cu_seqlens_k": [0, 4, 14])");
  EXPECT_TRUE(Check(lists, {}).pass);
  EXPECT_EQ(lists.Find("cu_seqlens_q")->shape, std::vector<int64_t>{3});
  ExpectWords(ErrorOf([&] { read(R"("cu_q": [0, 3.5])"); }),
              "option cu_q holds 3.5, it must hold whole numbers");
  EXPECT_EQ(read(R"("cu_q": "none")").Find("cu_seqlens_q"), nullptr);
}

TEST(Cases, OutputsOfAnotherFile) {
  Case inputs = SmallCase(), outputs;
  outputs.tensors["dq"] = *inputs.Find("dq");
  outputs.unread = {"weights"};
  inputs.tensors.erase("lse");
  const Case both = Combine(inputs, outputs);
  EXPECT_NE(both.Find("out"), nullptr);
  EXPECT_EQ(both.Find("lse"), nullptr);
  EXPECT_EQ(both.Find("dk"), nullptr);
  EXPECT_EQ(both.unread, outputs.unread);
}

struct WrongCase {
  const char* words;
  std::function<void(Case*)> change;
};

// The tensor, in the case, is now of this shape (of as many elements) or dtype.
std::function<void(Case*)> Shape(const char* name,
                                 const std::vector<int64_t>& shape) {
  return [=](Case* c) { c->tensors[name].shape = shape; };
}
std::function<void(Case*)> Type(const char* name, DType dtype) {
  return [=](Case* c) { c->tensors[name].dtype = dtype; };
}

void ExpectWrong(const Case& good, const std::vector<WrongCase>& wrong) {
  EXPECT_EQ(ErrorOf([&] { MakeProblem(good); }), "");
  for (const WrongCase& w : wrong) {
    Case c = good;
    c.name = "here";
    w.change(&c);
    const std::string error = ErrorOf([&] { MakeProblem(c); });
    EXPECT_EQ(error.rfind("here: ", 0), 0u) << w.words << " is: " << error;
    ExpectWords(error, w.words);
  }
}

TEST(Cases, TensorsThatDoNotFitAreNamed) {
  const std::string bhsd = "it must be [B, H, N, D]";
  ExpectWrong(
      SmallCase(),
      {{"tensor q has dtype i32", Type("q", DType::kI32)},
       {"tensor k has dtype bool", Type("k", DType::kBool)},
       {"it must be [B, H, N, D]", Shape("q", {4 * 20 * 16})},
       {"it must be [B, H, N, D]", Shape("q", {1, 1, 4, 20, 16})},
       {"tensor q, k or v is empty", Shape("q", {1, 4, 0, 16})},
       {"tensor q, k or v is empty", Shape("q", {0, 4, 20, 16})},
       {"tensor q, k or v is empty", Shape("k", {1, 2, 0, 16})},
       {"tensor q, k or v is empty", Shape("k", {1, 0, 30, 16})},
       {"tensor q, k or v is empty", Shape("v", {1, 2, 30, 0})},
       {"a number of heads that divides q's, 4", Shape("k", {1, 3, 20, 16})},
       {"[B, H, N, D] = [1, 2, 30, 16] in layout bhsd",
        Shape("k", {1, 2, 30, 8})},
       {"tensor dout has shape", Shape("dout", {1, 4, 10, 16})},
       {"tensor out has shape", Shape("out", {1, 4, 10, 16})},
       {"tensor lse has shape [80], it must be [B, H, N] = [1, 4, 20]",
        Shape("lse", {80})},
       {"tensor lse has shape [1, 1, 1, 4, 20]",
        Shape("lse", {1, 1, 1, 4, 20})},
       {"tensor lse has dtype i64", Type("lse", DType::kI64)},
       {"tensor cu_seqlens_q is missing, which layout thd needs",
        [](Case* c) {
          c->options.layout = Layout::kThd;
          for (auto& [name, array] : c->tensors) {
            if (array.shape.size() == 4) {
              array.shape = {array.shape[2], array.shape[1], array.shape[3]};
            }
          }
        }},
       {"dropout_p is 0.5", [](Case* c) { c->options.dropout_p = 0.5; }}});
  // Both layouts of lse.
  Case c = SmallCase();
  c.tensors["lse"].shape = {1, 4, 20, 1};
  EXPECT_TRUE(Check(c, {}).pass);
  c.tensors["lse"].shape = {4, 20};
  EXPECT_TRUE(Check(c, {}).pass);
}

TEST(Cases, OptionalTensorsThatDoNotFitAreNamed) {
  GenerateOptions o;
  o.batch = 2;
  o.heads = o.kv_heads = 2;
  o.nq = 8;
  o.nk = 12;
  o.head_dim = o.value_dim = 16;
  o.bias = {2, 2, 8, 12};
  o.sinks = o.alibi = o.dlse = true;
  Case c = Generate(o);
  AddAnswers(&c, 1);
  ExpectWrong(
      c,
      {{"tensor bias has dtype i64", Type("bias", DType::kI64)},
       {"tensor bias has dtype i32", Type("bias", DType::kI32)},
       {"[B or 1, H or 1, Nq or 1, Nk or 1]", Shape("bias", {2, 2, 8, 6})},
       {"[B or 1, H or 1, Nq or 1, Nk or 1]", Shape("bias", {1, 2, 2, 8, 12})},
       {"tensor dbias has dtype bool", Type("dbias", DType::kBool)},
       {"summed over what bias broadcasts", Shape("dbias", {1, 2, 8, 12})},
       {"tensor sinks has shape [3], it must be [H]", Shape("sinks", {3})},
       {"tensor sinks has dtype u8", Type("sinks", DType::kU8)},
       {"[H] or [B, H]", Shape("alibi_slopes", {3})},
       {"that of alibi_slopes", Shape("dalibi_slopes", {2, 2})},
       {"[B, H, N] = [2, 2, 8]", Shape("dlse", {2, 2, 4})},
       {"there is nothing to check",
        [](Case* c) {
          for (const char* name : {"out", "lse", "dq", "dk", "dv", "dbias",
                                   "dsinks", "dalibi_slopes"}) {
            c->tensors.erase(name);
          }
        }},
       {"that needs no dout, which is missing", [](Case* c) {
          for (const char* name : {"out", "lse", "dout"}) {
            c->tensors.erase(name);
          }
        }}});
}

TEST(Cases, PackedSequencesThatDoNotFitAreNamed) {
  const auto sums = [](const char* name, const std::vector<int64_t>& values,
                       DType dtype = DType::kI64) {
    return [=](Case* c) {
      void* data = nullptr;
      Array array =
          MakeArray(DType::kI64, {static_cast<int64_t>(values.size())}, &data);
      std::memcpy(data, values.data(), values.size() * sizeof(int64_t));
      array.dtype = dtype;
      c->tensors[name] = array;
    };
  };
  ExpectWrong(
      PackedCase(),
      {{"must rise from 0", sums("cu_seqlens_q", {0})},
       {"must rise from 0", sums("cu_seqlens_q", {1, 3, 10})},
       {"to at most the number of rows, 10", sums("cu_seqlens_q", {0, 3, 11})},
       {"must rise from 0", sums("cu_seqlens_q", {0, 4, 3})},
       {"has dtype f64, it must be i32 or i64",
        sums("cu_seqlens_q", {0, 3, 10}, DType::kF64)},
       {"cu_seqlens_k has 2 elements, it must have as many as",
        sums("cu_seqlens_k", {0, 14})},
       {"tensor cu_seqlens_k is missing",
        [](Case* c) { c->tensors.erase("cu_seqlens_k"); }},
       {"tensor cu_seqlens_q is missing",
        [](Case* c) {
          c->tensors.erase("cu_seqlens_q");
          c->options.layout = Layout::kBshd;
        }},
       {"of batch 1, since it is packed",
        [](Case* c) {
          c->options.layout = Layout::kBshd;
          for (auto& [name, array] : c->tensors) {
            if (array.shape.size() != 3) continue;
            array.shape = {2, array.shape[0] / 2, 2, 16};
          }
        }},
       {"[total, H, D]", Shape("q", {2, 5, 2, 16})},
       {"[H, total] of a packed case", Shape("lse", {10, 2})}});
  // Rows behind the last sequence: the kernels that answer refuse them.
  for (const char* name : {"", "here"}) {
    Case rest = PackedCase();
    rest.name = name;
    sums("cu_seqlens_q", {0, 3, 9})(&rest);
    const std::string error = ErrorOf([&] { Check(rest, {}); });
    ExpectWords(error, "cu_seqlens_q ends at 9; it must end at 10");
    EXPECT_EQ(error.rfind("here: ", 0) == 0, *name != '\0');
  }
  // The same sums for both where there are as many keys as queries.
  GenerateOptions o;
  o.heads = o.kv_heads = 2;
  o.head_dim = o.value_dim = 16;
  o.lengths_q = {3, 7};
  Case c = Generate(o);
  AddAnswers(&c, 1);
  c.tensors.erase("cu_seqlens_k");
  EXPECT_TRUE(Check(c, {}).pass);
}

TEST(Generate, SizesThatDoNotFitAreNamed) {
  const auto error_of = [](const std::function<void(GenerateOptions*)>& set) {
    GenerateOptions o;
    set(&o);
    return ErrorOf([&] { Generate(o); });
  };
  using O = GenerateOptions;
  ExpectWords(error_of([](O* o) { o->batch = 0; }), "batch is 0");
  ExpectWords(error_of([](O* o) { o->heads = -1; }), "heads is -1");
  ExpectWords(error_of([](O* o) { o->value_dim = 0; }), "value_dim is 0");
  ExpectWords(error_of([](O* o) { o->lengths_q = {3, 0}; }), "a length is 0");
  ExpectWords(error_of([](O* o) {
                o->lengths_q = {3};
                o->lengths_k = {-2};
              }),
              "a length is -2");
  ExpectWords(error_of([](O* o) { o->kv_heads = 3; }),
              "kv_heads is 3, it must divide heads, 4");
  ExpectWords(error_of([](O* o) { o->options.layout = Layout::kThd; }),
              "layout thd needs the sequences' lengths");
  ExpectWords(error_of([](O* o) {
                o->lengths_q = {3};
                o->lengths_k = {2, 1};
              }),
              "other numbers of lengths for q and for k");
  ExpectWords(error_of([](O* o) { o->nk = int64_t{1} << 40; }),
              "more than 1e11 elements");
  ExpectWords(error_of([](O* o) {
                o->bias = {1, 4, 128};
              }),
              "bias must be [B or 1, H or 1, Nq or 1, Nk or 1]");
  ExpectWords(error_of([](O* o) {
                o->bias = {1, 3, 128, 128};
              }),
              "bias must be [B or 1, H or 1, Nq or 1, Nk or 1]");
  ExpectWords(error_of([](O* o) { o->keep = true; }),
              "a mask of dropout needs dropout_p above 0");
  EXPECT_NE(ErrorOf([] { InputsNamed("zeros"); }), "");
}

}  // namespace
}  // namespace fa2::verify
