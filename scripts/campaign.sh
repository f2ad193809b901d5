#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# In a folder of scripts/bundle_campaign.sh: runs its fuzz targets, the soak and the limits on all cores at once, and writes
# OUT/report.txt (a table of executions and findings), OUT/logs.tar.gz, OUT/findings.tar.gz and OUT/corpus.tar.gz.
#   campaign.sh SECONDS OUT
# Exits with 1 where anything failed.
set -uo pipefail
if [[ $# -ne 2 ]]; then sed -n '3,6s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
seconds=$1 start=$SECONDS
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
work=$(mktemp -d)
mkdir "$work/logs" "$work/findings" "$work/corpus" "$work/tmp" "$work/merged"
cores=$(nproc)
export TMPDIR=$work/tmp LD_LIBRARY_PATH=$here/lib
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
report=$out/report.txt
left() { echo $((seconds - (SECONDS - start))); }

# Of 32 processes; on other machines in proportion, one at least.
shares="plain attention 20
plain training_ops 2
plain changed_call 4
plain safetensors 1
plain command 1
asan attention 2
asan training_ops 1
asan changed_call 1
asan safetensors 1
asan command 1"

{
  echo "$(date -u '+%Y-%m-%d %H:%M UTC'), $(cat "$here/revision" 2>/dev/null)"
  echo "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $cores cores"
  "$here/bin/list_targets" | tr '\n' ' '
  "$here/bin/list_targets" --engines | tr '\n' ' '
  echo
} >"$report"

# Merging takes the last fifth.
fuzz_seconds=$((seconds * 4 / 5 - 15))
pids=()
while read -r kind target share; do
  program=$here/bin/$kind/${target}_fuzz
  [[ -x $program ]] || continue
  processes=$(((share * cores + 31) / 32))
  name=$kind-$target
  mkdir -p "$work/corpus/$name"
  options=(-fork="$processes" -max_total_time="$fuzz_seconds" -max_len=400 -timeout=120 -rss_limit_mb=6000
           -ignore_crashes=1 -ignore_timeouts=1 -ignore_ooms=1 -artifact_prefix="$work/findings/$name-")
  # As scripts/fuzz.sh has it.
  if [[ $target == attention ]]; then options+=(-entropic=0); fi
  if [[ $target == safetensors ]]; then options+=(-max_len=2000 -dict="$here/safetensors.dict"); fi
  nice -n 5 timeout -k 5 $((fuzz_seconds + 30)) "$program" "${options[@]}" "$work/corpus/$name" "$here/corpus/$target" \
    >"$work/logs/$name.log" 2>&1 </dev/null &
  pids+=($!)
done <<<"$shares"

# The fuzz targets are its load.
timeout -k 5 $((seconds - 20)) "$here/bin/soak" --no-load --seconds=$((seconds * 3 / 4)) >"$work/logs/soak.log" 2>&1 &
soak=$!
timeout -k 5 $((seconds - 20)) "$here/bin/limits_test" >"$work/logs/limits.log" 2>&1 &
limits=$!
wait "${pids[@]}"

failed=0
{
  printf '\n%-6s %-14s %9s %12s %8s %8s %9s  %s\n' kind target processes executions edges inputs per_s oom/timeout/crash
  while read -r kind target share; do
    log=$work/logs/$kind-$target.log
    [[ -s $log ]] || continue
    grep -aE '^#[0-9]+: cov' "$log" | tail -n 1 |
      awk -v k="$kind" -v t="$target" -v p="$(((share * cores + 31) / 32))" -v s="$fuzz_seconds" '{
        sub("#", "", $1); sub(":", "", $1)
        for (i = 2; i < NF; ++i) { if ($i == "cov:") c = $(i + 1); if ($i == "corp:") n = $(i + 1); if ($i == "oom/timeout/crash:") f = $(i + 1) }
        printf "%-6s %-14s %9d %12d %8d %8d %9.1f  %s\n", k, t, p, $1, c, n, $1 / s, f }'
  done <<<"$shares"
} >>"$report"
found=$(find "$work/findings" -type f | wc -l)
echo "findings: $found" >>"$report"
if [[ $found -gt 0 ]]; then
  failed=1
  find "$work/findings" -type f -printf '  %f, %s bytes\n' >>"$report"
fi

# The smallest sets with the same coverage.
merge_seconds=$(($(left) > 35 ? $(left) - 15 : 20))
pids=()
while read -r kind target share; do
  name=$kind-$target program=$here/bin/$kind/${target}_fuzz
  [[ $kind == plain && -x $program ]] || continue
  mkdir -p "$work/merged/$target"
  sources=("$here/corpus/$target" "$work/corpus/$name")
  if [[ -d $work/corpus/asan-$target ]]; then sources+=("$work/corpus/asan-$target"); fi
  timeout -k 5 "$merge_seconds" "$program" -merge=1 -max_len=2000 -timeout=120 "$work/merged/$target" "${sources[@]}" \
    >"$work/logs/merge-$target.log" 2>&1 </dev/null &
  pids+=($!)
done <<<"$shares"
wait "${pids[@]}"

wait "$soak"
code=$?
{
  printf '\nsoak: exit code %d\n' "$code"
  tail -n 20 "$work/logs/soak.log"
} >>"$report"
[[ $code -eq 0 ]] || failed=1
wait "$limits"
code=$?
{
  printf '\nlimits: exit code %d\n' "$code"
  grep -aE '^\[ |MiB of workspace|Failure' "$work/logs/limits.log" | grep -v RUN
} >>"$report"
[[ $code -eq 0 ]] || failed=1

tar czf "$out/logs.tar.gz" -C "$work" logs
tar czf "$out/findings.tar.gz" -C "$work" findings
tar czf "$out/corpus.tar.gz" -C "$work" merged corpus
rm -rf "$work"
cat "$report"
exit "$failed"
