#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, configures, builds everything and runs all tests.
#   scripts/test.sh [CMake arguments...]
# Environment: FA2_BUILD_DIR (default: build), FA2_TESTS (a ctest -R pattern; default: all tests).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build}

scripts/install_deps.sh build
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFA2_BUILD_TESTS=ON \
  -DFA2_BUILD_BENCHMARKS=ON -DFA2_BUILD_TOOLS=ON "$@"
cmake --build "$build"
# A test may use several threads itself, so as many at once as there are cores is plenty.
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" \
  ${FA2_TESTS:+-R "$FA2_TESTS"}
