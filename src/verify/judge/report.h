// SPDX-License-Identifier: Apache-2.0

// Reports as JSON, as text and as a page.
#ifndef FA2_SRC_VERIFY_JUDGE_REPORT_H_
#define FA2_SRC_VERIFY_JUDGE_REPORT_H_

#include <string>
#include <vector>

#include "src/verify/judge/check.h"

namespace fa2::verify {

// {"cases": [...]}, as docs/check_gpu_port.md describes it.
std::string ReportJson(const std::vector<CaseReport>& reports);

// One HTML file that needs no other: verdicts, error maps, histograms.
std::string ReportHtml(const std::vector<CaseReport>& reports);

// A few lines a case.
std::string ReportText(const CaseReport& report);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_JUDGE_REPORT_H_
