// SPDX-License-Identifier: Apache-2.0
#include "src/simd/target.h"

#include <cstring>

#include "hwy/targets.h"

namespace fa2::simd {
namespace {

// hwy::TargetName gives "AVX3_DL"; fa2 shows and reads lower case.
std::string LowerName(int64_t target) {
  std::string name = hwy::TargetName(target);
  for (char& c : name) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return name;
}

}  // namespace

int64_t AvailableTargets() {
  // What the compiler may use anywhere needs no detection, and Highway has none
  // for RVV: there it names what its own library was compiled for.
  static const int64_t targets =
      (hwy::SupportedTargets() | HWY_STATIC_TARGET) & HWY_TARGETS;
  return targets;
}

std::vector<std::string> TargetNames(int64_t targets) {
  std::vector<std::string> names;
  // Highway numbers better targets with lower bits.
  for (int64_t rest = targets; rest != 0; rest &= rest - 1) {
    names.push_back(LowerName(rest & -rest));
  }
  return names;
}

int64_t TargetsUpTo(const std::string& name) {
  for (int64_t rest = AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (LowerName(target) == name) return rest;
  }
  return 0;
}

std::string BestTargetName(int64_t targets) {
  return targets == 0 ? "none" : LowerName(targets & -targets);
}

}  // namespace fa2::simd
