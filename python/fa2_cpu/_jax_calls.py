# SPDX-License-Identifier: Apache-2.0
"""Attention on traced JAX arrays [B, N, H, D], not differentiable: out and lse, and the gradients.

XLA calls fa2 in one of two ways. "ffi": a handler of its foreign function interface reads and writes XLA's own
buffers; it is in builds that had jaxlib's headers, and fits where this jaxlib takes their version. "callback":
jax.pure_callback, through Python and with copies, which works everywhere. FA2_JAX says which one is wanted.

Under jax.vmap the mapped axis joins the batch, and the call remains one.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np

from fa2_cpu import _core
from fa2_cpu._attention import attention_backward, attention_forward

Array = Any


class Options(NamedTuple):
    scale: float
    causal: bool
    window: tuple[int, int]


# ---- How XLA calls ------------------------------------------------------------------------------

_TARGETS = {"fa2_attention_forward": "xla_ffi_attention_forward",
            "fa2_attention_backward": "xla_ffi_attention_backward"}  # fmt: skip


def _register() -> Optional[str]:
    """Makes the handlers known to XLA, or says why not."""
    if not hasattr(_core, "xla_ffi_version"):
        return "this build of fa2 had no headers of jaxlib"
    if not hasattr(jax, "ffi"):
        return f"JAX {jax.__version__} has no jax.ffi"
    try:
        for target, handler in _TARGETS.items():
            jax.ffi.register_ffi_target(target, getattr(_core, handler), platform="cpu")
    except Exception as error:  # jaxlib's own, of several types; it names both versions
        return str(error)
    return None


@functools.cache
def call_way() -> tuple[str, Optional[str]]:
    """("ffi", None), or ("callback", why)."""
    wanted = os.environ.get("FA2_JAX", "")
    if wanted not in ("", "ffi", "callback"):
        raise ValueError(f'FA2_JAX is "{wanted}"; it must be "ffi", "callback" or empty')
    if wanted == "callback":
        return "callback", "FA2_JAX says so"
    problem = _register()
    if problem is None and jax.default_backend() != "cpu":
        problem = f"JAX computes on {jax.default_backend()}"
    if problem is not None and wanted == "ffi":
        raise RuntimeError(f'FA2_JAX is "ffi", but {problem}')
    return ("ffi", None) if problem is None else ("callback", problem)


def _ffi_call(target: str, shapes, inputs, options: Options):
    return jax.ffi.ffi_call(target, shapes)(
        *inputs, scale=np.float64(options.scale), causal=options.causal, window_left=np.int64(options.window[0]),
        window_right=np.int64(options.window[1]),
    )  # fmt: skip


def _keywords(options: Options, bias: Optional[np.ndarray]) -> dict[str, Any]:
    return dict(
        layout="bshd", scale=options.scale, causal="top_left" if options.causal else None, window=options.window,
        bias=None if bias is None else np.asarray(bias),
    )  # fmt: skip


def _host_forward(options: Options, q, k, v, bias=None):
    return attention_forward(np.asarray(q), np.asarray(k), np.asarray(v), **_keywords(options, bias))


def _host_backward(options: Options, want_dbias: bool, dout, q, k, v, out, lse, dlse, bias=None):
    arrays = (np.asarray(x) for x in (dout, q, k, v, out, lse))
    grads = attention_backward(*arrays, dlse=np.asarray(dlse), want_dbias=want_dbias, **_keywords(options, bias))
    return (grads.dq, grads.dk, grads.dv, *((grads.dbias,) if want_dbias else ()))


def _call_forward(options: Options, q, k, v, bias):
    batch, queries, heads, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct((batch, queries, heads, v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float64 if q.dtype == jnp.float64 else jnp.float32),
    )
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    if call_way()[0] == "ffi":
        return tuple(_ffi_call("fa2_attention_forward", shapes, inputs, options))
    return jax.pure_callback(functools.partial(_host_forward, options), shapes, *inputs)


def _call_backward(options: Options, want_dbias: bool, dout, q, k, v, out, lse, dlse, bias):
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ((q, k, v, bias) if want_dbias else (q, k, v)))
    inputs = (dout, q, k, v, out, lse, dlse) + (() if bias is None else (bias,))
    if call_way()[0] == "ffi":
        return tuple(_ffi_call("fa2_attention_backward", shapes, inputs, options))
    return jax.pure_callback(functools.partial(_host_backward, options, want_dbias), shapes, *inputs)


# ---- The mapped axis ----------------------------------------------------------------------------


def _merge(size: int, mapped: bool, x: Array) -> Array:
    """[size, B, ...], or [B, ...] for all alike, as [size · B, ...]."""
    if not mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _merge_bias(size: int, mapped: bool, bias: Optional[Array], batch: int, whole: bool) -> Optional[Array]:
    """As _merge; [1, ...] for all alike stays as it is, which fa2 broadcasts, unless it must be whole."""
    if bias is None or (not mapped and bias.shape[0] == 1 and not whole):
        return bias
    if bias.shape[-4] != batch:
        bias = jnp.broadcast_to(bias, (*bias.shape[:-4], batch, *bias.shape[-3:]))
    return _merge(size, mapped, bias)


def _split(size: int, x: Array) -> Array:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


@functools.lru_cache(maxsize=None)
def _forward_of(options: Options):
    @jax.custom_batching.custom_vmap
    def call(q, k, v, bias):
        return _call_forward(options, q, k, v, bias)

    @call.def_vmap
    def rule(size, mapped, q, k, v, bias):
        batch = q.shape[1] if mapped[0] else q.shape[0]
        tensors = (_merge(size, *x) for x in zip(mapped, (q, k, v)))
        results = call(*tensors, _merge_bias(size, mapped[3], bias, batch, whole=False))
        return tuple(_split(size, x) for x in results), (True, True)

    return call


@functools.lru_cache(maxsize=None)
def _backward_of(options: Options, want_dbias: bool):
    @jax.custom_batching.custom_vmap
    def call(dout, q, k, v, out, lse, dlse, bias):
        return _call_backward(options, want_dbias, dout, q, k, v, out, lse, dlse, bias)

    @call.def_vmap
    def rule(size, mapped, *arguments):
        *tensors, bias = arguments
        batch = tensors[1].shape[1] if mapped[1] else tensors[1].shape[0]
        merged = (_merge(size, *x) for x in zip(mapped, tensors))
        grads = [
            _split(size, x) for x in call(*merged, _merge_bias(size, mapped[7], bias, batch, whole=want_dbias))
        ]
        if want_dbias and bias.shape[-4] != batch:
            grads[3] = grads[3].sum(1, keepdims=True)
        return tuple(grads), (True,) * len(grads)

    return call


def forward(options: Options, q: Array, k: Array, v: Array, bias: Optional[Array]) -> tuple[Array, Array]:
    """(out [B, N, H, Dv], lse [B, H, N]); bias [1 or B, 1 or H, 1 or N, 1 or Nk], or None."""
    return _forward_of(options)(q, k, v, bias)


def backward(
    options: Options, want_dbias: bool, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
    dlse: Array, bias: Optional[Array],
) -> tuple[Array, ...]:  # fmt: skip
    """(dq, dk, dv), and dbias where wanted."""
    return _backward_of(options, want_dbias)(dout, q, k, v, out, lse, dlse, bias)
