#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention right after a product of PyTorch's, and alone: fa2 beside PyTorch's own, in one process.

    bench/after_linear.py                       N 128 to 1024, the table
    bench/after_linear.py --lengths 256 --causal --json after_linear.json

PyTorch's threads spin for some milliseconds after each of its operators, so that a kernel on other
threads finds the cores taken. Both sides take turns, round by round, with all settings at their
defaults: torch.get_num_threads() threads, fa2 on the pool that it chooses (FA2_POOL forces one).
"alone": calls one after another, after a pause. "linear": each call right after an nn.Linear on the
same tokens. Milliseconds, medians over the rounds.
"""

import argparse
import json
import statistics
import sys
import time

HEADS, HEAD_DIM = 16, 64


def measure(torch, fa2_torch, length, causal, rounds, calls):
    """{side: {pass: {when: milliseconds}}} for one length."""
    torch.manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    q, k, v = (torch.randn(shape).to(torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn(shape).to(torch.bfloat16)
    tokens = torch.randn(length, HEADS * HEAD_DIM).to(torch.bfloat16)
    linear = torch.nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM, dtype=torch.bfloat16)
    sides = {
        "fa2": fa2_torch.scaled_dot_product_attention,
        "pytorch": torch.nn.functional.scaled_dot_product_attention,
    }
    outputs = {name: side(q, k, v, is_causal=causal) for name, side in sides.items()}

    def forward(name):
        with torch.no_grad():
            sides[name](q, k, v, is_causal=causal)

    def backward(name):
        torch.autograd.grad(outputs[name], (q, k, v), dout, retain_graph=True)

    def seconds(run, name, when):
        total = 0.0
        for _ in range(calls):
            if when == "linear":
                with torch.no_grad():
                    linear(tokens)
            begin = time.perf_counter()
            run(name)
            total += time.perf_counter() - begin
        return total / calls

    passes = {"forward": forward, "backward": backward}
    times = {(s, p, w): [] for s in sides for p in passes for w in ("alone", "linear")}
    for index in range(-1, rounds):  # the first round warms up
        order = list(times) if index % 2 == 0 else list(times)[::-1]
        for key in order:
            name, run, when = key
            if when == "alone":
                time.sleep(0.02)  # until the threads of the other side have stopped spinning
            passes[run](name)
            value = seconds(passes[run], name, when)
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
    parser.add_argument("--calls", type=int, default=20, help="calls of a side in a round (default 20)")
    parser.add_argument("--json", help="write the numbers there too")
    options = parser.parse_args()
    try:
        import torch

        import fa2_cpu
        import fa2_cpu.torch as fa2_torch
    except ImportError as error:
        sys.exit(f"after_linear needs PyTorch and fa2-cpu: {error}")
    info = fa2_cpu._core.info(torch.get_num_threads(), "openmp")
    report = {
        "pytorch": torch.__version__, "threads": torch.get_num_threads(), "pool": info["pool"],
        "target": info["target"], "engine": info["engine"], "heads": HEADS, "head_dim": HEAD_DIM,
        "dtype": "bf16", "causal": options.causal, "rows": [],
    }  # fmt: skip
    print(f"PyTorch {report['pytorch']}, {report['threads']} threads, fa2 {report['target']}/{report['engine']} on "
          f"{report['pool']}; H {HEADS}, D {HEAD_DIM}, bf16, {'causal' if options.causal else 'full'}; ms")  # fmt: skip
    print("| N | pass | fa2 alone | after a Linear | ratio | PyTorch alone | after a Linear | PyTorch/fa2 after |")
    print("|---|---|---|---|---|---|---|---|")
    for length in options.lengths:
        row = measure(torch, fa2_torch, length, options.causal, options.rounds, options.calls)
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
