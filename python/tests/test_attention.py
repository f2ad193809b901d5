# SPDX-License-Identifier: Apache-2.0
"""Every option of attention_forward and attention_backward against the float64 oracle."""

import ml_dtypes
import numpy as np
import pytest

import fa2_cpu as fa2
from conftest import BOUNDS, relative_l2

NAMES = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")


def _check(rng, q, k, v, dtype, *, bounds=BOUNDS, want_dbias=False, **options):
    """Forward and backward against the oracle; returns the gradients."""
    expected, expected_lse = fa2.reference.attention_forward(q, k, v, **options)
    out, lse = fa2.attention_forward(q, k, v, **options)
    bound = bounds[dtype]
    assert relative_l2(out, expected) <= bound
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), finite)
    assert relative_l2(np.where(finite, lse, 0), np.where(finite, expected_lse, 0)) <= bound
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    arguments = dict(dlse=dlse, want_dbias=want_dbias, **options)
    grads = fa2.attention_backward(dout, q, k, v, out, lse, **arguments)
    expected = fa2.reference.attention_backward(dout, q, k, v, out, lse, **arguments)
    for name, grad, right in zip(NAMES, grads, expected):
        assert (grad is None) == (right is None), name
        if grad is not None:
            # Slopes and sinks have f32 gradients whatever the inputs are.
            limit = max(bound, bounds["float32"]) if grad.dtype == np.float32 else bound
            assert relative_l2(grad, right) <= limit, name
    return grads


OPTIONS = {
    "plain": {},
    "scale": dict(scale=0.31),
    "top_left": dict(causal="top_left"),
    "bottom_right": dict(causal="bottom_right"),
    "window": dict(window=(5, 2)),
    "causal window": dict(causal="bottom_right", window=(7, -1)),
    "softcap": dict(softcap=1.7),
    "dropout": dict(dropout_p=0.3, philox_seed=5, philox_offset=2**33 + 1),
    "dropout causal": dict(dropout_p=0.1, philox_seed=2**63, causal="top_left"),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("sizes", [(37, 53), (53, 37), (1, 31), (64, 64)], ids=str)
def test_options(rng, dtype, options, sizes):
    n, m = sizes
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q = rng.standard_normal((2, 4, n, 16)).astype(kind)
    k = rng.standard_normal((2, 2, m, 16)).astype(kind)
    v = rng.standard_normal((2, 2, m, 24)).astype(kind)
    _check(rng, q, k, v, dtype, **options)


@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (1, 1, 37, 53), (2, 1, 1, 53), (4, 37, 1), (53,)], ids=str)
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_bias(rng, shape, causal):
    q = rng.standard_normal((2, 4, 37, 16)).astype(np.float32)
    k = rng.standard_normal((2, 4, 53, 16)).astype(np.float32)
    v = rng.standard_normal((2, 4, 53, 16)).astype(np.float32)
    bias = rng.standard_normal(shape).astype(np.float32)
    grads = _check(rng, q, k, v, "float32", bias=bias, causal=causal, want_dbias=True)
    assert grads.dbias.shape == shape
    mask = rng.random(shape) > 0.3
    _check(rng, q, k, v, "float32", bias=mask, causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(1, 4, 37, 53), (2, 1, 1, 53), (2, 4, 37, 1)], ids=str)
