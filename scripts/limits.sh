#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs what takes minutes and gigabytes: the limits (a million keys, 100,000 sequences, offsets past 2^31, rows of 65,536) and the
# soak (one hash over engines, pools and threads, under load).
#   scripts/limits.sh [limits|soak]...    default: both
# Environment: FA2_BUILD_DIR (default: build), FA2_SOAK_REPEATS (default: 500), GTEST_FILTER (of the limits).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build}

if [[ $# -eq 0 ]]; then set -- limits soak; fi
for part in "$@"; do
  [[ $part == limits || $part == soak ]] ||
    { echo "limits.sh: unknown argument '$part': it must be limits or soak" >&2; exit 2; }
done
scripts/install_deps.sh build
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build" --target limits_test soak
for part in "$@"; do
  case "$part" in
    limits) "$build/tests/limits/limits_test" ;;
    soak) "$build/tests/soak/soak" --repeats="${FA2_SOAK_REPEATS:-500}" ;;
  esac
done
