# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.jax.dot_product_attention against jax.nn.dot_product_attention, with gradients, under jit."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fa2_cpu as fa2  # noqa: E402
import fa2_cpu.jax  # noqa: E402
from conftest import BOUNDS, relative_l2  # noqa: E402


def _arrays(rng, *shapes, dtype=jnp.float32):
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.2),
    "window": dict(local_window_size=(5, 3)),
    "symmetric window": dict(local_window_size=4),
    "causal window": dict(is_causal=True, local_window_size=(5, 3)),
    "lengths": dict(query_seq_lengths=jnp.array([19, 7]), key_value_seq_lengths=jnp.array([11, 23])),
    "mask": dict(mask=jnp.arange(19 * 23).reshape(1, 1, 19, 23) % 3 > 0),
    "mask causal": dict(mask=jnp.arange(23)[None, None, None] % 4 < 3, is_causal=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_agrees_with_jax(rng, options, jit, biased):
    q, k, v = _arrays(rng, (2, 19, 4, 16), (2, 23, 2, 16), (2, 23, 2, 16))
    bias = jnp.asarray(rng.standard_normal((1, 4, 19, 23)), jnp.float32) if biased else None
    weights = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def loss(function):
        def inner(q, k, v, bias):
            out = function(q, k, v, bias, **options)
            return (out * weights).sum(), out

        gradient = jax.grad(inner, (0, 1, 2, 3) if biased else (0, 1, 2), has_aux=True)
        return jax.jit(gradient) if jit else gradient

    grads, out = loss(fa2_cpu.jax.dot_product_attention)(q, k, v, bias)
    expected_grads, expected = loss(jax.nn.dot_product_attention)(q, k, v, bias)
    assert relative_l2(out, expected) <= 3e-6
    for a, b in zip(grads, expected_grads):
        assert a.dtype == b.dtype and relative_l2(a, b) <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit(rng, dtype):
    q, k, v = _arrays(rng, (2, 19, 4, 16), (2, 19, 2, 16), (2, 19, 2, 8), dtype=dtype)
    out, lse = fa2_cpu.jax.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    expected, expected_lse = fa2.reference.attention_forward(q, k, v, layout="bshd", causal="top_left")
    assert out.dtype == dtype and out.shape == (2, 19, 4, 8) and lse.shape == (2, 19, 4)
    assert relative_l2(out, expected) <= BOUNDS[dtype]
    assert relative_l2(lse, expected_lse.transpose(0, 2, 1)) <= BOUNDS[dtype]


def test_residual_is_differentiable(rng):
    q, k, v = _arrays(rng, (19, 4, 16), (23, 2, 16), (23, 2, 16))

    def loss(q):
        out, lse = fa2_cpu.jax.dot_product_attention(q, k, v, return_residual=True)
        assert out.shape == (19, 4, 16) and lse.shape == (19, 4)
        return out.sum() + lse.sum()

    def expected(q):
        scores = jnp.einsum("tnh,snh->nts", q, jnp.repeat(k, 2, 1)) / 4
        out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), jnp.repeat(v, 2, 1))
        return out.sum() + jax.nn.logsumexp(scores, -1).sum()

    assert relative_l2(jax.grad(loss)(q), jax.grad(expected)(q)) <= 1e-5


def test_large_arrays_under_jit(rng):
    """Callbacks with large arguments, one after the other, inside one computation."""
    q, k, v = _arrays(rng, (1, 512, 8, 64), (1, 512, 8, 64), (1, 512, 8, 64))

    @jax.jit
    def chain(q):
        for _ in range(3):
            q = fa2_cpu.jax.dot_product_attention(q @ jnp.eye(64), k, v, is_causal=True)
        return q

    assert jnp.isfinite(jax.grad(lambda q: chain(q).sum())(q)).all()


def test_arrays_outside_of_jit(rng):
    """fa2.attention_forward itself takes JAX arrays, and refuses traced ones."""
    q, k, v = _arrays(rng, (2, 4, 19, 16), (2, 2, 23, 16), (2, 2, 23, 8), dtype=jnp.bfloat16)
    out, lse = fa2.attention_forward(q, k, v)
    assert isinstance(out, jax.Array) and out.dtype == jnp.bfloat16 and isinstance(lse, jax.Array)
    with pytest.raises(TypeError, match="fa2_cpu.jax"):
        jax.jit(fa2.attention_forward)(q, k, v)


def test_errors(rng):
    """All while the function is traced, before anything runs."""
    q, k, v = _arrays(rng, (2, 19, 4, 16), (2, 23, 2, 16), (2, 23, 2, 16))

    def refuses(error, match, *arguments, **options):
        with pytest.raises(error, match=match):
            jax.eval_shape(lambda: fa2_cpu.jax.dot_product_attention(*arguments, **options))

    refuses(TypeError, "query is int32; it must be", q.astype(jnp.int32), k, v)
    refuses(TypeError, "query, key and value are float32, bfloat16", q, k.astype(jnp.bfloat16), v)
    refuses(ValueError, "key has shape .* must be those of query", q, k[..., :8], v)
    refuses(ValueError, "value has shape", q, k, v[:, :7])
    refuses(ValueError, "query has 3 heads and key 2", q[:, :, :3], k, v)
    refuses(ValueError, "bias has shape .* broadcastable", q, k, v, bias=jnp.zeros((1, 3, 19, 23)))
    refuses(ValueError, "mask has shape .* broadcastable", q, k, v, mask=jnp.ones((1, 1, 19, 22), bool))
    refuses(TypeError, "bias is bool", q, k, v, bias=jnp.ones((1, 1, 19, 23), bool))
    refuses(TypeError, "query is of type str; it must be an array", "q", k, v)
    refuses(TypeError, "scale is 'a'; it must be a number", q, k, v, scale="a")
    refuses(TypeError, "window is .1, 2, 3.; it must be a pair", q, k, v, local_window_size=(1, 2, 3))
    refuses(ValueError, "local_window_size is -5", q, k, v, local_window_size=-5)
    refuses(ValueError, "key_value_seq_lengths is int32 of shape .3,.; it must be integers, .2,.", q, k, v,
            key_value_seq_lengths=jnp.ones(3, jnp.int32))  # fmt: skip
    refuses(ValueError, "implementation is 'triton'", q, k, v, implementation="triton")
    with pytest.raises(TypeError, match="scale is traced by JAX"):
        jax.eval_shape(lambda s: fa2_cpu.jax.dot_product_attention(q, k, v, scale=s), 0.5)
    with pytest.raises(TypeError, match="mask is float32"):
        fa2_cpu.jax.dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 19, 23)))
    with pytest.raises(ValueError, match="query has shape"):
        fa2_cpu.jax.dot_product_attention(q[0, 0], k, v)
