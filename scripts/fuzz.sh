#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzz targets of tests/fuzz with clang's libFuzzer and runs them, one after another, from tests/corpus and what earlier runs found.
#   scripts/fuzz.sh [OPTION...] [TARGET...]   TARGET: attention, training_ops, changed_call, safetensors, command (default: all)
#   --seconds=N   how long each target runs (default: 60)
#   --runs=N      or for so many executions
#   --jobs=N      on so many processes (default: all cores)
#   --asan        with the address and undefined-behaviour sanitizers
#   --merge       afterwards the smallest set of inputs with the same coverage becomes tests/corpus/TARGET
#   --coverage    instead of fuzzing: runs what the corpora hold, and prints line and branch coverage of src/ and tools/ by llvm-cov
# Prints executions, coverage (edges of instrumented code) and inputs of each target; stops at the first input that ends a target and names it.
# Environment: FA2_BUILD_DIR (default: build-fuzz, build-fuzz-asan, build-fuzz-coverage), FA2_FUZZ_MAX_LEN (bytes of an input; default: 400,
# of files 2000), FA2_FUZZ_DISABLED_TARGETS (a bit mask for Highway, HACKING.md; default: none on fuzzing, 6848 for coverage).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=60 runs=-1 jobs=$(nproc) kind=plain merge='' targets=()
for word in "$@"; do
  case "$word" in
    --seconds=*) seconds=${word#*=} ;;
    --runs=*) runs=${word#*=} seconds=0 ;;
    --jobs=*) jobs=${word#*=} ;;
    --asan) kind=asan ;;
    --coverage) kind=coverage ;;
    --merge) merge=1 ;;
    attention | training_ops | changed_call | safetensors | command) targets+=("$word") ;;
    *) echo "fuzz.sh: unknown argument '$word'" >&2; sed -n '4,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
if [[ ${#targets[@]} -eq 0 ]]; then targets=(attention training_ops changed_call safetensors command); fi

scripts/install_deps.sh build clang llvm libclang-rt-dev
disabled=${FA2_FUZZ_DISABLED_TARGETS:-}
case "$kind" in
  plain) folder="build-fuzz" flags="-fsanitize=fuzzer-no-link" ;;
  asan)
    folder="build-fuzz-asan"
    flags="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
    ;;
  coverage)
    folder="build-fuzz-coverage" disabled=${disabled:-6848}
    flags="-fprofile-instr-generate -fcoverage-mapping"
    ;;
esac
build=${FA2_BUILD_DIR:-$folder}
# What judges a call is optimised, and its edges are not counted.
fuzz=ON judge="-O2;-fno-sanitize-coverage=edge,inline-8bit-counters,pc-table,trace-cmp,indirect-calls"
if [[ $kind == coverage ]]; then fuzz=OFF judge=; fi
cmake -S . -B "$build" -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" -DCMAKE_C_FLAGS="$flags" \
  -DCMAKE_CXX_FLAGS="$flags${disabled:+ -DHWY_DISABLED_TARGETS=$disabled}" -DFA2_FUZZ=$fuzz -DFA2_REFERENCE_OPTIONS="$judge" \
  -DFA2_BUILD_TOOLS=ON -DFA2_BUILD_BENCHMARKS=OFF -DFA2_BUILD_EXAMPLES=OFF -DFA2_TEST_AMX_EMULATED=OFF \
  -DFA2_STATIC_AND_SHARED=OFF >/dev/null
cmake --build "$build" --target "${targets[@]/%/_fuzz}"
build=$(cd "$build" && pwd)
corpora=$PWD/tests/corpus

# Mapping and thread pools last as long as the process; sizes that no memory has are a status.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

if [[ $kind == coverage ]]; then
  for target in "${targets[@]}"; do
    folders=("$corpora/$target")
    for found in build-fuzz build-fuzz-asan; do
      if [[ -d $found/corpus/$target ]]; then folders+=("$PWD/$found/corpus/$target"); fi
    done
    LLVM_PROFILE_FILE=$build/$target.profraw "$build/tests/fuzz/${target}_fuzz" "${folders[@]}"
  done
  # Debian's clang 14 has its tools beside it.
  bin=$(dirname "$(readlink -f "$(command -v clang)")")
  objects=() profiles=()
  for target in "${targets[@]}"; do
    objects+=(${objects[0]+-object} "$build/tests/fuzz/${target}_fuzz")
    profiles+=("$build/$target.profraw")
  done
  "$bin/llvm-profdata" merge -o "$build/fuzz.profdata" "${profiles[@]}"
  "$bin/llvm-cov" report "${objects[@]}" -instr-profile="$build/fuzz.profdata" --show-branch-summary \
    -ignore-filename-regex='(^|/)(bench|include|tests)/'
  exit 0
fi

for target in "${targets[@]}"; do
  work=$build/corpus/$target
  mkdir -p "$work"
  length=400 dictionary=() schedule=()
  # So much code runs in an execution that libFuzzer's bookkeeping of rare edges takes as long as the calls: without it twice as many
  # executions, and more edges in the same time.
  if [[ $target == attention ]]; then schedule=(-entropic=0); fi
  if [[ $target == safetensors ]]; then
    length=2000 dictionary=("-dict=$PWD/tests/fuzz/safetensors.dict")
  fi
  options=(-max_len="${FA2_FUZZ_MAX_LEN:-$length}" "${dictionary[@]}" "${schedule[@]}" -timeout=120 -rss_limit_mb=4096 -artifact_prefix="$work-")
  echo "== $target ($kind)"
  log=$build/$target.log
  if ! "$build/tests/fuzz/${target}_fuzz" "${options[@]}" -fork="$jobs" -max_total_time="$seconds" -runs="$runs" \
    "$work" "$corpora/$target" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "fuzz.sh: $target failed; the input is one of" "$work"-* >&2
    exit 1
  fi
  grep -E '^#[0-9]+: cov' "$log" | tail -n 1 |
    awk -v t="$target" '{ sub(":", "", $1); sub("#", "", $1); print t ": " $1 " executions, " $3 " edges, " $7 " inputs" }'
  if [[ -n $merge ]]; then
    smallest=$(mktemp -d)
    "$build/tests/fuzz/${target}_fuzz" "${options[@]}" -merge=1 "$smallest" "$corpora/$target" "$work" >>"$log" 2>&1
    rm -rf "${corpora:?}/$target"
    mv "$smallest" "$corpora/$target"
    chmod 755 "$corpora/$target"
    echo "$target: $(find "$corpora/$target" -type f | wc -l) inputs kept"
  fi
done
