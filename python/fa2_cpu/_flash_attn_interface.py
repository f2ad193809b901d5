# SPDX-License-Identifier: Apache-2.0
"""flash_attn.flash_attn_interface: the functions below flash-attn's public ones, which other packages import.

Argument lists, results, in-place outputs and operators are those of flash-attn 2.8.3. rng_state is int64 [2], seed and
offset of the dropout mask.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from fa2_cpu import _core, _flash_attn_probabilities
from fa2_cpu.torch import _compute
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._ops import draw_philox
from fa2_cpu.torch._tensors import descriptor

# What flash-attn rounds lengths up to in softmax_d.
_BLOCK = 128


def _options(
    layout: str, scale: Optional[float], causal: bool, left: int, right: int, softcap: float, dropout_p: float,
    max_q: int = 0, max_k: int = 0,
) -> AttentionOptions:  # fmt: skip
    return AttentionOptions(
        layout, scale, "bottom_right" if causal else "", max(left, -1), max(right, -1), softcap, dropout_p, max_q, max_k
    )


def _forward(q, k, v, alibi_slopes, return_softmax, options: AttentionOptions, cu_q=None, cu_k=None):
    rng_state = draw_philox() if options.dropout_p > 0.0 else torch.zeros(2, dtype=torch.int64)
    out, lse = _compute.forward(q, k, v, None, alibi_slopes, None, cu_q, cu_k, rng_state, options)
    probabilities = q.new_empty(0)
    if return_softmax and options.dropout_p > 0.0:
        o = options
        probabilities = _flash_attn_probabilities.signed(
            q, k, lse, layout=o.layout, scale=o.scale, causal=o.causal or None, window=(o.window_left, o.window_right),
            softcap=o.softcap, alibi_slopes=alibi_slopes, dropout_p=o.dropout_p, philox=rng_state, cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k, max_seqlen_q=o.max_seqlen_q, max_seqlen_k=o.max_seqlen_k,
        )  # fmt: skip
    return out, lse, probabilities, rng_state


def _backward(
    dout, q, k, v, out, lse, dq, dk, dv, alibi_slopes, rng_state, options: AttentionOptions, cu_q=None, cu_k=None
) -> Tensor:
    """Writes dq, dk and dv; returns rowsum(out · dout) [B, H, N] or [H, total]."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    delta = (out.to(wide) * dout.to(wide)).sum(-1).transpose(-1, -2).contiguous()
    grads = [torch.empty_like(like) if x is None else x for x, like in ((dq, q), (dk, k), (dv, v))]
    _core.attention_backward(
        *map(descriptor, (dout, q, k, v, out, lse, None, delta, *grads, None, None, None)),
        *_compute._core_options(q, None, alibi_slopes, None, cu_q, cu_k, rng_state, options),
    )  # fmt: skip
    return delta


def _rounded(n: int) -> int:
    return -(-n // _BLOCK) * _BLOCK


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cpu")
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state) of q [B, Nq, Hq, D], k and v [B, Nk, Hkv, D]."""
    options = _options("bshd", softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
    return _forward(q, k, v, alibi_slopes, return_softmax, options)


@_flash_attn_forward.register_fake
def _(q, k, v, dropout_p, scale, causal, left, right, softcap, alibi_slopes, return_softmax):
    out, lse = _compute.allocate_forward(q, v, "bshd")
    shape = (*lse.shape, k.shape[1]) if return_softmax and dropout_p > 0.0 else (0,)
    return out, lse, q.new_empty(shape), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), device_types="cpu")
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse [Hq, total_q], S_dmask, rng_state) of q [total_q, Hq, D], k and v [total_k, Hkv, D]."""
    if block_table is not None or leftpad_k is not None or seqused_k is not None:
        k, v, cu_seqlens_k = _used_keys(k, v, cu_seqlens_k, block_table, leftpad_k, seqused_k)
    options = _options(
        "thd", softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k
    )
    return _forward(q, k, v, alibi_slopes, return_softmax, options, cu_seqlens_q, cu_seqlens_k)


def _used_keys(k, v, cu_seqlens_k, block_table, leftpad_k, seqused_k) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of k and v that sequences use, packed anew, and their prefix sums."""
    starts = cu_seqlens_k.tolist()
    lists: tuple[list[Tensor], list[Tensor]] = ([], [])
    for n, (start, stop) in enumerate(zip(starts, starts[1:])):
        first = 0 if leftpad_k is None else int(leftpad_k[n])
        last = stop - start if seqused_k is None else int(seqused_k[n])
        for x, rows in zip((k, v), lists):
            own = x[start:stop] if block_table is None else x[block_table[n].long()].flatten(0, 1)
            rows.append(own[first:last])
    lengths = torch.tensor([0, *(len(x) for x in lists[0])], dtype=torch.int32)
    return torch.cat(lists[0]), torch.cat(lists[1]), lengths.cumsum(0).to(torch.int32)


@_flash_attn_varlen_forward.register_fake
def _(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    out, lse = _compute.allocate_forward(q, q.new_empty((0, 1, v.shape[-1])), "thd")
    shape = (0,)
    if return_softmax and dropout_p > 0.0:
        shape = (cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k)
    return out, lse, q.new_empty(shape), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
) -> Tensor:
    """Writes dq, dk and dv; softmax_d f32 [B, Hq, Nq rounded up to 128] is rowsum(out · dout), 0 behind Nq."""
    options = _options("bshd", softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
    delta = _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, rng_state, options)
    result = torch.zeros((*delta.shape[:2], _rounded(delta.shape[2])), dtype=torch.float32)
    result[..., : delta.shape[2]] = delta
    return result


@_flash_attn_backward.register_fake
def _(dout, q, *rest):
    return q.new_empty((q.shape[0], q.shape[2], _rounded(q.shape[1])), dtype=torch.float32)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv; softmax_d f32 [Hq, total_q + 128 · sequences], sequence b from row cu_seqlens_q[b] + 128 b."""
    options = _options(
        "thd", softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k
    )
    delta = _backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, rng_state, options, cu_seqlens_q, cu_seqlens_k
    )
    starts = cu_seqlens_q.tolist()
    result = torch.zeros((delta.shape[0], delta.shape[1] + _BLOCK * (len(starts) - 1)), dtype=torch.float32)
    for n, (start, stop) in enumerate(zip(starts, starts[1:])):
        result[:, start + _BLOCK * n : stop + _BLOCK * n] = delta[:, start:stop]
    return result


@_flash_attn_varlen_backward.register_fake
def _(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, *rest):
    return q.new_empty((q.shape[1], q.shape[0] + _BLOCK * (cu_seqlens_q.shape[0] - 1)), dtype=torch.float32)


_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward

INTERNALS = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
)
