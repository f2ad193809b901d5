# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a sequence, and messages between them through torch.distributed."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import Tensor


class Circle:
    """The ranks of one process group, numbered from 0; of one rank alone where group is None."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.index = 0 if group is None else dist.get_rank(group)
        self.ranks = [0] if group is None else [dist.get_global_rank(group, n) for n in range(self.size)]

    def send(self, x: Tensor, to: int) -> Pending:
        """x, contiguous and not to be written before wait(), on its way to a rank of the circle."""
        return Pending(lambda: dist.isend(x, self.ranks[to], group=self.group), f"sending to rank {self.ranks[to]}", x)

    def receive(self, x: Tensor, source: int) -> Pending:
        """x, contiguous, to be read after wait()."""
        peer = self.ranks[source]
        return Pending(lambda: dist.irecv(x, peer, group=self.group), f"receiving from rank {peer}", x)


class Pending:
    """A message under way. Messages without elements are not sent."""

    def __init__(self, start: Callable[[], Any], what: str, x: Tensor) -> None:
        self._what = what
        self._buffer = x  # kept alive
        self._work = guarded(what, start) if x.numel() else None

    def wait(self) -> Tensor:
        if self._work is not None:
            guarded(self._what, self._work.wait)
            self._work = None
        return self._buffer


def guarded(what: str, function: Callable[[], Any]) -> Any:
    """function(), its errors as a sentence: another rank failed, ended, or did not come within the group's timeout."""
    try:
        return function()
    except RuntimeError as error:
        raise RuntimeError(
            f"fa2_cpu.distributed: {what} failed; another rank has ended or failed, or did not make this call within "
            f"the group's timeout ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


class Team:
    """All ranks of a call: circles of ranks that exchange heads (Ulysses), in a circle of circles (ring).

    The number of a rank is ring.index · heads.size + heads.index; parts of the sequence are in this order.
    """

    def __init__(self, ring: Circle, heads: Circle) -> None:
        self.ring, self.heads = ring, heads
        self.world = ring.size * heads.size
        self.rank = ring.index * heads.size + heads.index

    def with_method(self, method: str) -> Team:
        """A one-dimensional team, all in the ring or all in one circle of heads."""
        circle = self.ring if self.heads.size == 1 else self.heads
        return Team(circle, Circle()) if method == "ring" else Team(Circle(), circle)

    @property
    def two_dimensional(self) -> bool:
        return self.ring.size > 1 and self.heads.size > 1


def team_of(group: Any) -> Team:
    """The team of a ProcessGroup, of a DeviceMesh of one dimension, or of one with the dimensions "ring", "ulysses"."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fa2_cpu.distributed needs process groups; call torch.distributed.init_process_group first"
        )
    if group is None:
        return Team(Circle(dist.group.WORLD), Circle())
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim == 1:
            return Team(Circle(group.get_group()), Circle())
        names = group.mesh_dim_names
        if group.ndim != 2 or names != ("ring", "ulysses"):
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions named {names}; it must have one dimension, or two "
                'named ("ring", "ulysses")'
            )
        return Team(Circle(group.get_group("ring")), Circle(group.get_group("ulysses")))
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is of type {type(group).__name__}; it must be a ProcessGroup or a DeviceMesh")
    if dist.get_rank(group) < 0:
        raise ValueError("group does not contain this rank")
    return Team(Circle(group), Circle())


def gather(team: Team, x: Tensor, what: str) -> Tensor:
    """[world, …] of x [n] of every rank, in the team's order."""
    for circle in (team.heads, team.ring):
        if circle.size == 1:
            x = x.unsqueeze(0)
            continue
        parts = [x.new_empty(x.shape) for _ in range(circle.size)]
        guarded(what, lambda parts=parts, x=x, group=circle.group: dist.all_gather(parts, x.contiguous(), group=group))
        x = torch.stack(parts)
    return x.reshape(team.world, -1)


def gather_objects(team: Team, x: Any, what: str) -> list[Any]:
    """x of every rank, pickled on the way; for sentences of errors."""
    found: list[Any] = [x]
    for circle in (team.heads, team.ring):
        if circle.size > 1:
            parts: list[Optional[list[Any]]] = [None] * circle.size
            guarded(what, lambda p=parts, f=found, g=circle.group: dist.all_gather_object(p, f, group=g))
            found = [y for part in parts for y in part]
    return found