def test_bias_dtypes(rng, dtype, bias_dtype, shape):
    """Any float bias with any inputs; with sinks a bias that broadcasts its keys has a gradient too."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v = (rng.standard_normal((2, 4, n, 16)).astype(kind) for n in (37, 53, 53))
    bias = rng.standard_normal(shape).astype(getattr(ml_dtypes, bias_dtype, bias_dtype))
    sinks = rng.standard_normal(4).astype(np.float32)
    coarse = dtype if np.dtype(kind).itemsize == 2 or bias_dtype not in ("bfloat16", "float16") else bias_dtype
    _check(rng, q, k, v, coarse, bias=bias, sinks=sinks, want_dbias=True)


def test_alibi_and_sinks(rng):
    q = rng.standard_normal((2, 4, 37, 16)).astype(np.float32)
    k = rng.standard_normal((2, 2, 53, 16)).astype(np.float32)
    slopes = rng.random(4).astype(np.float32)
    sinks = rng.standard_normal(4).astype(np.float32)
    grads = _check(rng, q, k, k, "float32", alibi_slopes=slopes, sinks=sinks)
    assert grads.dalibi_slopes.shape == (4,) and grads.dsinks.shape == (4,)
    _check(rng, q, k, k, "float32", alibi_slopes=np.stack([slopes, 2 * slopes]), causal="bottom_right")


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_varlen(rng, index):
    """Packed sequences are the same sequences one by one."""
    lengths_q, lengths_k = (13, 0, 40, 1), (21, 5, 0, 33)
    cu_q, cu_k = (np.cumsum((0, *x)).astype(index) for x in (lengths_q, lengths_k))
    q = rng.standard_normal((sum(lengths_q), 4, 16)).astype(np.float32)
    k = rng.standard_normal((sum(lengths_k), 2, 16)).astype(np.float32)
    v = rng.standard_normal((sum(lengths_k), 2, 16)).astype(np.float32)
    options = dict(layout="thd", causal="bottom_right", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    _check(rng, q, k, v, "float32", **options)
    out, lse = fa2.attention_forward(q, k, v, **options)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        one, one_lse = fa2.attention_forward(q[None, a:b], k[None, c:d], v[None, c:d], layout="bshd", causal="bottom_right")
        np.testing.assert_allclose(out[a:b], one[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[:, a:b], one_lse[0], rtol=1e-5, atol=1e-6)


def test_exact_gradients_in_float32(rng):
    """precision "exact" with bf16 inputs and f32 gradients keeps the products' f32 accuracy."""
    q, k, v, dout = (rng.standard_normal((1, 2, 65, 32)).astype(ml_dtypes.bfloat16) for _ in range(4))
    out, lse = fa2.reference.attention_forward(q, k, v)
    out, lse = out.astype(ml_dtypes.bfloat16), lse.astype(np.float32)
    expected = fa2.reference.attention_backward(dout, q, k, v, out, lse)
    for precision, bound in (("exact", 3e-6), ("fast", 2.5e-3)):
        grads = fa2.attention_backward(
            dout, q, k, v, out, lse, precision=precision, grad_dtype="float32"
        )  # fmt: skip
        for name in ("dq", "dk", "dv"):
            assert getattr(grads, name).dtype == np.float32
            assert relative_l2(getattr(grads, name), getattr(expected, name)) <= bound, (name, precision)


def test_philox_keep_mask(rng):
    """The mask that attention uses: with v = 1 at one key, out shows whether that key is kept."""
    keep = fa2.philox_keep_mask((2, 3, 5, 7), 0.25, 42, 1000)
    assert keep.dtype == np.bool_ and keep.shape == (2, 3, 5, 7)
    q = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    v = np.broadcast_to(np.eye(7, dtype=np.float32), (2, 3, 7, 7))
    k = rng.standard_normal((2, 3, 7, 8)).astype(np.float32)
    out, _ = fa2.attention_forward(q, k, v, dropout_p=0.25, philox_seed=42, philox_offset=1000)
    np.testing.assert_array_equal(out != 0, keep)
    # A row of the random stream: element n of the mask is output offset + n.
    tail = fa2.philox_keep_mask((100,), 0.25, 42, 1000 + 110)
    np.testing.assert_array_equal(tail[:100], fa2.philox_keep_mask((210,), 0.25, 42, 1000)[110:])
    assert abs(fa2.philox_keep_mask((1 << 16,), 0.25, 1, 0).mean() - 0.75) < 0.01
    assert fa2.philox_keep_mask((64,), 0.0, 1, 0).all() and not fa2.philox_keep_mask((64,), 1.0, 1, 0).any()
    with pytest.raises(ValueError, match="dropout_p"):
        fa2.philox_keep_mask((4,), 2.0, 1, 0)
