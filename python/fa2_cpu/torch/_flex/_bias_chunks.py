# SPDX-License-Identifier: Apache-2.0
"""The kernels with a bias that depends on query and key: it is made for some queries at a time, never whole."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _compute
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._flex import _blocks
from fa2_cpu.torch._flex._forms import capped_sum
from fa2_cpu.torch._flex._graph import Node
from fa2_cpu.torch._flex._second import gradients
from fa2_cpu.torch._flex._terms import ranges, total

# Elements of a bias at a time: 16 MiB of f32. Twice of it took a third more time, a quarter as much (N 4,096, 4 heads).
_ELEMENTS = 1 << 22


class Call(NamedTuple):
    terms: tuple[Node, ...]  # whose sum is the bias
    captured: tuple[Node, ...]  # whose gradients are wanted
    options: AttentionOptions


class BiasChunks(torch.autograd.Function):
    """(out, lse); twice differentiable, by q, k, v and the captured tensors."""

    @staticmethod
    def forward(ctx, q, k, v, call, *captured):
        out, lse = _compute.allocate_forward(q, v, "bhsd")
        for rows in _chunks(call, q, k):
            bias = _bias(call, q, k, rows, {})
            tensors = q[:, :, rows], k, v, bias, *(None,) * 5
            out[:, :, rows], lse[:, :, rows] = _compute.forward(*tensors, _options(call, rows))
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *captured = ctx.saved_tensors
        call = ctx.call
        if dout is None and dlse is None:
            return (None,) * (4 + len(captured))
        wanted = [*ctx.needs_input_grad[:3], bool(captured), False, False]

        def first(dout, dlse, q, k, v, *captured):
            return _backward(call, (q, k, v, out.detach(), lse.detach()), captured, dout, dlse, wanted)

        scores = capped_sum(call.options.softcap, call.terms)
        of_blocks = _blocks.Call(scores, call.captured, call.options.block_mask, call.options.scale)
        dq, dk, dv, *rest = gradients(first, of_blocks, dout, dlse, q, k, v, captured)
        return (dq, dk, dv, None, *rest)


def _backward(call: Call, tensors, captured, dout, dlse, wanted: list[bool]) -> tuple[Optional[Tensor], ...]:
    q, k, v, out, lse = tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq = _compute.empty_in_order(q, q.shape, "bhsd") if wanted[0] else None
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device="cpu") if want else None for x, want in zip((k, v), wanted[1:]))
    leaves = [x.detach().requires_grad_() for x in captured]
    sums = [torch.zeros_like(x, dtype=dtype) for x in captured]
    for rows in _chunks(call, q, k):
        with torch.enable_grad():
            bias = _bias(call, q, k, rows, {id(node): x for node, x in zip(call.captured, leaves)})
        rest = [x if x is None else x[:, :, rows] for x in (out, lse, dlse)]
        operands = dout[:, :, rows], q[:, :, rows], k, v, *rest, bias.detach(), *(None,) * 5
        grads = _compute.backward(*operands, _options(call, rows), wanted)
        if dq is not None:
            dq[:, :, rows] = grads[0]
        for to, x in zip((dk, dv), grads[1:]):
            if to is not None:
                to += x
        if leaves:
            dbias = grads[3]
            for to, x in zip(sums, torch.autograd.grad(bias, leaves, dbias, allow_unused=True)):
                if x is not None:
                    to += x
    of_keys = (g if g is None else g.to(k.dtype) for g in (dk, dv))
    return (dq, *of_keys, *(g.to(x.dtype) for g, x in zip(sums, captured)))


def _chunks(call: Call, q: Tensor, k: Tensor) -> list[slice]:
    """Queries whose bias exists together: whole blocks of the mask."""
    dims = frozenset().union(*(x.dims for x in call.terms))
    heads = (q.shape[0] if "b" in dims else 1) * (q.shape[1] if "h" in dims else 1)
    lists = call.options.block_mask
    block = 128 if lists is None else lists.block_q
    step = max(1, _ELEMENTS // max(1, heads * k.shape[2] * block)) * block
    return [slice(i, min(i + step, q.shape[2])) for i in range(0, q.shape[2], step)]


def _options(call: Call, rows: slice) -> AttentionOptions:
    lists = call.options.block_mask
    return call.options if lists is None else call.options.masked_by(lists.part(rows))


def _bias(call: Call, q: Tensor, k: Tensor, rows: slice, captured: dict[int, Tensor]) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    where = ranges(slice(0, q.shape[0]), slice(0, q.shape[1]), rows, slice(0, k.shape[2]))
    return total(call.terms, where, dtype, captured)
