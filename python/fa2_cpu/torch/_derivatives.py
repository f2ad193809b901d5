# SPDX-License-Identifier: Apache-2.0
"""Attention as a function that is twice differentiable: in reverse mode, in forward mode, and by torch.func.

    function              what it computes                     its gradient            its tangent
    Attention             out, lse                             AttentionBackward       AttentionTangent
    AttentionBackward     dx of (dout, dlse)                   Second                  Second
    AttentionTangent      out˙, lse˙ along ẋ                   Second, dx of dout      refused
    Second                both of the above, along a           refused (Guard),        refused (Guard),
                          direction of x, dout and dlse                      but in the directions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _compute
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._operators import attention_backward_op, attention_op
from fa2_cpu.torch._tangents import tangents
from fa2_cpu.torch._tensors import traced, transformed, unwatched

_TENSORS = 9  # q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox come before options
_DIFFERENTIABLE = 6

_NO_THIRD = (
    "fa2 has no third derivative of attention; use F.scaled_dot_product_attention within "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where one is needed"
)


def _mapped(function: Any, info: Any, in_dims: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, Any]:
    """The rule of torch.func.vmap: a call for each element."""
    results = [
        function.apply(
            *(x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x for x, dim in zip(arguments, in_dims))
        )
        for i in range(info.batch_size)
    ]
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _save(ctx: Any, tensors: Sequence[Optional[Tensor]], forward_mode: bool = True) -> None:
    ctx.save_for_backward(*tensors)
    if forward_mode:
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)  # lse is rarely used, and then costs no gradient of zeros


def _gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    """Of the differentiable inputs of Attention, None where not wanted."""
    (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, out, lse) = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * _DIFFERENTIABLE
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox)
    return backward(tensors, ctx.options, ctx.needs_input_grad[:_DIFFERENTIABLE])


def backward(
    tensors: Sequence[Optional[Tensor]], options: AttentionOptions, wanted: Sequence[bool]
) -> tuple[Optional[Tensor], ...]:
    """Gradients of AttentionBackward's tensors in its order, differentiable where somebody may ask; None: not wanted."""
    wanted = tuple(wanted)
    if traced(tensors) and options.block_mask is None:
        grads = attention_backward_op(*tensors, *options, wanted)
    elif torch.is_grad_enabled() or transformed():
        grads = AttentionBackward.apply(*tensors, options, wanted)
    else:
        grads = _compute.backward(*tensors, options, wanted)
    return tuple(g if want and g is not None else None for g, want in zip(grads, wanted))


class Attention(torch.autograd.Function):
    """(out, lse) of plain calls. Without setup_context apply() takes some 20 µs less."""

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options):
        tensors = (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox)
        out, lse = _compute.forward(*tensors, options)
        ctx.options = options
        _save(ctx, (*tensors, out, lse), forward_mode=False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse) + (None,) * (_TENSORS - _DIFFERENTIABLE + 1)


class TransformedAttention(torch.autograd.Function):
    """(out, lse) under forward-mode AD and the transforms of torch.func."""

    @staticmethod
    def forward(*inputs):
        return _compute.forward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[_TENSORS]
        _save(ctx, (*inputs[:_TENSORS], *output))

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse) + (None,) * (_TENSORS - _DIFFERENTIABLE + 1)

    @staticmethod
    def jvp(ctx, *directions):
        return AttentionTangent.apply(*ctx.saved_tensors, *directions[:_DIFFERENTIABLE], ctx.options)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(TransformedAttention, info, in_dims, inputs)


class AttentionBackward(torch.autograd.Function):
    """dq, dk, dv, dbias, dalibi_slopes, dsinks of dout, q, k, v, out, lse, dlse, ...; None where not wanted.

    out and lse count as functions of the others, which they are: their own gradients are None.
    """

    @staticmethod
    def forward(*inputs):
        return _compute.backward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        (*tensors, ctx.options, ctx.wanted) = inputs
        _save(ctx, tensors)

    @staticmethod
    def backward(ctx, *directions):
        return second_backward(ctx, directions) + (None, None)

    @staticmethod
    def jvp(ctx, doutt, qt, kt, vt, _out, _lse, dlset, biast, slopest, sinkst, *_):
        x, others, out_lse, w = _sorted(ctx.saved_tensors)
        xt = (qt, kt, vt, biast, slopest, sinkst)
        wanted = ctx.wanted
        return _second((*x, *others, *out_lse, *w), xt, (doutt, dlset), ctx.options, False, wanted)[2:]

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(AttentionBackward, info, in_dims, inputs)


def _sorted(saved: Sequence[Optional[Tensor]]):
    """x, what is not differentiable, (out, lse) and w, of AttentionBackward's tensors."""
    (dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, *others) = saved
    return (q, k, v, bias, alibi_slopes, sinks), tuple(others), (out, lse), (dout, dlse)


def second_backward(ctx: Any, directions: Sequence[Optional[Tensor]]) -> tuple[Optional[Tensor], ...]:
    """The gradients of AttentionBackward's tensors, of those of its results."""
    need = ctx.needs_input_grad
    nothing = (None,) * (_TENSORS + 4)
    if all(u is None for u in directions):
        return nothing
    x, others, out_lse, w = _sorted(ctx.saved_tensors)
    wanted = tuple(bool(need[i]) and y is not None for i, y in zip((1, 2, 3, 7, 8, 9), x))
    want_out = bool(need[0] or need[6])
    if not want_out and not any(wanted):
        return nothing
    result = _second((*x, *others, *out_lse, *w), directions, (None, None), ctx.options, want_out, wanted)
    doutt, dlset, dq, dk, dv, dbias, dslopes, dsinks = result
    return (doutt if need[0] else None, dq, dk, dv, None, None, dlset if need[6] else None, dbias, dslopes, dsinks,
            None, None, None)  # fmt: skip


