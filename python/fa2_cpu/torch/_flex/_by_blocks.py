# SPDX-License-Identifier: Apache-2.0
"""Attention with any function of the scores, by PyTorch's operators on a block of scores at a time: O(block) memory.

With S = scale · q kᵀ, T = score_mod(S) and -inf where hidden, P = exp(T − lse):

    out = P v                           dP = dout vᵀ
    lse = log Σ exp T                   dT = P (dP − Σ P dP + dlse)

dS, and the gradients of tensors that score_mod captured, are autograd's of T along dT, block by block.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch._compute import allocate_forward
from fa2_cpu.torch._flex._blocks import Blocks, Call
from fa2_cpu.torch._flex._second import gradients


class ByBlocks(torch.autograd.Function):
    """out, lse and the greatest score of each row; twice differentiable, by q, k, v and the captured tensors."""

    @staticmethod
    def forward(ctx, q, k, v, call: Call, *captured):
        with torch.autocast("cpu", enabled=False):
            out, lse = allocate_forward(q, v, "bhsd")
            greatest = torch.full_like(lse, -math.inf)
            out.zero_()
            lse.fill_(-math.inf)
            _forward(Blocks(q, k, v, call, None), out, lse, greatest)
        ctx.save_for_backward(q, k, v, lse, *captured)
        ctx.call = call
        ctx.mark_non_differentiable(greatest)
        ctx.set_materialize_grads(False)
        return out, lse, greatest

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, k, v, lse, *captured = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (4 + len(captured))

        def first(dout, dlse, q, k, v, *captured):
            blocks = Blocks(q, k, v, ctx.call, [x.detach().requires_grad_() for x in captured])
            return _backward(blocks, lse.detach(), dout, dlse)

        dq, dk, dv, *rest = gradients(first, ctx.call, dout, dlse, q, k, v, captured)
        return (dq, dk, dv, None, *rest)


def _forward(blocks: Blocks, out: Tensor, lse: Tensor, greatest: Tensor) -> None:
    q, k, v = blocks.tensors
    q, out = blocks.grouped(q), blocks.grouped(out)
    rows_of = [blocks.grouped(x) for x in (lse, greatest)]
    for block, places, keys in blocks.each():
        t = blocks.modified(blocks.scores(block, blocks.load(q, *places), blocks.load(k, *keys)), block)
        hidden = blocks.hidden(block)
        if hidden is not None:
            t = t.masked_fill(hidden, -math.inf)
        most = t.amax(-1)
        values = t.logsumexp(-1)
        p = torch.exp(t - values.masked_fill(values == -math.inf, 0.0)[..., None])
        of_block = blocks.load(v, *keys)
        result = p.view(of_block.shape[0], -1, of_block.shape[1]) @ of_block
        out[places] = result.view(out[places].shape).to(out.dtype)
        for to, x in zip(rows_of, (values, most)):
            to[places] = x.view(to[places].shape)


def _backward(blocks: Blocks, lse: Tensor, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Tensor, ...]:
    grads = [torch.zeros(x.shape, dtype=blocks.dtype, device="cpu") for x in blocks.tensors]
    sums = [torch.zeros_like(x, dtype=blocks.dtype) for x in blocks.captured]
    q_all, k_all, v_all = blocks.tensors
    q_all, dq = blocks.grouped(q_all), blocks.grouped(grads[0])
    dout = None if dout is None else blocks.grouped(dout)
    lse, dlse = (None if x is None else blocks.grouped(x).unsqueeze(-1) for x in (lse, dlse))
    for block, places, keys in blocks.each():
        q, k, v = blocks.load(q_all, *places), blocks.load(k_all, *keys), blocks.load(v_all, *keys)
        s = blocks.scores(block, q, k).requires_grad_()
        with torch.enable_grad():
            t = blocks.modified(s, block)
        value = lse[places].flatten(1, 2)
        p = torch.exp(t.detach() - value.masked_fill(value == -math.inf, math.inf))
        hidden = blocks.hidden(block)
        if hidden is not None:
            p.masked_fill_(hidden, 0.0)
        dt = torch.zeros_like(p)
        flat = p.view(v.shape[0], -1, v.shape[1])
        if dout is not None:
            d = blocks.load(dout, *places)
            dp = (d @ v.mT).view(p.shape)
            dt = p * (dp - (p * dp).sum(-1, keepdim=True))
            grads[2][keys] += (flat.mT @ d).view(grads[2][keys].shape)
        if dlse is not None:
            dt = dt + p * dlse[places].flatten(1, 2)
        leaves = [s, *blocks.captured]
        found = [None] * len(leaves)
        if t.requires_grad:
            found = torch.autograd.grad(t, leaves, dt, allow_unused=True)
        for to, x in zip(sums, found[1:]):
            if x is not None:
                to += x
        if found[0] is not None:
            ds = found[0] if hidden is None else found[0].masked_fill(hidden, 0.0)
            ds = ds.view(flat.shape) * blocks.scale
            dq[places] = (ds @ k).view(dq[places].shape)
            grads[1][keys] += (ds.mT @ q).view(grads[1][keys].shape)
    of_inputs = [g.to(x.dtype) for g, x in zip(grads, blocks.tensors)]
    return (*of_inputs, *(g.to(x.dtype) for g, x in zip(sums, blocks.captured)))
