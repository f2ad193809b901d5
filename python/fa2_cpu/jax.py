# SPDX-License-Identifier: Apache-2.0
"""fa2 for JAX: dot_product_attention with the signature of jax.nn, differentiable, also under jax.jit.

The computation leaves JAX by jax.pure_callback, so it runs on the host's CPU.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
import numpy as np

from fa2_cpu._attention import attention_backward, attention_forward

__all__ = ["dot_product_attention"]

Array = Any


class _Options(NamedTuple):
    scale: Optional[float]
    causal: Optional[str]
    window: tuple[int, int]


def _keywords(options: _Options, bias: Optional[np.ndarray]) -> dict[str, Any]:
    return dict(
        layout="bshd", scale=options.scale, causal=options.causal, window=options.window,
        bias=None if bias is None else np.asarray(bias),
    )  # fmt: skip


def _host_forward(options: _Options, q, k, v, bias=None):
    return attention_forward(np.asarray(q), np.asarray(k), np.asarray(v), **_keywords(options, bias))


def _host_backward(options: _Options, want_dbias: bool, dout, q, k, v, out, lse, dlse, bias=None):
    arrays = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    grads = attention_backward(
        *arrays, dlse=np.asarray(dlse), want_dbias=want_dbias, **_keywords(options, bias)
    )  # fmt: skip
    return (grads.dq, grads.dk, grads.dv, *((grads.dbias,) if want_dbias else ()))


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, q, k, v, bias):
    batch, queries, heads, _ = q.shape
    lse_dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    shapes = (
        jax.ShapeDtypeStruct((batch, queries, heads, v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), lse_dtype),
    )
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    return jax.pure_callback(
        functools.partial(_host_forward, options), shapes, *inputs, vmap_method="sequential"
    )  # fmt: skip


def _forward_rule(options: _Options, q, k, v, bias):
    out, lse = _attention(options, q, k, v, bias)
    return (out, lse), (q, k, v, bias, out, lse)


def _backward_rule(options: _Options, saved, cotangents):
    q, k, v, bias, out, lse = saved
    dout, dlse = cotangents
    want_dbias = bias is not None and jnp.issubdtype(bias.dtype, jnp.floating)
    inputs = (dout, q, k, v, out, lse, dlse) + (() if bias is None else (bias,))
    shapes = tuple(_like(x) for x in ((q, k, v, bias) if want_dbias else (q, k, v)))
    grads = jax.pure_callback(
        functools.partial(_host_backward, options, want_dbias), shapes, *inputs, vmap_method="sequential"
    )  # fmt: skip
    return grads if want_dbias else (*grads, None)


_attention.defvjp(_forward_rule, _backward_rule)


def _four_dimensions(name: str, x: Optional[Array]) -> Optional[Array]:
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise ValueError(f"{name} has shape {x.shape}; it must have 3 or 4 dimensions")
    return x if x.ndim == 4 else x[None]


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Optional[Array] = None,
    mask: Optional[Array] = None,
    *,
    scale: Optional[float] = None,
    is_causal: bool = False,
    query_seq_lengths: Optional[Array] = None,
    key_value_seq_lengths: Optional[Array] = None,
    local_window_size: Optional[Union[int, tuple[int, int]]] = None,
    implementation: Optional[Literal["xla", "cudnn"]] = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention, computed by fa2.

    Args:
      query: [B, T, N, H] or [T, N, H]; key [B, S, K, H]; value [B, S, K, Hv]; N a multiple of K; f32,
        bf16, f16 or f64.
      bias: added to the scores, broadcastable to [B, N, T, S]; differentiable.
      mask: bool, broadcastable to [B, N, T, S]; True takes part.
      is_causal: query i sees keys j ≤ i.
      query_seq_lengths, key_value_seq_lengths: int32 [B]: rows past them are 0, keys past them are
        masked.
      local_window_size: w or (left, right): query i sees keys i − left … i + right.
      implementation: accepted, without effect.
      return_residual: also the logsumexp [B, T, N].

    Returns:
      [B, T, N, Hv] in query's dtype, without B where query had none. A row that sees no key is 0
      (jax.nn gives the mean of the values there).
    """
    batched = jnp.ndim(query) == 4
    q, k, v = (_four_dimensions(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    bias, mask = _four_dimensions("bias", bias), _four_dimensions("mask", mask)
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask is {mask.dtype}; it must be bool (an additive mask is a bias)")
    queries, keys = q.shape[1], k.shape[1]
    window = (-1, -1)
    if local_window_size is not None:
        window = (local_window_size,) * 2 if isinstance(local_window_size, int) else tuple(local_window_size)
        if not is_causal and queries != keys:
            # Without causality fa2 counts a window from the bottom-right diagonal, JAX from the top-left one.
            distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
            inside = ((distance >= -window[0]) & (distance <= window[1]))[None, None]
            mask = inside if mask is None else mask & inside
            window = (-1, -1)
    if key_value_seq_lengths is not None:
        lengths = jnp.asarray(key_value_seq_lengths)
        filled = (jnp.arange(keys)[None, :] < lengths[:, None])[:, None, None, :]
        mask = filled if mask is None else mask & filled
    if bias is None:
        combined = mask
    else:
        combined = bias if mask is None else jnp.where(mask, bias, -jnp.inf)
    options = _Options(
        None if scale is None else float(scale), "top_left" if is_causal else None, (int(window[0]), int(window[1]))
    )
    out, lse = _attention(options, q, k, v, combined)
    lse = lse.transpose(0, 2, 1)
    if query_seq_lengths is not None:
        inside = jnp.arange(queries)[None, :] < jnp.asarray(query_seq_lengths)[:, None]
        out = jnp.where(inside[:, :, None, None], out, 0)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out
