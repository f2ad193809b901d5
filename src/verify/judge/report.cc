// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "src/verify/judge/report_json.h"

namespace fa2::verify {
namespace {

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
  nlohmann::ordered_json root;
  root["cases"] = nlohmann::ordered_json::array();
  for (const CaseReport& report : reports) {
    root["cases"].push_back(CaseJson(report));
  }
  // Names come from files: what is no UTF-8 is replaced.
  return root.dump(1, ' ', false,
                   nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
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
  if (!report.style.empty()) {
    text += "  right for a kernel that rounds " + report.style +
            " before the scores\n";
  }
  for (const std::string& moved : report.moved) text += "  " + moved + "\n";
  if (!report.unchecked.empty()) {
    text +=
        "  not checked, since the file has none: " + Joined(report.unchecked) +
        "\n";
    // It may be there, by a name of its own.
    if (!report.unread.empty()) {
      text += "  left alone, since their names say nothing (--map NAME=...): " +
              Joined(report.unread) + "\n";
    }
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
