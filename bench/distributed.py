# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.distributed: the efficiency of n processes on one machine, and a model that predicts other machines.

    python bench/distributed.py [--processes 2] [--tokens 16384 ...] [--method ring ulysses] [--link 10gbit] [--json FILE]
    python bench/distributed.py --profile [--timeline FILE]                  # how much of the messages computing hides
    python bench/distributed.py --processes 8 --share --tokens 262144        # memory: more processes than cores
    python bench/distributed.py --table --rate 1.5e12 --bandwidth 1.25e9     # no measurement: the model's tables

Efficiency is the time of one process with all cores over the time of n processes with 1/n of the cores each, both
pinned, in turns; a call is a causal forward and backward. --link (as root) puts each process into a network namespace
of its own, on virtual links of that rate (tc-tbf). Measured in the same run: what a rank computes alone, the bandwidth
between two ranks and the processor time that a byte takes. From these the model (distributed_model.py) predicts each
time. The memory of a rank is the growth of its peak over all calls so far; give one N for the memory of that N.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from distributed_model import Machine, Shape, predict, table

DTYPES = ("bf16", "f32")
BRIDGE, PREFIX = "fa2bench", "10.201.77"


# What follows runs in the processes that are measured.


def _inputs(shape: Shape, dtype: str) -> list[Any]:
    import torch

    torch.manual_seed(0)
    kind = dict(bf16=torch.bfloat16, f32=torch.float32)[dtype]
    return [torch.randn(1, h, shape.tokens, shape.depth).to(kind) for h in (shape.heads, shape.kv_heads, shape.kv_heads)]


def _rank_shape(arguments: argparse.Namespace, tokens: int) -> Shape:
    return Shape(tokens, arguments.heads, arguments.kv_heads, arguments.depth, 2 if arguments.dtype == "bf16" else 4)


def worker(arguments: argparse.Namespace) -> None:
    """A rank: answers "tokens method" lines by a JSON line."""
    import torch
    import torch.distributed as dist

    import fa2_cpu.distributed as fd
    import fa2_cpu.torch as fa2

    torch.set_num_threads(arguments.threads)
    rank, world = arguments.rank, arguments.world
    dist.init_process_group("gloo", init_method=arguments.store, rank=rank, world_size=world)
    print(json.dumps(_link(dist, torch, rank, world)), flush=True)
    for line in sys.stdin:
        tokens, method = line.split()
        before = _peak()
        parts = _inputs(_rank_shape(arguments, int(tokens)), arguments.dtype)
        if world > 1:
            parts = fd.shard(parts, dim=2)
        leaves = [x.requires_grad_() for x in parts]
        dout = torch.ones_like(leaves[0])

        def call() -> float:
            dist.barrier()
            start = time.perf_counter()
            if world > 1:
                out, _ = fd.attention(*leaves, causal="top_left", method=method)
            else:
                out, _ = fa2.attention(*leaves, causal="top_left")
            torch.autograd.grad(out, leaves, dout)
            dist.barrier()
            return time.perf_counter() - start

        seconds = call()
        answer = dict(seconds=seconds, memory=_peak() - before)
        if arguments.profile and world > 1:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                call()
            waits = [e.cpu_time_total for e in profile.key_averages() if e.key == "fa2::distributed wait"]
            answer["wait"] = sum(waits) / 1e6
            answer["messages"] = _without_blocks(call)
            if arguments.timeline and rank == 0:
                profile.export_chrome_trace(arguments.timeline)
        print(json.dumps(answer), flush=True)


def _peak() -> int:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _without_blocks(call: Callable[[], float]) -> float:
    """Seconds of a call that sends everything and computes no block."""
    from fa2_cpu.distributed import _blocks

    kept = _blocks.forward, _blocks.backward
    _blocks.forward = _blocks.backward = lambda *arguments: None
    try:
        return call()
    finally:
        _blocks.forward, _blocks.backward = kept


