# SPDX-License-Identifier: Apache-2.0
"""fa2::attention and fa2::attention_backward: operators of torch.library with autograd and fake kernels.

What compiles, traces, transforms or records operators sees these; a plain call goes past them, with
the same derivative (Attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _compute
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._tensors import unwatched

_TENSORS = 9  # q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox come before options
_DIFFERENTIABLE = 6


@torch.library.custom_op("fa2::attention", mutates_args=(), device_types="cpu")
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    philox: Optional[Tensor],
    layout: str,
    scale: Optional[float],
    causal: str,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of fa2_cpu.attention_forward; philox is int64 [2]: seed and offset; causal "" is None."""
    options = AttentionOptions(
        layout, scale, causal, window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision
    )
    return _compute.forward(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options)


@attention_op.register_fake
def _attention_fake(q, k, v, *rest):
    return _compute.allocate_forward(q, v, AttentionOptions(*rest[_TENSORS - 3 :]).layout)


@torch.library.custom_op("fa2::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Optional[Tensor],
    bias: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    philox: Optional[Tensor],
    layout: str,
    scale: Optional[float],
    causal: str,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    precision: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of fa2::attention: dq, dk, dv, dbias, dalibi_slopes, dsinks, empty where not wanted."""
    options = AttentionOptions(
        layout, scale, causal, window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision
    )
    grads = _compute.backward(
        dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options, wanted
    )
    return _without_none(grads, q)


def _without_none(grads: Sequence[Optional[Tensor]], q: Tensor) -> tuple[Tensor, ...]:
    """Operators return tensors: one without elements for each gradient that is not wanted."""
    return tuple(q.new_empty((0,)) if g is None else g for g in grads)


@attention_backward_op.register_fake
def _attention_backward_fake(dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, *rest):
    *_, layout = rest[:4]
    return _without_none(_compute.allocate_backward(q, k, v, bias, alibi_slopes, sinks, layout, rest[-1]), q)


def _save(ctx, tensors, options: AttentionOptions, out: Tensor, lse: Tensor) -> None:
    ctx.save_for_backward(*tensors, out, lse)
    ctx.options = options
    ctx.set_materialize_grads(False)  # lse is rarely used, and then costs no gradient of zeros


def _gradients(ctx, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    """Of the differentiable inputs, None where not wanted."""
    (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, out, lse) = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * _DIFFERENTIABLE
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    tensors = (dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox)
    # With create_graph the operator is called, whose own derivative refuses.
    if not torch.is_grad_enabled() and unwatched(tensors):
        grads = _compute.backward(*tensors, ctx.options, wanted)
    else:
        grads = attention_backward_op(*tensors, *ctx.options, wanted)
    return tuple(g if want and g is not None else None for g, want in zip(grads, wanted))


def _setup_context(ctx, inputs, output):
    _save(ctx, inputs[:_TENSORS], AttentionOptions(*inputs[_TENSORS:]), *output)


def _backward(ctx, dout, dlse):
    not_differentiable = _TENSORS - _DIFFERENTIABLE + len(ctx.options)
    return _gradients(ctx, dout, dlse) + (None,) * not_differentiable


attention_op.register_autograd(_backward, setup_context=_setup_context)


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError(
        "fa2 has no second derivative of attention; use "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where create_graph=True is needed"
    )


attention_backward_op.register_autograd(_refuse_double_backward)


class Attention(torch.autograd.Function):
    """The operator's derivative for calls that go past the dispatcher."""

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options):
        tensors = (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox)
        out, lse = _compute.forward(*tensors, options)
        _save(ctx, tensors, options, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse) + (None,) * (_TENSORS - _DIFFERENTIABLE + 1)


def call(tensors: tuple[Optional[Tensor], ...], options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox; differentiable."""
    if not unwatched(tensors):
        return torch.ops.fa2.attention(*tensors, *options)
    if torch.is_grad_enabled():
        for x in tensors[:_DIFFERENTIABLE]:
            if x is not None and x.requires_grad:
                return Attention.apply(*tensors, options)
    return _compute.forward(*tensors, options)
