#!/usr/bin/env bash
# Runs clang-tidy's short list (.clang-tidy) over the library's sources, as they are compiled for AVX2 and plain C++ alone.
#   scripts/tidy.sh [REVISION]      only what differs from REVISION (or includes a header that does); without it, all
# Environment: FA2_BUILD_DIR (default: build-tsan-short, a build by clang).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build-tsan-short}

scripts/install_deps.sh build clang clang-tidy libclang-rt-dev git python3
[[ -f $build/compile_commands.json ]] || cmake --preset tsan-short -B "$build" >/dev/null

mapfile -t files < <(git -c safe.directory="$PWD" ls-files -- 'src/*.cc')
if [[ $# -gt 0 ]]; then
  mapfile -t changed < <(git -c safe.directory="$PWD" diff --name-only "$1" -- src include)
  pattern=$(printf '%s\n' "${changed[@]}" | sed -n 's#^include/##p; /^src/p' | paste -sd'|')
  mapfile -t files < <(for file in "${files[@]}"; do
    if printf '%s\n' "${changed[@]}" | grep -qxF "$file" || { [[ -n $pattern ]] && grep -qE "\"($pattern)\"" "$file"; }; then
      echo "$file"
    fi
  done)
fi
if [[ ${#files[@]} -eq 0 ]]; then echo "tidy.sh: nothing to look at"; exit 0; fi
# A kernel's file names itself as the one to include for each target; the static analyser takes minutes for that.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy -p "$build" --quiet --warnings-as-errors='*' --extra-arg=-Wno-unknown-warning-option 2>/dev/null
echo "tidy.sh: ${#files[@]} files are clean"
