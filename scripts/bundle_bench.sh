#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copies bench_attention, bench_peak, compare_pytorch.py with its modules, and the shared libraries they need (but the C
# library) into a folder that runs on another x86-64 or Arm Linux without fa2's dependencies.
#   scripts/bundle_bench.sh FOLDER
# Environment: FA2_BUILD_DIR (default: build).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -ne 1 ]]; then sed -n '3,6s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
build=${FA2_BUILD_DIR:-build}
folder=$1

scripts/install_deps.sh build
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build" --target bench_attention bench_peak
mkdir -p "$folder/lib"
cp bench/{compare_pytorch,pytorch_cases,pytorch_sides,pytorch_report,shapes,shapes_report}.py "$folder"
for program in bench_attention bench_peak; do
  cp "$build/bench/$program" "$folder/lib"
  ldd "$build/bench/$program" | awk '$2 == "=>" { print $3 }' |
    grep -Ev '/(libc|libm|libpthread|libdl|librt)\.so' | xargs -r cp -L -t "$folder/lib"
  # The wrapper finds the libraries wherever the folder is put.
  cat >"$folder/$program" <<'WRAPPER'
#!/bin/sh
folder=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$folder/lib/$(basename "$0")" "$@"
WRAPPER
  chmod +x "$folder/$program"
done
echo "Run $folder/bench_attention, or: python3 $folder/compare_pytorch.py --bench $folder/bench_attention --quick"
