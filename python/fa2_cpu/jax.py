# SPDX-License-Identifier: Apache-2.0
"""fa2 for JAX: dot_product_attention with the signature of jax.nn, differentiable, also under jax.jit and jax.vmap.

XLA calls fa2 on its own buffers where the build fits the installed jaxlib (call_way() says), else through
jax.pure_callback. Both compute on the host's CPU, on the threads that NumPy's functions use.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, Optional, Union

import jax
import jax.numpy as jnp

from fa2_cpu import _jax_calls
from fa2_cpu._jax_calls import Options as _Options
from fa2_cpu._options import number as _number
from fa2_cpu._options import window_pair as _window_pair

__all__ = ["call_way", "dot_product_attention"]

Array = Any


def call_way() -> tuple[str, Optional[str]]:
    """How XLA calls fa2: ("ffi", None), or ("callback", and why the first is not had).

    FA2_JAX=callback or FA2_JAX=ffi in the environment forces one.

    Raises:
      RuntimeError: "ffi" is forced and cannot be had.

    Example:
      >>> import fa2_cpu.jax
      >>> way, reason = fa2_cpu.jax.call_way()
      >>> way == "ffi" or bool(reason)
      True
    """
    return _jax_calls.call_way()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, q, k, v, bias):
    return _jax_calls.forward(options, q, k, v, bias)


def _forward_rule(options: _Options, q, k, v, bias):
    out, lse = _attention(options, q, k, v, bias)
    return (out, lse), (q, k, v, bias, out, lse)


def _backward_rule(options: _Options, saved, cotangents):
    q, k, v, bias, out, lse = saved
    dout, dlse = cotangents
    want_dbias = bias is not None and jnp.issubdtype(bias.dtype, jnp.floating)
    grads = _jax_calls.backward(options, want_dbias, dout, q, k, v, out, lse, dlse, bias)
    return grads if want_dbias else (*grads, None)


_attention.defvjp(_forward_rule, _backward_rule)

# Outside of jit JAX would go through the rules above in Python, call by call: some 0.4 ms.
_compiled_attention = jax.jit(_attention, static_argnums=0)


def _array(name: str, x: Any) -> Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is of type {type(x).__name__}; it must be an array") from None


def _four_dimensions(name: str, x: Any) -> Array:
    x = _array(name, x)
    if x.ndim not in (3, 4):
        raise ValueError(f"{name} has shape {x.shape}; it must have 3 or 4 dimensions")
    return x if x.ndim == 4 else x[None]


def _window(size: Any) -> tuple[int, int]:
    pair = _window_pair(size if isinstance(size, (tuple, list)) else (size, size))
    if min(pair) < 0:
        raise ValueError(f"local_window_size is {size!r}; it must be a number of keys, or a pair of them, not below 0")
    return pair


def _lengths(name: str, x: Any, batch: int) -> Array:
    x = _array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.shape != (batch,):
        raise ValueError(f"{name} is {x.dtype} of shape {x.shape}; it must be integers, ({batch},)")
    return x


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(max(head_dim, 1))
    if isinstance(scale, jax.core.Tracer):
        raise TypeError("scale is traced by JAX; it must be a number that is known then (multiply query by it instead)")
    return _number("scale", scale)


_FLOATS = ("float32", "bfloat16", "float16", "float64")


def _check(q: Array, k: Array, v: Array, bias: Optional[Array], mask: Optional[Array]) -> None:
    """Shapes and dtypes, while the function is traced: what XLA runs later can only fail as a whole."""
    if str(q.dtype) not in _FLOATS:
        raise TypeError(f"query is {q.dtype}; it must be one of {', '.join(_FLOATS)}")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(f"query, key and value are {q.dtype}, {k.dtype} and {v.dtype}; they must have one dtype")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"key has shape {k.shape}; its batch and head dimension must be those of query, {q.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"value has shape {v.shape}; all but its head dimension must be that of key, {k.shape}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"query has {q.shape[2]} heads and key {k.shape[2]}; the first must be a multiple")
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None and any(size not in (1, whole) for size, whole in zip(x.shape, scores)):
            raise ValueError(f"{name} has shape {x.shape}; it must be broadcastable to [B, N, T, S] = {scores}")
    if bias is not None and str(bias.dtype) not in _FLOATS:
        raise TypeError(f"bias is {bias.dtype}; it must be one of {', '.join(_FLOATS)}")


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

    Raises:
      TypeError, ValueError: dtypes or shapes that do not fit, while the function is traced.

    Example:
      >>> import jax, fa2_cpu.jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> out = jax.jit(fa2_cpu.jax.dot_product_attention)(q, k, v)
      >>> out.shape, bool(jax.numpy.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
      ((2, 5, 4, 8), True)
    """
    query = _array("query", query)
    batched = query.ndim == 4
    q, k, v = (_four_dimensions(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    bias = None if bias is None else _four_dimensions("bias", bias)
    mask = None if mask is None else _four_dimensions("mask", mask)
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f'implementation is {implementation!r}; it must be None, "xla" or "cudnn"')
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask is {mask.dtype}; it must be bool (an additive mask is a bias)")
    _check(q, k, v, bias, mask)
    queries, keys = q.shape[1], k.shape[1]
    window = (-1, -1)
    if local_window_size is not None:
        window = _window(local_window_size)
        if not is_causal and queries != keys:
            # Without causality fa2 counts a window from the bottom-right diagonal, JAX from the top-left one.
            distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
            inside = ((distance >= -window[0]) & (distance <= window[1]))[None, None]
            mask = inside if mask is None else mask & inside
            window = (-1, -1)
    if key_value_seq_lengths is not None:
        lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, q.shape[0])
        filled = (jnp.arange(keys)[None, :] < lengths[:, None])[:, None, None, :]
        mask = filled if mask is None else mask & filled
    if bias is None:
        combined = mask
    else:
        combined = bias if mask is None else jnp.where(mask, bias, -jnp.inf)
    options = _Options(_scale(scale, q.shape[-1]), bool(is_causal), window)
    out, lse = _compiled_attention(options, q, k, v, combined)
    if query_seq_lengths is not None:
        lengths = _lengths("query_seq_lengths", query_seq_lengths, q.shape[0])
        inside = jnp.arange(queries)[None, :] < lengths[:, None]
        out = jnp.where(inside[:, :, None, None], out, 0)
    if not batched:
        out = out[0]
    if not return_residual:
        return out
    lse = lse.transpose(0, 2, 1)
    return out, lse if batched else lse[0]
