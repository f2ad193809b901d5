#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the C++ tests on everything that this machine can be or imitate, and prints a table: instruction sets, processors under qemu-user,
# compilers, distributions.
#   scripts/matrix.sh [--quick] [ROW...]     ROW: a name of the table's first column, or the beginning of some (default: all)
# --quick runs four suites of random cases, an eighth of each, and builds only what a row needs: minutes a row instead of hours.
# What cannot run says why. Logs are in build-matrix. Exits with 1 where a row failed.
# shellcheck disable=SC2317  # functions that `row` calls
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

quick='' wanted=()
for word in "$@"; do
  case "$word" in
    --quick) quick=1 ;;
    -*) echo "matrix.sh: unknown argument '$word'" >&2; exit 2 ;;
    *) wanted+=("$word") ;;
  esac
done
mkdir -p build-matrix
suites=(half_test philox_test attention_random_test ops_random_test)
plain=(-DCMAKE_BUILD_TYPE=Release -DFA2_BUILD_BENCHMARKS=OFF -DFA2_BUILD_EXAMPLES=OFF -DFA2_STATIC_AND_SHARED=OFF)
if [[ -n $quick ]]; then
  pattern="^($(IFS='|'; echo "${suites[*]}"))$"
  export FA2_TESTS=$pattern FA2_BUILD_TARGETS="${suites[*]}" FA2_TEST_FEW_CASES=2
  plain+=(-DFA2_TEST_AMX_EMULATED=OFF)
fi
failed=0

# Runs a row's command unless other rows are wanted, and prints its line.
row() {  # name, command...
  local name=$1 start=$SECONDS log result
  shift
  if [[ ${#wanted[@]} -gt 0 ]]; then
    local word meant=''
    for word in "${wanted[@]}"; do
      if [[ $name == "$word"* ]]; then meant=1; fi
    done
    [[ -n $meant ]] || return 0
  fi
  if [[ $1 == unable ]]; then
    printf '| %s | not run: %s | |\n' "$name" "$2"
    return 0
  fi
  log=build-matrix/${name//[^a-zA-Z0-9_.-]/_}.log
  if "$@" >"$log" 2>&1; then
    result="passed, $(grep -oE 'out of [0-9]+' "$log" | awk '{ n += $3 } END { print n + 0 }') suites"
  else
    result="FAILED: $log"
    failed=1
  fi
  printf '| %s | %s | %d s |\n' "$name" "$result" "$((SECONDS - start))"
}

build_and_test() {  # folder, CMake arguments...
  local build=build-matrix/$1
  shift
  # ${FA2_BUILD_TARGETS} is a list of words.
  # shellcheck disable=SC2086
  cmake -S . -B "$build" -G Ninja "${plain[@]}" "$@" &&
    cmake --build "$build" ${FA2_BUILD_TARGETS:+--target $FA2_BUILD_TARGETS} &&
    ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" ${FA2_TESTS:+-R "$FA2_TESTS"}
}

capped() {  # variable=value
  env "$1" ctest --test-dir build-matrix/here --output-on-failure --no-tests=error -j "$(nproc)" ${FA2_TESTS:+-R "$FA2_TESTS"}
}

# An architecture of Debian's under qemu-user, on a CPU of qemu's or that which qemu.sh takes.
emulated() {  # architecture, CPU
  FA2_QEMU_CPU=${2-} FA2_BUILD_DIR=build-matrix/$1 scripts/qemu.sh "$1"
}

# A command in a chroot with fa2 in /fa2.
distribution() {  # suite of Debian's, command...
  local root=build-matrix/$1
  scripts/install_deps.sh debootstrap || return 1
  [[ -e $root/complete ]] || { rm -rf "$root" && debootstrap --variant=minbase "$1" "$root" && touch "$root/complete"; } || return 1
  rm -rf "$root/fa2" && mkdir "$root/fa2" && git -c safe.directory="$PWD" archive HEAD | tar x -C "$root/fa2" &&
    chroot "$root" "${@:2}"
}

root_row() {  # as row
  if [[ $(id -u) -eq 0 ]]; then row "$@"; else row "$1" unable "chroot needs root"; fi
}

echo "$(date -u +%Y-%m-%d), $(git -c safe.directory="$PWD" describe --always --dirty), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
echo
echo "| where | result | time |"
echo "|---|---|---|"
scripts/install_deps.sh build
row here build_and_test here
if [[ -x build-matrix/here/tests/list_targets ]] || cmake --build build-matrix/here --target list_targets >/dev/null 2>&1; then
  for target in $(build-matrix/here/tests/list_targets); do row "target $target" capped "FA2_MAX_TARGET=$target"; done
  for engine in $(build-matrix/here/tests/list_targets --engines); do row "engine $engine" capped "FA2_ENGINE=$engine"; done
fi
row "arm64 NEON" emulated arm64 cortex-a72
for bits in 128 256 512; do row "arm64 SVE $bits" emulated arm64 "max,sve$bits=on"; done
row "arm64 SVE2" emulated arm64
row armhf emulated armhf
row ppc64el emulated ppc64el  # plain C++: Highway has vectors for it from 1.2 on
root_row "ppc64el POWER10, Debian 13" distribution trixie env FA2_BUILD_DIR=/build-ppc64el /fa2/scripts/qemu.sh ppc64el
row s390x emulated s390x
for bits in 128 256; do
  root_row "riscv64 RVV $bits" distribution trixie \
    env FA2_QEMU_CPU="max,v=true,vlen=$bits" FA2_BUILD_DIR=/build-riscv64 /fa2/scripts/qemu.sh riscv64
done
for compiler in gcc-12:g++-12 clang-14:clang++-14 clang-16:clang++-16 clang-19:clang++-19 gcc-14:g++-14; do
  cc=${compiler%:*} cxx=${compiler#*:}
  package=$cxx
  if [[ $cc == clang* ]]; then package=$cc; fi
  if command -v "$cxx" >/dev/null || scripts/install_deps.sh "$package" >/dev/null 2>&1; then
    row "$cc" build_and_test "$cc" -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx"
  else
    row "$cc" unable "this distribution has no package $package"
  fi
done
for suite in bookworm trixie; do
  root_row "Debian $suite" distribution "$suite" env -u FA2_BUILD_TARGETS /fa2/scripts/test.sh "${plain[@]}"
done
exit "$failed"
