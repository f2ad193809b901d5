# SPDX-License-Identifier: Apache-2.0
"""Arrays of every library go in without a copy and come back in that library."""

import threading

import ml_dtypes
import numpy as np
import pytest

import fa2_cpu as fa2
from conftest import BOUNDS, relative_l2


def _inputs(rng, dtype=np.float32, layout="bhsd"):
    shapes = {"bhsd": ((2, 4, 17, 24), (2, 2, 33, 24), (2, 2, 33, 8)),
              "bshd": ((2, 17, 4, 24), (2, 33, 2, 24), (2, 33, 2, 8)),
              "thd": ((17, 4, 24), (33, 2, 24), (33, 2, 8))}[layout]  # fmt: skip
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_numpy(rng, dtype, layout):
    q, k, v = _inputs(rng, dtype, layout)
    options = dict(layout=layout)
    if layout == "thd":
        options.update(cu_seqlens_q=np.array([0, 5, 17]), cu_seqlens_k=np.array([0, 20, 33], np.int32))
    out, lse = fa2.attention_forward(q, k, v, **options)
    assert isinstance(out, np.ndarray) and out.dtype == q.dtype and out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    expected, expected_lse = fa2.reference.attention_forward(q, k, v, **options)
    bound = BOUNDS[np.dtype(dtype).name]
    assert relative_l2(out, expected) <= bound
    assert relative_l2(lse, expected_lse) <= bound
    dout = rng.standard_normal(out.shape).astype(dtype)
    grads = fa2.attention_backward(dout, q, k, v, out, lse, **options)
    expected = fa2.reference.attention_backward(dout, q, k, v, expected, expected_lse, **options)
    for name in ("dq", "dk", "dv"):
        grad = getattr(grads, name)
        assert isinstance(grad, np.ndarray) and grad.dtype == q.dtype
        assert relative_l2(grad, getattr(expected, name)) <= bound, name
    assert grads.dbias is None and grads.dalibi_slopes is None and grads.dsinks is None


def test_layouts_are_the_same_call(rng):
    q, k, v = _inputs(rng)
    out, lse = fa2.attention_forward(q, k, v, causal="bottom_right")
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    out2, lse2 = fa2.attention_forward(*swapped, layout="bshd", causal="bottom_right")
    np.testing.assert_array_equal(out, out2.swapaxes(1, 2))
    np.testing.assert_array_equal(lse, lse2)


def test_strides(rng):
    """Packed, transposed, reversed, broadcast, read-only and non-contiguous views."""
    q, k, v = _inputs(rng)
    expected, _ = fa2.attention_forward(q, k, v)
    packed = np.zeros((2, 17, 3, 4, 24), np.float32)
    packed[:, :, 1] = q.swapaxes(1, 2)
    backwards = q[:, :, ::-1].copy()[:, :, ::-1]
    read_only = q.copy()
    read_only.flags.writeable = False
    last = np.zeros((2, 4, 24, 17), np.float32)
    last[:] = q.swapaxes(2, 3)
    bytes_ = np.zeros(q.nbytes + 1, np.uint8)
    misaligned = bytes_[1:].view(np.float32).reshape(q.shape)
    misaligned[:] = q
    for view in (packed[:, :, 1].swapaxes(1, 2), backwards, read_only, last.swapaxes(2, 3), misaligned,
                 q.astype(">f4")):  # fmt: skip
        np.testing.assert_array_equal(fa2.attention_forward(view, k, v)[0], expected)
    one = fa2.attention_forward(q, k[:, :1].copy(), v[:, :1].copy())[0]
    spread = [np.broadcast_to(x[:, :1], (2, 4, *x.shape[2:])) for x in (k, v)]
    np.testing.assert_allclose(fa2.attention_forward(q, *spread)[0], one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(0, 4, 17, 33, 24), (2, 0, 17, 33, 24), (2, 4, 0, 33, 24), (2, 4, 17, 0, 24)])
def test_empty(sizes):
    b, h, n, m, d = sizes
    q, k = np.ones((b, h, n, d), np.float32), np.ones((b, h, m, d), np.float32)
    out, lse = fa2.attention_forward(q, k, k)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (b, h, n) and np.all(lse == -np.inf)
    grads = fa2.attention_backward(out, q, k, k, out, lse)
    assert grads.dk.shape == k.shape and not grads.dk.any() and not grads.dq.any()


