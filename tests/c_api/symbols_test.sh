#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that the shared library shows the functions of the public headers and nothing else.
#   symbols_test.sh NM LIBRARY INCLUDE_DIRECTORY
set -euo pipefail
nm=$1 library=$2 include=$3

# "A" is the version node itself.
shown=$("$nm" -DC --defined-only "$library" | awk '$2 != "A" { sub(/^[^ ]+ . /, ""); sub(/@.*/, ""); print }' |
  sort -u)

# C: every fa2_ function of the headers, by the parenthesis after its name.
declared_c=$(sed 's://.*::' "$include"/*_c.h "$include"/compat/*.h | tr '\n' ' ' |
  sed 's:/\*[^*]*\*\+\([^/*][^*]*\*\+\)*/: :g' | grep -oE 'FA2_EXPORT[^;]*;' |
  grep -oE 'fa2_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u)
# C++: the functions marked FA2_EXPORT, and the members of Context.
declared_cpp=$(cat "$include"/*.h "$include"/compat/*.h | tr '\n' ' ' |
  grep -oE 'FA2_EXPORT +(Status|void|bool|int64_t|const char\*) +[A-Z][A-Za-z0-9]*\(' |
  grep -oE '[A-Z][A-Za-z0-9]*\(' | tr -d '(' | sort -u)

status=0
fail() { echo "symbols_test.sh: $*" >&2; status=1; }

[[ $(wc -l <<<"$declared_c") -ge 20 ]] || fail "found only these C functions in the headers: $declared_c"
[[ $(wc -l <<<"$declared_cpp") -ge 8 ]] || fail "found only these C++ functions in the headers: $declared_cpp"
while read -r name; do
  grep -qxF -- "$name" <<<"$shown" || fail "$name is declared but not shown"
done <<<"$declared_c"
while read -r name; do
  grep -qE "^fa2::$name\(" <<<"$shown" || fail "fa2::$name is declared but not shown"
done <<<"$declared_cpp"
while read -r symbol; do
  case "$symbol" in
    fa2_*) grep -qxF -- "$symbol" <<<"$declared_c" || fail "$symbol is shown but not declared" ;;
    fa2::Context::*) ;;
    fa2::*)
      name=${symbol#fa2::}
      grep -qxF -- "${name%%(*}" <<<"$declared_cpp" || fail "$symbol is shown but not declared" ;;
    *) fail "$symbol is shown but is not fa2's" ;;
  esac
done <<<"$shown"
exit $status
