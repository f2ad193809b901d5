// SPDX-License-Identifier: Apache-2.0

// The report as a page of its own.
#include <cmath>
#include <nlohmann/json.hpp>

#include "src/verify/judge/report.h"
#include "src/verify/judge/report_json.h"
#include "src/verify/judge/verify_js.h"
#include "src/verify/page/page.h"

namespace fa2::verify {
namespace {

using Json = nlohmann::ordered_json;

Json SliceJson(const SliceError& slice) {
  const double error = std::sqrt(slice.error2);
  return {{"ratio", Number(slice.allowed > 0.0 ? error / slice.allowed
                           : error > 0.0       ? HUGE_VAL
                                               : 0.0)},
          {"relative", Number(slice.relative())},
          {"not_finite", slice.bad}};
}

}  // namespace

std::string ReportHtml(const std::vector<CaseReport>& reports) {
  Json root;
  root["cases"] = Json::array();
  for (const CaseReport& report : reports) {
    Json json = CaseJson(report);
    for (size_t i = 0; i < report.tensors.size(); ++i) {
      const TensorVerdict& t = report.tensors[i];
      Json& tensor = json["tensors"][i];
      tensor["sizes"] = t.sizes;
      tensor["tiles"] = t.tiles;
      tensor["tile_rows"] = kTileRows;
      tensor["histogram"] = t.histogram;
      tensor["map"] = Json::array();
      for (const SliceError& s : t.map) tensor["map"].push_back(SliceJson(s));
    }
    root["cases"].push_back(std::move(json));
  }
  return Page("fa2 verify",
              root.dump(-1, ' ', false, Json::error_handler_t::replace),
              kVerifyJs);
}

}  // namespace fa2::verify
