#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of bench_attention on a noisy machine.

Each round runs both builds of every case back to back, in alternating order, so that a slow second of
the machine slows both. A round gives one ratio head / base of their rates per case; printed are the
median ratio and the interval that holds the median with 95% confidence (from order statistics, which
need no assumption about the noise). A case counts as changed when that interval leaves out 1 and the
median is off by more than --threshold.

Only Python's standard library is needed.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys

SHORT_LIST = [
    "backward/bf16/H4/N2048/D64/full/T1",
    "backward/bf16/H4/N2048/D128/full/T1",
    "backward/bf16/H4/N2048/D128/causal/T1",
    "backward/f32/H4/N2048/D128/full/T1",
    "forward/bf16/H4/N2048/D128/full/T1",
    "backward/bf16/H8/N2048/D128/full/T0",
    "backward/bf16/H1/N128/D64/full/T1",
]


def run(binary, arguments):
    """Standard output of one run of the binary."""
    result = subprocess.run([binary, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)
    if result.returncode != 0:
        sys.exit(f"{binary} failed:\n{result.stderr}")
    return result.stdout


def rate(binary, case, min_time):
    """GFLOPS of one case, or None where this build cannot run it."""
    output = run(binary, [f"--case={case}", "--benchmark_format=json",
                          f"--benchmark_min_time={min_time}"])
    entry = json.loads(output)["benchmarks"][0]
    return None if entry.get("error_occurred") else entry["GFLOPS"]


def median_interval(values, confidence=0.95):
    """The median and the narrowest pair of order statistics around it that reaches the confidence.

    P(x_(k) <= median <= x_(n+1-k)) = 1 - 2 * P(Binomial(n, 1/2) < k). Too few values for the
    confidence give their whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    best = 1
    for k in range(1, n // 2 + 1):
        outside = 2 * sum(math.comb(n, i) for i in range(k)) / 2 ** n
        if 1 - outside >= confidence:
            best = k
    return statistics.median(ordered), ordered[best - 1], ordered[n - best]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="bench_attention of the base revision")
    parser.add_argument("--head", required=True, help="bench_attention of the new revision")
    parser.add_argument("--base-name", default="base")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of runs (default 9)")
    parser.add_argument("--min-time", type=float, default=0.2,
                        help="seconds per case and run (default 0.2)")
    parser.add_argument("--threshold", type=float, default=0.02,
                        help="a smaller change is never called one (default 0.02)")
    parser.add_argument("--json", help="also write the ratios of all rounds to this file")
    options, arguments = parser.parse_known_args()
    if not any(a.startswith(("--case", "--suite", "--benchmark_filter")) for a in arguments):
        arguments += [f"--case={case}" for case in SHORT_LIST]
    listed = run(options.head, [*arguments, "--benchmark_list_tests=true"]).split()
    cases = [name.removesuffix("/real_time") for name in listed]

    ratios, rates = {}, {}
    for index in range(options.rounds):
        for case in cases:
            order = ("base", "head") if index % 2 == 0 else ("head", "base")
            pair = {side: rate(getattr(options, side), case, options.min_time) for side in order}
            if None not in pair.values():
                ratios.setdefault(case, []).append(pair["head"] / pair["base"])
                rates.setdefault(case, []).append(pair["head"])
        print(f"\rround {index + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if not ratios:
        sys.exit("no case ran in both builds")

    width = max(map(len, ratios))
    print(f"{'case':{width}}  GFLOPS  this/{options.base_name}  95% interval    verdict")
    slower = 0
    for case in sorted(ratios):
        middle, low, high = median_interval(ratios[case])
        verdict = "same"
        if len(ratios[case]) < 6:  # 1 - 2 / 2**5 < 0.95
            verdict = "too few rounds to tell: at least 6"
        elif high < 1 and middle < 1 - options.threshold:
            verdict = "SLOWER"
            slower += 1
        elif low > 1 and middle > 1 + options.threshold:
            verdict = "faster"
        elif high - low > 0.2:
            verdict = "too noisy to tell: more rounds"
        print(f"{case:{width}}  {statistics.median(rates[case]):6.0f}  "
              f"{middle:{len(options.base_name) + 5}.3f}  {low:.3f} - {high:.3f}   {verdict}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"base": options.base_name, "ratios": ratios}, file, indent=1)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
