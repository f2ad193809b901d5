# SPDX-License-Identifier: Apache-2.0
"""Attention of [B, H, N, D] tensors under a mask or a bias that needs no gradient: the shortest way to the core.

The results are those of the general way, _derivatives.call. A call of a few short heads takes as long in
Python as in the core, and here a third of what it takes there.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch import _derivatives
from fa2_cpu.torch._compute import AttentionOptions, empty_in_order, named, num_threads, resolve_precision
from fa2_cpu.torch._tensors import FLOATS, descriptor, unwatched


# Tensors as they are where PyTorch has a table of C functions that the core reads them by.
_EXCHANGED = _core.use_tensor_exchange(Tensor)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor],
    dropout_p: float,
    is_causal: bool,
    scale: Optional[float],
    enable_gqa: bool,
) -> Optional[Tensor]:
    """out, differentiable, of dense 4-D CPU tensors that fit, without dropout and while nothing watches operators.

    None for all others: they take the general way.
    """
    if dropout_p != 0.0 or not (scale is None or type(scale) is float):
        return None
    if query is None or key is None or value is None:
        return None
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not unwatched(tensors) or torch.is_autocast_enabled("cpu"):
        return None
    for x in tensors:
        if not x.is_cpu or x.layout is not torch.strided or x.is_nested or x.is_neg():
            return None
    dtype = query.dtype
    if dtype not in FLOATS or key.dtype is not dtype or value.dtype is not dtype:
        return None
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return None
    batch, heads, _, depth = query.shape
    k_batch, k_heads, _, _ = key.shape
    v_batch, v_heads, _, v_depth = value.shape
    if not (batch == k_batch == v_batch and k_heads == v_heads and (heads == k_heads or enable_gqa)):
        return None
    differentiable = torch.is_grad_enabled()
    if attn_mask is not None and (is_causal or not _takes_mask(attn_mask, batch, heads, differentiable)):
        return None
    if differentiable and (query.requires_grad or key.requires_grad or value.requires_grad):
        return PlainAttention.apply(query, key, value, attn_mask, bool(is_causal), scale)
    return _forward(query, key, value, attn_mask, None, bool(is_causal), scale, v_depth == depth)


def _takes_mask(mask: Tensor, batch: int, heads: int, differentiable: bool) -> bool:
    if mask.dtype is not torch.bool and (mask.dtype not in FLOATS or (differentiable and mask.requires_grad)):
        return False
    return 1 <= mask.dim() <= 4 and within(mask, batch, heads)


def within(mask: Tensor, batch: int, heads: int) -> bool:
    """Whether the batch and heads of a mask are these, or 1."""
    return all(mask.dim() < -dim or mask.shape[dim] in (1, size) for dim, size in ((-4, batch), (-3, heads)))


def _empty(x: Tensor) -> Tensor:
    """A tensor of x's shape that lies in memory as x does, if dense."""
    return torch.empty_like(x) if x.is_contiguous() else empty_in_order(x, x.shape, "bhsd")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    lse: Optional[Tensor],
    causal: bool,
    scale: Optional[float],
    one_depth: bool,
) -> Tensor:
    """out; one_depth says whether rows of q and v have the same length."""
    out = _empty(q) if one_depth else empty_in_order(q, (*q.shape[:3], v.shape[3]), "bhsd")
    tensors = (q, k, v, bias, out, lse) if _EXCHANGED else map(descriptor, (q, k, v, bias, out, lse))
    precision = resolve_precision("torch", q.dtype)
    named("fa2::attention", _core.plain_attention_forward, *tensors, causal, scale, precision, num_threads())
    return out


class PlainAttention(torch.autograd.Function):
    """The derivative; lse is kept, but is no result."""

    @staticmethod
    def forward(ctx, q, k, v, bias, causal, scale):
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        out = _forward(q, k, v, bias, lse, causal, scale, q.shape[3] == v.shape[3])
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 6
        q, k, v, bias, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        # With create_graph the gradients are differentiable themselves.
        if torch.is_grad_enabled() or not unwatched((dout, q, k, v, bias, out)):
            options = AttentionOptions("bhsd", ctx.scale, "top_left" if ctx.causal else "")
            none = (None,) * 5  # alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox
            flags = [*wanted, False, False, False]
            grads = _derivatives.backward((dout, q, k, v, out, lse, None, bias, *none), options, flags)
            return (*(g if want else None for g, want in zip(grads, wanted)), None, None, None)
        dq = _empty(q) if wanted[0] else None
        dk = _empty(k) if wanted[1] else None
        dv = _empty(v) if wanted[2] else None
        if dout.is_neg():
            dout = dout.resolve_neg()
        tensors = (dout, q, k, v, bias, out, lse, dq, dk, dv)
        named(
            "fa2::attention_backward", _core.plain_attention_backward,
            *(tensors if _EXCHANGED else map(descriptor, tensors)),
            ctx.causal, ctx.scale, resolve_precision("torch", q.dtype), num_threads(),
        )  # fmt: skip
        return dq, dk, dv, None, None, None
