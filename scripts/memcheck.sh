#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs suites under valgrind's memcheck. It sees what the address sanitizer does not: branches, addresses and system calls that depend
# on memory nobody wrote.
#   scripts/memcheck.sh [suites...]    default: those below
# On SSSE3, an eighth of the random cases: valgrind runs a thread at a time, 20 to 50 times as slowly, and knows no AVX-512.
# Environment: FA2_BUILD_DIR (default: build), FA2_MAX_TARGET (default: ssse3), FA2_TEST_FEW_CASES (default: 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build}
export FA2_MAX_TARGET=${FA2_MAX_TARGET:-ssse3} FA2_TEST_FEW_CASES=${FA2_TEST_FEW_CASES:-2}
if [[ $# -eq 0 ]]; then
  set -- attention_random attention_edge attention_bias attention_alibi attention_mask attention_workspace ops ops_random c_api \
    c_api_attention_options compat_dnn_attention compat_mem_efficient_attention verify_files reference_error
fi

scripts/install_deps.sh build valgrind
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build" --target "${@/%/_test}"

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
check() {  # suite; what it says comes when it is over
  local program log=$2/$1.log begin=$SECONDS
  program=$(find "$3/tests" -type f -name "$1_test" | head -n 1)
  if valgrind -q --error-exitcode=99 --num-callers=25 "$program" >"$log" 2>&1; then
    echo "$1: nothing found, $((SECONDS - begin)) s"
  else
    echo "$1: FAILED, $((SECONDS - begin)) s"
    cat "$log"
    return 1
  fi
}
export -f check
printf '%s\n' "$@" | xargs -P "$(nproc)" -I '{}' bash -c 'check "$@"' _ '{}' "$logs" "$build"
