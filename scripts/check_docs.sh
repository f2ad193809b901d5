#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks what the documentation says about files: relative links exist, and so does every path in backticks
# (`src/...`, but in the laboratory notes, which keep the names of their day); every code block that names its source in
# a comment on the line above, <!-- from FILE -->, stands in that file word for word; and the tree of docs/HACKING.md
# has every folder of src/ and none that is not there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
for page in *.md docs/*.md docs/lab/*.md; do
  folder=$(dirname "$page")
  while IFS= read -r link; do
    if [[ -n "$link" && ! -e "$folder/$link" ]]; then
      echo "$page links to $link, which does not exist" >&2
      failed=1
    fi
  done < <(grep -o '](\([^)]*\))' "$page" | sed 's/^](//; s/)$//; s/#.*//' | grep -v '^[a-z]*:' || true)
  if [[ $folder != docs/lab ]]; then
    # shellcheck disable=SC2016
    while IFS= read -r path; do
      if [[ ! -e "$path" ]]; then
        echo "$page names $path, which does not exist" >&2
        failed=1
      fi
    done < <(grep -oE '`(src|include|tests|bench|python|scripts|tools|examples|docs|cmake)/[a-zA-Z0-9_./-]+`' "$page" |
      tr -d '`' | grep -vE '[A-Z]{3,}-' | sort -u || true)
  fi
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

# The tree: two spaces and a folder of src/, or a folder of the root, before what it is for.
listed=$(awk '
  /^## The tree/ { on = 1 } /^## A walk/ { on = 0 } !on { next }
  /^src\/$/ { base = "src/"; next } /^[a-z.]/ { base = "" }
  { for (i = 1; i <= NF && $i ~ /^[a-z0-9._\/]+\/$/; ++i) print base $i }' docs/HACKING.md)
while IFS= read -r path; do
  if [[ ! -d $path ]]; then
    echo "docs/HACKING.md has $path in its tree, which does not exist" >&2
    failed=1
  fi
done <<<"$listed"
while IFS= read -r path; do
  if ! grep -qxF "$path/" <<<"$listed"; then
    echo "docs/HACKING.md lacks $path/ in its tree" >&2
    failed=1
  fi
done < <(find src -mindepth 1 -type d -not -name '__*' | grep -vx 'src/attention')
exit $failed
