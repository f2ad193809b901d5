# SPDX-License-Identifier: Apache-2.0
"""The functions of the flash-attn 2 package, for CPU tensors: same names, argument lists and layouts.

Differences: float32 and float64 are accepted too, head dimensions have no limit, the head dimension
of v may differ, everything is deterministic, and dropout draws its mask from PyTorch's CPU generator.
install_as_flash_attn() lets `import flash_attn` find this module.

Shapes: q [B, Nq, Hq, D]; k, v [B, Nk, Hkv, D], Hq a multiple of Hkv; packed qkv [B, N, 3, H, D] and
kv [B, Nk, 2, Hkv, D]; varlen functions take [total, ...] with int32 prefix sums. causal and
window_size count from the bottom-right diagonal i + Nk − Nq. With return_attn_probs the result is
(out, softmax_lse, S_dmask): lse f32 [B, Hq, Nq] or [Hq, total_q], S_dmask without elements unless
dropout_p > 0, then softmax probabilities, negative where dropped (formed in O(N²) memory, for tests).
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu import _flash_attn_alias, _flash_attn_metadata, _flash_attn_probabilities
from fa2_cpu._flash_attn_kvcache import flash_attn_with_kvcache, window_of
from fa2_cpu.torch._library import integer, number
from fa2_cpu.torch._ops import attention, draw_philox
from fa2_cpu.torch._tensors import check_tensor

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install_as_flash_attn",
]

__version__ = "2.8.3"  # of the interface


def _call(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
    layout="bshd", **varlen,
) -> Any:  # fmt: skip
    check_tensor("q", q)
    dropout_p = number("dropout_p", dropout_p)
    philox = draw_philox() if dropout_p > 0.0 else None
    options = dict(
        scale=softmax_scale,
        causal="bottom_right" if causal else None,
        window=window_of(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        philox=philox,
        **varlen,
    )
    out, lse = attention(q, k, v, layout=layout, **options)
    if not return_attn_probs:
        return out
    probabilities = q.new_empty(0)
    if dropout_p > 0.0:
        probabilities = _flash_attn_probabilities.signed(q, k, lse, layout=layout, **options)
    return out, lse.detach(), probabilities


def _unpacked(name: str, x: Tensor, parts: int) -> tuple[Tensor, ...]:
    check_tensor(name, x)
    if x.dim() < 3 or x.shape[-3] != parts:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [..., {parts}, heads, D]")
    return x.unbind(-3)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Nq, Hq, D] over k, v [B, Nk, Hkv, D]; out [B, Nq, Hq, D]. See the module.

    Raises:
      TypeError: an argument that is no dense CPU tensor, or dtypes that differ.
      ValueError: shapes or options that do not fit.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_func
      >>> q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
      >>> flash_attn_func(q, k, v, causal=True).shape
      torch.Size([2, 5, 4, 16])
    """
    return _call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with k and v packed as kv [B, Nk, 2, Hkv, D], which raises the same.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_kvpacked_func
      >>> flash_attn_kvpacked_func(torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 1, 16)).shape
      torch.Size([2, 5, 4, 16])
    """
    k, v = _unpacked("kv", kv, 2)
    return _call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with q, k and v packed as qkv [B, N, 3, H, D], which raises the same.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_qkvpacked_func
      >>> flash_attn_qkvpacked_func(torch.randn(2, 5, 3, 4, 16), causal=True).shape
      torch.Size([2, 5, 4, 16])
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    return _call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )  # fmt: skip


def _varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> dict[str, Any]:
    return dict(
        layout="thd", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=integer("max_seqlen_q", max_seqlen_q), max_seqlen_k=integer("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Any:
    """Sequences of different lengths, packed: q [total_q, Hq, D], k and v [total_k, Hkv, D].

    cu_seqlens_q and cu_seqlens_k are int32 prefix sums [sequences + 1]. With block_table (int32
    [sequences, pages]) k and v are pages [pages, page_size, Hkv, D], for inference.

    Raises:
      TypeError: an argument that is no dense CPU tensor, or dtypes that differ.
      ValueError: shapes, prefix sums or options that do not fit.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_varlen_func
      >>> q, k, v = (torch.randn(8, 2, 16) for _ in range(3))  # sequences of 3 and of 5
      >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
      >>> flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True).shape
      torch.Size([8, 2, 16])
    """
    if block_table is not None:
        lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).tolist()
        pages = block_table.long()
        k, v = (
            torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(pages, lengths)]) for x in (k, v)
        )  # fmt: skip
    return _call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        **_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with k and v packed as kv [total_k, 2, Hkv, D], which raises the same.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_varlen_kvpacked_func
      >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
      >>> q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 2, 16)
      >>> flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 5, 5, causal=True).shape
      torch.Size([8, 4, 16])
    """
    k, v = _unpacked("kv", kv, 2)
    return _call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        **_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with q, k and v packed as qkv [total, 3, H, D], which raises the same.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_varlen_qkvpacked_func
      >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
      >>> flash_attn_varlen_qkvpacked_func(torch.randn(8, 3, 4, 16), ends, 5, causal=True).shape
      torch.Size([8, 4, 16])
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    return _call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        **_varlen(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
    )  # fmt: skip


def install_as_flash_attn(*, metadata: bool = False) -> None:
    """Lets `import flash_attn` find this module.

    That is flash_attn itself, flash_attn_interface with the functions below the public ones (_flash_attn_forward and the
    like), bert_padding, layers.rotary, ops.rms_norm and losses.cross_entropy, as in version 2.8.3.

    Args:
      metadata: also let importlib.metadata find the distribution flash-attn, and transformers take
        attn_implementation="flash_attention_2" on a CPU.

    Raises:
      RuntimeError: another flash_attn is imported already.

    Example:
      >>> import fa2_cpu.flash_attn
      >>> fa2_cpu.flash_attn.install_as_flash_attn()
      >>> from flash_attn import flash_attn_func
      >>> flash_attn_func is fa2_cpu.flash_attn.flash_attn_func
      True
    """
    _flash_attn_alias.install(__name__)
    if metadata:
        _flash_attn_metadata.install(__version__)
