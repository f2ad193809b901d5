// SPDX-License-Identifier: Apache-2.0

// fa2 bench, compare and info.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/tools/run_command.h"

namespace fa2::test {
namespace {

using Json = nlohmann::json;

std::string Result(const std::string& name, double rate,
                   const std::string& c = "forward/f32/H1/N64") {
  Json rounds = Json::array();
  for (int n = 0; n < 9; ++n) rounds.push_back(rate * (1.0 + 0.001 * n));
  const Json json = {
      {"cpu", "one"},
      {"revision", "abc"},
      {"cases",
       {{{"name", c}, {"rounds", rounds}, {"peak_rounds", {100.0, 100.0}}}}}};
  const std::string path = TestPath(name + ".json");
  WriteBytes(path, json.dump());
  return path;
}

TEST(Bench, SharesOfTheMachine) {
  const std::string json = TestPath("a.json"), html = TestPath("a.html");
  const CommandResult result =
      RunFa2({"bench", "forward/f32/H1/N64/D16", "1,1,1,32,48,16", "--rounds",
              "4", "--min-time", "0", "--json", json, "--html", html});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const Json root = Json::parse(ReadText(json));
  for (const char* key : {"fa2", "revision", "cpu", "cores"}) {
    EXPECT_TRUE(root.contains(key)) << key;
  }
  EXPECT_FALSE(root["machine"]["peaks"].empty());
  EXPECT_GT(root["machine"]["memory"][0]["triad_gbps"].get<double>(), 0.0);
  ASSERT_EQ(root["cases"].size(), 2u);
  const Json& c = root["cases"][0];
  EXPECT_EQ(c["name"], "forward/f32/B1/H1/KV1/N64/D16/full/T1");
  EXPECT_EQ(c["rounds"].size(), 4u);
  EXPECT_NE(root["cases"][1]["name"].get<std::string>().find("/N32x48/D16"),
            std::string::npos);
  EXPECT_GT(c["gflops"].get<double>(), 0.0);
  // Four arrays of 64 x 16 and lse, once each.
  const double bytes = 4.0 * (4 * 64 * 16 + 64);
  EXPECT_NEAR(c["flops_per_byte"].get<double>(), 4.0 * 64 * 64 * 16 / bytes,
              1e-6);
  EXPECT_LE(c["limit_gflops"].get<double>(), c["peak_gflops"].get<double>());
  EXPECT_EQ(ReadText(html).rfind("<!doctype html>", 0), 0u);
  EXPECT_EQ(RunFa2({"compare", json, json}).exit_code, 0);
  EXPECT_TRUE(IsUsageError(RunFa2({"bench", "sideways"}), "sideways"));
  EXPECT_TRUE(IsUsageError(RunFa2({"bench", "1,1,1,8,8,16,8"}), "wide"));
  EXPECT_TRUE(IsUsageError(RunFa2({"bench", "--suite", "tiny"}), "tiny"));
  EXPECT_TRUE(IsUsageError(RunFa2({"bench", "--rounds", "0"}), "rounds"));
}

TEST(Compare, VerdictsAndExitCodes) {
  const std::string a = Result("a", 50.0), slow = Result("slow", 45.0),
                    fast = Result("fast", 60.0), near = Result("near", 49.9);
  const std::string json = TestPath("compared.json");
  const CommandResult slower = RunFa2({"compare", a, slow, "--json", json});
  EXPECT_EQ(slower.exit_code, 1);
  EXPECT_NE(slower.out.find("SLOWER"), std::string::npos);
  const Json root = Json::parse(ReadText(json));
  EXPECT_EQ(root["verdict"], "slower");
  EXPECT_NEAR(root["cases"][0]["ratio"].get<double>(), 0.9, 1e-3);
  EXPECT_LT(root["cases"][0]["interval"][1].get<double>(), 1.0);
  EXPECT_EQ(RunFa2({"compare", a, slow, "--threshold", "0.2"}).exit_code, 0);
  const CommandResult faster = RunFa2({"compare", a, fast});
  EXPECT_EQ(faster.exit_code, 0);
  EXPECT_NE(faster.out.find("faster"), std::string::npos);
  EXPECT_NE(RunFa2({"compare", a, near}).out.find("same"), std::string::npos);
}

TEST(Compare, FilesThatDoNotFit) {
  const std::string a = Result("a", 50.0);
  EXPECT_TRUE(IsUsageError(RunFa2({"compare", a, Result("b", 50.0, "another")}),
                           "b.json"));
  EXPECT_TRUE(IsUsageError(RunFa2({"compare", a, TestPath("none")}), "none"));
  const std::string broken = TestPath("broken.json");
  for (const char* text : {"", "[]", "{", "{\"cases\": 3}", "{\"cpu\": 1}"}) {
    WriteBytes(broken, text);
    EXPECT_TRUE(IsUsageError(RunFa2({"compare", a, broken}), "broken.json"));
  }
  EXPECT_EQ(RunFa2({"compare", a}).exit_code, 2);
}

TEST(Info, WhatTheMachineComputesWith) {
  const std::string json = TestPath("info.json");
  const CommandResult result = RunFa2({"info", "--json", json});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const Json root = Json::parse(ReadText(json));
  for (const char* key : {"version", "cpu", "target", "targets", "engine",
                          "engine_because", "threads", "pool", "cache_bytes"}) {
    EXPECT_TRUE(root.contains(key)) << key;
  }
}

}  // namespace
}  // namespace fa2::test
