// SPDX-License-Identifier: Apache-2.0
#include "src/verify/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace fa2::verify {
namespace {

using Json = nlohmann::ordered_json;

// NaN and infinity are no JSON.
Json Number(double value) {
  if (!std::isfinite(value)) return nullptr;
  return value;
}

Json Number(const std::optional<double>& value) {
  return value ? Number(*value) : Json(nullptr);
}

Json TensorJson(const TensorVerdict& t) {
  Json json;
  json["name"] = t.name;
  json["verdict"] = t.pass ? "pass" : "fail";
  json["relative_l2"] = Number(t.relative_l2);
  json["bound"] = Number(t.bound);
  json["twin_relative_l2"] = Number(t.twin_relative_l2);
  json["worst"] = {{"index", t.worst.index},
                   {"got", Number(t.worst.got)},
                   {"expected", Number(t.worst.expected)}};
  json["own"] = nullptr;
  if (t.own) json["own"] = *t.own ? "pass" : "fail";
  json["own_relative_l2"] = Number(t.own_relative_l2);
  json["cosine"] = Number(t.cosine);
  json["not_finite"] = t.bad;
  json["findings"] = t.findings;
  return json;
}

std::string Text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%9.2e", value);
  return text;
}

std::string Text(const std::vector<int64_t>& index) {
  std::string text = "[";
  for (size_t i = 0; i < index.size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(index[i]);
  }
  return text + "]";
}

std::string Padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string Row(const TensorVerdict& t) {
  std::string row =
      "  " + Padded(t.name, 13) + (t.pass ? "pass" : "FAIL") + "  ";
  row += t.relative_l2 ? Text(*t.relative_l2) : "  0 = 0  ";
  row += "  " + Text(t.bound) + "  " + Text(t.twin_relative_l2) + "  ";
  row += Padded(!t.own ? "-" : *t.own ? "pass" : "FAIL", 6);
  char worst[96];
  std::snprintf(worst, sizeof(worst), "%s: %.6g, must be %.6g",
                Text(t.worst.index).c_str(), t.worst.got, t.worst.expected);
  return row + worst + "\n";
}

std::string Joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

}  // namespace

std::string ReportJson(const std::vector<CaseReport>& reports) {
  Json cases = Json::array();
  for (const CaseReport& report : reports) {
    Json json;
    json["name"] = report.name;
    json["verdict"] = report.pass ? "pass" : "fail";
    json["what"] = report.what;
    json["precision"] = NameOf(report.products);
    json["tensors"] = Json::array();
    for (const TensorVerdict& t : report.tensors) {
      json["tensors"].push_back(TensorJson(t));
    }
    json["unchecked"] = report.unchecked;
    json["diagnosis"] = Json::array();
    for (const Diagnosis& d : report.diagnosis) {
      json["diagnosis"].push_back(
          {{"id", d.id}, {"sentence", d.sentence}, {"tensors", d.tensors}});
    }
    json["moved"] = report.moved;
    cases.push_back(json);
  }
  Json root;
  root["cases"] = cases;
  // Names come from files: what is no UTF-8 is replaced.
  return root.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ReportText(const CaseReport& report) {
  std::string text = report.pass ? "PASS  " : "FAIL  ";
  if (!report.name.empty()) text += report.name + "  ";
  text += report.what + ", products in " + NameOf(report.products) + "\n";
  text +=
      "  tensor       verdict relative L2    bound      twin   own   worst\n";
  for (const TensorVerdict& t : report.tensors) text += Row(t);
  for (const TensorVerdict& t : report.tensors) {
    if (t.bad > 0) {
      text += "  " + t.name + ": " + std::to_string(t.bad) +
              " elements are NaN or infinite where the answer is not, or the "
              "reverse\n";
    }
    for (const std::string& finding : t.findings) {
      text += "  " + t.name + ": " + finding + "\n";
    }
  }
  for (const std::string& moved : report.moved) text += "  " + moved + "\n";
  if (!report.unchecked.empty()) {
    text +=
        "  not checked, since the file has none: " + Joined(report.unchecked) +
        "\n";
  }
  for (const Diagnosis& d : report.diagnosis) {
    text +=
        "  => " + d.id + " (" + Joined(d.tensors) + "): " + d.sentence + "\n";
  }
  if (!report.pass && report.diagnosis.empty() && report.moved.empty()) {
    text += "  no known mistake alone explains it\n";
  }
  return text;
}

}  // namespace fa2::verify
