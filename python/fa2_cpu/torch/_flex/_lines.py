# SPDX-License-Identifier: Apache-2.0
"""Terms that depend on q - k: lines of both, and matrices that are constant along their diagonals."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.torch._flex._graph import Node


def line_of(node: Any) -> Optional[tuple[int, int, int]]:
    """(a, b, c) of an integer a · q + b · k + c; None for everything else."""
    if isinstance(node, int) and not isinstance(node, bool):
        return 0, 0, node
    if not isinstance(node, Node):
        return None
    if node.name in ("q", "k"):
        return (1, 0, 0) if node.name == "q" else (0, 1, 0)
    if node.packet not in ("add", "sub", "rsub", "neg", "_to_copy"):
        return None
    if node.packet in ("neg", "_to_copy"):
        line = line_of(node.args[0])
        return line if line is None or node.packet == "_to_copy" else tuple(-x for x in line)
    lines = [line_of(x) for x in node.args[:2]]
    if None in lines or node.kwargs.get("alpha", 1) != 1:
        return None
    signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[node.packet]
    return tuple(signs[0] * x + signs[1] * y for x, y in zip(*lines))


def of_difference(node: Any) -> bool:
    """Whether q and k come into a node as multiples of q - k alone."""
    known: dict[int, bool] = {}

    def visit(x: Any) -> bool:
        if isinstance(x, (list, tuple)):
            return all(visit(y) for y in x)
        if not isinstance(x, Node) or not x.dims & {"q", "k"}:
            return True
        if id(x) not in known:
            line = line_of(x)
            known[id(x)] = line[0] == -line[1] if line is not None else not x.name and visit((x.args, tuple(x.kwargs.values())))
        return known[id(x)]

    return visit(node)


class Diagonals(torch.autograd.Function):
    """[..., rows, keys] of x [..., rows + keys - 1]: element (i, j) is x[j - i + rows - 1]."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: int, keys: int) -> Tensor:
        x = x.contiguous()
        ctx.rows, ctx.keys = rows, keys
        upwards = x.as_strided((*x.shape[:-1], rows, keys), (*x.stride()[:-1], 1, 1))
        return upwards.flip(-2)

    @staticmethod
    def backward(ctx, dy: Tensor):
        rows, keys = ctx.rows, ctx.keys
        # Rows of one element less than were written: each begins one place further to the right.
        skewed = torch.nn.functional.pad(dy.flip(-2), (0, rows)).flatten(-2)[..., :-rows]
        return skewed.unflatten(-1, (rows, rows + keys - 1)).sum(-2), None, None
