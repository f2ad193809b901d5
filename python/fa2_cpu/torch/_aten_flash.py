# SPDX-License-Identifier: Apache-2.0
"""aten::_flash_attention_forward and _backward for CPU tensors, dense [B, N, H, D] or packed [total, H, D].

Causal and windows count from the bottom-right diagonal, as in the flash-attn package.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._operators import attention_backward_op
from fa2_cpu.torch._ops import attention, draw_philox


def _window(left: Optional[int], right: Optional[int]) -> tuple[int, int]:
    """None and anything negative are unbounded."""
    return (
        -1 if left is None or left < 0 else left,
        -1 if right is None or right < 0 else right,
    )


def _used_keys(key, value, cum_seq_k, seqused_k, block_table):
    """The keys in use, packed, and their prefix sums: of paged storage [pages, page, H, D] the pages
    that block_table names for each sequence, of packed storage the first seqused_k of each."""
    lengths = seqused_k.tolist()
    if block_table is not None:
        rows = [(key[pages].flatten(0, 1), value[pages].flatten(0, 1)) for pages in block_table.long()]
    else:
        starts = cum_seq_k.tolist()
        rows = [(key[start:], value[start:]) for start in starts[:-1]]
    key = torch.cat([k[:n] for (k, _), n in zip(rows, lengths)])
    value = torch.cat([v[:n] for (_, v), n in zip(rows, lengths)])
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.cumsum(seqused_k, 0)
    return key, value, cu_seqlens, max(lengths, default=0)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Optional[Tensor],
    cum_seq_k: Optional[Tensor],
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: Optional[float] = None,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
    seqused_k: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    num_splits: Optional[int] = None,
):
    if block_table is not None and seqused_k is None:
        raise ValueError("block_table is given without seqused_k; the lengths in use must be given too")
    inference_only = seqused_k is not None
    if inference_only:
        if cum_seq_q is None:
            raise ValueError("seqused_k is given without cum_seq_q; queries must be packed")
        key, value, cum_seq_k, max_k = _used_keys(key, value, cum_seq_k, seqused_k, block_table)
    varlen = cum_seq_q is not None
    philox = draw_philox() if dropout_p > 0.0 else torch.zeros(2, dtype=torch.int64)
    out, lse = attention(
        query, key, value,
        layout="thd" if varlen else "bshd",
        scale=scale,
        causal="bottom_right" if is_causal else None,
        window=_window(window_size_left, window_size_right),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        philox=philox,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        max_seqlen_q=max_q if varlen else 0,
        max_seqlen_k=max_k if varlen else 0,
    )  # fmt: skip
    # `unused` is saved and handed to the backward, whose signature has no place for the slopes.
    if inference_only:
        unused = torch.zeros((), dtype=torch.bool)
    elif alibi_slopes is not None:
        unused = alibi_slopes.clone()
    else:
        unused = torch.empty((), dtype=torch.uint64)
    return out, lse, philox.view(torch.uint64), unused, query.new_empty(0)


def flash_attention_forward_no_dropout_inplace(out: Tensor, *args, **keywords) -> Tensor:
    result, lse, *_ = flash_attention_forward(*args, **keywords)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Optional[Tensor],
    cum_seq_k: Optional[Tensor],
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Optional[Tensor],
    *,
    scale: Optional[float] = None,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
):
    if unused is not None and unused.dtype == torch.bool:
        raise NotImplementedError("seqused_k and block_table are for inference; they have no backward")
    has_slopes = unused is not None and unused.is_floating_point() and unused.numel() > 0
    varlen = cum_seq_q is not None
    left, right = _window(window_size_left, window_size_right)
    grads = attention_backward_op(
        grad_out, query, key, value, out, logsumexp, None, None, unused if has_slopes else None, None,
        cum_seq_q, cum_seq_k, rng_state.view(torch.int64) if dropout_p > 0.0 else None,
        *AttentionOptions(
            "thd" if varlen else "bshd", scale, "bottom_right" if is_causal else "", left, right,
            dropout_p=dropout_p, max_seqlen_q=max_q if varlen else 0, max_seqlen_k=max_k if varlen else 0,
        ),
        [True, True, True, False, False, False],
    )  # fmt: skip
    return grads[:3]


KERNELS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": flash_attention_backward,
}
