# SPDX-License-Identifier: Apache-2.0
"""Nodes of a score_mod that do not depend on the score, as tensors of the smallest shape that broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.torch._flex._graph import PLACES, Node, evaluate
from fa2_cpu.torch._flex._index_functions import over
from fa2_cpu.torch._flex._lines import Diagonals, of_difference

Ranges = dict[str, Tensor]  # of b, h, q and k


def ranges(batch: slice, heads: slice, rows: slice, keys: slice) -> Ranges:
    places = (batch, heads, rows, keys)
    return {name: torch.arange(x.start, x.stop, device="cpu") for name, x in zip(PLACES, places)}


def values(node: Node, where: Ranges, captured: Optional[dict[int, Tensor]] = None) -> Tensor:
    """[B or 1, H or 1, Q or 1, K or 1]; a dimension is 1 unless the node depends on it."""
    if not node.dims >= {"q", "k"} or not of_difference(node):
        return _values(node, where, captured)
    rows, keys = (where[name].shape[0] for name in ("q", "k"))
    last = int(where["q"][-1]) - int(where["k"][0])  # the greatest q - k, at the lower left corner
    differences = torch.arange(last, last - (rows + keys - 1), -1, device="cpu")
    along = _values(node, {**where, "q": differences, "k": torch.zeros(1, dtype=torch.int64, device="cpu")}, captured)
    return Diagonals.apply(along[..., 0], rows, keys)


def _values(node: Node, where: Ranges, captured: Optional[dict[int, Tensor]]) -> Tensor:
    names = [name for name in PLACES if name in node.dims]

    def scalar(*places: Tensor) -> Tensor:
        return evaluate([node], dict(zip(names, places)), captured)[0]

    dims = [tuple(0 if other == name else None for other in names) for name in reversed(names)]
    result = over(scalar, dims)(*(where[name] for name in names))
    return result.reshape([where[name].shape[0] if name in node.dims else 1 for name in PLACES])


def total(nodes: Sequence[Node], where: Ranges, dtype: torch.dtype, captured: Any = None) -> Tensor:
    """The sum of nodes, in dtype."""
    result = None
    for node in nodes:
        x = values(node, where, captured).to(dtype)
        result = x if result is None else result + x
    return result


def captured_by(nodes: Sequence[Node]) -> list[Node]:
    """The captured tensors that nodes read and that require grad, each once."""
    found: dict[int, Node] = {}
    seen: set[int] = set()

    def visit(x: Any) -> None:
        if isinstance(x, (list, tuple)):
            for y in x:
                visit(y)
        elif isinstance(x, Node) and id(x) not in seen:
            seen.add(id(x))
            if x.tensor is not None and x.tensor.requires_grad:
                found[id(x)] = x
            visit(x.args)
            visit(tuple(x.kwargs.values()))

    visit(tuple(nodes))
    return list(found.values())


def whole_table(node: Node, sizes: tuple[int, int, int, int]) -> Optional[Tensor]:
    """The captured tensor that a node reads element for element, [B or 1, H or 1, Q or 1, K or 1]; None for other nodes."""
    found = _read(node)
    if found is None:
        return None
    table, names = found
    if None in names or len(set(names)) != len(names) or not table.is_floating_point():
        return None
    for dim, name in enumerate(names):
        size = sizes[PLACES.index(name)]
        if table.shape[dim] < size:
            return None
        table = table.narrow(dim, 0, size)
    table = table.permute(sorted(range(len(names)), key=lambda dim: PLACES.index(names[dim])))
    for dim, name in enumerate(PLACES):
        if name not in names:
            table = table.unsqueeze(dim)
    return table


def _read(node: Node) -> Optional[tuple[Tensor, list[Optional[str]]]]:
    """The tensor that a node reads, and which of b, h, q and k reads a dimension of it; None: the dimension is the node's."""
    if node.tensor is not None:
        return node.tensor, [None] * node.tensor.dim()
    if node.packet not in ("index", "select"):
        return None
    found = _read(node.args[0])
    if found is None:
        return None
    table, names = found
    left = [dim for dim, name in enumerate(names) if name is None]
    if node.packet == "select":
        dim = left[node.args[1]]
        return table.select(dim, node.args[2]), names[:dim] + names[dim + 1 :]
    for dim, place in zip(left, node.args[1]):
        if not isinstance(place, Node) or place.name not in PLACES:
            return None
        names[dim] = place.name
    return table, names
