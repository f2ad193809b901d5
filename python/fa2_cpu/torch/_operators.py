# SPDX-License-Identifier: Apache-2.0
"""fa2::attention and fa2::attention_backward: operators of torch.library with fake kernels.

What compiles, traces or records operators sees these; a plain call goes past them, with the same
derivatives (fa2_cpu.torch._derivatives).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _compute
from fa2_cpu.torch._compute import AttentionOptions

_TENSORS = 9  # q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox come before options


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
