#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How a call scales: one process on all cores beside one-thread processes, each pinned to a core.

    bench/scaling.py --threads 32                          the package fa2_cpu, on PyTorch's tensors
    bench/scaling.py --bench build/bench/bench_attention   the bench binary instead
    bench/scaling.py --cores 0-31 --cases 64x2048 1x8192 --json scaling.json

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

from pytorch_cases import Case
from pytorch_sides import Inputs, time_calls

HEAD_DIM = 128


def case_of(heads, length, threads):
    return Case("backward", "bf16", 1, heads, heads, length, HEAD_DIM, False, threads)


class Running:
    """A process that measures a case: the bench binary, or this script with --one, which waits for a line to begin."""

    def __init__(self, options, case, cores, environment=None):
        self.by_package = options.bench is None
        if self.by_package:
            command = [sys.executable, os.path.abspath(__file__), "--one", case.name, "--min-time", str(options.min_time)]
        else:
            command = [options.bench, f"--case={case.name}", "--benchmark_format=json",
                       f"--benchmark_min_time={options.min_time}"]
        self.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})

    def wait_until_ready(self):
        if self.by_package and self.process.stdout.readline() != "ready\n":
            sys.exit(f"the benchmark failed:\n{self.process.communicate()[1]}")

    def begin(self):
        if self.by_package:
            self.process.stdin.write("begin\n")
            self.process.stdin.flush()

    def gflops(self):
        out, error = self.process.communicate()
        if self.process.returncode != 0:
            sys.exit(f"the benchmark failed:\n{error}")
        entry = json.loads(out)["benchmarks"][0]
        if entry.get("error_occurred"):
            sys.exit(entry["error_message"])
        return entry["GFLOPS"]


def rates_of(running):
    """GFLOP/s of processes that measure at the same time."""
    for process in running:
        process.wait_until_ready()
    for process in running:
        process.begin()
    return [process.gflops() for process in running]


def measure_one(case, at_least):
    """What the bench binary does, through the package."""
    import fa2_cpu
    inputs = Inputs(case)
    q, k, v, dout = (x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = fa2_cpu.attention_forward(q, k, v, num_threads=case.threads)

    def call():
        fa2_cpu.attention_backward(dout, q, k, v, out, lse, num_threads=case.threads)

    call()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"benchmarks": [{"GFLOPS": case.flops / time_calls(call, at_least) / 1e9}]}))


def parse_case(text):
    heads, _, length = text.partition("x")
    return int(heads), int(length)


def parse_cores(text):
    cores = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", help="bench_attention (default: the Python package fa2_cpu)")
    parser.add_argument("--cases", type=parse_case, nargs="+", metavar="HEADSxN", default=[(64, 2048), (32, 2048), (1, 8192)],
                        help="(default: 64x2048 32x2048 1x8192)")
    parser.add_argument("--cores", help="as taskset has them (default: all that this process may use)")
    parser.add_argument("--threads", type=int, help="the first so many of the cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min-time", type=float, default=1.0, help="seconds a measurement (default 1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="measure one process with this in its environment too; may be repeated")  # fmt: skip
    parser.add_argument("--json", help="write the numbers there too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure_one(Case.parse(options.one), options.min_time)
        return
    if shutil.which("taskset") is None:
        sys.exit("scaling needs taskset")
    cores = parse_cores(options.cores) if options.cores else sorted(os.sched_getaffinity(0))
    cores = cores[: options.threads]
    variants = {"": {}, **{text: dict([text.split("=", 1)]) for text in options.set}}
    report = {"cores": cores, "head_dim": HEAD_DIM, "rows": []}
    print(f"{len(cores)} cores, backward, bf16, D {HEAD_DIM}; GFLOP/s")
    print("| heads | N | environment | one process | pinned processes | share |")
    print("|---|---|---|---|---|---|")
    for heads, length in options.cases:
        own = max(1, heads // len(cores))
        together = {variant: [] for variant in variants}
        pinned = []
        for _ in range(options.rounds):
            for variant, environment in variants.items():
                case = case_of(heads, length, len(cores))
                together[variant] += rates_of([Running(options, case, cores, environment)])
            pinned.append(sum(rates_of([Running(options, case_of(own, length, 1), [core]) for core in cores])))
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