def _link(dist: Any, torch: Any, rank: int, world: int) -> dict[str, float]:
    """Bandwidth between neighbours, both ways at once, the processor time of a byte, and a message's latency."""
    if world == 1:
        return {}
    to, source = (rank + 1) % world, (rank - 1) % world

    def exchange(size: int) -> None:
        out, into = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        receive, send = dist.irecv(into, source), dist.isend(out, to)
        receive.wait(), send.wait()

    times, processor = [], []
    size = 32 << 20
    for _ in range(6):
        dist.barrier()
        start, before = time.perf_counter(), time.process_time()
        exchange(size)
        times.append(time.perf_counter() - start)
        processor.append(time.process_time() - before)
    small = []
    for _ in range(50):
        dist.barrier()
        start = time.perf_counter()
        exchange(8)
        small.append(time.perf_counter() - start)
    touch = []
    for _ in range(5):
        start = time.perf_counter()
        torch.zeros(64 << 20, dtype=torch.uint8)
        touch.append(time.perf_counter() - start)
    return dict(bandwidth=size / statistics.median(times[1:]), byte_time=statistics.median(processor[1:]) / size,
                latency=statistics.median(small), touch_time=statistics.median(touch) / (64 << 20))  # fmt: skip


# The parent: processes, pinned, and their links.


