#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests on a CPU that this machine does not have: a small Linux, booted in the Bochs emulator, whose CPU has
# AVX-512 (qemu-user ends at AVX2), AMX in software included. Bochs does some 50 million instructions a second, so
# choose the tests.
#   scripts/bochs.sh PATTERN [CMake arguments...]    PATTERN: of test names, as for ctest -R
#   GTEST_FILTER='RowStore*' scripts/bochs.sh engine_test -DCMAKE_CXX_FLAGS=-DHWY_DISABLED_TARGETS=6656
# (which leaves out all AVX-512 targets but AVX3 and spares half of the build.)
# Environment: GTEST_FILTER, FA2_TEST_FEW_CASES and FA2_TEST_SEED for the tests; FA2_BUILD_DIR (default: build-bochs);
# FA2_BOCHS_CPU (default: corei7_skylake_x; `bochs --help cpu` lists them); FA2_BOCHS_SECONDS (default: 3600), how long
# it may take.
# Bochs 2.7 converts 2^-25 to f16 as no CPU does: simd_convert_test fails there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -eq 0 ]]; then echo "bochs.sh: give a pattern of test names" >&2; exit 2; fi
pattern=$1
shift
build=${FA2_BUILD_DIR:-build-bochs}

scripts/install_deps.sh build bochs bochsbios vgabios isolinux syslinux-common xorriso busybox-static cpio python3
# What the CPU here could not run is built as for one that can.
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFA2_CPU_HAS_AVX512=ON "$@" >/dev/null
cmake --build "$build"
python3 scripts/bochs.py "$build" "$pattern" --cpu "${FA2_BOCHS_CPU:-corei7_skylake_x}" \
  --seconds "${FA2_BOCHS_SECONDS:-3600}"
