#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, configures, builds everything and runs all tests.
#   scripts/test.sh [CMake arguments...]
# The attention suites and engine_test run on every target and engine of the CPU, on AMX in software where it has none. To
# have that beside the hardware: -DFA2_TEST_AMX_EMULATED=ON -DFA2_TEST_AMX_EMULATED_BLOCKS=ON.
# Environment: FA2_BUILD_DIR (default: build), FA2_TESTS (a ctest -R pattern; default: all tests).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build}

scripts/install_deps.sh build
emulated=ON
if grep -qsw amx_bf16 /proc/cpuinfo; then emulated=OFF; fi
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFA2_BUILD_TESTS=ON \
  -DFA2_BUILD_BENCHMARKS=ON -DFA2_BUILD_TOOLS=ON -DFA2_TEST_AMX_EMULATED="$emulated" \
  -DFA2_TEST_AMX_EMULATED_BLOCKS="$emulated" "$@"
cmake --build "$build"
# A test may use several threads itself, so as many at once as there are cores is plenty.
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" \
  ${FA2_TESTS:+-R "$FA2_TESTS"}
