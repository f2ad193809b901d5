#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lines and branches of src/ that the fast suites run, by llvm-cov: each suite once and, where the CPU has a matrix engine that is better
# than vector lanes (AMX, bf16 dot products), the attention suites on the others too (@f32, @bf16dot); a quarter of the random cases.
#   scripts/coverage.sh    twenty minutes on two cores, with AMX forty
# The last table counts each outcome of a place in the source once, whatever template or target (AVX-512 and plain C++: 6848 leaves the
# others out, HACKING.md) took it, before and after what scripts/coverage_exempt.txt argues (scripts/coverage_report.py).
# Environment: FA2_BUILD_DIR (default: build-coverage), FA2_TESTS (a ctest -R pattern; default: all tests),
# FA2_TEST_FEW_CASES (default: 1), FA2_COVERAGE_SHOW (a file: source with counts, lines that nothing runs among them),
# FA2_COVERAGE_LIST (1: print each outcome that did not run and is not exempt).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install_deps.sh build clang llvm libclang-rt-dev
build=${FA2_BUILD_DIR:-build-coverage}
# Highway's header includes a source again for each target: code of ours that clang would leave out as a system's.
flags="-fprofile-instr-generate -fcoverage-mapping --no-system-header-prefix=hwy/foreach_target.h"
# AMX's blocks run in software where the CPU has none.
emulated=ON
if grep -qsw amx_bf16 /proc/cpuinfo; then emulated=OFF; fi
cmake -S . -B "$build" -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" -DCMAKE_C_FLAGS="$flags" \
  -DCMAKE_CXX_FLAGS="$flags -DHWY_DISABLED_TARGETS=6848" -DFA2_BUILD_TESTS=ON -DFA2_BUILD_TOOLS=ON \
  -DFA2_BUILD_BENCHMARKS=OFF -DFA2_BUILD_EXAMPLES=OFF -DFA2_TEST_AMX_EMULATED=OFF \
  -DFA2_TEST_AMX_EMULATED_BLOCKS="$emulated" -DFA2_STATIC_AND_SHARED=OFF >/dev/null
cmake --build "$build"
build=$(cd "$build" && pwd)

# Processes of one program add up in one file.
rm -rf "$build/profiles"
export LLVM_PROFILE_FILE="$build/profiles/%m.profraw" FA2_TEST_FEW_CASES=${FA2_TEST_FEW_CASES:-1}
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" -E '@(scalar|emu128|ssse3|sse4|avx|amx|neon|sve)' \
  ${FA2_TESTS:+-R "$FA2_TESTS"}

# Debian's clang 14 has its tools beside it.
bin=$(dirname "$(readlink -f "$(command -v clang)")")
"$bin/llvm-profdata" merge -o "$build/tests.profdata" "$build"/profiles/*.profraw
objects=()
while read -r program; do
  # No pipe to grep -q: it ends early, and under pipefail a program would be left out now and then.
  if [[ $(readelf -SW "$program" 2>/dev/null) == *__llvm_covmap* ]]; then objects+=(${objects[0]+-object} "$program"); fi
done < <(find "$build/tests" "$build/tools" -type f -executable -not -path '*/installation/*')
report=("${objects[@]}" -instr-profile="$build/tests.profdata" -ignore-filename-regex='(^|/)(bench|include|tests|tools)/')
if [[ -n ${FA2_COVERAGE_SHOW:-} ]]; then
  "$bin/llvm-cov" show "${report[@]}" >"$FA2_COVERAGE_SHOW"
fi
"$bin/llvm-cov" report "${report[@]}" --show-branch-summary
"$bin/llvm-cov" export "${report[@]}" >"$build/coverage.json"
scripts/coverage_report.py "$build/coverage.json" ${FA2_COVERAGE_LIST:+--list}
