# SPDX-License-Identifier: Apache-2.0
"""shard and unshard: a rank's part of tensors, and the whole of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fa2_cpu.distributed import _agree
from fa2_cpu.distributed._agree import same
from fa2_cpu.distributed._shards import SHARDS, Segments, rows, segments_of, segments_of_parts
from fa2_cpu.distributed._team import Circle, Team, team_of


def _each(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """function of a tensor, or of each in a dict, list or tuple; None stays."""
    if isinstance(x, Tensor):
        return function(x)
    if x is None:
        return None
    if isinstance(x, Mapping):
        return {name: _each(function, y) for name, y in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_each(function, y) for y in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_each(function, y) for y in x)
    raise TypeError(f"x holds a {type(x).__name__}; it must be a tensor, or a dict, list or tuple of tensors")


def _dimension(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}; a tensor of shape {tuple(x.shape)} does not have it")
    return dim % x.dim()


def _check_shards(shards: str) -> None:
    if shards not in SHARDS:
        raise ValueError(f"shards is {shards!r}; it must be one of {', '.join(map(repr, SHARDS))}")


def cut(x: Tensor, dim: int, segments: Segments) -> Tensor:
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in segments], dim)


def shard(x: Any, *, dim: int = 1, group: Any = None, shards: str = "zigzag") -> Any:
    """This rank's part, along a dimension, of a tensor, or of each in a dict, list or tuple (None stays None).

    Args:
      x: whole tensors, alike on every rank; nothing is sent.
      dim: the dimension of the sequence: 1 of [B, N] and [B, N, H, D], 2 of [B, H, N, D].
      group: as for attention.
      shards: "zigzag": of 2·world pieces those numbered r and 2·world − 1 − r; "contiguous": piece r of world.
        The first N mod (number of pieces) pieces are one row longer.

    Returns:
      Copies, differentiable.

    Raises:
      TypeError: what is neither a tensor nor a dict, list or tuple of tensors.
      ValueError: a dim that a tensor does not have, or an unknown shards.
      RuntimeError: there is no process group.

    Example (a group of one process; torchrun starts one for each rank):
      >>> import torch, torch.distributed as dist, fa2_cpu.distributed as fd
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: "gloo" alone
      >>> batch = fd.shard({"input_ids": torch.arange(8)[None], "attention_mask": None})
      >>> batch["input_ids"].tolist()  # rank 0 of 2 would have 0, 1, 6 and 7
      [[0, 1, 2, 3, 4, 5, 6, 7]]
      >>> dist.destroy_process_group()
    """
    team = team_of(group)
    _check_shards(shards)

    def part(y: Tensor) -> Tensor:
        along = _dimension(y, dim)
        return cut(y, along, segments_of(y.shape[along], team.world, shards)[team.rank])

    return _each(part, x)


def unshard(x: Any, *, dim: int = 1, group: Any = None, shards: str = "zigzag") -> Any:
    """The whole, on every rank, of the parts that ranks have: shard undone.

    The arguments are those of shard; contiguous parts may have any lengths. Differentiable: a part's gradient is the sum
    of what all ranks' losses give it.

    Raises:
      TypeError: as shard. ValueError: parts that do not fit each other, on every rank alike. RuntimeError: as attention.

    Example (a group of one process; torchrun starts one for each rank):
      >>> import torch, torch.distributed as dist, fa2_cpu.distributed as fd
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: "gloo" alone
      >>> x = torch.randn(2, 7, 3)
      >>> torch.equal(fd.unshard(fd.shard(x)), x)
      True
      >>> dist.destroy_process_group()
    """
    team = team_of(group)
    _check_shards(shards)
    return _each(lambda y: _whole(y, dim, team, shards), x)


_DTYPES = tuple(sorted((x for x in vars(torch).values() if isinstance(x, torch.dtype)), key=str))


def _whole(x: Tensor, dim: int, team: Team, shards: str) -> Tensor:
    if team.world == 1:
        return x
    dims = 8

    def prepare() -> list[int]:
        along = _dimension(x, dim)
        if not x.is_cpu or x.dim() > dims:
            raise ValueError(f"x is on {x.device} and has {x.dim()} dimensions; it must be on the CPU and have up to {dims}")
        others = [n for i, n in enumerate(x.shape) if i != along]
        return [along, x.shape[along], _DTYPES.index(x.dtype), x.dim(), *others, *[0] * (dims - 1 - len(others)),
                SHARDS.index(shards), bool(x.requires_grad and torch.is_grad_enabled())]  # fmt: skip

    table = _agree.exchange(team, "unshard", prepare)
    names = {0: "dim", 2: "x's dtype", 3: "x's number of dimensions", dims + 3: "shards", dims + 4: "x.requires_grad"}
    for column in range(len(table[0])):
        if column != 1:
            same(table, column, names.get(column, "a size of x along another dimension than dim"))
    segments = segments_of_parts([r[1] for r in table], shards)
    if isinstance(segments, str):
        raise ValueError(f"x {segments}")
    return _Whole.apply(x, _dimension(x, dim), team, segments)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, team, segments):
        ctx.dim, ctx.team, ctx.segments = dim, team, segments
        parts = [x.detach().movedim(dim, 0).contiguous()]
        for circle in (team.heads, team.ring):
            counts = _counts(team, segments, circle)
            parts = _gathered(circle, parts, counts)
        whole = torch.empty((sum(rows(s) for s in segments), *parts[0].shape[1:]), dtype=x.dtype)
        for part, own in zip(parts, segments):
            row = 0
            for start, stop in own:
                whole[start:stop] = part[row : row + stop - start]
                row += stop - start
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        team = ctx.team
        pieces = [cut(grad, ctx.dim, s).movedim(ctx.dim, 0).contiguous() for s in ctx.segments]
        # First over the ring, each circle of heads at a time, then within the circle.
        width = team.heads.size
        pieces = _summed(team.ring, [torch.cat(pieces[n * width : (n + 1) * width]) for n in range(team.ring.size)])
        own = ctx.segments[team.ring.index * width : (team.ring.index + 1) * width]
        result = _summed(team.heads, list(pieces.split([rows(s) for s in own])))
        return result.movedim(0, ctx.dim), None, None, None


def _counts(team: Team, segments: tuple[Segments, ...], circle: Circle) -> list[list[int]]:
    """The lengths of the parts that each rank of the circle has before it gathers."""
    lengths = [rows(s) for s in segments]
    if circle is team.heads:
        first = team.ring.index * circle.size
        return [[lengths[first + n]] for n in range(circle.size)]
    width = team.heads.size
    return [lengths[n * width : (n + 1) * width] for n in range(circle.size)]


def _gathered(circle: Circle, parts: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
    """The parts of all ranks of the circle, in its order."""
    if circle.size == 1:
        return parts
    own = torch.cat(parts)
    order = [(circle.index + step) % circle.size for step in range(1, circle.size)]
    into = {n: own.new_empty((sum(counts[n]), *own.shape[1:])) for n in order}
    receives = [circle.receive(into[n], n) for n in order]
    sends = [circle.send(own, n) for n in order]
    for pending in receives + sends:
        pending.wait()
    into[circle.index] = own
    return [part for n in range(circle.size) for part in into[n].split(counts[n])]


def _summed(circle: Circle, pieces: list[Tensor]) -> Tensor:
    """The sum over ranks of what each has for this rank, in the order of the ranks."""
    if circle.size == 1:
        return pieces[0]
    own = pieces[circle.index]
    order = [(circle.index + step) % circle.size for step in range(1, circle.size)]
    into = {n: torch.empty_like(own) for n in order}
    receives = {n: circle.receive(into[n], n) for n in order}
    sends = [circle.send(pieces[n], n) for n in order]
    total = torch.zeros_like(own)
    for n in range(circle.size):
        total += own if n == circle.index else receives[n].wait()
    for pending in sends:
        pending.wait()
    return total
