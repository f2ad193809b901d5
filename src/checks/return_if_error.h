// SPDX-License-Identifier: Apache-2.0
#ifndef FA2_SRC_CHECKS_RETURN_IF_ERROR_H_
#define FA2_SRC_CHECKS_RETURN_IF_ERROR_H_

// Returns from a function that returns Status, unless the expression is ok.
#define FA2_RETURN_IF_ERROR(expression)                                      \
  do {                                                                       \
    if (auto fa2_status = (expression); !fa2_status.ok()) return fa2_status; \
  } while (false)

#endif  // FA2_SRC_CHECKS_RETURN_IF_ERROR_H_
