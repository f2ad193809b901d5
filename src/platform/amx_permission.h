// SPDX-License-Identifier: Apache-2.0

// Whether this process may use Intel's AMX tile registers.
#ifndef FA2_SRC_PLATFORM_AMX_PERMISSION_H_
#define FA2_SRC_PLATFORM_AMX_PERMISSION_H_

namespace fa2::platform {

// Whether the CPU has AMX-TILE and AMX-BF16 and the system lets this process
// use them. The first call asks the system; later ones give its answer.
bool MayUseAmxBf16();

}  // namespace fa2::platform

#endif  // FA2_SRC_PLATFORM_AMX_PERMISSION_H_
