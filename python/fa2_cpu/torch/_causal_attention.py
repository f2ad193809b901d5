# SPDX-License-Identifier: Apache-2.0
"""causal_attention: self-attention on [B, N, heads · D], as a layer's projections leave it."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from fa2_cpu.torch._library import check_float, integer
from fa2_cpu.torch._ops import attention
from fa2_cpu.torch._sdpa import autocast


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, num_kv_heads: Optional[int] = None
) -> Tensor:
    """Causal self-attention with scale 1/√D: query i sees keys j ≤ i.

    Args:
      q: [B, N, num_heads · D]; k, v [B, N, num_kv_heads · D]; one dtype (f32, bf16, f16, f64), any strides.
      num_heads: a multiple of num_kv_heads, of which head h reads h // (num_heads / num_kv_heads).
      num_kv_heads: None is num_heads.

    Returns:
      [B, N, num_heads · D] in q's dtype.

    Raises:
      TypeError: dtypes that differ, or an input that is not on the CPU.
      ValueError: shapes that do not fit.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> q, k, v = torch.randn(2, 6, 4 * 16), torch.randn(2, 6, 2 * 16), torch.randn(2, 6, 2 * 16)
      >>> fa2.causal_attention(q, k, v, num_heads=4, num_kv_heads=2).shape
      torch.Size([2, 6, 64])
    """
    num_heads = integer("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
    for name, x, heads in (("q", q, num_heads), ("k", k, num_kv_heads), ("v", v, num_kv_heads)):
        check_float(name, x)
        if x.dim() != 3 or heads < 1 or x.shape[-1] % heads:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B, N, heads · D] with {heads} heads")
    q, k, v = (autocast(x) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must have one dtype")
    heads = [x.unflatten(-1, (h, -1)) for x, h in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads))]
    return attention(*heads, layout="bshd", causal="top_left")[0].flatten(2)
