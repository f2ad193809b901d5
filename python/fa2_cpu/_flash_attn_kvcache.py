# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache: decoding with a cache that is updated in place. No gradients."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from fa2_cpu._options import window_pair
from fa2_cpu.torch._ops import attention
from fa2_cpu.torch._tensors import check_tensor


def window_of(window_size: Any) -> tuple[int, int]:
    """flash-attn's window, in which None and negative numbers are no bound, as fa2's."""
    if isinstance(window_size, (list, tuple)):
        window_size = tuple(-1 if w is None else w for w in window_size)
    left, right = window_size if torch.compiler.is_compiling() else window_pair(window_size)
    return max(left, -1), max(right, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x [B, N, H, D] at positions [B, N]; cos and sin [length, rotary / 2]."""
    half = cos.shape[-1]
    cos = cos[positions].unsqueeze(2).to(x.dtype)
    sin = sin[positions].unsqueeze(2).to(x.dtype)
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotary[..., ::2], rotary[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = rotary[..., :half], rotary[..., half:]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rotated, rest], -1)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q [B, Nq, Hq, D] over a cache, after appending k and v to it.

    Args:
      k_cache, v_cache: [caches, length, Hkv, D], or pages [pages, page_size, Hkv, D] with block_table
        int32 [B, pages of a sequence]; written in place where k and v are given.
      k, v: [B, new, Hkv, D], stored from cache_seqlens on.
      rotary_cos, rotary_sin: [length, rotary / 2]; k is rotated at its positions, q at the same if
        causal or windowed, else at cache_seqlens.
      cache_seqlens: lengths in use before the call, int or int32 [B]; None is the whole cache.
      cache_batch_idx: int32 [B], the cache of each sequence. cache_leftpad: int32 [B], first valid row.

    Returns:
      out [B, Nq, Hq, D], with return_softmax_lse also lse f32 [B, Hq, Nq].

    Raises:
      TypeError: an argument that is no dense CPU tensor, or dtypes that differ.
      ValueError: shapes or options that do not fit, or new rows that the cache has no room for.

    Example:
      >>> import torch
      >>> from fa2_cpu.flash_attn import flash_attn_with_kvcache
      >>> k_cache, v_cache = torch.zeros(1, 32, 2, 16), torch.zeros(1, 32, 2, 16)
      >>> q, k, v = (torch.randn(1, 3, 2, 16) for _ in range(3))
      >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=4, causal=True).shape
      torch.Size([1, 3, 2, 16])
      >>> torch.equal(k_cache[:, 4:7], k)
      True
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions")
    batch, queries = q.shape[:2]
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = capacity
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32)
    lengths = cache_seqlens.long()
    if k is not None:
        if v is None:
            raise ValueError("k is given without v; both must be given, or neither")
        if int(lengths.max()) + k.shape[1] > capacity:
            raise ValueError(
                f"cache_seqlens reaches {int(lengths.max())} and k has {k.shape[1]} rows; "
                f"together they must be at most {capacity}, the rows of the cache"
            )
    if rotary_cos is not None:
        moving = causal or tuple(window_size) != (-1, -1)
        steps = torch.arange(queries) if moving else torch.zeros(queries, dtype=torch.long)
        q = _rotate(q, rotary_cos, rotary_sin, lengths[:, None] + steps, rotary_interleaved)
        if k is not None:
            positions = lengths[:, None] + torch.arange(k.shape[1])
            k = _rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)

    def rows(b: int, first: int, last: int):
        """What of the caches holds rows first … last of sequence b."""
        if block_table is None:
            return (int(cache_batch_idx[b]) if cache_batch_idx is not None else b, slice(first, last))
        index = torch.arange(first, last)
        page_size = k_cache.shape[1]
        return block_table[b].long()[index // page_size], index % page_size

    lists: tuple[list[Tensor], list[Tensor]] = ([], [])
    for b, used in enumerate(lengths.tolist()):
        end = used
        if k is not None:
            end = used + k.shape[1]
            k_cache[rows(b, used, end)] = k[b].to(k_cache.dtype)
            v_cache[rows(b, used, end)] = v[b].to(v_cache.dtype)
        first = int(cache_leftpad[b]) if cache_leftpad is not None else 0
        for cache, parts in zip((k_cache, v_cache), lists):
            parts.append(cache[rows(b, first, end)])
    cu_seqlens_k = torch.zeros(batch + 1, dtype=torch.int32)
    cu_seqlens_k[1:] = torch.tensor([x.shape[0] for x in lists[0]]).cumsum(0)
    out, lse = attention(
        q.flatten(0, 1), torch.cat(lists[0]), torch.cat(lists[1]),
        layout="thd",
        scale=softmax_scale,
        causal="bottom_right" if causal else None,
        window=window_of(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * queries,
        cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    out = out.unflatten(0, (batch, queries))
    if return_softmax_lse:
        return out, lse.unflatten(1, (batch, queries)).transpose(0, 1)
    return out
