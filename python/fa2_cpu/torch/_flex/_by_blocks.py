# SPDX-License-Identifier: Apache-2.0
"""Attention with any function of the scores, by PyTorch's operators on a block of scores at a time: O(block) memory.

With S = scale · q kᵀ, T = score_mod(S) and -inf where hidden, P = exp(T − lse):

    out = P v                           dP = dout vᵀ
    lse = log Σ exp T                   dT = P (dP − Σ P dP + dlse)

dS, and the gradients of tensors that score_mod captured, are autograd's of T along dT, block by block.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fa2_cpu.torch._compute import AttentionOptions, allocate_forward
from fa2_cpu.torch._block_lists import BlockLists
from fa2_cpu.torch._flex._graph import PLACES, Graph, Node, evaluate
from fa2_cpu.torch._flex._index_functions import over
from fa2_cpu.torch._flex._terms import ranges
from fa2_cpu.torch._score_blocks import Block, Scores


class Call(NamedTuple):
    graph: Graph
    captured: tuple[Node, ...]  # whose gradients are wanted
    lists: Optional[BlockLists]
    scale: float


class ByBlocks(torch.autograd.Function):
    """out, lse and the greatest score of each row; differentiable once, by q, k, v and the captured tensors."""

    @staticmethod
    def forward(ctx, q, k, v, call, *captured):
        with torch.autocast("cpu", enabled=False):
            out, lse = allocate_forward(q, v, "bhsd")
            greatest = torch.full_like(lse, -math.inf)
            out.zero_()
            lse.fill_(-math.inf)
            _Blocks(q, k, v, call, None).forward(out, lse, greatest)
        ctx.save_for_backward(q, k, v, lse, *captured)
        ctx.call = call
        ctx.mark_non_differentiable(greatest)
        ctx.set_materialize_grads(False)
        return out, lse, greatest

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse, _):
        q, k, v, lse, *captured = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (4 + len(captured))
        with torch.autocast("cpu", enabled=False):
            blocks = _Blocks(q, k, v, ctx.call, [x.detach().requires_grad_() for x in captured])
            return blocks.backward(lse, dout, dlse)


class _Blocks:
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call, captured: Optional[list[Tensor]]) -> None:
        self._dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._tensors = (q, k, v)
        self._group = q.shape[1] // max(1, k.shape[1])
        self._q = self._grouped(q)
        self._k, self._v = k, v
        self._call, self._captured = call, captured
        self._scores = Scores(self._q, k, 0, (0, 0), AttentionOptions().masked_by(call.lists), None)
        self._values = {}
        if captured is not None:
            self._values = {id(node): x for node, x in zip(call.captured, captured)}

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (x.shape[1] // self._group, self._group))

    def _load(self, x: Tensor, *places: slice) -> Tensor:
        """A part of x in the dtype of the sums, [batch and kv heads, rows of all the group, ...]."""
        x = x[places].to(self._dtype)
        return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    def _each(self):
        """Each block, and the places of its queries in grouped tensors."""
        if self._scores.nk:
            for batch, heads in self._scores.heads():
                for block in self._scores.blocks(batch, heads):
                    yield block, (block.batch, block.heads, slice(None), block.rows)

    def _modified(self, s: Tensor, block: Block) -> Tensor:
        """score_mod of s, [batch, query heads, rows, keys]."""
        heads = slice(block.heads.start * self._group, block.heads.stop * self._group)
        where = ranges(block.batch, heads, block.rows, block.keys)

        def scalar(score: Tensor, *places: Tensor) -> Tensor:
            return evaluate([self._call.graph.output], {"score": score, **dict(zip(PLACES, places))}, self._values)[0]

        dims = [(0, *(0 if other == name else None for other in PLACES)) for name in reversed(PLACES)]
        return over(scalar, dims)(s, *where.values()).to(self._dtype)

    def _hidden(self, block: Block) -> Optional[Tensor]:
        """Broadcastable to [batch, query heads, rows, keys]."""
        hidden = self._scores.hidden(block)
        return None if hidden is None else hidden.flatten(1, 2)

    def _products(self, block: Block, places) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q · scale, k and v of a block, and its scores [batch, query heads, rows, keys]."""
        q = self._load(self._q, *places) * self._call.scale
        k, v = (self._load(x, block.batch, block.heads, block.keys) for x in (self._k, self._v))
        s = q @ k.mT
        batch, heads = block.batch.stop - block.batch.start, block.heads.stop - block.heads.start
        return q, k, v, s.view(batch, heads * self._group, block.rows.stop - block.rows.start, k.shape[1])

    def forward(self, out: Tensor, lse: Tensor, greatest: Tensor) -> None:
        out = self._grouped(out)
        rows_of = [self._grouped(x) for x in (lse, greatest)]
        for block, places in self._each():
            _, _, v, s = self._products(block, places)
            t = self._modified(s, block)
            hidden = self._hidden(block)
            if hidden is not None:
                t = t.masked_fill(hidden, -math.inf)
            most = t.amax(-1)
            values = t.logsumexp(-1)
            p = torch.exp(t - values.masked_fill(values == -math.inf, 0.0)[..., None])
            result = p.view(v.shape[0], -1, v.shape[1]) @ v
            out[places] = result.view(out[places].shape).to(out.dtype)
            for to, x in zip(rows_of, (values, most)):
                to[places] = x.view(to[places].shape)

    def backward(self, lse: Tensor, dout: Optional[Tensor], dlse: Optional[Tensor]):
        grads = [torch.zeros(x.shape, dtype=self._dtype, device="cpu") for x in self._tensors]
        sums = [torch.zeros_like(x, dtype=self._dtype) for x in self._captured]
        dq = self._grouped(grads[0])
        dout = None if dout is None else self._grouped(dout)
        lse, dlse = (None if x is None else self._grouped(x).unsqueeze(-1) for x in (lse, dlse))
        for block, places in self._each():
            q, k, v, s = self._products(block, places)
            s.requires_grad_()
            with torch.enable_grad():
                t = self._modified(s, block)
            value = lse[places].flatten(1, 2)
            p = torch.exp(t.detach() - value.masked_fill(value == -math.inf, math.inf))
            hidden = self._hidden(block)
            if hidden is not None:
                p.masked_fill_(hidden, 0.0)
            dt = torch.zeros_like(p)
            flat = p.view(v.shape[0], -1, v.shape[1])
            where = block.batch, block.heads, block.keys
            if dout is not None:
                d = self._load(dout, *places)
                dp = (d @ v.mT).view(p.shape)
                dt = p * (dp - (p * dp).sum(-1, keepdim=True))
                grads[2][where] += (flat.mT @ d).view(grads[2][where].shape)
            if dlse is not None:
                dt = dt + p * dlse[places].flatten(1, 2)
            leaves = [s, *self._captured]
            found = [None] * len(leaves)
            if t.requires_grad:
                found = torch.autograd.grad(t, leaves, dt, allow_unused=True)
            for to, x in zip(sums, found[1:]):
                if x is not None:
                    to += x
            if found[0] is not None:
                ds = found[0] if hidden is None else found[0].masked_fill(hidden, 0.0)
                ds = ds.view(flat.shape)
                dq[places] = (ds @ k).mul_(self._call.scale).view(dq[places].shape)
                grads[1][where] += (ds.mT @ q).view(grads[1][where].shape)
        of_inputs = [g.to(x.dtype) for g, x in zip(grads, self._tensors)]
        return (*of_inputs, None, *(g.to(x.dtype) for g, x in zip(sums, self._captured)))
