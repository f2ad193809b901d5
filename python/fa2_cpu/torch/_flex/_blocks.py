# SPDX-License-Identifier: Apache-2.0
"""Scores of an attention call under any score_mod, one block at a time."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fa2_cpu.torch._block_lists import BlockLists
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._flex._graph import PLACES, Node, evaluate
from fa2_cpu.torch._flex._index_functions import over
from fa2_cpu.torch._flex._terms import ranges
from fa2_cpu.torch._score_blocks import Block, Scores


class Call(NamedTuple):
    output: Node  # of score, b, h, q and k
    captured: tuple[Node, ...]  # whose gradients are wanted
    lists: Optional[BlockLists]
    scale: float


class Blocks:
    """Blocks of [B, H, N, D] tensors: some batch elements and heads, some queries, all keys they may see."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call, captured: Optional[list[Tensor]]) -> None:
        """captured: tensors instead of the captured ones, in the order of call.captured."""
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.tensors = (q, k, v)
        self._group = q.shape[1] // max(1, k.shape[1])
        self._call, self.captured, self.scale = call, captured, call.scale
        self._scores = Scores(self.grouped(q), k, 0, (0, 0), AttentionOptions().masked_by(call.lists), None)
        self._values = {}
        if captured is not None:
            self._values = {id(node): x for node, x in zip(call.captured, captured)}

    def grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (x.shape[1] // self._group, self._group))

    def load(self, x: Tensor, *places: slice) -> Tensor:
        """A part of x in the dtype of the sums, [batch and kv heads, rows of all the group, ...]."""
        x = x[places].to(self.dtype)
        return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    def each(self):
        """Each block, and the places of its queries in grouped tensors and of its keys."""
        if self._scores.nk:
            for batch, heads in self._scores.heads():
                for block in self._scores.blocks(batch, heads):
                    yield block, (batch, heads, slice(None), block.rows), (batch, heads, block.keys)

    def scores(self, block: Block, q: Tensor, k: Tensor) -> Tensor:
        """scale · q kᵀ of loaded tensors, [batch, query heads, rows, keys]."""
        batch, heads = block.batch.stop - block.batch.start, block.heads.stop - block.heads.start
        s = q * self.scale @ k.mT
        return s.view(batch, heads * self._group, block.rows.stop - block.rows.start, k.shape[1])

    def modified(self, s: Tensor, block: Block) -> Tensor:
        """score_mod of s, [batch, query heads, rows, keys]."""
        heads = slice(block.heads.start * self._group, block.heads.stop * self._group)
        where = ranges(block.batch, heads, block.rows, block.keys)

        def scalar(score: Tensor, *places: Tensor) -> Tensor:
            return evaluate([self._call.output], {"score": score, **dict(zip(PLACES, places))}, self._values)[0]

        dims = [(0, *(0 if other == name else None for other in PLACES)) for name in reversed(PLACES)]
        return over(scalar, dims)(s, *where.values()).to(self.dtype)

    def hidden(self, block: Block) -> Optional[Tensor]:
        """Broadcastable to [batch, query heads, rows, keys]; None: nothing is."""
        hidden = self._scores.hidden(block)
        return None if hidden is None else hidden.flatten(1, 2)
