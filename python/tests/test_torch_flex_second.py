# SPDX-License-Identifier: Apache-2.0
"""Second derivatives of flex_attention under score_mods that the kernels do not have whole."""

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.flex_attention")

from torch.autograd import grad, gradcheck, gradgradcheck  # noqa: E402

import fa2_cpu.torch as fa2  # noqa: E402
from conftest import relative_l2  # noqa: E402
from fa2_cpu.torch import _score_blocks  # noqa: E402
from flex_examples import score_mods  # noqa: E402

HEADS, ROWS, KEYS = 4, 9, 11


def _inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, ROWS, 3), (2, 2, KEYS, 3), (2, 2, KEYS, 2))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def _sees_some(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx % 4 != 2) & (kv_idx > 1)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", ["relative", "sum", "square", "learned softcap"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_gradgradcheck(name, masked, monkeypatch):
    monkeypatch.setattr(_score_blocks, "_ELEMENTS", 256)  # several blocks
    monkeypatch.setattr(_score_blocks, "_ROWS", 4)
    torch.manual_seed(0)
    score_mod, captured, _ = score_mods(HEADS, ROWS, KEYS)[name]
    mask = fa2.create_block_mask(_sees_some, None, HEADS, ROWS, KEYS, BLOCK_SIZE=16) if masked else None

    def function(q, k, v, *_):
        out, lse = fa2.flex_attention(q, k, v, score_mod, mask, 0.7, True, True)
        return out, lse.nan_to_num(neginf=0.0)

    leaves = (*_inputs(), *captured)
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["relative", "square"])
def test_bf16(name):
    torch.manual_seed(0)
    score_mod, captured, _ = score_mods(HEADS, ROWS, KEYS)[name]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x = [t.detach().to(dtype).requires_grad_() for t in _inputs(torch.bfloat16)]
        out = fa2.flex_attention(*x, score_mod, enable_gqa=True)
        first = grad(out.double().square().sum(), (*x, *captured), create_graph=True)
        results.append(grad(sum(g.double().square().sum() for g in first), (*x, *captured)))
    for got, expected in zip(*results):
        assert relative_l2(got.double(), expected) <= 1e-2


@pytest.mark.parametrize("name", ["relative", "square"])
def test_third_derivatives_are_refused(name):
    """Also where the gradient has another way to q, which alone would be a wrong answer."""
    q, k, v = _inputs()
    out = fa2.flex_attention(q, k, v, score_mods(HEADS, ROWS, KEYS)[name][0], enable_gqa=True)
    (first,) = grad(out.square().sum(), q, create_graph=True)
    (second,) = grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivative of flex_attention"):
        grad(second.sum() + q.square().sum(), q)
