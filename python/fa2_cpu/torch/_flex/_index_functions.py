# SPDX-License-Identifier: Apache-2.0
"""mask_mod and score_mod, functions of one element's place, evaluated over ranges of places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ReadByTensor(TorchFunctionMode):
    """x[i] with a tensor i of no dimension reads an element, where PyTorch would take i as a Python number."""

    def __torch_function__(self, function, types, args, kwargs=None):
        if function is torch.Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in places) and all(_simple(i) for i in places):
                x, tensors = args[0], []
                for i in places:
                    if isinstance(i, int):  # select keeps the dimension's place: those before are read by tensors
                        x = x.select(len(tensors), i)
                    else:
                        tensors.append(None if isinstance(i, slice) else i)
                return torch.ops.aten.index(x, tensors)
        return function(*args, **(kwargs or {}))


def _simple(i: Any) -> bool:
    """A number, a tensor or `:`."""
    return isinstance(i, (Tensor, int)) and not isinstance(i, bool) or (isinstance(i, slice) and i == slice(None))


def over(function: Callable[..., Any], in_dims: list[tuple[Any, ...]]) -> Callable[..., Any]:
    """function mapped over dimensions of its arguments, the last of in_dims outermost."""
    for dims in in_dims:
        function = torch.vmap(function, in_dims=dims)
    return function


def mask_of_ranges(mask_mod: Callable[..., Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """[B, H, Q, K] of mask_mod; dimensions that it does not depend on have stride 0."""
    places = [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)]
    return _evaluate(mask_mod, places, b, h, q, k)


def mask_of_blocks(mask_mod: Callable[..., Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """[P, Q, K] of mask_mod in P blocks: b and h are [P], q [P, Q], k [P, K]."""
    return _evaluate(mask_mod, [(None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)], b, h, q, k)


def _evaluate(mask_mod: Callable[..., Tensor], places: list[tuple[Any, ...]], *indices: Tensor) -> Tensor:
    with torch.no_grad(), ReadByTensor():
        mask = over(mask_mod, places)(*indices)
    if mask.dtype is not torch.bool:
        raise TypeError(f"mask_mod gives {mask.dtype}; it must give bool, True where the query sees the key")
    return mask
