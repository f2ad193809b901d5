#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Is this revision faster? Builds BASE_REV and this work tree, runs bench_attention of both in turn
# (A B, B A, ...), and prints the ratio of their rates with its spread: see scripts/bench_compare.py.
#   scripts/bench_compare.sh BASE_REV [--rounds N] [--min-time S] [bench_attention arguments...]
# Without arguments of its own, bench_attention runs a short list: one line for each engine's main case.
#   scripts/bench_compare.sh HEAD~1 --rounds 9 --case=backward/bf16/H4/N2048/D128/T1
# Environment: FA2_BUILD_DIR (default: build), FA2_CMAKE_ARGS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -lt 1 || "$1" == -* ]]; then
  sed -n '3,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
base=$(git rev-parse --verify --short "$1^{commit}")
shift
build=${FA2_BUILD_DIR:-build}
scripts/install_deps.sh build
command -v python3 >/dev/null || scripts/install_deps.sh python

build_bench() {  # source folder, build folder
  # shellcheck disable=SC2086
  cmake -S "$1" -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFA2_BUILD_TESTS=OFF \
    -DFA2_BUILD_TOOLS=OFF -DFA2_BUILD_EXAMPLES=OFF ${FA2_CMAKE_ARGS-} >/dev/null
  cmake --build "$2" --target bench_attention
}

# The base revision keeps its own tree and build folder, so that a second comparison is quick.
tree=$build/compare/$base
if [[ ! -d $tree/source ]]; then
  mkdir -p "$tree"
  git archive --prefix=source/ "$base" | tar -x -C "$tree"
fi
echo "Building base $base"
build_bench "$tree/source" "$tree/build"
echo "Building this work tree"
build_bench . "$build/compare/head"

python3 scripts/bench_compare.py --base "$tree/build/bench/bench_attention" --base-name "$base" \
  --head "$build/compare/head/bench/bench_attention" "$@"
