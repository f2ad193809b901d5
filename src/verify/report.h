// SPDX-License-Identifier: Apache-2.0

// Reports as JSON and as text.
#ifndef FA2_SRC_VERIFY_REPORT_H_
#define FA2_SRC_VERIFY_REPORT_H_

#include <string>
#include <vector>

#include "src/verify/check.h"

namespace fa2::verify {

// {"cases": [...]}, as docs/check_gpu_port.md describes it.
std::string ReportJson(const std::vector<CaseReport>& reports);

// A few lines a case.
std::string ReportText(const CaseReport& report);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_REPORT_H_
