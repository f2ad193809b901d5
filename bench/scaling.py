#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How a call scales: one process on all cores beside one-thread processes, each pinned to a core.

    bench/scaling.py --bench build/bench/bench_attention --threads 32
    bench/scaling.py --cores 0-31 --json scaling.json

The share is the rate of one call on all threads over the sum of the rates of as many one-thread
processes that run at the same time, each with its part of the heads (or, where there are fewer heads
than cores, with a head of its own): shared caches, memory and clocks are then alike. Each runs
under taskset on the cores of --cores, in turns with the others, medians.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

CASES = ((64, 2048), (32, 2048), (1, 8192))  # heads, N
HEAD_DIM = 128


def name_of(heads, length, threads):
    return f"backward/bf16/B1/H{heads}/KV{heads}/N{length}/D{HEAD_DIM}/full/T{threads}"


def start(options, case, cores, environment=None):
    return subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), options.bench, f"--case={case}", "--benchmark_format=json",
         f"--benchmark_min_time={options.min_time}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **(environment or {})})  # fmt: skip


def gflops(process):
    out, error = process.communicate()
    if process.returncode != 0:
        sys.exit(f"the benchmark failed:\n{error}")
    entry = json.loads(out)["benchmarks"][0]
    if entry.get("error_occurred"):
        sys.exit(entry["error_message"])
    return entry["GFLOPS"]


def parse_cores(text):
    cores = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="build/bench/bench_attention")
    parser.add_argument("--cores", help="as taskset has them (default: all that this process may use)")
    parser.add_argument("--threads", type=int, help="the first so many of the cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min-time", type=float, default=1.0, help="seconds a measurement (default 1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="measure one process with this in its environment too; may be repeated")  # fmt: skip
    parser.add_argument("--json", help="write the numbers there too")
    options = parser.parse_args()
    if shutil.which("taskset") is None:
        sys.exit("scaling needs taskset")
    cores = parse_cores(options.cores) if options.cores else sorted(os.sched_getaffinity(0))
    cores = cores[: options.threads]
    variants = {"": {}, **{text: dict([text.split("=", 1)]) for text in options.set}}
    report = {"cores": cores, "head_dim": HEAD_DIM, "rows": []}
    print(f"{len(cores)} cores, backward, bf16, D {HEAD_DIM}; GFLOP/s")
    print("| heads | N | environment | one process | pinned processes | share |")
    print("|---|---|---|---|---|---|")
    for heads, length in CASES:
        own = max(1, heads // len(cores))
        together = {variant: [] for variant in variants}
        pinned = []
        for _ in range(options.rounds):
            for variant, environment in variants.items():
                case = name_of(heads, length, len(cores))
                together[variant].append(gflops(start(options, case, cores, environment)))
            running = [start(options, name_of(own, length, 1), [core]) for core in cores]
            pinned.append(sum(gflops(process) for process in running))
        for variant, rates in together.items():
            row = {
                "heads": heads, "length": length, "environment": variant,
                "one_process": statistics.median(rates), "pinned": statistics.median(pinned),
            }  # fmt: skip
            row["share"] = row["one_process"] / row["pinned"]
            report["rows"].append(row)
            print(f"| {heads} | {length} | {variant or '-'} | {row['one_process']:.0f} | {row['pinned']:.0f} "
                  f"| {row['share']:.2f} |", flush=True)  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
