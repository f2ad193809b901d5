#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Gives every tracked source file that lacks it the line that names its licence (https://spdx.dev).
#   scripts/spdx.sh [--check]               --check: changes nothing, names the files that lack it and fails
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

check=${1-}
if [[ -n $check && $check != --check ]]; then
  echo "spdx.sh: unknown argument '$check': it must be --check or left out" >&2
  exit 2
fi
line="SPDX-License-Identifier: Apache-2.0"
failed=0
while IFS= read -r -d '' file; do
  if head -n 3 "$file" | grep -qF "$line"; then continue; fi
  if [[ -n $check ]]; then
    echo "$file lacks '$line'" >&2
    failed=1
    continue
  fi
  case "$file" in
    *.h | *.hpp | *.c | *.cc | *.rs) mark="//" ;;
    *) mark="#" ;;
  esac
  if [[ $(head -c 2 "$file") == '#!' ]]; then
    sed -i "1a $mark $line\n" "$file"
  else
    sed -i "1i $mark $line\n" "$file"
  fi
# safe.directory: a checkout may belong to another user, as in a container.
done < <(git -c safe.directory="$PWD" ls-files -z -- '*.h' '*.hpp' '*.c' '*.cc' '*.rs' '*.py' '*.sh' '*.cmake' '*CMakeLists.txt' '.ci/run')
exit $failed
