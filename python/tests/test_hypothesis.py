# SPDX-License-Identifier: Apache-2.0
"""Arguments drawn by hypothesis: any strides, sizes, dtypes and objects.

A call gives the bits that it gives for contiguous copies, within its bound of the reference, or raises with a sentence.
Its inputs are as before.
"""

import os

import ml_dtypes
import numpy as np
import pytest

import fa2_cpu as fa2
from conftest import BOUNDS, relative_l2

if not os.environ.get("FA2_NEED_TORCH"):
    pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

try:
    import torch
except ImportError:
    torch = None

# The same draws in every run: FA2_TEST_CASES=10000 for others, and more.
_CASES = int(os.environ.get("FA2_TEST_CASES", "0"))
_settings = settings(
    max_examples=_CASES or 80, derandomize=not _CASES, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

FLOATS = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
ERRORS = (TypeError, ValueError)


def _values(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@st.composite
def views(draw, shape, dtype):
    """An array of this shape and dtype that lies in memory in some way."""
    values = _values(shape, dtype, draw(st.integers(0, 2**32 - 1)))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, -1, -1, 2, -3]), min_size=len(shape), max_size=len(shape)))
    stored = np.zeros([shape[i] * abs(steps[i]) for i in order], dtype)
    view = stored.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    if view.shape != tuple(shape):  # a size of 0
        view = np.zeros(shape, dtype)
    view[...] = values
    how = draw(st.sampled_from(["", "", "", "broadcast", "misaligned", "read-only", "fortran", "big-endian", "torch"]))
    if how == "broadcast" and shape[0] > 0:
        return np.broadcast_to(view[:1], shape)
    if how == "misaligned":
        memory = np.zeros(view.nbytes + 1, np.uint8)
        moved = memory[1:].view(np.uint8)[: view.nbytes].view(dtype).reshape(shape)
        moved[...] = view
        return moved
    if how == "read-only":
        view.flags.writeable = False
    if how == "fortran":
        return np.asfortranarray(view)
    if how == "big-endian" and dtype != ml_dtypes.bfloat16:
        return view.astype(dtype.newbyteorder(">"))
    if how == "torch" and torch is not None and dtype != ml_dtypes.bfloat16:
        # Strides as torch may have them: no negative ones.
        return torch.from_numpy(np.ascontiguousarray(view)).transpose(-1, -2).contiguous().transpose(-1, -2)
    return view


def _numpy(x):
    return x.numpy() if torch is not None and isinstance(x, torch.Tensor) else np.asarray(x)


sizes = st.integers(0, 6)


@st.composite
def calls(draw):
    dtype = draw(st.sampled_from(FLOATS))
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    batch, kv_heads, group, n, m = (draw(sizes) for _ in range(5))
    dims = [draw(st.integers(0, 11)) for _ in range(2)]
    shapes = [(batch, kv_heads * group, n, dims[0]), (batch, kv_heads, m, dims[0]), (batch, kv_heads, m, dims[1])]
    if layout == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    options = {"layout": layout}
    if draw(st.booleans()):
        options["causal"] = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    if draw(st.booleans()):
        options["window"] = tuple(draw(st.sampled_from([None, 0, 1, 3, 100])) for _ in range(2))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.0, 0.5, 30.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.25, 1.0]))
    if draw(st.integers(0, 2)) == 0:
        shape = [s if draw(st.booleans()) else 1 for s in (batch, kv_heads * group, n, m)]
        options["bias"] = draw(views(shape, draw(st.sampled_from(FLOATS))))
    return [draw(views(shape, dtype)) for shape in shapes], options


def _outcome(function, *arguments, **options):
    """The results, or the kind of error, whose sentence must say something."""
    try:
        return function(*arguments, **options)
    except ERRORS as error:
        assert len(str(error)) > 10
        return type(error)


