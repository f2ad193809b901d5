# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks make the same call: one small gather before anything else is sent.

A rank on which an argument is wrong takes part too, so that its sentence is raised on every rank.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.distributed._team import Team, gather, gather_objects

CALLS = ("attention", "unshard", "context_parallel")
_FIELDS = 40  # one width for every call, so that different calls meet
_MARK = 0x66613263


def float_bits(x: Optional[float]) -> int:
    """A number that two floats share where they are equal bit by bit; None has its own."""
    return 0x7FF8_0000_0000_0001 if x is None else struct.unpack("<q", struct.pack("<d", float(x)))[0]


def content(x: Optional[Tensor]) -> int:
    """63 bits of a digest of a tensor's dtype, shape and elements."""
    if x is None:
        return 0
    data = x.detach().contiguous().view(torch.uint8) if x.dim() else x.detach().reshape(1).view(torch.uint8)
    digest = hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode() + data.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def exchange(
    team: Team, call: str, prepare: Callable[[], Sequence[int]]
) -> list[list[int]]:
    """What prepare() gives on every rank, in the team's order.

    Raises on every rank what prepare() raised on one, naming the rank.
    """
    error: Optional[Exception] = None
    numbers: Sequence[int] = ()
    try:
        numbers = prepare()
    except (TypeError, ValueError, NotImplementedError) as caught:
        if team.world == 1:
            raise
        error = caught
    if team.world == 1:
        return [list(numbers)]
    row = torch.zeros(_FIELDS, dtype=torch.int64)
    row[0], row[1], row[2] = _MARK, CALLS.index(call), error is not None
    if numbers:
        row[3 : 3 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    what = f"comparing the arguments of {call} between ranks"
    rows = gather(team, row, what).tolist()
    calls = [CALLS[r[1]] if r[0] == _MARK and 0 <= r[1] < len(CALLS) else "another collective" for r in rows]
    if len(set(calls)) > 1:
        other = next(n for n, name in enumerate(calls) if name != calls[0])
        raise RuntimeError(
            f"rank 0 of the group calls fa2_cpu.distributed.{calls[0]} where rank {other} calls {calls[other]}; "
            "all ranks must make the same calls in one order"
        )
    if any(r[2] for r in rows):
        said = gather_objects(team, None if error is None else (type(error).__name__, str(error)), what)
        rank, (kind, sentence) = next((n, x) for n, x in enumerate(said) if x is not None)
        types = {"TypeError": TypeError, "NotImplementedError": NotImplementedError}
        raise types.get(kind, ValueError)(f"on rank {rank} of the group: {sentence}")
    return [r[3 : 3 + len(numbers)] for r in rows]


def same(rows: list[list[int]], column: int, name: str, show: Callable[[int], Any] = lambda x: x) -> None:
    """ValueError, alike on every rank, unless a number is the same on all."""
    first = rows[0][column]
    for rank, row in enumerate(rows):
        if row[column] != first:
            raise ValueError(
                f"{name} is {show(first)} on rank 0 of the group and {show(row[column])} on rank {rank}; "
                "it must be the same on all"
            )
