# SPDX-License-Identifier: Apache-2.0
"""rms_norm, softmax, swiglu, rotary embeddings, embedding and causal_attention of fa2_cpu.torch."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import fa2_cpu as fa2  # noqa: E402
import fa2_cpu.torch as ft  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Relative L2 of results in a dtype: its own rounding, for f64 that of some hundred sums.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float64: 1e-14}


def _error(result, expected):
    result, expected = result.detach().double(), expected.detach().double()
    return ((result - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def _compare(function, reference, *inputs, bound=None, scale=1.0):
    """Values and gradients of function against reference on the inputs in f64."""
    out = function(*inputs)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    expected = reference(*wide)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype)
    asked = [i for i, x in enumerate(inputs) if x.requires_grad]
    grads = torch.autograd.grad(out, [inputs[i] for i in asked], grad)
    expected_grads = torch.autograd.grad(expected, [wide[i] for i in asked], grad.double())
    for result, want, like in zip((out, *grads), (expected, *expected_grads), (inputs[0], *(inputs[i] for i in asked))):
        assert result.shape == want.shape and result.dtype == like.dtype
        assert _error(result, want) <= scale * (bound or BOUNDS[result.dtype])


def _randn(*shape, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def _views(x):
    """x, dense and with other strides: permuted, every second row, elements not side by side."""
    yield x
    yield x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(x.requires_grad)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x.detach()
    yield wide[..., ::2].requires_grad_(x.requires_grad)
    yield torch.flip(x.detach(), (0,)).contiguous().flip(0).requires_grad_(x.requires_grad)


def _rms_norm(x, weight, eps=1e-6, offset=0.0):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype):
    for x in _views(_randn(5, 3, 37, dtype=dtype)):
        for weight_dtype in {dtype, torch.float32, torch.float64}:
            weight = _randn(37, dtype=weight_dtype, seed=2)
            for offset in (0.0, 1.0):
                _compare(
                    lambda x, w: ft.rms_norm(x, 37, w, 1e-6, offset=offset),
                    lambda x, w: _rms_norm(x, w, offset=offset), x, weight,
                    bound=None if dtype == weight_dtype else max(1e-6, BOUNDS[dtype]),
                )  # fmt: skip
    x = _randn(2, 3, 4, 5, 6, 8, dtype=dtype)
    _compare(lambda x: ft.rms_norm(x, (6, 8)), lambda x: F.rms_norm(x, (6, 8), eps=torch.finfo(dtype).eps), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax(dtype):
    for x in _views(_randn(5, 3, 37, dtype=dtype)):
        for dim in (-1, 0, 1):
            _compare(lambda x: ft.softmax(x, dim), lambda x: torch.softmax(x, dim), x, scale=4)
    assert ft.softmax(_randn(3, dtype=dtype), dtype=torch.float64).dtype == torch.float64
    assert ft.softmax(torch.tensor(3.0, dtype=dtype)) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype):
    for gate, up in zip(_views(_randn(5, 3, 37, dtype=dtype)), _views(_randn(5, 3, 37, dtype=dtype, seed=3))):
        _compare(ft.swiglu, lambda gate, up: F.silu(gate) * up, gate, up)
    gate, up = _randn(8, dtype=dtype), _randn(8, dtype=dtype, grad=False)
    _compare(ft.swiglu, lambda gate, up: F.silu(gate) * up, gate, up)


def _rotate(x, cos, sin, interleaved):
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    parts = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(dtype, interleaved):
    for angles in ((7, 9), (2, 7, 9)):
        cos, sin = (_randn(*angles, dtype=dtype, grad=False, seed=s) for s in (1, 2))
        wide = [x.double() if x.dim() == 2 else x.double()[:, None] for x in (cos, sin)]
        for x in _views(_randn(2, 3, 7, 21, dtype=dtype)):
            _compare(
                lambda x: ft.apply_rotary_emb(x, cos, sin, interleaved=interleaved),
                lambda x: _rotate(x, *wide, interleaved), x,
            )  # fmt: skip
            bshd = ft.apply_rotary_emb(x.transpose(1, 2), cos, sin, interleaved=interleaved, layout="bshd")
            assert torch.equal(bshd.transpose(1, 2), ft.apply_rotary_emb(x, cos, sin, interleaved=interleaved))


def test_rotary_pos_emb_is_that_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = _randn(2, 4, 7, 16), _randn(2, 2, 7, 16)
    angles = torch.rand(2, 7, 8, dtype=torch.float64).repeat(1, 1, 2)
    for dim in (1, 2):
        args = (q, k) if dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))
        expected = llama.apply_rotary_pos_emb(*args, angles.cos(), angles.sin(), unsqueeze_dim=dim)
        results = ft.apply_rotary_pos_emb(*args, angles.cos(), angles.sin(), unsqueeze_dim=dim)
        half = ft.apply_rotary_pos_emb(*args, angles.cos()[..., :8], angles.sin()[..., :8], unsqueeze_dim=dim)
        for result, same, want in zip(results, half, expected):
            torch.testing.assert_close(result, want)
            assert torch.equal(result, same)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype):
    ids = torch.randint(0, 11, (4, 9))
    weight = _randn(11, 33, dtype=dtype)
    for padding_idx in (None, 3, -2):
        _compare(
            lambda w: ft.embedding(ids.int(), w, padding_idx), lambda w: F.embedding(ids, w, padding_idx), weight
        )
    with pytest.raises(ValueError, match="padding_idx is 11"):
        ft.embedding(ids, weight, 11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_attention(dtype):
    q, k, v = _randn(2, 19, 32, dtype=dtype), _randn(2, 19, 16, dtype=dtype), _randn(2, 19, 16, dtype=dtype, seed=1)

    def reference(q, k, v):
        q, k, v = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    _compare(lambda *x: ft.causal_attention(*x, 4, 2), reference, q, k, v, scale=4 if dtype != torch.float32 else 16)


CALLS = {
    "rms_norm": (lambda x, w: ft.rms_norm(x, 6, w, 1e-5), lambda: (_randn(3, 6), _randn(6))),
    "softmax": (ft.softmax, lambda: (_randn(3, 5),)),
    "swiglu": (ft.swiglu, lambda: (_randn(3, 5), _randn(3, 5, seed=1))),
    "rotary": (
        lambda x: ft.apply_rotary_emb(x, _randn(3, 2, grad=False), _randn(3, 2, grad=False, seed=1)),
        lambda: (_randn(1, 2, 3, 6),),
    ),
    "rotary_interleaved": (
        lambda x: ft.apply_rotary_emb(x, _randn(3, 2, grad=False), _randn(3, 2, grad=False, seed=1), interleaved=True),
        lambda: (_randn(1, 2, 3, 6),),
    ),
    "embedding": (lambda w: ft.embedding(torch.tensor([[0, 2], [2, 1]]), w), lambda: (_randn(4, 3),)),
    "causal_attention": (lambda q, k: ft.causal_attention(q, k, k, 2, 1), lambda: (_randn(1, 4, 6), _randn(1, 4, 3))),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(name):
    function, inputs = CALLS[name]
    assert torch.autograd.gradcheck(function, inputs())


def test_opcheck():
    x, weight = _randn(3, 6), _randn(6)
    angles = _randn(3, 2, grad=False)
    checks = {
        "rms_norm": (x, weight, 1e-5),
        "softmax": (x,),
        "swiglu": (x, _randn(3, 6, seed=1)),
        "rotary_embedding": (_randn(1, 2, 3, 6), angles[None, None], angles[None, None], True, False),
        "embedding": (torch.tensor([1, 2]), _randn(4, 3), 1),
    }
    for name, args in checks.items():
        torch.library.opcheck(getattr(torch.ops.fa2, name).default, args)


def test_compile_without_breaks():
    weight = _randn(6, dtype=torch.float32)

    def step(x, up):
        x = ft.swiglu(ft.rms_norm(x, 6, weight, offset=1.0), up)
        x = ft.apply_rotary_emb(x, x.detach()[0, 0, :, :2], x.detach()[0, 0, :, 2:4])
        return ft.softmax(x).square().sum()

    x, up = _randn(1, 2, 3, 6, dtype=torch.float32), _randn(1, 2, 3, 6, dtype=torch.float32, seed=1)
    expected = torch.autograd.grad(step(x, up), (x, up, weight))
    results = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x, up), (x, up, weight))
    for result, want in zip(results, expected):
        torch.testing.assert_close(result, want)


def test_autocast():
    q, k = _randn(1, 4, 6, dtype=torch.float32), _randn(1, 4, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ft.causal_attention(q, k, k, 2, 1).dtype == torch.bfloat16
        # What is not a product keeps its inputs' dtype, in which fa2 loses nothing.
        assert ft.rms_norm(q, 6).dtype == torch.float32


def test_wrong_calls_are_sentences():
    x = _randn(1, 2, 3, 6)
    angles = _randn(3, 3)
    with pytest.raises(TypeError, match="cos requires grad"):
        ft.apply_rotary_emb(x, angles, angles)
    with pytest.raises(ValueError, match=r"cos has shape \(3, 4\)"):
        ft.apply_rotary_emb(x, torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(TypeError, match="input is torch.int64; it must be float32"):
        ft.softmax(torch.arange(3))
    with pytest.raises(TypeError, match="input is on device meta"):
        ft.rms_norm(torch.zeros(3, device="meta"), 3)
    with pytest.raises(ValueError, match="its last sizes must be normalized_shape"):
        ft.rms_norm(x, 5)
    with pytest.raises(ValueError, match="up has shape"):
        ft.swiglu(x, x[..., :3])
    with pytest.raises(TypeError, match="up is torch.float32"):
        ft.swiglu(x, x.float())
    with pytest.raises(ValueError, match="with 4 heads"):
        ft.causal_attention(x[0], x[0], x[0], 4)
    table, cos = _randn(5, 4), angles.detach().repeat(1, 2)[None]
    for call, error, sentence in (
        (lambda: ft.rms_norm(x, 3.5), TypeError, "normalized_shape is 3.5; it must be an int"),
        (lambda: ft.rms_norm(x, ()), ValueError, "its last sizes must be normalized_shape"),
        (lambda: ft.rms_norm(x, 6, eps="a"), TypeError, "eps is 'a'; it must be a number"),
        (lambda: ft.rms_norm(x, 6, offset=None), TypeError, "offset is None; it must be a number"),
        (lambda: ft.softmax(x, 4), ValueError, r"dim is 4; it must be in \[-4, 4\)"),
        (lambda: ft.softmax(x, "a"), TypeError, "dim is 'a'; it must be an int"),
        (lambda: ft.softmax(x, dtype=torch.int32), TypeError, "dtype is torch.int32"),
        (lambda: ft.softmax([1.0], dtype=torch.float32), TypeError, "input is of type list"),
        (lambda: ft.embedding([1], table), TypeError, "input is of type list"),
        (lambda: ft.embedding(torch.ones(2), table), TypeError, "input is torch.float32; it must be int32 or int64"),
        (lambda: ft.embedding(torch.tensor([1, 5, -2]), table), ValueError, r"input has 5; ids must be in \[0, 5\)"),
        (lambda: ft.embedding(torch.tensor([1]), table, "a"), TypeError, "padding_idx is 'a'; it must be an int"),
        (lambda: ft.apply_rotary_emb(x, cos[0, :, :3], cos[0, :, :2]), ValueError, "cos and sin have last sizes 3 and 2"),
        (lambda: ft.apply_rotary_emb(x, cos[..., :3].expand(2, 3, 3), cos[..., :3]), ValueError, "with B = 1"),
        (lambda: ft.apply_rotary_emb(x, cos[0, :, :3], cos[0, :, :3], interleaved="no"), TypeError, "interleaved is 'no'"),
        (lambda: ft.apply_rotary_pos_emb(x, x, cos, cos, 0), ValueError, "unsqueeze_dim is 0; it must be 1"),
        (lambda: ft.apply_rotary_pos_emb(x, x, cos[..., :2], cos), ValueError, "cos has shape .1, 3, 2."),
        (lambda: ft.apply_rotary_pos_emb([x], x, cos, cos), TypeError, "q is of type list"),
        (lambda: ft.causal_attention(x[0], x[0], x[0], 2.0), TypeError, "num_heads is 2.0; it must be an int"),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(torch.autograd.grad(ft.softmax(x).square().sum(), x, create_graph=True)[0].sum(), x)


def test_functions_without_derivative_refuse_gradients():
    x, target = torch.randn(3, 4, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    for name, call in {
        "rms_norm": lambda x: fa2.rms_norm(x, torch.ones(4)),
        "softmax": fa2.softmax,
        "cross_entropy": lambda x: fa2.cross_entropy(x, target),
    }.items():
        with pytest.raises(TypeError, match=f"requires grad, and fa2_cpu.{name} is not differentiable"):
            call(x)
        call(x.detach())
        with torch.no_grad():
            call(x)


def test_core_functions_take_every_dtype(rng):
    import numpy as np

    for dtype in (np.float16, np.float64):
        x = rng.standard_normal((4, 9)).astype(dtype)
        y = fa2.softmax(x)
        assert y.dtype == dtype
        expected = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True)
        np.testing.assert_allclose(y, expected, rtol=1e-3 if dtype == np.float16 else 1e-14)