class AttentionTangent(torch.autograd.Function):
    """out˙ and lse˙ of x, what is not differentiable, out, lse and ẋ."""

    @staticmethod
    def forward(*inputs):
        x, others, xt = inputs[:6], inputs[6:9], inputs[11:17]
        return tangents(x, others, inputs[17], xt)[:2]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[17]
        _save(ctx, inputs[:17])

    @staticmethod
    def backward(ctx, dout, dlse):
        saved, need = ctx.saved_tensors, ctx.needs_input_grad
        x, others, (out, lse), xt = saved[:6], saved[6:9], saved[9:11], saved[11:]
        if dout is None and dlse is None:
            return (None,) * 18
        if dout is None:
            dout = torch.zeros_like(out)
        of_x: Sequence[Optional[Tensor]] = (None,) * 6
        wanted = tuple(bool(n) for n in need[:6])
        if any(wanted):
            of_x = _second((*saved[:11], dout, dlse), xt, (None, None), ctx.options, False, wanted)[2:]
        of_xt: Sequence[Optional[Tensor]] = (None,) * 6
        wanted = tuple(bool(n) for n in need[11:17])
        if any(wanted):
            of_xt = AttentionBackward.apply(
                dout, *x[:3], out, lse, dlse, *x[3:], *others, ctx.options, wanted
            )  # fmt: skip
        return (*of_x, None, None, None, None, None, *of_xt, None)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(
            "fa2 has no forward-mode derivative of attention's forward-mode derivative; "
            "second derivatives are jvp of grad, grad of jvp or grad of grad"
        )

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(AttentionTangent, info, in_dims, inputs)


class Second(torch.autograd.Function):
    """fa2_cpu.torch._tangents.tangents of x, others, out and lse (not read), w, ẋ, ẇ, options, want_out, wanted.

    Linear in ẋ and ẇ, and its own transpose: J and Jᵀ change places, and second derivatives are symmetric. So it is
    differentiable in these as often as one likes; in x and w Guard refuses to be.
    """

    @staticmethod
    def forward(*inputs):
        x, others, w, xt, wt = inputs[:6], inputs[6:9], inputs[11:13], inputs[13:19], inputs[19:21]
        options, want_out, wanted = inputs[21:]
        return tangents(x, others, options, xt, w, wt, want_out, wanted)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, ctx.want_out, ctx.wanted = inputs[21:]
        _save(ctx, inputs[:13])

    @staticmethod
    def backward(ctx, dout, dlse, *directions):
        need = ctx.needs_input_grad[13:21]
        wanted = tuple(bool(n) for n in need[:6])
        result = _second(ctx.saved_tensors, directions, (dout, dlse), ctx.options, bool(need[6] or need[7]), wanted)
        of_w = tuple(y if n else None for y, n in zip(result[:2], need[6:]))
        return (*(None,) * 13, *result[2:], *of_w, None, None, None)

    @staticmethod
    def jvp(ctx, *inputs):
        return _second(ctx.saved_tensors, inputs[13:19], inputs[19:21], ctx.options, ctx.want_out, ctx.wanted)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(Second, info, in_dims, inputs)


class Guard(torch.autograd.Function):
    """The identity, which refuses derivatives: those by x and w of what Second computes."""

    @staticmethod
    def forward(*inputs):
        return tuple(None if x is None else x.view_as(x) for x in inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(Guard, info, in_dims, inputs)


def _second(fixed, direction, w_direction, options: AttentionOptions, want_out: bool, wanted: Sequence[bool]):
    """Second of x, others, out, lse and w (fixed) along the directions."""
    guarded = Guard.apply(*fixed[:6], *fixed[11:])
    return Second.apply(
        *guarded[:6], *fixed[6:11], *guarded[6:], *direction, *w_direction, options, want_out, tuple(wanted)
    )  # fmt: skip


def _setup_op(ctx, inputs, output):
    ctx.options = AttentionOptions(*inputs[_TENSORS:])
    _save(ctx, (*inputs[:_TENSORS], *output), forward_mode=False)


def _op_backward(ctx, dout, dlse):
    not_differentiable = _TENSORS - _DIFFERENTIABLE + len(ctx.options)
    return _gradients(ctx, dout, dlse) + (None,) * not_differentiable


def _setup_backward_op(ctx, inputs, output):
    tensors = inputs[: _TENSORS + 4]
    ctx.options = AttentionOptions(*inputs[_TENSORS + 4 : -1])
    _save(ctx, tensors, forward_mode=False)
    ctx.given = [bool(want) for want in inputs[-1]]


def _backward_op_backward(ctx, *directions):
    directions = [u if given else None for u, given in zip(directions, ctx.given)]
    return second_backward(ctx, directions) + (None,) * (len(ctx.options) + 1)


attention_op.register_autograd(_op_backward, setup_context=_setup_op)
attention_backward_op.register_autograd(_backward_op_backward, setup_context=_setup_backward_op)


def call(tensors: tuple[Optional[Tensor], ...], options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) of q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox; differentiable.

    The operators of torch.library take no block mask; with one the functions here run as they are.
    """
    if not unwatched(tensors):
        if traced(tensors) and options.block_mask is None:
            return torch.ops.fa2.attention(*tensors, *options)
        return TransformedAttention.apply(*tensors, options)
    if torch.is_grad_enabled():
        for x in tensors[:_DIFFERENTIABLE]:
            if x is not None and x.requires_grad:
                return Attention.apply(*tensors, options)
    return _compute.forward(*tensors, options)
