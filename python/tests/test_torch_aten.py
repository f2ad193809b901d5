# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own entry points on fa2: activation, replacement, varlen_attn, the two operator pairs, restoring."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.nn import attention as torch_attention  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import fa2_cpu as fa2  # noqa: E402
import fa2_cpu.torch  # noqa: E402
from fa2_cpu.torch import _aten_efficient  # noqa: E402
from conftest import relative_l2  # noqa: E402

# The oracle, also of tensors that require grad.
oracle_forward = torch.no_grad()(fa2.reference.attention_forward)
oracle_backward = torch.no_grad()(fa2.reference.attention_backward)
HAS_REGISTRY = hasattr(torch_attention, "activate_flash_attention_impl")


class _Operators(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def _runs_on_fa2(function) -> bool:
    with _Operators() as operators:
        function()
    return any(name.startswith("fa2.") for name in operators.names)


@pytest.fixture
def replaced():
    with fa2_cpu.torch.replace_sdpa():
        yield


def _qkv(*shape, n=3, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(n)]


VARIANTS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "dropout": dict(dropout_p=0.3),
    "bool mask": dict(attn_mask=torch.ones(19, 19).tril().bool()),
    "float mask": dict(attn_mask=torch.randn(2, 1, 19, 19, requires_grad=True)),
    "scale": dict(scale=0.2),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_stays_fused(replaced, variant):
    q, k, v = _qkv(2, 4, 19, 8)
    assert _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, k, v, **variant))
    assert _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, k, v, **variant).sum().backward())
    with torch.no_grad():
        assert _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, k, v, **variant))
    kv = k[:, :2], v[:, :2]
    assert _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, *kv, enable_gqa=True, **variant))


def test_inference_mode(replaced):
    q, k, v = _qkv(2, 4, 19, 8)
    expected = fa2_cpu.torch.scaled_dot_product_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)


def test_autocast(replaced):
    q, k, v = _qkv(2, 4, 19, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_math_backend_and_unknown_inputs_stay_with_pytorch(replaced):
    q, k, v = _qkv(2, 4, 19, 8)
    with sdpa_kernel(SDPBackend.MATH):
        assert not _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, k, v))
    meta = [x.detach().to("meta") for x in (q, k, v)]
    assert F.scaled_dot_product_attention(*meta).device.type == "meta"
    nested = [torch.nested.nested_tensor([x[0].detach(), x[1, :, :7].detach()]) for x in (q, k, v)]
    assert not _runs_on_fa2(lambda: F.scaled_dot_product_attention(*nested))
    # PyTorch 2.6 takes both, later ones refuse them with a RuntimeError.
    with contextlib.suppress(RuntimeError):
        assert not _runs_on_fa2(lambda: F.scaled_dot_product_attention(q, k, v, torch.zeros(19, 19), is_causal=True))


def test_vmap_and_forward_derivatives_stay_with_pytorch(replaced):
    q, k, v = (x.detach() for x in _qkv(2, 4, 19, 8))
    out = torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out, tangent = torch.func.jvp(F.scaled_dot_product_attention, (q, k, v), (q, k, v))
    assert out.isfinite().all() and tangent.isfinite().all()


def test_multihead_attention(replaced):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 19, 16, requires_grad=True)
    call = lambda: module(x, x, x, need_weights=False)[0]  # noqa: E731
    assert _runs_on_fa2(call)
    out = call()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
    module.eval()
    with torch.no_grad():
        assert _runs_on_fa2(call)
    torch.testing.assert_close(out, module(x, x, x, need_weights=True)[0])
    padding = torch.zeros(2, 19, dtype=torch.bool)
    padding[1, 12:] = True
    masked = module(x, x, x, need_weights=False, key_padding_mask=padding)[0]
    torch.testing.assert_close(masked, module(x, x, x, need_weights=True, key_padding_mask=padding)[0])


def test_compile(replaced):
    q, k, v = _qkv(2, 4, 19, 8)

    def step(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    compiled = torch.compile(step, fullgraph=True)
    expected = torch.autograd.grad(step(q, k, v), (q, k, v))
    for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected):
        torch.testing.assert_close(a, b)


