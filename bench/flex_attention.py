#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FlexAttention on a CPU: fa2's forward and backward, PyTorch's compiled forward, and SDPA with a dense mask.

    bench/flex_attention.py --length 4096 --threads 2
    bench/flex_attention.py --cases documents relative --dtype f32 --json flex.json

All in one process, in turns; medians of the rounds in ms. PyTorch's flex_attention has no backward on a CPU. SDPA is
given the same mask as a boolean tensor, which exists only for masks that a tensor of N² elements can be made of.
"""

import argparse
import json
import statistics
import time
import warnings

import torch
from torch.nn.attention import flex_attention as pytorch

import fa2_cpu.torch as fa2

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def cases(n, heads):
    """Name: (mask_mod or None, score_mod or None)."""
    documents = torch.arange(n) * 8 // n
    relative = torch.randn(heads, 2 * n, requires_grad=True)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])

    def same(b, h, q_idx, kv_idx):
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 512) | (kv_idx < 4))

    def prefix(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < n // 4)

    return {
        "causal": (causal, None),
        "documents": (same, None),
        "window": (window, None),
        "prefix": (prefix, None),
        "alibi": (causal, lambda s, b, h, q, k: s + slopes[h] * (k - q)),
        "softcap": (causal, lambda s, b, h, q, k: 20 * torch.tanh(s / 20)),
        "relative": (causal, lambda s, b, h, q, k: s + relative[h, q - k + n]),
        "blocks": (causal, lambda s, b, h, q, k: s - s.square() / 100),
    }


class Side:
    """A function to time, with the times of its rounds."""

    clock = time.perf_counter

    def __init__(self, name, function):
        self.name, self.function, self.times = name, function, []

    def run(self):
        start = Side.clock()
        self.function()
        self.times.append((Side.clock() - start) * 1e3)


def sides_of(options, mask_mod, score_mod):
    n, heads = options.length, options.heads
    shape = (1, heads, n, options.head_dim)
    q, k, v = (torch.randn(shape, dtype=DTYPES[options.dtype], requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, dtype=q.dtype)
    mask = fa2.create_block_mask(mask_mod, None, None, n, n)

    def step(attend):
        attend(q, k, v).backward(dout)
        q.grad = k.grad = v.grad = None

    plain = [x.detach() for x in (q, k, v)]

    def forward(attend):
        with torch.no_grad():
            return attend(*plain)

    def ours(q, k, v):
        return fa2.flex_attention(q, k, v, score_mod, mask)

    sides = [Side("fa2 forward", lambda: forward(ours)), Side("fa2 step", lambda: step(ours))]
    if not options.without_compile:
        compiled = torch.compile(pytorch.flex_attention, dynamic=False)
        sides.append(Side("compiled forward", lambda: forward(lambda q, k, v: compiled(q, k, v, score_mod, mask))))
    if score_mod is None:
        dense = pytorch.create_mask(mask_mod, 1, 1, n, n, device="cpu")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        sides.append(Side("SDPA forward", lambda: forward(lambda q, k, v: sdpa(q, k, v, dense))))
        sides.append(Side("SDPA step", lambda: step(lambda q, k, v: sdpa(q, k, v, dense))))
    return sides


def measure(options, name, mask_mod, score_mod):
    row = {"case": name}
    for side in (sides := sides_of(options, mask_mod, score_mod)):
        try:
            side.run()  # compiles, and touches the memory
        except Exception as error:  # PyTorch's compiler has no kernel for some
            row[side.name] = None
            print(f"{name}, {side.name}: {str(error).splitlines()[0]}")
    for _ in range(options.rounds):
        for side in sides:
            if side.name not in row:
                side.run()
    row.update({side.name: statistics.median(side.times[1:]) for side in sides if side.name not in row})
    return row


def masks(options):
    """How long create_block_mask takes, of fa2 and of PyTorch."""
    n = options.length
    sides = [Side("fa2 mask", lambda: fa2.create_block_mask(causal, None, None, n, n)),
             Side("PyTorch mask", lambda: pytorch.create_block_mask(causal, None, None, n, n, device="cpu"))]
    for _ in range(options.rounds + 1):
        for side in sides:
            side.run()
    return {"case": "create_block_mask", **{side.name: statistics.median(side.times[1:]) for side in sides}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--without-compile", action="store_true", help="leave PyTorch's compiled forward out")
    parser.add_argument("--cpu-time", action="store_true", help="the process's CPU time, for a busy machine: with one thread")
    parser.add_argument("--json", help="write the times to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.cpu_time:
        Side.clock = time.process_time
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    rows = [masks(options)]
    for name, (mask_mod, score_mod) in cases(options.length, options.heads).items():
        if not options.cases or name in options.cases:
            rows.append(measure(options, name, mask_mod, score_mod))
    print(f"{options.dtype}, {options.heads} heads, N {options.length}, D {options.head_dim}, {options.threads} threads, ms"
          + (" of CPU time" if options.cpu_time else ""))
    for row in rows:
        print(row["case"], *(f"{key} {value:.1f}" for key, value in row.items() if isinstance(value, float)), sep="; ")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
