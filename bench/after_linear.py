#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention right after a product of PyTorch's, and alone: fa2 beside PyTorch's own, in one process.

    bench/after_linear.py                       N 128 to 1024, the table
    bench/after_linear.py --lengths 256 --causal --json after_linear.json

PyTorch's threads spin for some milliseconds after each of its operators, so that a kernel on other
threads finds the cores taken. Both sides take turns, round by round, with all settings at their
defaults: torch.get_num_threads() threads, fa2 on the pool that it chooses (FA2_POOL forces one).
"alone": calls one after another, after a pause. "linear": each call right after an nn.Linear on the
same tokens. Milliseconds, medians over the rounds. compare_pytorch.py --when linear has such rows of any shape.
"""

import argparse
import json
import statistics
import sys
import time

from pytorch_cases import Case
from pytorch_sides import Attention, Inputs, time_calls

HEADS, HEAD_DIM = 16, 64


def measure(torch, fa2_torch, case, rounds, at_least):
    """{side: {pass: {when: milliseconds}}} of one case."""
    inputs = Inputs(case)
    linear = inputs.linear()
    sides = {
        "fa2": Attention(inputs, fa2_torch.scaled_dot_product_attention),
        "pytorch": Attention(inputs, torch.nn.functional.scaled_dot_product_attention),
    }

    def forward(side):
        with torch.no_grad():
            side.forward()

    passes = {"forward": forward, "backward": lambda side: side.backward(side.out)}
    times = {(s, p, w): [] for s in sides for p in passes for w in ("alone", "linear")}
    for index in range(-1, rounds):  # the first round warms up
        order = list(times) if index % 2 == 0 else list(times)[::-1]
        for key in order:
            name, run, when = key

            def call():
                passes[run](sides[name])

            if when == "alone":
                time.sleep(0.02)  # until the threads of the other side have stopped spinning
            call()
            value = time_calls(call, at_least, linear if when == "linear" else None)
            if index >= 0:
                times[key].append(value * 1e3)
    return {
        s: {p: {w: statistics.median(times[s, p, w]) for w in ("alone", "linear")} for p in passes} for s in sides
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--min-time", type=float, default=0.02, help="seconds of calls of a side in a round")
    parser.add_argument("--json", help="write the numbers there too")
    options = parser.parse_args()
    try:
        import torch

        import fa2_cpu
        import fa2_cpu.torch as fa2_torch
    except ImportError as error:
        sys.exit(f"after_linear needs PyTorch and fa2-cpu: {error}")
    threads = torch.get_num_threads()
    info = fa2_cpu._core.info(threads, "openmp")
    report = {
        "pytorch": torch.__version__, "threads": threads, "pool": info["pool"],
        "target": info["target"], "engine": info["engine"], "heads": HEADS, "head_dim": HEAD_DIM,
        "dtype": "bf16", "causal": options.causal, "rows": [],
    }  # fmt: skip
    print(f"PyTorch {report['pytorch']}, {report['threads']} threads, fa2 {report['target']}/{report['engine']} on "
          f"{report['pool']}; H {HEADS}, D {HEAD_DIM}, bf16, {'causal' if options.causal else 'full'}; ms")  # fmt: skip
    print("| N | pass | fa2 alone | after a Linear | ratio | PyTorch alone | after a Linear | PyTorch/fa2 after |")
    print("|---|---|---|---|---|---|---|---|")
    for length in options.lengths:
        case = Case("forward", "bf16", 1, HEADS, HEADS, length, HEAD_DIM, options.causal, threads)
        row = measure(torch, fa2_torch, case, options.rounds, options.min_time)
        report["rows"].append({"length": length, **row})
        for run in ("forward", "backward"):
            fa2, own = row["fa2"][run], row["pytorch"][run]
            print(f"| {length} | {run} | {fa2['alone']:.3f} | {fa2['linear']:.3f} | {fa2['linear'] / fa2['alone']:.2f} "
                  f"| {own['alone']:.3f} | {own['linear']:.3f} | {own['linear'] / fa2['linear']:.2f} |",
                  flush=True)  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