def _check_call(operands, options):
    before = [_numpy(x).copy() for x in operands]
    result = _outcome(fa2.attention_forward, *operands, **options)
    for x, old in zip(operands, before):
        assert _numpy(x).tobytes() == old.tobytes(), "an input was written"
    plain = [np.ascontiguousarray(x.astype(x.dtype.newbyteorder("="))) for x in before]
    dense_options = dict(options)
    if "bias" in options:
        bias = _numpy(options["bias"])
        dense_options["bias"] = np.ascontiguousarray(bias.astype(bias.dtype.newbyteorder("=")))
    dense = _outcome(fa2.attention_forward, *plain, **dense_options)
    if isinstance(dense, type):
        assert result is dense
        return
    out, lse = result
    np.testing.assert_array_equal(_numpy(out), dense[0])
    np.testing.assert_array_equal(_numpy(lse), dense[1])
    expected = fa2.reference.attention_forward(*plain, **dense_options)
    bound = BOUNDS[plain[0].dtype.name]
    assert relative_l2(_numpy(out), expected[0]) <= 3 * bound  # few elements: three deviations
    dout = _values(dense[0].shape, plain[0].dtype, 1)
    grads = fa2.attention_backward(dout, *operands, out, lse, **options)
    expected = fa2.attention_backward(dout, *plain, *dense, **dense_options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(_numpy(getattr(grads, name)), getattr(expected, name), err_msg=name)


@_settings
@given(calls())
def test_any_valid_call(call):
    _check_call(*call)


def _sparse():
    return torch.eye(4).to_sparse() if torch is not None else [0]


def _meta():
    return torch.empty(1, 2, 3, 4, device="meta") if torch is not None else object()


STRANGE = [
    lambda: None, lambda: 3, lambda: "q", lambda: [[1.0]], lambda: {}, object, lambda: np.float32(3),
    lambda: np.ones((1, 2, 3, 4), np.int8), lambda: np.ones((1, 2, 3, 4), np.complex64),
    lambda: np.array([["a"]]), lambda: np.array([None]), lambda: np.ones(()), lambda: np.ones((1,) * 7, np.float32),
    lambda: np.ones((2, 3), np.float32), lambda: np.ones((1, 2, 3, 4), np.float64),
    lambda: np.ma.masked_array(np.ones((1, 2, 3, 4), np.float32), True), lambda: np.ones((1, 2, 3, 4), "O"),
    lambda: np.ones((1, 2, 3, 4), [("a", "f4"), ("b", "f4")]), lambda: np.ones((1, 2, 3, 4), "M8[s]"),
    lambda: np.full((1, 2, 3, 4), np.nan, np.float32), lambda: np.ones((1, 2, 3, 5), np.float32),
    lambda: np.broadcast_to(np.float32(1), (10**6, 10**6, 0, 4)), _sparse, _meta, lambda: memoryview(b"1234"),
]  # fmt: skip
NAMES = ("q", "k", "v")
VALUES = [None, -1, 0, 2**63, -(2**70), 1.5, float("nan"), float("inf"), "x", [], (1,), (1, 2, 3), {}, b"", object(),
          np.ones(3), True]  # fmt: skip
OPTIONS = ["scale", "causal", "window", "softcap", "bias", "alibi_slopes", "sinks", "dropout_p", "philox_seed",
           "philox_offset", "cu_seqlens_q", "cu_seqlens_k", "precision", "layout", "nonsense"]  # fmt: skip


@_settings
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(STRANGE)), max_size=2),
       st.dictionaries(st.sampled_from(OPTIONS), st.sampled_from(VALUES), max_size=2))  # fmt: skip
def test_any_objects(strange, options):
    """A status of the library or a sentence of the package: nothing ends the process, nothing else is raised."""
    operands = [np.ones((1, 2, 3, 4), np.float32) for _ in range(3)]
    for index, make in strange:
        operands[index] = make()
    _outcome(fa2.attention_forward, *operands, **options)
    out, lse = fa2.attention_forward(*[np.ones((1, 2, 3, 4), np.float32)] * 3)
    _outcome(fa2.attention_backward, out, *operands, out, lse, **options)
    _outcome(fa2.softmax, operands[0])
    _outcome(fa2.rms_norm, operands[0], operands[1])
    _outcome(fa2.transpose_2d, operands[0])
    _outcome(fa2.embedding_backward, operands[0], operands[1], 7)
    _outcome(fa2.cross_entropy, operands[0], operands[1])


@_settings
@given(st.data())
def test_rows(data):
    """Kernels of rows: the same bits for any strides."""
    dtype = data.draw(st.sampled_from(FLOATS))
    shape = data.draw(st.lists(sizes, min_size=2, max_size=4))
    x = data.draw(views(shape, dtype))
    plain = _numpy(x)
    plain = np.ascontiguousarray(plain.astype(plain.dtype.newbyteorder("=")))
    # Where no step is taken along a row, its stride is nothing's.
    strided = x.size > 0 and x.shape[-1] > 1 and (x.strides[-1] != x.dtype.itemsize and x.dtype.isnative) \
        if isinstance(x, np.ndarray) else x.numel() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1  # fmt: skip
    for function in (fa2.softmax, fa2.transpose_2d):
        result, expected = _outcome(function, x), _outcome(function, plain)
        if strided or isinstance(expected, type):
            assert result is ValueError if strided else result is expected
        else:
            np.testing.assert_array_equal(_numpy(result), expected)
