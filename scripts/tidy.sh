#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs clang-tidy's short list (.clang-tidy) over the library, as clang compiles it for AVX2 and plain C++ alone.
#   scripts/tidy.sh              what is not a kernel: two minutes on two cores
#   scripts/tidy.sh --all        kernels too: seven
#   scripts/tidy.sh FILE...
# Environment: FA2_BUILD_DIR (default: build-tsan-short, a build by clang).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build-tsan-short}

scripts/install_deps.sh build clang clang-tidy libclang-rt-dev git
[[ -f $build/compile_commands.json ]] || cmake --preset tsan-short -B "$build" >/dev/null

if [[ $# -gt 0 && $1 != --all ]]; then
  files=("$@")
else
  # safe.directory: a checkout may belong to another user, as in a container.
  mapfile -t files < <(git -c safe.directory="$PWD" ls-files -- 'src/*.cc')
  # A kernel is included once for each target.
  if [[ $# -eq 0 ]]; then mapfile -t files < <(grep -L 'hwy/foreach_target.h' "${files[@]}"); fi
fi
# What clang-tidy says on its error output is how much it did not say.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 2 -P "$(nproc)" clang-tidy -p "$build" --quiet --warnings-as-errors='*' 2>/dev/null
echo "tidy.sh: ${#files[@]} files are clean"
