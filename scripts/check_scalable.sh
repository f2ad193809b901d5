#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whether GCC accepts the kernels for arm64, where vectors of SVE have no size when compiling: much that compiles for
# x86 does not there. No code is made, so seconds do for what scripts/qemu.sh builds and runs in minutes.
#   scripts/check_scalable.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

triplet=aarch64-linux-gnu
scripts/install_deps.sh build "g++-$triplet"
# Highway's headers alone: the others beside them are this machine's.
headers=$(mktemp -d)
trap 'rm -rf "$headers"' EXIT
ln -s /usr/include/hwy "$headers/hwy"

mapfile -t sources < <(grep -rl --include='*.cc' 'hwy/foreach_target.h' src | sort)
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 1 \
  "$triplet-g++" -std=c++17 -fsyntax-only -Wall -Wextra -Werror -I. -Iinclude -isystem "$headers"
echo "check_scalable.sh: ${#sources[@]} files are accepted for arm64"
