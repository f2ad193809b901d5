// SPDX-License-Identifier: Apache-2.0
#include "tools/fa2/option_flags.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "src/verify/cases/error.h"

namespace fa2::tool {
namespace {

using Json = nlohmann::json;

struct Flag {
  const char* name;
  const char* what;
};

constexpr Flag kFlags[] = {
    {"layout", "bhsd, bshd or thd"},
    {"causal", "none, top_left or bottom_right"},
    {"window", "left,right; -1: unbounded"},
    {"scale", "Of the scores; 1 / sqrt(D) without it"},
    {"softcap", "0: none"},
    {"dropout_p", "Probability of dropping"},
    {"philox_seed", "Of dropout's mask"},
    {"philox_offset", "Of dropout's mask"},
    {"lse_base", "e or 2"},
    {"precision", "bf16, f16, f32, tf32 or f64: what products are rounded to"}};

[[noreturn]] void Wrong(const std::string& name, const std::string& value,
                        const char* must) {
  throw verify::Error("--" + name + " is " + value + ", it must be " + must);
}

// "null", "-1" and "none" are unbounded.
Json Window(const std::string& value) {
  Json sides = Json::array();
  std::string text = value;
  for (char& c : text) {
    if (c == '[' || c == ']') c = ' ';
  }
  std::istringstream stream(text);
  std::string side;
  while (std::getline(stream, side, ',')) {
    const size_t begin = side.find_first_not_of(' ');
    const size_t end = side.find_last_not_of(' ');
    side =
        begin == std::string::npos ? "" : side.substr(begin, end - begin + 1);
    if (side == "null" || side == "none") {
      sides.push_back(nullptr);
      continue;
    }
    const Json number = Json::parse(side, nullptr, false);
    if (!number.is_number_integer()) Wrong("window", value, "left,right");
    sides.push_back(number);
  }
  if (sides.size() != 2) Wrong("window", value, "left,right");
  return sides;
}

}  // namespace

void OptionFlags::AddTo(CLI::App* app) {
  for (const Flag& flag : kFlags) {
    const std::string name = flag.name;
    std::string names = "--" + name;
    std::string dashed = name;
    for (char& c : dashed) c = c == '_' ? '-' : c;
    if (dashed != name) names += ",--" + dashed;
    app->add_option_function<std::string>(
        names,
        [this, name](const std::string& value) { values_[name] = value; },
        flag.what);
  }
}

std::string OptionFlags::Json() const {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [name, value] : values_) {
    if (name == "window") {
      json[name] = Window(value);
    } else if (name == "layout" || name == "precision" || name == "lse_base") {
      json[name] = value;
    } else if (name == "causal") {
      json[name] = value == "none" || value == "null" ? nlohmann::json(nullptr)
                                                      : nlohmann::json(value);
    } else {
      const auto number = nlohmann::json::parse(value, nullptr, false);
      if (!number.is_number()) Wrong(name, value, "a number");
      json[name] = number;
    }
  }
  return json.dump();
}

}  // namespace fa2::tool
