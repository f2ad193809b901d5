#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formats all tracked C and C++ files with clang-format (Google style).
#   scripts/format.sh [--check]             --check: changes nothing, fails if a file would change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=(-i)
case "${1-}" in
  "") ;;
  --check) mode=(--dry-run -Werror) ;;
  *) echo "format.sh: unknown argument '$1': it must be --check or left out" >&2; exit 2 ;;
esac
scripts/install_deps.sh format
# safe.directory: a checkout may belong to another user, as in a container.
git -c safe.directory="$PWD" ls-files -z -- '*.h' '*.hpp' '*.c' '*.cc' |
  xargs -0 -r clang-format "${mode[@]}"
