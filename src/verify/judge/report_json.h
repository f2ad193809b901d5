// SPDX-License-Identifier: Apache-2.0

// A case's report as JSON.
#ifndef FA2_SRC_VERIFY_JUDGE_REPORT_JSON_H_
#define FA2_SRC_VERIFY_JUDGE_REPORT_JSON_H_

#include <nlohmann/json.hpp>
#include <optional>

#include "src/verify/judge/check.h"

namespace fa2::verify {

// Null where it is not finite, or none.
nlohmann::ordered_json Number(const std::optional<double>& value);

nlohmann::ordered_json CaseJson(const CaseReport& report);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_REPORT_JSON_H_
