# SPDX-License-Identifier: Apache-2.0
"""Rows exchanged for heads (DeepSpeed Ulysses, Jacobs et al. 2023): each rank of a circle has the rows of all for some
of the heads. Key heads that are fewer than ranks go to each rank that needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa2_cpu.distributed._shards import Segments, joined, pieces, places, rows
from fa2_cpu.distributed._team import Circle

Range = tuple[int, int]


class HeadRun(NamedTuple):
    """Query heads q0 … q1 that share key heads k0 … k1 evenly, counted in a rank's own."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def queries(self) -> int:
        return self.q1 - self.q0


class HeadShares:
    """The heads of each rank of a circle."""

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        per_key = heads // kv_heads
        self.per_key = per_key
        self.queries: list[Range] = pieces(heads, size)
        self.keys: list[Range] = [
            (a // per_key, -(-b // per_key)) if a < b else (0, 0) for a, b in self.queries
        ]  # fmt: skip

    @property
    def shared(self) -> bool:
        """Whether some key heads are on several ranks."""
        return any(a[1] > b[0] for a, b in zip(self.keys, self.keys[1:]))

    def runs(self, index: int) -> tuple[HeadRun, ...]:
        """The calls that a rank's heads take: one where its query heads share its key heads evenly."""
        (a, b), (c, d) = self.queries[index], self.keys[index]
        if a == b:
            return ()
        if d - c == 1 or (a % self.per_key == 0 and b % self.per_key == 0):
            return (HeadRun(0, b - a, 0, d - c),)
        return tuple(
            HeadRun(max(a, n * self.per_key) - a, min(b, (n + 1) * self.per_key) - a, n - c, n - c + 1)
            for n in range(c, d)
        )


class HeadExchange:
    """Between [B, own rows, all heads, D] and [B, rows of the circle, own heads, D]."""

    def __init__(self, circle: Circle, segments: Sequence[Segments]) -> None:
        """segments: those of each rank of the circle."""
        self._circle = circle
        self._rows = [rows(s) for s in segments]
        self.segments = joined(segments)
        self._places = [places(s, self.segments) for s in segments]

    def _swap(
        self, outgoing: Callable[[int], Tensor], shape: Callable[[int], tuple[int, ...]], like: Tensor,
        take: Callable[[int, Tensor], None],
    ) -> None:  # fmt: skip
        """Sends outgoing(n) to each rank n and takes what it sends, in the circle's order."""
        circle = self._circle
        order = [(circle.index + step) % circle.size for step in range(1, circle.size)]
        into = {n: torch.empty(shape(n), dtype=like.dtype) for n in order}
        receives = {n: circle.receive(into[n], n) for n in order}
        sends = [circle.send(outgoing(n), n) for n in order]
        for n in range(circle.size):
            take(n, outgoing(n) if n == circle.index else receives[n].wait())
        for send in sends:
            send.wait()

    def to_heads(self, x: Tensor, ranges: Sequence[Range]) -> Tensor:
        """Heads ranges[n] go to rank n."""
        if self._circle.size == 1:
            return x
        batch, _, _, depth = x.shape
        a, b = ranges[self._circle.index]
        result = x.new_empty((batch, sum(self._rows), b - a, depth))

        def take(n: int, part: Tensor) -> None:
            for row, place, length in self._places[n]:
                result[:, place : place + length] = part[:, row : row + length]

        self._swap(
            lambda n: x[:, :, slice(*ranges[n])].contiguous(), lambda n: (batch, self._rows[n], b - a, depth), x, take
        )
        return result

    def to_rows(self, x: Tensor, ranges: Sequence[Range], heads: int) -> Tensor:
        """The way back; what several ranks have of one head is summed in their order."""
        if self._circle.size == 1:
            return x
        batch, _, _, depth = x.shape
        own = self._rows[self._circle.index]
        overlap = any(a[1] > b[0] for a, b in zip(ranges, ranges[1:]))
        result = (x.new_zeros if overlap else x.new_empty)((batch, own, heads, depth))

        def outgoing(n: int) -> Tensor:
            part = x.new_empty((batch, self._rows[n], x.shape[2], depth))
            for row, place, length in self._places[n]:
                part[:, row : row + length] = x[:, place : place + length]
            return part

        def take(n: int, part: Tensor) -> None:
            own_heads = result[:, :, slice(*ranges[n])]
            own_heads.add_(part) if overlap else own_heads.copy_(part)

        self._swap(outgoing, lambda n: (batch, own, ranges[n][1] - ranges[n][0], depth), x, take)
        return result
