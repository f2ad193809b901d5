# SPDX-License-Identifier: Apache-2.0
"""aten::_efficient_attention_forward and _backward for CPU tensors: [B, M, H, K], or packed with B = 1.

PyTorch has this pair of operators (memory-efficient attention, from xFormers) for CUDA only.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._operators import attention_backward_op
from fa2_cpu.torch._ops import attention, draw_philox

_CAUSAL = {0: None, 1: "top_left", 2: "bottom_right"}
# Rows of lse are padded to a multiple of this, as the CUDA operator pads them.
_LSE_ALIGNMENT = 32


def _mask(custom_mask_type: int, window_size: Optional[int]) -> tuple[Optional[str], tuple[int, int]]:
    if custom_mask_type not in _CAUSAL:
        raise ValueError(f"custom_mask_type is {custom_mask_type}; it must be 0, 1 or 2")
    if window_size is None or window_size <= 0:
        return _CAUSAL[custom_mask_type], (-1, -1)
    if custom_mask_type == 0:
        raise ValueError(f"window_size is {window_size} and custom_mask_type 0; a window needs type 1 or 2")
    return _CAUSAL[custom_mask_type], (window_size - 1, -1)


@functools.cache
def derivative_has_window() -> bool:
    """Whether PyTorch's derivative of the forward operator hands window_size on to the backward one.

    That of PyTorch 2.6 does not. Called once while the overrides are installed: within an operator
    autograd is off.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, 1, 1, 1, requires_grad=True)
        out, *_ = torch.ops.aten._efficient_attention_forward(x, x, x, None, None, None, None, None, 0.0, 0)
    return hasattr(out.grad_fn, "_saved_window_size")


def _packed(cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], bias: Optional[Tensor]) -> bool:
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("one of cu_seqlens_q and cu_seqlens_k is given; both must be, or neither")
    if cu_seqlens_q is not None and bias is not None:
        raise ValueError("bias is given with cu_seqlens_q; packed sequences take no bias")
    return cu_seqlens_q is not None


def efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: Optional[float] = None,
    seqlen_k: Optional[Tensor] = None,
    window_size: Optional[int] = None,
):
    if seqlen_k is not None:
        raise NotImplementedError("seqlen_k is not supported on the CPU; pack the keys with cu_seqlens_k")
    causal, window = _mask(custom_mask_type, window_size)
    if window[0] >= 0 and torch.is_grad_enabled() and not derivative_has_window():
        if any(x is not None and x.requires_grad for x in (query, key, value, bias)):
            raise NotImplementedError(
                f"window_size is {window_size}; this PyTorch ({torch.__version__}) leaves it out of the gradient, "
                "use fa2_cpu.torch.attention or a later PyTorch"
            )
    packed = _packed(cu_seqlens_q, cu_seqlens_k, bias)
    if packed and (max_seqlen_q is None or max_seqlen_k is None):
        raise ValueError("max_seqlen_q and max_seqlen_k must be given with cu_seqlens_q and cu_seqlens_k")
    philox = draw_philox() if dropout_p > 0.0 else torch.zeros(2, dtype=torch.int64)
    options = dict(scale=scale, causal=causal, window=window, dropout_p=dropout_p, philox=philox)
    if packed:
        out, lse = attention(
            query[0], key[0], value[0], layout="thd", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options,
        )  # fmt: skip
        out = out.unsqueeze(0)
        extents = max_seqlen_q, max_seqlen_k
    else:
        out, lse = attention(query, key, value, layout="bshd", bias=bias, **options)
        extents = query.shape[1], key.shape[1]
    padded = _pad_lse(lse, cu_seqlens_q, extents[0]) if compute_log_sumexp else lse.new_empty((*lse.shape[:2], 0))
    if packed and not compute_log_sumexp:
        padded = lse.new_empty((cu_seqlens_q.numel() - 1, lse.shape[0], 0))
    return out, padded, philox[0].clone(), philox[1].clone(), *extents


def _pad_lse(lse: Tensor, cu_seqlens_q: Optional[Tensor], longest: int) -> Tensor:
    """lse [B, H, M] or packed [H, total] as [B, H, M rounded up], padded with +inf."""
    rows = (longest + _LSE_ALIGNMENT - 1) // _LSE_ALIGNMENT * _LSE_ALIGNMENT
    if cu_seqlens_q is None:
        padded = lse.new_full((*lse.shape[:2], rows), torch.inf)
        padded[:, :, : lse.shape[2]] = lse
        return padded
    starts = cu_seqlens_q.tolist()
    padded = lse.new_full((len(starts) - 1, lse.shape[0], rows), torch.inf)
    for sequence, (start, end) in enumerate(zip(starts, starts[1:])):
        padded[sequence, :, : end - start] = lse[:, start:end]
    return padded


def efficient_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Optional[Tensor],
    out: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: Optional[float] = None,
    num_splits_key: Optional[int] = None,
    window_size: Optional[int] = None,
    shared_storage_dqdkdv: bool = False,
):
    causal, window = _mask(custom_mask_type, window_size)
    packed = _packed(cu_seqlens_q, cu_seqlens_k, bias)
    philox = torch.stack([philox_seed.reshape(()), philox_offset.reshape(())]).long() if dropout_p > 0.0 else None
    if packed:
        tensors = [x[0] for x in (grad_out, query, key, value, out)]
        lse = logsumexp
    else:
        tensors = [grad_out, query, key, value, out]
        lse = logsumexp[:, :, : query.shape[1]]
    want_bias = bias is not None and bias_requires_grad
    dq, dk, dv, dbias, *_ = attention_backward_op(
        *tensors, lse, None, bias, None, None, cu_seqlens_q, cu_seqlens_k, philox,
        *AttentionOptions(
            "thd" if packed else "bshd", scale, causal or "", *window, dropout_p=dropout_p,
            max_seqlen_q=max_seqlen_q if packed else 0, max_seqlen_k=max_seqlen_k if packed else 0,
        ),
        [True, True, True, want_bias, False, False],
    )  # fmt: skip
    grads = [x.unsqueeze(0) for x in (dq, dk, dv)] if packed else [dq, dk, dv]
    if shared_storage_dqdkdv:
        chunk = torch.stack(grads, -3)
        grads = list(chunk.unbind(-3))
    return *grads, dbias if want_bias else query.new_empty(())


KERNELS = {
    "_efficient_attention_forward": efficient_attention_forward,
    "_efficient_attention_backward": efficient_attention_backward,
}
