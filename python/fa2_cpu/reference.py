# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: attention by plain loops, to check any kernel against.

The functions take the arguments of fa2_cpu.attention_forward and fa2_cpu.attention_backward and compute in
double whatever the inputs are; every result is float64 unless grad_dtype says otherwise. Slow, and
O(Nq · Nk) memory a head. precision and num_threads have no effect.
"""

from __future__ import annotations

from typing import Any

from fa2_cpu._arrays import Array
from fa2_cpu._attention import Gradients, backward, forward

__all__ = ["attention_backward", "attention_forward"]


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int, int] = (-1, -1),
    bias: Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    philox_seed: int = 0,
    philox_offset: int = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    precision: str = "fast",
    num_threads: int | None = None,
) -> tuple[Array, Array]:
    """fa2_cpu.attention_forward in float64: (out, lse), both float64."""
    return forward(
        q, k, v, reference=True, layout=layout, scale=scale, causal=causal, window=window, bias=bias,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p,
        philox_seed=philox_seed, philox_offset=philox_offset, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, precision=precision, num_threads=num_threads,
    )  # fmt: skip


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int, int] = (-1, -1),
    bias: Array | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    philox_seed: int = 0,
    philox_offset: int = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    precision: str = "fast",
    num_threads: int | None = None,
    dlse: Array | None = None,
    grad_dtype: Any = None,
    want_dbias: bool = False,
) -> Gradients:
    """fa2_cpu.attention_backward in float64: gradients in float64, or in grad_dtype."""
    return backward(
        dout, q, k, v, out, lse, dlse=dlse, grad_dtype=grad_dtype, want_dbias=want_dbias,
        reference=True, layout=layout, scale=scale, causal=causal, window=window, bias=bias,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p,
        philox_seed=philox_seed, philox_offset=philox_offset, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, precision=precision, num_threads=num_threads,
    )  # fmt: skip
