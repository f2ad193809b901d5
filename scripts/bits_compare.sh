#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Does this revision compute the same bits? Builds BASE_REV and this work tree, runs the same calls of attention on both
# (tests/bits/print_hashes.cc: some 780 over all options) for every engine and a few instruction sets of this CPU, and
# shows what differs.
#   scripts/bits_compare.sh BASE_REV [FIRST_SEED CASES]
# Environment: FA2_BUILD_DIR (default: build), FA2_CMAKE_ARGS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -lt 1 || "$1" == -* ]]; then
  sed -n '3,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
base=$(git rev-parse --verify --short "$1^{commit}")
shift
build=${FA2_BUILD_DIR:-build}
scripts/install_deps.sh build

tree=$build/compare/$base
if [[ ! -d $tree/source ]]; then
  mkdir -p "$tree"
  git archive --prefix=source/ "$base" | tar -x -C "$tree"
fi
# The program comes from this work tree; it uses the public interface and tests/support of its own tree.
if [[ ! -d $tree/source/tests/bits ]]; then
  cp -r tests/bits "$tree/source/tests/bits"
  echo 'add_subdirectory(bits)' >>"$tree/source/tests/CMakeLists.txt"
fi
for pair in "$tree/source:$tree/bits" ".:$build/compare/bits"; do
  # shellcheck disable=SC2086
  cmake -S "${pair%%:*}" -B "${pair##*:}" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFA2_TEST_AMX_EMULATED=OFF \
    ${FA2_CMAKE_ARGS-} >/dev/null
  cmake --build "${pair##*:}" --target print_hashes list_targets
done

failed=0
compare() {  # NAME=VALUE of the environment
  local name=${1//=/-}
  env "$1" "$tree/bits/tests/bits/print_hashes" "${@:2}" >"$build/compare/$name.base"
  env "$1" "$build/compare/bits/tests/bits/print_hashes" "${@:2}" >"$build/compare/$name.head"
  local lines differing
  lines=$(wc -l <"$build/compare/$name.base")
  differing=$(diff "$build/compare/$name.base" "$build/compare/$name.head" | grep -c '^>' || true)
  echo "$1: $lines calls, $differing differ"
  if [[ $differing -ne 0 ]]; then
    diff "$build/compare/$name.base" "$build/compare/$name.head" | head -n 6
    failed=1
  fi
}
for engine in $("$build/compare/bits/tests/list_targets" --engines); do compare "FA2_ENGINE=$engine" "$@"; done
for target in $("$build/compare/bits/tests/list_targets" | grep -E '^(avx2|sse4|neon|sve)$' || true); do
  compare "FA2_MAX_TARGET=$target" "$@"
done
exit $failed
