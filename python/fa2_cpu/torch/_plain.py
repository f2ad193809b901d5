# SPDX-License-Identifier: Apache-2.0
"""Attention of [B, H, N, D] tensors under a mask or a bias that needs no gradient: the shortest way to the core.

The results are those of the general way, _derivatives.call. A call of a few short heads takes as long in
Python as in the core, and here a third of what it takes there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch import _derivatives
from fa2_cpu.torch._compute import AttentionOptions, empty_in_order, num_threads, resolve_precision, under_its_name
from fa2_cpu.torch._tensors import descriptor, has_own_rules, is_readable, recorded, transformed, unwatched

# Tensors as they are where PyTorch has a table of C functions that the core reads them by.
_EXCHANGED = _core.use_tensor_exchange(Tensor, torch.nn.Parameter)
_AS_QUERY = 2  # what plain_attention_fit says of calls whose out has query's shape and strides


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
    if recorded() or transformed() or torch.is_autocast_enabled("cpu"):
        return None
    if not _EXCHANGED:
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        if has_own_rules(tensors) or not all(map(is_readable, tensors)):
            return None
    fit = _core.plain_attention_fit(*_read(query, key, value, attn_mask), bool(enable_gqa))
    if not fit or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    differentiable = torch.is_grad_enabled()
    if attn_mask is not None and (is_causal or attn_mask.is_neg() or (differentiable and attn_mask.requires_grad)):
        return None
    if differentiable and (query.requires_grad or key.requires_grad or value.requires_grad):
        return PlainAttention.apply(query, key, value, attn_mask, bool(is_causal), scale, fit)
    return _forward(query, key, value, attn_mask, None, bool(is_causal), scale, fit)


def _read(*tensors: Optional[Tensor]) -> Iterable[Any]:
    """What the core takes for tensors."""
    return tensors if _EXCHANGED else map(descriptor, tensors)


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
    fit: int,
) -> Tensor:
    """out."""
    out = torch.empty_like(q) if fit == _AS_QUERY else empty_in_order(q, (*q.shape[:3], v.shape[3]), "bhsd")
    precision = resolve_precision("torch", q.dtype)
    _run_forward(*_read(q, k, v, bias, out, lse), causal, scale, precision, num_threads())
    return out


_run_forward = under_its_name("fa2::attention", _core.plain_attention_forward)
_run_backward = under_its_name("fa2::attention_backward", _core.plain_attention_backward)


class PlainAttention(torch.autograd.Function):
    """The derivative; lse is kept, but is no result."""

    @staticmethod
    def forward(ctx, q, k, v, bias, causal, scale, fit):
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        out = _forward(q, k, v, bias, lse, causal, scale, fit)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 7
        q, k, v, bias, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        # With create_graph the gradients are differentiable themselves.
        if torch.is_grad_enabled() or not unwatched((dout, q, k, v, bias, out)):
            options = AttentionOptions("bhsd", ctx.scale, "top_left" if ctx.causal else "")
            none = (None,) * 5  # alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox
            flags = [*wanted, False, False, False]
            grads = _derivatives.backward((dout, q, k, v, out, lse, None, bias, *none), options, flags)
            return (*(g if want else None for g, want in zip(grads, wanted)), *(None,) * 4)
        dq = _empty(q) if wanted[0] else None
        dk = _empty(k) if wanted[1] else None
        dv = _empty(v) if wanted[2] else None
        if dout.is_neg():
            dout = dout.resolve_neg()
        tensors = _read(dout, q, k, v, bias, out, lse, dq, dk, dv)
        _run_backward(*tensors, ctx.causal, ctx.scale, resolve_precision("torch", q.dtype), num_threads())
        return dq, dk, dv, None, None, None, None
