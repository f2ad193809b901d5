# SPDX-License-Identifier: Apache-2.0
"""Second derivatives under a score_mod that the kernels do not have whole.

The gradients of a block of queries with all of its keys are differentiated by PyTorch's autograd, in O(block) memory:
with directions u of the gradients dx, L = Σ ⟨u, dx⟩ is a sum over blocks, and ∂L/∂x and ∂L/∂dout are too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.torch._flex._blocks import Blocks, Call
from fa2_cpu.torch._score_blocks import Block


def gradients(
    first: Callable[..., Any], call: Call, dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
    captured: Sequence[Tensor],
) -> tuple[Optional[Tensor], ...]:  # fmt: skip
    """first(dout, dlse, q, k, v, *captured), the gradients of q, k, v and captured, as a function that can be
    differentiated where somebody may ask for it."""
    arguments = (dout, dlse, q, k, v, *captured)
    if torch.is_grad_enabled():
        return _Gradients.apply(first, call, *arguments)
    with torch.autocast("cpu", enabled=False):
        return first(*arguments)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, call, *arguments):
        ctx.save_for_backward(*arguments)
        ctx.call = call
        ctx.set_materialize_grads(False)
        with torch.autocast("cpu", enabled=False):
            return tuple(first(*arguments))

    @staticmethod
    def backward(ctx, *directions):
        return (None, None, *_Second.apply(ctx.call, len(directions), *directions, *ctx.saved_tensors))


class _Second(torch.autograd.Function):
    """The gradients of dout, dlse, q, k, v and the captured tensors."""

    @staticmethod
    def forward(ctx, call, count, *tensors):
        ctx.set_materialize_grads(False)
        with torch.autocast("cpu", enabled=False):
            return _second(call, tensors[:count], *tensors[count:])

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "fa2 has no third derivative of flex_attention; its gradients can be differentiated once"
        )


def _second(call: Call, directions: Sequence[Optional[Tensor]], dout, dlse, q, k, v, *captured):
    blocks = Blocks(q, k, v, call, [x.detach().requires_grad_() for x in captured])
    inputs = (dout, dlse, q, k, v, *captured)
    sums = [None if x is None else torch.zeros(x.shape, dtype=blocks.dtype, device="cpu") for x in inputs]

    def places_of(i: int, places, keys):
        return places if i in (0, 1, 2) else keys

    def grouped(i: int, x: Optional[Tensor]) -> Optional[Tensor]:
        if x is None or i > 2:
            return x
        return blocks.grouped(x.unsqueeze(-1) if i == 1 else x)

    whole = [grouped(i, x) for i, x in enumerate(inputs[:5])]
    along = [grouped(i + 2, u) for i, u in enumerate(directions[:3])]
    to = [grouped(i, x) for i, x in enumerate(sums[:5])]
    for block, places, keys in blocks.each():
        where = [places_of(i, places, keys) for i in range(5)]
        leaves = [None if x is None else blocks.load(x, *w).requires_grad_() for x, w in zip(whole, where)]
        leaves += blocks.captured
        us = [None if u is None else blocks.load(u, *w) for u, w in zip(along, where[2:])]
        us += [None if u is None else u.to(x.dtype) for u, x in zip(directions[3:], captured)]
        found = _of_block(blocks, block, leaves, us)
        for i, x in enumerate(found):
            if x is not None and i < 5:
                here = to[i][where[i]]
                here += x.view(here.shape)
            elif x is not None:
                sums[i] += x
    return tuple(None if x is None else total.to(x.dtype) for total, x in zip(sums, inputs))


def _of_block(blocks: Blocks, block: Block, leaves: list[Optional[Tensor]], directions: list[Optional[Tensor]]):
    """Of one block: the gradients of Σ ⟨direction, gradient⟩ with respect to leaves."""
    dout, dlse, q, k, v, *captured = leaves
    with torch.enable_grad():
        t = blocks.modified(blocks.scores(block, q, k), block)
        hidden = blocks.hidden(block)
        if hidden is not None:
            t = t.masked_fill(hidden, -math.inf)
        empty = (t.detach() == -math.inf).all(-1, keepdim=True)
        t = t.masked_fill(empty, 0.0)
        loss = 0.0
        if dout is not None:
            p = t.softmax(-1).masked_fill(empty, 0.0).view(v.shape[0], -1, v.shape[1])
            loss = (p @ v * dout).sum()
        if dlse is not None:
            lse = t.logsumexp(-1, keepdim=True).masked_fill(empty, 0.0)
            loss = loss + (lse.reshape(dlse.shape) * dlse).sum()
        first = torch.autograd.grad(loss, (q, k, v, *captured), create_graph=True, allow_unused=True)
        pairs = [(g, u) for g, u in zip(first, directions) if g is not None and u is not None and g.requires_grad]
        if not pairs:
            return [None] * len(leaves)
        total = sum((g * u).sum() for g, u in pairs)
    wanted = [i for i, x in enumerate(leaves) if x is not None]
    found = torch.autograd.grad(total, [leaves[i] for i in wanted], allow_unused=True)
    result: list[Optional[Tensor]] = [None] * len(leaves)
    for i, x in zip(wanted, found):
        result[i] = x
    return result
