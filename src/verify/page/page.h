// SPDX-License-Identifier: Apache-2.0

// One HTML file that needs no other: data as JSON, and the script that draws
// it.
#ifndef FA2_SRC_VERIFY_PAGE_PAGE_H_
#define FA2_SRC_VERIFY_PAGE_PAGE_H_

#include <string>

namespace fa2::verify {

// `json`: what the script reads from the element "data". The style sheet and
// the helpers of page.js are in every page.
std::string Page(const std::string& title, const std::string& json,
                 const std::string& script);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_PAGE_PAGE_H_
