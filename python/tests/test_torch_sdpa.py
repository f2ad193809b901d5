# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention against PyTorch's math path in float64, over combinations of its arguments."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import fa2_cpu.torch  # noqa: E402
from conftest import BOUNDS, relative_l2  # noqa: E402

MASKS = {
    "none": None,
    "causal": "causal",
    "bool": ((2, 1, 19, 23), torch.bool),
    "keys": ((2, 1, 1, 23), torch.bool),
    "float": ((2, 4, 19, 23), torch.float64),
    "rows": ((19, 1), torch.float64),
    "broadcast": ((1, 4, 1, 23), torch.float64),
}


def _compare(tensors, mask, dtype, **keywords):
    """fa2 in dtype against PyTorch in float64 on the same values, forward and all gradients."""
    tensors = [x.to(dtype) for x in tensors]
    float_mask = mask is not None and mask.dtype != torch.bool
    if float_mask:
        mask = mask.to(dtype)
    results = []
    for kind in (dtype, torch.float64):
        inputs = [x.to(kind).requires_grad_() for x in tensors]
        given = mask.to(kind).requires_grad_() if float_mask else mask
        if kind is dtype:
            function = fa2_cpu.torch.scaled_dot_product_attention
            out = function(*inputs, attn_mask=given, **keywords)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(*inputs, attn_mask=given, **keywords)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(dtype).to(kind)
        leaves = [*inputs, given] if float_mask else inputs
        results.append([out.detach(), *torch.autograd.grad(out, leaves, weights)])
    bound = BOUNDS[str(dtype).removeprefix("torch.")] * (2 if dtype in (torch.bfloat16, torch.float16) else 1)
    for got, expected in zip(*results):
        assert got.dtype == dtype
        if expected.abs().max() < 1e-12:  # a bias of one value a row changes nothing: its gradient is 0
            assert got.abs().max() <= bound
        else:
            assert relative_l2(got.double(), expected) <= bound


def _mask(spec):
    shape, dtype = spec
    return torch.rand(shape) > 0.3 if dtype == torch.bool else torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_combinations(dtype, mask, gqa, scale):
    torch.manual_seed(0)
    heads = 2 if gqa else 4
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((2, 4, 19, 16), (2, heads, 23, 16), (2, heads, 23, 8))]
    given = None if mask in (None, "causal") else _mask(mask)
    _compare(tensors, given, dtype, is_causal=mask == "causal", scale=scale, enable_gqa=gqa)


SHAPES = {
    "3-D": ((3, 19, 16), (3, 23, 16), (3, 23, 8), (19, 23)),
    "3-D mask": ((3, 19, 16), (3, 23, 16), (3, 23, 8), (3, 19, 23)),
    "2-D": ((19, 16), (23, 16), (23, 8), (19, 23)),
    "5-D": ((2, 3, 4, 19, 16), (2, 3, 4, 23, 16), (2, 3, 4, 23, 8), (3, 1, 19, 23)),
    "batch broadcast": ((2, 4, 19, 16), (1, 4, 23, 16), (4, 23, 8), (1, 19, 23)),
    "head broadcast": ((2, 4, 19, 16), (2, 1, 23, 16), (2, 1, 23, 8), (19, 23)),
    "value heads": ((2, 4, 19, 16), (2, 1, 23, 16), (2, 4, 23, 8), (19, 23)),
    "query heads": ((2, 1, 19, 16), (2, 4, 23, 16), (2, 4, 23, 8), (19, 23)),
    "mask adds a batch": ((1, 4, 19, 16), (1, 4, 23, 16), (1, 4, 23, 8), (3, 1, 19, 23)),
    "mask adds heads": ((2, 1, 19, 16), (2, 1, 23, 16), (2, 1, 23, 8), (4, 19, 23)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True])
def test_shapes(shapes, masked):
    torch.manual_seed(0)
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes[:3]]
    _compare(tensors, torch.randn(shapes[3], dtype=torch.float64) if masked else None, torch.float64)


def test_strides():
    """Transposed, expanded and non-contiguous inputs, and a gradient that is expanded."""
    torch.manual_seed(0)
    base = torch.randn(2, 19, 3, 4, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in base.unbind(2))
    out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous(), "heads lie as the query's do"
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v)
    gradients = [torch.autograd.grad(x.sum(), base, retain_graph=True)[0] for x in (out, expected)]
    assert relative_l2(out.detach(), expected.detach()) <= 1e-13
    assert relative_l2(*gradients) <= 1e-12
    columns = torch.randn(2, 4, 16, 19, dtype=torch.float64).transpose(2, 3)
    _compare([columns, columns, columns], None, torch.float64)


def test_rows_that_see_nothing():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(5, 5) > 0.5
    mask[2] = False
    out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out.sum().backward()
    assert not out[:, :, 2].any() and not q.grad[:, :, 2].any()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("empty", itertools.combinations(range(4), 1), ids=str)
def test_empty(empty):
    sizes = [2, 4, 19, 23]
    sizes[empty[0]] = 0
    b, h, n, m = sizes
    q, k, v = (torch.randn(b, h, rows, 8, requires_grad=True) for rows in (n, m, m))
    out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v)
    out.sum().backward()
    assert out.shape == (b, h, n, 8) and not out.any()
    assert k.grad.shape == k.shape and not k.grad.any()


def test_errors():
    q = torch.randn(2, 4, 19, 16)
    with pytest.raises(TypeError, match="one dtype"):
        fa2_cpu.torch.scaled_dot_product_attention(q, q.double(), q)
    with pytest.raises(ValueError, match="is_causal"):
        fa2_cpu.torch.scaled_dot_product_attention(q, q, q, torch.zeros(19, 19), is_causal=True)
    with pytest.raises(TypeError, match="attn_mask is torch.int64"):
        fa2_cpu.torch.scaled_dot_product_attention(q, q, q, torch.zeros(19, 19, dtype=torch.int64))
    with pytest.raises((ValueError, RuntimeError)):
        fa2_cpu.torch.scaled_dot_product_attention(q, q[:, :3], q[:, :3])
