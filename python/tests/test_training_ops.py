# SPDX-License-Identifier: Apache-2.0
"""The kernels of a training step against formulas in float64."""

import ml_dtypes
import numpy as np
import pytest

import fa2_cpu as fa2
from conftest import relative_l2

# A bf16 result is rounded once: 2⁻⁹ a value at most. f32 sums of `dim` terms.
BOUNDS = {"float32": 2e-6, "bfloat16": 4e-3}


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


def _random(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_transpose_2d(rng, dtype):
    for shape in ((3, 5), (1, 67), (2, 65, 33), (0, 4)):
        x = _random(rng, dtype, *shape)
        np.testing.assert_array_equal(fa2.transpose_2d(x), x.swapaxes(-1, -2))
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    np.testing.assert_array_equal(fa2.transpose_2d(ids), ids.T)


@pytest.mark.parametrize("shape", [(7, 129), (2, 3, 5), (1,), (3, 0), (2, 1, 2, 3, 31)], ids=str)
def test_softmax(rng, dtype, shape):
    x, dy = _random(rng, dtype, *shape), _random(rng, dtype, *shape)
    y = fa2.softmax(x)
    assert y.dtype == x.dtype and y.shape == shape
    if not x.size:
        return
    assert relative_l2(y, _softmax(x.astype(np.float64))) <= BOUNDS[dtype]
    y64, dy64 = y.astype(np.float64), dy.astype(np.float64)
    expected = y64 * (dy64 - (y64 * dy64).sum(-1, keepdims=True))
    assert relative_l2(fa2.softmax_backward(dy, y), expected) <= BOUNDS[dtype] + (shape == (1,))


@pytest.mark.parametrize("dim", [1, 64, 257])
def test_rms_norm(rng, dtype, dim):
    x, dy, weight = _random(rng, dtype, 5, 3, dim), _random(rng, dtype, 5, 3, dim), _random(rng, dtype, dim)
    eps = 1e-3
    x64, dy64, w64 = (a.astype(np.float64) for a in (x, dy, weight))
    r = 1 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps)
    assert relative_l2(fa2.rms_norm(x, weight, eps), x64 * r * w64) <= BOUNDS[dtype]
    dx, dweight = fa2.rms_norm_backward(dy, x, weight, eps)
    expected = w64 * r * dy64 - x64 * r**3 / dim * (x64 * w64 * dy64).sum(-1, keepdims=True)
    # Where dim is 1 the two terms cancel down to eps; the error is that of one term.
    assert np.linalg.norm(dx.astype(np.float64) - expected) <= BOUNDS[dtype] * np.linalg.norm(w64 * r * dy64)
    assert relative_l2(dweight, (x64 * r * dy64).sum((0, 1))) <= BOUNDS[dtype]


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_embedding_backward(rng, dtype, index):
    dy = _random(rng, dtype, 4, 31, 19)
    ids = rng.integers(0, 11, (4, 31)).astype(index)
    expected = np.zeros((11, 19))
    np.add.at(expected, ids.reshape(-1), dy.reshape(-1, 19).astype(np.float64))
    assert relative_l2(fa2.embedding_backward(dy, ids, 11), expected) <= BOUNDS[dtype]
    ids[2, 3] = 11
    with pytest.raises(ValueError, match="65.*11|11.*65"):
        fa2.embedding_backward(dy, ids, 11)


def test_cross_entropy(rng, dtype):
    logits = _random(rng, dtype, 3, 13, 101)
    targets = rng.integers(0, 101, (3, 13))
    targets[1, 4:9] = -100
    loss, dlogits = fa2.cross_entropy(logits, targets)
    p = _softmax(logits.astype(np.float64)).reshape(-1, 101)
    flat = targets.reshape(-1)
    counted = flat != -100
    expected_loss = -np.log(p[counted, flat[counted]]).sum() / counted.sum()
    assert loss.shape == () and abs(float(loss) - expected_loss) <= 2e-6 * expected_loss
    expected = p.copy()
    expected[np.arange(len(flat)), np.where(counted, flat, 0)] -= 1
    expected = np.where(counted[:, None], expected, 0).reshape(logits.shape) / counted.sum()
    assert dlogits.dtype == logits.dtype and relative_l2(dlogits, expected) <= BOUNDS[dtype]
    loss, dlogits = fa2.cross_entropy(logits, np.full((3, 13), 7), ignore_index=7)
    assert float(loss) == 0 and not dlogits.any()
    targets[0, 2] = 101
    with pytest.raises(ValueError, match="101"):
        fa2.cross_entropy(logits, targets)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_causal_attention_backward(rng, lead):
    q, dout = (rng.standard_normal((*lead, 67, 4 * 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((*lead, 67, 2 * 16)).astype(np.float32) for _ in range(2))
    grads = fa2.causal_attention_backward(dout, q, k, v, 4, 2)

    def split(x, heads):
        return x.reshape(-1, 67, heads, 16)

    arrays = split(q, 4), split(k, 2), split(v, 2)
    out, lse = fa2.reference.attention_forward(*arrays, layout="bshd", causal="top_left")
    expected = fa2.reference.attention_backward(split(dout, 4), *arrays, out, lse, layout="bshd", causal="top_left")
    for grad, right, x in zip(grads, expected[:3], (q, k, v)):
        assert grad.shape == x.shape
        assert relative_l2(grad, right.reshape(x.shape)) <= 3e-6


def test_torch(rng):
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 33)
    np.testing.assert_array_equal(fa2.softmax(x).numpy(), fa2.softmax(x.numpy()))
    loss, dlogits = fa2.cross_entropy(x.bfloat16(), torch.arange(5))
    assert isinstance(loss, torch.Tensor) and loss.dim() == 0 and dlogits.dtype == torch.bfloat16
