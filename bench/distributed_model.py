# SPDX-License-Identifier: Apache-2.0
"""What a call of fa2_cpu.distributed.attention costs: bytes, seconds, the N from which messages are hidden."""

from __future__ import annotations

from typing import NamedTuple


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
    cores: int = 1  # of a rank


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
    # Of ring's steps the first computes what a rank has itself; the others' messages are under way meanwhile. What they
    # cost a processor falls on all cores of a rank, of which gloo's threads take some.
    total = machine.call_time + touched / machine.cores
    for part, bytes_sent in zip((4 / 14, 10 / 14), sent):
        busy = (compute * part + bytes_sent * machine.byte_time / machine.cores) / ranks
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


def table(shape: Shape, tokens: list[int], machine: Machine) -> None:
    """Prints the model's times for 8 to 1,024 machines; shape's own tokens do not count."""
    print("| machines | " + " | ".join(f"N {n:,}" for n in tokens) + " | messages hidden from N |")
    print("|---" * (len(tokens) + 2) + "|")
    for ranks in (8, 32, 128, 512, 1024):
        cells = []
        for count in tokens:
            at = shape._replace(tokens=count)
            seconds = predict(at, ranks, "ring", machine)
            cells.append(f"{seconds:.3g} s ({100 * at.flops() / machine.rate / ranks / seconds:.0f}%)")
        print(f"| {ranks} | " + " | ".join(cells) + f" | {hidden_from(ranks, shape, machine):,} |")
