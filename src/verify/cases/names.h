// SPDX-License-Identifier: Apache-2.0

// The names of a case's tensors: q k v dout out lse dq dk dv bias dbias dlse
// sinks dsinks alibi_slopes dalibi_slopes cu_seqlens_q cu_seqlens_k keep.
#ifndef FA2_SRC_VERIFY_CASES_NAMES_H_
#define FA2_SRC_VERIFY_CASES_NAMES_H_

#include <string>
#include <vector>

namespace fa2::verify {

// Inputs, and outputs in the order in which they are judged.
const std::vector<std::string>& InputNames();
const std::vector<std::string>& OutputNames();

// "grad_query" -> "dq"; empty where the name means nothing here.
std::string CanonicalName(const std::string& name);

}  // namespace fa2::verify

#endif  // FA2_SRC_VERIFY_CASES_NAMES_H_