def test_replacements_nest_and_end():
    q, k, v = _qkv(2, 4, 19, 8)
    call = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    before = call()
    assert not _runs_on_fa2(call)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    permanent = fa2_cpu.torch.replace_sdpa()
    assert _runs_on_fa2(call)
    with fa2_cpu.torch.replace_sdpa():
        assert _runs_on_fa2(call)
    assert _runs_on_fa2(call)
    permanent.remove()
    permanent.remove()
    assert not _runs_on_fa2(call) and torch.equal(call(), before)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(q, k, v, None, None, 4, 4, 0.0, False, False)


@pytest.mark.skipif(not HAS_REGISTRY, reason="this PyTorch has no registry of flash attention implementations")
def test_activation():
    q, k, v = _qkv(2, 4, 19, 8)
    call = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    assert "fa2" in torch_attention.list_flash_attention_impls()
    assert not _runs_on_fa2(call)
    torch_attention.activate_flash_attention_impl("fa2")
    try:
        assert torch_attention.current_flash_attention_impl() == "fa2"
        assert _runs_on_fa2(call)
        torch_attention.activate_flash_attention_impl("fa2")
        assert _runs_on_fa2(call)
    finally:
        torch_attention.restore_flash_attention_impl()
    assert not _runs_on_fa2(call)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (3, 2)], ids=str)
