#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a folder with which another x86-64 Linux, without fa2's dependencies, runs the fuzz targets, the limits and the soak.
#   scripts/bundle_campaign.sh FOLDER FUZZ_BUILD ASAN_BUILD RELEASE_BUILD
# The first two builds are those of scripts/fuzz.sh and scripts/fuzz.sh --asan, the third that of scripts/limits.sh. Where a folder of these
# is named -, its programs are left out. Then there: FOLDER/campaign.sh SECONDS OUT.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -ne 4 ]]; then sed -n '4,6s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
folder=$1 fuzz=$2 asan=$3 release=$4

mkdir -p "$folder/bin/plain" "$folder/bin/asan" "$folder/lib" "$folder/corpus"
add() {  # program, folder of bin
  [[ -x $1 ]] || return 0
  strip -o "$folder/bin/$2/$(basename "$1")" "$1"
  # Not the C library, which belongs to the machine's loader.
  ldd "$1" | awk '$2 == "=>" { print $3 }' | grep -Ev '/(libc|libm|libpthread|libdl|librt)\.so' | xargs -r cp -L -t "$folder/lib"
}
for program in "$fuzz"/tests/fuzz/*_fuzz; do add "$program" plain; done
for program in "$asan"/tests/fuzz/*_fuzz; do add "$program" asan; done
for program in list_targets soak/soak limits/limits_test; do add "$release/tests/$program" .; done
# Loaded by name where it is there.
gomp=$(ldconfig -p | awk '$1 == "libgomp.so.1" { print $NF; exit }')
if [[ -n $gomp ]]; then cp -L "$gomp" "$folder/lib"; fi
cp -r tests/corpus/. "$folder/corpus"
cp tests/fuzz/safetensors.dict scripts/campaign.sh "$folder"
git -c safe.directory="$PWD" describe --always --dirty >"$folder/revision"
du -sh "$folder"