@contextlib.contextmanager
def namespaces(count: int, rate: str) -> Iterator[list[list[str]]]:
    """Commands in front of each process that put it on a link of its own."""
    run = lambda *command: subprocess.run(command, check=True)
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")
        for n in range(count):
            space, inside, outside = f"{BRIDGE}{n}", f"{BRIDGE[:8]}i{n}", f"{BRIDGE[:8]}o{n}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            run("ip", "link", "set", inside, "netns", space)
            run("ip", "link", "set", outside, "master", BRIDGE, "up")
            enter = ("ip", "netns", "exec", space)
            run(*enter, "ip", "addr", "add", f"{PREFIX}.{n + 1}/24", "dev", inside)
            run(*enter, "ip", "link", "set", inside, "up")
            run(*enter, "ip", "link", "set", "lo", "up")
            run(*enter, "tc", "qdisc", "add", "dev", inside, "root", "tbf", "rate", rate, "burst", "2mb", "latency", "50ms")
        yield [["ip", "netns", "exec", f"{BRIDGE}{n}", "env", f"GLOO_SOCKET_IFNAME={BRIDGE[:8]}i{n}"] for n in range(count)]
    finally:
        for n in range(count):
            subprocess.run(["ip", "netns", "del", f"{BRIDGE}{n}"], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


class Group:
    """n processes, each with 1/n of the cores."""

    def __init__(self, arguments: argparse.Namespace, world: int, prefixes: list[list[str]], store: str) -> None:
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // world
        if each == 0 and not arguments.share:
            raise SystemExit(f"{len(cores)} cores are fewer than {world} processes; --share puts several on one")
        self.processes = []
        for rank in range(world):
            own = cores[rank * each : (rank + 1) * each] if each else [cores[rank % len(cores)]]
            command = [
                *prefixes[rank], "taskset", "-c", ",".join(map(str, own)), sys.executable, os.path.abspath(__file__),
                "--worker", f"--rank={rank}", f"--world={world}", f"--threads={len(own)}", f"--store={store}",
                f"--heads={arguments.heads}", f"--kv-heads={arguments.kv_heads}", f"--depth={arguments.depth}",
                f"--dtype={arguments.dtype}", *(["--profile"] if arguments.profile else []),
                *([f"--timeline={arguments.timeline}"] if arguments.timeline else []),
            ]  # fmt: skip
            self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self.link = self._read()[0]

    def _read(self) -> list[dict[str, float]]:
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def call(self, tokens: int, method: str) -> dict[str, float]:
        for process in self.processes:
            process.stdin.write(f"{tokens} {method}\n")
            process.stdin.flush()
        answers = self._read()
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait()


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    world = arguments.processes
    rows = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        prefixes = [[] for _ in range(world)]
        if arguments.link:
            prefixes = stack.enter_context(namespaces(world, arguments.link))
        many = Group(arguments, world, prefixes, f"file://{folder}/many")
        one = None if arguments.share else Group(arguments, 1, [[]], f"file://{folder}/one")
        for tokens in arguments.tokens:
            for method in arguments.method:
                row = dict(tokens=tokens, method=method, processes=world, link=arguments.link or "loopback")
                rows.append(row | _one_row(arguments, _rank_shape(arguments, tokens), method, one, many))
                print(_line(rows[-1]), flush=True)
        many.close()
        if one:
            one.close()
    return rows


def _one_row(arguments: argparse.Namespace, shape: Shape, method: str, one: Group | None, many: Group) -> dict[str, Any]:
    alone, together = [], []
    for _ in range(arguments.rounds):
        if one:
            alone.append(one.call(shape.tokens, method)["seconds"])
        together.append(many.call(shape.tokens, method))
    row = dict(many=statistics.median(x["seconds"] for x in together), **many.link)
    # The first call of a process is the one that allocates.
    row["memory"] = max(x["memory"] for x in together)
    if one:
        single, ranks = statistics.median(alone), arguments.processes
        # A rank has 1/n of the cores: its rate is taken as that part of the single process's.
        machine = Machine(shape.flops() / single / ranks, many.link["bandwidth"], many.link["latency"],
                          many.link["byte_time"], many.link["touch_time"], 10 * many.link["latency"],
                          max(1, len(os.sched_getaffinity(0)) // ranks))  # fmt: skip
        row |= dict(one=single, efficiency=single / row["many"], predicted=predict(shape, ranks, method, machine))
    if arguments.profile and method == "ring":
        # Of the rank that waits most. Ulysses computes nothing while its messages are under way.
        row["wait"] = statistics.median(x["wait"] for x in together)
        row["messages"] = statistics.median(x["messages"] for x in together)
        row["hidden"] = max(0.0, 1 - row["wait"] / row["messages"])
    return row


def _line(row: dict[str, Any]) -> str:
    text = f"N {row['tokens']:7}  {row['method']:8} {row['processes']} processes, {row['link']}: {row['many']:.3f} s"
    if "one" in row:
        text += f", one {row['one']:.3f} s, efficiency {row['efficiency']:.3f}; predicted {row['predicted']:.3f} s"
        text += f" ({100 * (row['predicted'] / row['many'] - 1):+.0f}%)"
    if "hidden" in row:
        text += f"; messages alone {row['messages']:.3f} s, waited {row['wait']:.3f} s, {100 * row['hidden']:.0f}% hidden"
    if "bandwidth" in row:
        text += f"; {row['bandwidth'] / 1e9:.2f} GB/s, {row['byte_time'] * 1e9:.2f} ns a byte sent, "
        text += f"{row['touch_time'] * 1e9:.2f} ns a new one, {row['latency'] * 1e6:.0f} µs a message"
    return text + f"; a rank's memory {row['memory'] / 2**20:.0f} MiB"


def print_table(arguments: argparse.Namespace) -> None:
    machine = Machine(arguments.rate, arguments.bandwidth, arguments.latency, 0.0, 0.0, 1e-3)
    print(f"{arguments.heads} heads, {arguments.kv_heads} of keys, D {arguments.depth}, {arguments.dtype}; a machine "
          f"{arguments.rate / 1e12:.2f} TFLOP/s, {arguments.bandwidth / 1e9:.2f} GB/s, {arguments.latency * 1e6:.0f} µs")  # fmt: skip
    table(_rank_shape(arguments, 0), arguments.tokens, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--method", nargs="+", choices=("ring", "ulysses"), default=["ring"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", help="a rate as tc writes it; needs root")
    parser.add_argument("--share", action="store_true", help="more processes than cores, for memory: not their times")
    parser.add_argument("--profile", action="store_true", help="more calls: time waited for messages, messages alone")
    parser.add_argument("--timeline", help="with --profile, a file for rank 0's calls in Chrome's format")
    parser.add_argument("--json", help="a file for the numbers, with the machine")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rate", type=float, default=1e12, help="of a machine, operations a second")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes a second")
    parser.add_argument("--latency", type=float, default=5e-5, help="seconds")
    for name in ("--worker",):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("--rank", int), ("--world", int), ("--threads", int), ("--store", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
    elif arguments.table:
        print_table(arguments)
    else:
        rows = measure(arguments)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(dict(machine=platform.processor() or platform.machine(), cores=os.cpu_count(), rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