def test_varlen_attn(replaced, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    torch.manual_seed(0)
    starts_q, starts_k = torch.tensor([0, 7, 7, 30]).int(), torch.tensor([0, 11, 15, 40]).int()
    q = torch.randn(30, 4, 8, requires_grad=True)
    k, v = (torch.randn(40, 2, 8, requires_grad=True) for _ in range(2))
    out = varlen.varlen_attn(q, k, v, starts_q, starts_k, 23, 25, window_size=window, enable_gqa=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    options = dict(layout="thd", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, window=window)
    expected, lse = oracle_forward(q, k, v, **options)
    assert relative_l2(out.detach(), expected) <= 3e-6
    right = oracle_backward(dout, q, k, v, expected, lse, **options)
    for a, b in zip(grads, right[:3]):
        assert relative_l2(a, b) <= 3e-6


def test_varlen_attn_inference(replaced):
    """Slots longer than what is used, and pages: the same as the used keys alone."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    import inspect

    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this PyTorch's varlen_attn has no block_table")
    torch.manual_seed(0)
    q = torch.randn(5, 4, 8)
    pages_k, pages_v = torch.randn(6, 4, 4, 8), torch.randn(6, 4, 4, 8)
    table = torch.tensor([[4, 1], [0, 5]]).int()
    used = torch.tensor([7, 3]).int()
    starts = torch.tensor([0, 3, 5]).int()
    out = varlen.varlen_attn(
        q, pages_k, pages_v, starts, None, 3, 8, seqused_k=used, block_table=table, window_size=(-1, 0)
    )  # fmt: skip
    for i, (a, b) in enumerate(((0, 3), (3, 5))):
        k, v = (x[table[i].long()].flatten(0, 1)[: used[i]] for x in (pages_k, pages_v))
        expected = fa2.attention_forward(*(x[None] for x in (q[a:b], k, v)), layout="bshd", causal="bottom_right")[0][0]
        torch.testing.assert_close(out[a:b], expected)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slopes", [None, torch.rand(4)], ids=["", "alibi"])
def test_flash_operators(replaced, dropout_p, causal, slopes):
    q, k, v = _qkv(2, 19, 4, 8)
    out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, 19, 19, dropout_p, causal, False, alibi_slopes=slopes, window_size_left=9
    )  # fmt: skip
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    seed, offset = rng_state.view(torch.int64).tolist()
    options = dict(layout="bshd", causal="bottom_right" if causal else None, window=(9, -1), dropout_p=dropout_p,
                   philox_seed=seed, philox_offset=offset, alibi_slopes=slopes)  # fmt: skip
    expected, expected_lse = oracle_forward(q, k, v, **options)
    assert relative_l2(out.detach(), expected) <= 3e-6 and relative_l2(lse.detach(), expected_lse) <= 3e-6
    right = oracle_backward(dout, q, k, v, expected, expected_lse, **options)
    for a, b in zip(grads, right[:3]):
        assert relative_l2(a, b) <= 3e-6


@pytest.mark.parametrize("mask_type", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("biased", [False, True])
def test_efficient_operators(replaced, mask_type, window, dropout_p, biased):
    torch.manual_seed(0)
    q = torch.randn(2, 19, 4, 8, requires_grad=True)
    k, v = torch.randn(2, 23, 4, 8, requires_grad=True), torch.randn(2, 23, 4, 6, requires_grad=True)
    bias = torch.randn(2, 4, 19, 23, requires_grad=True) if biased else None
    call = lambda: torch.ops.aten._efficient_attention_forward(  # noqa: E731
        q, k, v, bias, None, None, None, None, dropout_p, mask_type, True, scale=0.3, window_size=window
    )  # fmt: skip
    if window is not None and mask_type == 0:
        with pytest.raises(ValueError, match="window_size"):
            call()
        return
    differentiable = window is None or _aten_efficient.derivative_has_window()
    if not differentiable:
        with pytest.raises(NotImplementedError, match="window_size"):
            call()
    with torch.set_grad_enabled(differentiable):
        out, lse, seed, offset, max_q, max_k = call()
    assert lse.shape == (2, 4, 32) and (max_q, max_k) == (19, 23)
    dout = torch.randn_like(out)
    leaves = (q, k, v, bias) if biased else (q, k, v)
    if differentiable:
        grads = torch.autograd.grad(out, leaves, dout)
    else:
        with torch.no_grad():
            grads = torch.ops.aten._efficient_attention_backward(
                dout, q, k, v, bias, out, None, None, 19, 23, lse, dropout_p, seed, offset, mask_type, biased,
                scale=0.3, window_size=window,
            )  # fmt: skip
    options = dict(layout="bshd", causal=(None, "top_left", "bottom_right")[mask_type], scale=0.3,
                   window=(-1 if window is None else window - 1, -1), dropout_p=dropout_p,
                   philox_seed=int(seed), philox_offset=int(offset), bias=bias)  # fmt: skip
    expected, expected_lse = oracle_forward(q, k, v, **options)
    assert relative_l2(out.detach(), expected) <= 3e-6
    finite = torch.isfinite(expected_lse)
    assert relative_l2(lse[:, :, :19].detach()[finite], expected_lse[finite]) <= 3e-6
    right = oracle_backward(
        dout, q, k, v, expected, expected_lse, want_dbias=biased, **options
    )  # fmt: skip
    for a, b in zip(grads, right[: len(leaves)]):
        assert relative_l2(a, b) <= 3e-6


def test_efficient_operators_packed(replaced):
    torch.manual_seed(0)
    starts_q, starts_k = torch.tensor([0, 7, 19]).int(), torch.tensor([0, 11, 23]).int()
    q = torch.randn(1, 19, 4, 8, requires_grad=True)
    k, v = (torch.randn(1, 23, 4, 8, requires_grad=True) for _ in range(2))
    out, lse, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, starts_q, starts_k, 12, 12, 0.25, 2, True
    )  # fmt: skip
    assert lse.shape == (2, 4, 32)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    options = dict(layout="thd", causal="bottom_right", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
                   dropout_p=0.25, philox_seed=int(seed), philox_offset=int(offset))  # fmt: skip
    expected, expected_lse = oracle_forward(q[0], k[0], v[0], **options)
    assert relative_l2(out[0].detach(), expected) <= 3e-6
    right = oracle_backward(dout[0], q[0], k[0], v[0], expected, expected_lse, **options)
    for a, b in zip(grads, right[:3]):
        assert relative_l2(a[0], b) <= 3e-6
