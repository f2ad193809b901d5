// SPDX-License-Identifier: Apache-2.0
#include "src/verify/judge/report_json.h"

#include <cmath>

namespace fa2::verify {
namespace {

using Json = nlohmann::ordered_json;

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
  json["tile_ratio"] = Number(t.tile_ratio);
  json["element_ratio"] = Number(t.element_ratio);
  json["cosine"] = Number(t.cosine);
  json["not_finite"] = t.bad;
  json["findings"] = t.findings;
  return json;
}

}  // namespace

// NaN and infinity are no JSON.
Json Number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

Json CaseJson(const CaseReport& report) {
  Json json;
  json["name"] = report.name;
  json["verdict"] = report.pass ? "pass" : "fail";
  json["what"] = report.what;
  json["precision"] = NameOf(report.products);
  if (!report.style.empty()) json["style"] = report.style;
  json["tensors"] = Json::array();
  for (const TensorVerdict& t : report.tensors) {
    json["tensors"].push_back(TensorJson(t));
  }
  json["unchecked"] = report.unchecked;
  json["unread"] = report.unread;
  json["diagnosis"] = Json::array();
  for (const Diagnosis& d : report.diagnosis) {
    json["diagnosis"].push_back(
        {{"id", d.id}, {"sentence", d.sentence}, {"tensors", d.tensors}});
  }
  json["moved"] = report.moved;
  return json;
}

}  // namespace fa2::verify
