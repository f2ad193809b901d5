# SPDX-License-Identifier: Apache-2.0
"""Ring attention (Liu et al. 2023): queries stay, keys and values come by, a rank's at a time.

In step t a rank computes with the keys of the rank t places before it, while those of step t + 1 are under way.
Messages go straight to the rank that reads them, and hold only the rows that its queries see; on a switched network
that costs no more than passing on from neighbour to neighbour, and no rank waits for the one between. In the backward
dK and dV go back in f32 while the next step is computed, and their owner sums them in the order of the steps, so that
a run repeats bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fa2_cpu.distributed import _blocks
from fa2_cpu.distributed._blocks import Gradients, Scores, Sums, accumulator
from fa2_cpu.distributed._shards import Segments, rows
from fa2_cpu.distributed._team import Circle, Pending
from fa2_cpu.distributed._tiles import Documents, Mask, Tile, key_rows, moved, tiles_of


class Reading(NamedTuple):
    """What a rank's queries read of another rank's keys."""

    tiles: list[Tile]  # their keys counted in what is sent
    sent: Segments  # ranges of the owner's key rows


class RingPlan:
    """Who reads what of whom, a function of shapes and masks that every rank knows."""

    def __init__(
        self, queries: Sequence[Segments], keys: Sequence[Segments], documents: Documents, mask: Mask, join: bool,
        pack: bool,
    ) -> None:  # fmt: skip
        self.queries, self.keys, self.documents = queries, keys, documents
        self._mask, self._join, self._pack = mask, join, pack
        self._readings: dict[tuple[int, int], Reading] = {}

    def reading(self, reader: int, owner: int) -> Reading:
        key = (reader, owner)
        if key not in self._readings:
            keys = self.keys[owner]
            tiles = tiles_of(self.queries[reader], keys, self.documents, self._mask, self._join, self._pack)
            sent = key_rows(tiles, keys) if reader != owner else ((0, rows(keys)),)
            self._readings[key] = Reading(moved(tiles, sent), sent)
        return self._readings[key]

    def rows_read(self, reader: int) -> int:
        """Key rows that a rank receives in a forward."""
        return sum(rows(self.reading(reader, n).sent) for n in range(len(self.keys)) if n != reader)


class _Message:
    """K and V rows, or dK and dV rows, one behind the other in one buffer."""

    def __init__(self, k: Tensor, v: Tensor, count: int, dtype: torch.dtype) -> None:
        batch, _, heads, depth = k.shape
        k_shape, v_shape = (batch, count, heads, depth), (batch, count, v.shape[2], v.shape[3])
        size = batch * count * heads * depth
        self.buffer = torch.empty(size + batch * count * v.shape[2] * v.shape[3], dtype=dtype)
        self.k, self.v = self.buffer[:size].view(k_shape), self.buffer[size:].view(v_shape)

    def gather(self, k: Tensor, v: Tensor, ranges: Segments) -> _Message:
        row = 0
        for a, b in ranges:
            self.k[:, row : row + b - a] = k[:, a:b]
            self.v[:, row : row + b - a] = v[:, a:b]
            row += b - a
        return self


class _Step(NamedTuple):
    owner: int
    tiles: list[Tile]
    k: Tensor
    v: Tensor


def _steps(circle: Circle, plan: RingPlan, k: Tensor, v: Tensor) -> Iterator[_Step]:
    """The keys of every rank in turn, the next ones under way meanwhile."""
    me, size = circle.index, circle.size

    def start(step: int) -> tuple[_Message, Pending, Pending]:
        to, source = (me + step) % size, (me - step) % size
        ranges = plan.reading(to, me).sent
        outgoing = _Message(k, v, rows(ranges), k.dtype).gather(k, v, ranges)
        incoming = _Message(k, v, rows(plan.reading(me, source).sent), k.dtype)
        return incoming, circle.receive(incoming.buffer, source), circle.send(outgoing.buffer, to)

    under_way = start(1) if size > 1 else None
    yield _Step(me, plan.reading(me, me).tiles, k, v)
    for step in range(1, size):
        incoming, receive, send = under_way
        with record_function("fa2::distributed wait"):
            receive.wait()
        under_way = start(step + 1) if step + 1 < size else None
        owner = (me - step) % size
        yield _Step(owner, plan.reading(me, owner).tiles, incoming.k, incoming.v)
        with record_function("fa2::distributed wait"):
            send.wait()


def forward(
    circle: Circle, plan: RingPlan, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype [B, rows, H, Dv], lse [B, H, rows])."""
    sums = Sums(q, v)
    for step in _steps(circle, plan, k, v):
        for tile in step.tiles:
            _blocks.forward(tile, scores, q, step.k, step.v, sums)
    sums.finish()
    if sinks is not None:
        _blocks.add_sinks(sums.out, sums.lse, sinks)
    return sums.out.to(q.dtype), sums.lse


def backward(
    circle: Circle, plan: RingPlan, scores: Scores, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
    dlse: Optional[Tensor], delta: Tensor, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """wanted: of dq, dk, dv, dbias and the slopes' gradient."""
    grads = Gradients(q, k, v, scores, wanted)
    me, size = circle.index, circle.size
    dtype = accumulator(q.dtype)
    returns = wanted[1] or wanted[2]
    coming: list[tuple[int, _Message, Pending]] = []
    going: list[Pending] = []

    def add(reader: int, message: _Message, receive: Pending) -> None:
        with record_function("fa2::distributed wait"):
            receive.wait()
        row = 0
        for a, b in plan.reading(reader, me).sent:
            for total, part in ((grads.dk, message.k), (grads.dv, message.v)):
                if total is not None:
                    total[:, a:b] += part[:, row : row + b - a]
            row += b - a

    for number, step in enumerate(_steps(circle, plan, k, v)):
        own = step.owner == me
        message = None
        if own:
            dk, dv = grads.dk, grads.dv
        else:
            message = _Message(k, v, step.k.shape[1], dtype)
            message.buffer.zero_()
            dk, dv = (x if want else None for x, want in zip((message.k, message.v), wanted[1:3]))
        for tile in step.tiles:
            _blocks.backward(tile, scores, dout, q, step.k, step.v, lse, dlse, delta, grads, dk, dv)
        if own or not returns:
            continue
        reader = (me + number) % size
        incoming = _Message(k, v, rows(plan.reading(reader, me).sent), dtype)
        coming.append((reader, incoming, circle.receive(incoming.buffer, reader)))
        going.append(circle.send(message.buffer, step.owner))
        if len(coming) > 1:
            add(*coming.pop(0))
            going.pop(0).wait()
    for item in coming:
        add(*item)
    for pending in going:
        pending.wait()
    return grads