def test_torch(rng):
    torch = pytest.importorskip("torch")
    arrays = _inputs(rng)
    expected, _ = fa2.attention_forward(*arrays)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in arrays)
    with torch.no_grad():
        out, lse = fa2.attention_forward(q, k, v)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float32 and not out.requires_grad
    np.testing.assert_array_equal(out.numpy(), expected)
    halves = [x.detach().bfloat16() for x in (q, k, v)]
    out, lse = fa2.attention_forward(*halves)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    grads = fa2.attention_backward(out, *halves, out, lse, grad_dtype=torch.float32)
    assert grads.dq.dtype == torch.float32
    same = fa2.attention_forward(*(x.float().numpy().astype(ml_dtypes.bfloat16) for x in halves))[0]
    np.testing.assert_array_equal(out.float().numpy(), same.astype(np.float32))


def test_dlpack_only(rng):
    """An array of a library that fa2 does not know: nothing but __dlpack__."""

    class Array:
        def __init__(self, data):
            self._data = data

        def __dlpack__(self, **keywords):
            return self._data.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self._data.__dlpack_device__()

    q, k, v = _inputs(rng)
    out, _ = fa2.attention_forward(*(Array(x) for x in (q, k, v)))
    np.testing.assert_array_equal(out, fa2.attention_forward(q, k, v)[0])


def test_cuda_is_refused(rng):
    class CudaArray:
        shape, dtype = (2, 4, 17, 24), np.dtype(np.float32)

        def __dlpack__(self, **keywords):
            raise BufferError("device memory")

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(TypeError, match="q is not on the CPU .*CUDA"):
        fa2.attention_forward(CudaArray(), *_inputs(rng)[1:])


def test_errors(rng):
    q, k, v = _inputs(rng)
    with pytest.raises(TypeError, match="q is of type list"):
        fa2.attention_forward([[1.0]], k, v)
    with pytest.raises(TypeError, match="int8"):
        fa2.attention_forward(q.astype(np.int8), k, v)
    with pytest.raises(TypeError, match="uint16.*ml_dtypes"):
        fa2.attention_forward(*(x.astype(np.uint16) for x in (q, k, v)))
    with pytest.raises(ValueError, match="q has shape"):
        fa2.attention_forward(q[0], k, v)
    with pytest.raises(ValueError, match="layout"):
        fa2.attention_forward(q, k, v, layout="bnhd")
    with pytest.raises(ValueError, match="causal"):
        fa2.attention_forward(q, k, v, causal="left")
    with pytest.raises(ValueError, match="precision"):
        fa2.attention_forward(q, k, v, precision="double")
    with pytest.raises(ValueError, match="dropout_p"):
        fa2.attention_forward(q, k, v, dropout_p=1.5)
    with pytest.raises(ValueError, match="num_threads"):
        fa2.attention_forward(q, k, v, num_threads=0)
    with pytest.raises(ValueError, match="philox_seed"):
        fa2.attention_forward(q, k, v, philox_seed=-1)
    with pytest.raises(ValueError, match="k"):
        fa2.attention_forward(q, k[..., :7], v)
    with pytest.raises(TypeError, match="window"):
        fa2.attention_forward(q, k, v, window=3)
    out, lse = fa2.attention_forward(q, k, v)
    with pytest.raises(ValueError, match="want_dbias"):
        fa2.attention_backward(out, q, k, v, out, lse, want_dbias=True)


def test_gil_is_released(rng):
    """Another thread runs Python code while one call computes."""
    q = rng.standard_normal((1, 2, 1024, 64)).astype(np.float32)
    inside, ticks = threading.Event(), 0

    def compute():
        inside.set()
        fa2.reference.attention_forward(q, q, q)
        inside.clear()

    thread = threading.Thread(target=compute)
    thread.start()
    inside.wait()
    while inside.is_set():
        ticks += 1
    thread.join()
    # With the GIL held throughout, the loop would see the event only once before or after the call.
    assert ticks > 1000


def test_threads_give_the_same_bits(rng):
    q, k, v = _inputs(rng)
    one = fa2.attention_forward(q, k, v, num_threads=1)
    two = fa2.attention_forward(q, k, v, num_threads=2)
    for a, b in zip(one, two):
        np.testing.assert_array_equal(a, b)


def test_info():
    info = fa2.info()
    assert info["version"] == fa2.__version__
    assert info["target"] in info["targets"] and info["engine"] in info["engines"]
    assert info["threads"] >= 1
    assert info["peak"] > 1e6  # any CPU does more than a million operations a second
    assert fa2.info() == info  # measured once
