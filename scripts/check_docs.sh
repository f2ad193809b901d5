#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks what the documentation says about files: relative links exist, and every code block that names
# its source in a comment on the line above, <!-- from FILE -->, stands in that file word for word.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
for page in *.md docs/*.md; do
  folder=$(dirname "$page")
  while IFS= read -r link; do
    if [[ -n "$link" && ! -e "$folder/$link" ]]; then
      echo "$page links to $link, which does not exist" >&2
      failed=1
    fi
  done < <(grep -o '](\([^)]*\))' "$page" | sed 's/^](//; s/)$//; s/#.*//' | grep -v '^[a-z]*:' || true)
  awk -v page="$page" '
    function read_all(file,   line, text) {
      text = "\n"
      while ((getline line < file) > 0) text = text line "\n"
      close(file)
      return text
    }
    /^<!-- from .* -->$/ { file = $3; next }
    /^```/ {
      if (in_block && file != "") {
        if (index(read_all(file), "\n" block) == 0) {
          print page ": the block that ends at line " NR " is not in " file > "/dev/stderr"
          bad = 1
        }
        file = ""
      }
      in_block = !in_block; block = ""; next
    }
    in_block { block = block $0 "\n" }
    END { exit bad }' "$page" || failed=1
done
exit $failed
