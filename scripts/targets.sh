#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests once for each instruction set that the build and this CPU have, capped at it
# (FA2_MAX_TARGET), best first, and then the attention suites once for each matrix engine (FA2_ENGINE).
#   scripts/targets.sh [CMake arguments...]
# Environment: FA2_BUILD_DIR (default: build), FA2_TESTS (a ctest -R pattern; default: all tests).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build}

scripts/install_deps.sh build
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >/dev/null
cmake --build "$build"

failed=()
run() {  # variable, value
  echo "== $1=$2"
  env "$1=$2" ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" \
    ${FA2_TESTS:+-R "$FA2_TESTS"} || failed+=("$1=$2")
}
for target in $("$build/tests/list_targets"); do run FA2_MAX_TARGET "$target"; done
# Other suites go through instruction sets themselves, which may lack the engine.
FA2_TESTS=${FA2_TESTS:-^attention}
if [[ $FA2_TESTS == *attention* ]]; then
  for engine in $("$build/tests/list_targets" --engines); do run FA2_ENGINE "$engine"; done
fi
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "targets.sh: tests failed with ${failed[*]}" >&2
  exit 1
fi
