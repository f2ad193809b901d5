// SPDX-License-Identifier: Apache-2.0
#include "fa2/version.h"

namespace fa2 {

const char* Version() noexcept { return FA2_VERSION_STRING; }

}  // namespace fa2
