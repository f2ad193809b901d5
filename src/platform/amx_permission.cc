// SPDX-License-Identifier: Apache-2.0
#include "src/platform/amx_permission.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fa2::platform {
namespace {

#if defined(__x86_64__) && defined(__linux__)

bool CpuHasAmxBf16() {
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool bf16 = (d >> 22 & 1) != 0;
  const bool tile = (d >> 24 & 1) != 0;
  return bf16 && tile;
}

// Linux hands out the tile registers' 8 KiB of state only on request, once a
// process (Documentation/arch/x86/xstate.rst): ARCH_REQ_XCOMP_PERM of
// XFEATURE_XTILEDATA. Seccomp or an old kernel may refuse.
bool RequestPermission() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}

#else

bool CpuHasAmxBf16() { return false; }
bool RequestPermission() { return false; }

#endif

}  // namespace

bool MayUseAmxBf16() {
  static const bool may = CpuHasAmxBf16() && RequestPermission();
  return may;
}

}  // namespace fa2::platform
