#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests under sanitizers.
#   scripts/sanitize.sh [asan|integer|tsan|asan-short|tsan-short]...    default: the first three, some 80 minutes on two cores
# asan includes undefined behaviour. integer is about sizes, strides and counts: overflow, and conversions that lose bits or the
# sign, with AVX2 and plain C++ alone and an eighth of the cases. tsan builds a oneTBB with ThreadSanitizer first (build-tbb-tsan).
# asan and tsan run every suite on every target and engine of the CPU, a quarter of the random cases each. No kernel is checked
# for variables used after their scope: their temporaries are so many that GCC took four times as long, and the suites twice.
# The short ones, which CI runs, leave out AVX-512, SSE4 and SSSE3 (6592 names them to Highway), build at -O1, and run
# each suite once, on an eighth of its cases; tsan-short those that share work between threads, asan-short all but two long
# ones of the checker and the pools on libomp. asan-short checks no pointers for null, alignment and the size of objects, which
# would double the time that GCC takes. What tests compute with the reference is at -O2. The thread sanitizer does
# not follow the float64 reference, which has no threads: attention's suites took 2.4 times as long.
# Environment: FA2_TESTS (a ctest -R pattern; default: all tests).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install_deps.sh build clang libclang-rt-dev
export UBSAN_OPTIONS=print_stacktrace=1
if [[ $# -eq 0 ]]; then set -- asan integer tsan; fi
for preset in "$@"; do
  if [[ $preset == tsan* ]]; then scripts/instrumented_tbb.sh build-tbb-tsan; fi
  cmake --preset "$preset"
  # The short runs leave suites out, which need not be built: a suite has its target's name.
  targets=()
  if [[ $preset == tsan-short ]]; then
    mapfile -t targets < <(ctest --preset "$preset" -N | awk '$1 == "Test" && $2 ~ /^#/ { print $3 }')
  fi
  cmake --build --preset "$preset" ${targets[@]:+--target "${targets[@]}"}
  ctest --preset "$preset" -j "$(nproc)" ${FA2_TESTS:+-R "$FA2_TESTS"}
done
