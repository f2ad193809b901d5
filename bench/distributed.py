# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.distributed: the efficiency of n processes on one machine, and a model that predicts other machines.

    python bench/distributed.py [--processes 2] [--tokens 16384 ...] [--method ring ulysses] [--link 10gbit] [--json FILE]
    python bench/distributed.py --table --rate 1.5e12 --bandwidth 1.25e9     # no measurement: the model's tables

Efficiency is the time of one process with all cores over the time of n processes with 1/n of the cores each, both
pinned, in turns; a call is a causal forward and backward. --link (as root) puts each process into a network namespace
of its own, on virtual links of that rate (tc-tbf). Measured in the same run: what a rank computes alone, the bandwidth
between two ranks and the processor time that a byte takes. From these the model predicts each time.
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
from collections.abc import Iterator
from typing import Any, NamedTuple

DTYPES = ("bf16", "f32")
BRIDGE, PREFIX = "fa2bench", "10.201.77"


class Shape(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    depth: int
    bytes: int  # of an element

    def flops(self) -> float:
        """Forward (4 N² D H / 2) and backward (10 N² D H / 2), causal."""
        return 14 * self.tokens**2 * self.depth * self.heads / 2


class Machine(NamedTuple):
    rate: float  # floating-point operations a second of one rank
    bandwidth: float  # bytes a second, each way
    latency: float  # seconds a message
    byte_time: float  # processor seconds of a rank for a byte sent and one received
    touch_time: float  # seconds for a byte of a buffer that is new: the first write
    call_time: float  # seconds of a call beside the above: comparing arguments, starting


def ring_bytes(shape: Shape, ranks: int) -> tuple[float, float]:
    """Bytes that a rank sends in a forward and in a backward: K and V; K, V, and dK and dV in f32.

    Causal with zigzag: a rank sends half of its rows to ranks behind it and all to those before, 3/4 on average.
    """
    rows = 0.75 * (ranks - 1) * shape.tokens / ranks
    elements = rows * 2 * shape.kv_heads * shape.depth
    return elements * shape.bytes, elements * (shape.bytes + 4)


def ulysses_bytes(shape: Shape, ranks: int) -> tuple[float, float]:
    """Q, K, V, out and lse; dout and lse's gradient, dQ, dK and dV in f32."""
    rows = shape.tokens / ranks * (ranks - 1) / ranks
    kv = max(shape.kv_heads, ranks)
    forward = rows * (2 * (shape.heads + kv) * shape.depth * shape.bytes + 4 * shape.heads)
    backward = rows * (shape.heads * shape.depth * (shape.bytes + 4) + 2 * kv * shape.depth * 4 + 4 * shape.heads)
    return forward, backward


def new_bytes(shape: Shape, ranks: int, sent: tuple[float, float]) -> float:
    """Bytes of buffers that a rank makes in a forward and a backward: sums in f32, results, messages in and out."""
    rows = shape.tokens / ranks * shape.depth
    queries = shape.heads * (4 + shape.bytes + 3 * 4 + shape.bytes)  # out; dQ and the product for delta
    keys = 2 * shape.kv_heads * (4 + shape.bytes)
    return rows * (queries + keys) + 2 * sum(sent)


def predict(shape: Shape, ranks: int, method: str, machine: Machine) -> float:
    """Seconds of a forward and a backward."""
    compute = shape.flops() / ranks / machine.rate
    if ranks == 1:
        return compute
    sent = ring_bytes(shape, ranks) if method == "ring" else ulysses_bytes(shape, ranks)
    handling = sum(sent) * machine.byte_time
    touched = new_bytes(shape, ranks, sent) * machine.touch_time
    on_the_wire = sum(sent) / machine.bandwidth
    if method == "ulysses":
        return compute + touched + max(handling, on_the_wire) + 2 * (ranks - 1) * machine.latency + machine.call_time
    # Of ring's steps the first computes what a rank has itself; the others' messages are under way meanwhile.
    total = machine.call_time + touched
    for part, bytes_sent in zip((4 / 14, 10 / 14), sent):
        busy = (compute * part + bytes_sent * machine.byte_time) / ranks
        wire = bytes_sent / (ranks - 1) / machine.bandwidth + machine.latency
        total += busy + (ranks - 1) * max(busy, wire)
        if part > 0.5:
            total += max(0.0, wire - busy)  # the last dK and dV, which nothing hides
    return total


def hidden_from(ranks: int, shape: Shape, machine: Machine) -> int:
    """The least N, a power of 2, at which ring's messages take no longer than the steps that hide them."""
    tokens = 1024
    while tokens < 1 << 30:
        at = shape._replace(tokens=tokens)
        compute = at.flops() / ranks / machine.rate / ranks
        if sum(ring_bytes(at, ranks)) / (ranks - 1) / machine.bandwidth <= compute:
            break
        tokens *= 2
    return tokens


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
        waited = 0.0
        if arguments.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                call()
            waits = [e.cpu_time_total for e in profile.key_averages() if e.key == "fa2::distributed wait"]
            waited = sum(waits) / 1e6
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(dict(seconds=seconds, wait=waited, memory=memory)), flush=True)


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
        if each == 0:
            raise SystemExit(f"{len(cores)} cores are fewer than {world} processes")
        self.processes = []
        for rank in range(world):
            own = cores[rank * each : (rank + 1) * each]
            command = [
                *prefixes[rank], "taskset", "-c", ",".join(map(str, own)), sys.executable, os.path.abspath(__file__),
                "--worker", f"--rank={rank}", f"--world={world}", f"--threads={each}", f"--store={store}",
                f"--heads={arguments.heads}", f"--kv-heads={arguments.kv_heads}", f"--depth={arguments.depth}",
                f"--dtype={arguments.dtype}", *(["--profile"] if arguments.profile else []),
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
        one = Group(arguments, 1, [[]], f"file://{folder}/one")
        for tokens in arguments.tokens:
            for method in arguments.method:
                pairs = []
                for _ in range(arguments.rounds):
                    pairs.append((one.call(tokens, method), many.call(tokens, method)))
                single = statistics.median(a["seconds"] for a, _ in pairs)
                several = statistics.median(b["seconds"] for _, b in pairs)
                shape = _rank_shape(arguments, tokens)
                # A rank has 1/n of the cores: its rate is taken as that part of the single process's.
                machine = Machine(shape.flops() / single / world, many.link["bandwidth"], many.link["latency"],
                                  many.link["byte_time"], many.link["touch_time"], 10 * many.link["latency"])  # fmt: skip
                expected = predict(shape, world, method, machine)
                rows.append(dict(
                    tokens=tokens, method=method, processes=world, link=arguments.link or "loopback", one=single,
                    many=several, efficiency=single / several, predicted=expected, wait=pairs[-1][1]["wait"],
                    memory=pairs[-1][1]["memory"], **many.link,
                ))  # fmt: skip
                print(
                    f"N {tokens:7}  {method:8} {world} processes, {rows[-1]['link']}: one {single:.3f} s, "
                    f"{world}: {several:.3f} s, efficiency {single / several:.3f}; predicted {expected:.3f} s "
                    f"({100 * (expected / several - 1):+.0f}%); {many.link['bandwidth'] / 1e9:.2f} GB/s, "
                    f"{many.link['byte_time'] * 1e9:.2f} ns a byte sent, {many.link['touch_time'] * 1e9:.2f} ns a new one, {many.link['latency'] * 1e6:.0f} µs a message; a rank's "
                    f"peak {rows[-1]['memory'] / 2**20:.0f} MiB", flush=True,
                )  # fmt: skip
        many.close()
        one.close()
    return rows


def table(arguments: argparse.Namespace) -> None:
    machine = Machine(arguments.rate, arguments.bandwidth, arguments.latency, 0.0, 0.0, 1e-3)
    shape = _rank_shape(arguments, 0)
    print(f"{arguments.heads} heads, {arguments.kv_heads} of keys, D {arguments.depth}, {arguments.dtype}; a machine "
          f"{arguments.rate / 1e12:.2f} TFLOP/s, {arguments.bandwidth / 1e9:.2f} GB/s, {arguments.latency * 1e6:.0f} µs")  # fmt: skip
    print("| machines | " + " | ".join(f"N {n:,}" for n in arguments.tokens) + " | messages hidden from N |")
    print("|---" * (len(arguments.tokens) + 2) + "|")
    for ranks in (8, 32, 128, 512, 1024):
        cells = []
        for tokens in arguments.tokens:
            at = shape._replace(tokens=tokens)
            seconds = predict(at, ranks, "ring", machine)
            cells.append(f"{seconds:.3g} s ({100 * at.flops() / arguments.rate / ranks / seconds:.0f}%)")
        print(f"| {ranks} | " + " | ".join(cells) + f" | {hidden_from(ranks, shape, machine):,} |")


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
    parser.add_argument("--profile", action="store_true", help="one more call under PyTorch's profiler: time waited")
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
        table(arguments)
    else:
        rows = measure(arguments)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(dict(machine=platform.processor() or platform.machine(), cores=os.cpu_count(), rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
