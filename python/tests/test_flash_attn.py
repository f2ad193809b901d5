# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.flash_attn: the functions of the flash-attn 2 package against the float64 oracle, and the alias."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import fa2_cpu as fa2  # noqa: E402
from conftest import BOUNDS, relative_l2  # noqa: E402
from fa2_cpu import bert_padding, flash_attn  # noqa: E402

# The oracle, also of tensors that require grad.
oracle_forward = torch.no_grad()(fa2.reference.attention_forward)
oracle_backward = torch.no_grad()(fa2.reference.attention_backward)


def _check(out, inputs, arrays, dtype, **options):
    """out of `arrays` and the gradients of `inputs` against the oracle; returns the oracle's lse."""
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    expected, lse = oracle_forward(*arrays, **options)
    bound = BOUNDS[str(dtype).removeprefix("torch.")]
    assert out.dtype == dtype and relative_l2(out.detach().double(), expected) <= bound
    rounded = expected.to(dtype)
    right = oracle_backward(dout, *arrays, rounded, lse, **options)[:3]
    return grads, right, bound, lse


OPTIONS = {
    "plain": ({}, {}),
    "causal": (dict(causal=True), dict(causal="bottom_right")),
    "window": (dict(window_size=(5, 2)), dict(window=(5, 2))),
    "causal window": (dict(causal=True, window_size=(5, -1)), dict(causal="bottom_right", window=(5, -1))),
    "softcap": (dict(softcap=2.0), dict(softcap=2.0)),
    "scale": (dict(softmax_scale=0.2, deterministic=True), dict(scale=0.2)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_flash_attn_func(options, dtype):
    given, meaning = options
    torch.manual_seed(0)
    q = torch.randn(2, 19, 4, 16).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 23, 2, 16).to(dtype).requires_grad_() for _ in range(2))
    slopes = torch.rand(4)
    out, lse, probabilities = flash_attn.flash_attn_func(
        q, k, v, alibi_slopes=slopes, return_attn_probs=True, **given
    )  # fmt: skip
    assert lse.shape == (2, 4, 19) and lse.dtype == torch.float32 and probabilities.numel() == 0
    grads, right, bound, right_lse = _check(
        out, (q, k, v), (q, k, v), dtype, layout="bshd", alibi_slopes=slopes, **meaning
    )  # fmt: skip
    assert relative_l2(lse, right_lse) <= bound
    for a, b in zip(grads, right):
        assert relative_l2(a.double(), b) <= bound


def test_packed():
    torch.manual_seed(0)
    qkv = torch.randn(2, 19, 3, 4, 16, requires_grad=True)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    arrays = [x.contiguous() for x in qkv.unbind(2)]
    (grad,), right, bound, _ = _check(out, (qkv,), arrays, torch.float32, layout="bshd", causal="bottom_right")
    assert relative_l2(grad, torch.stack(right, 2)) <= bound
    q = torch.randn(2, 7, 4, 16)
    kv = qkv[:, :, 1:].detach()
    expected = flash_attn.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], window_size=(3, 3))
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, window_size=(3, 3)), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal):
    torch.manual_seed(0)
    starts_q, starts_k = torch.tensor([0, 7, 7, 30]).int(), torch.tensor([0, 11, 15, 40]).int()
    q = torch.randn(30, 4, 16, requires_grad=True)
    kv = torch.randn(40, 2, 2, 16, requires_grad=True)
    out, lse, _ = flash_attn.flash_attn_varlen_kvpacked_func(
        q, kv, starts_q, starts_k, 23, 25, causal=causal, return_attn_probs=True
    )  # fmt: skip
    assert lse.shape == (4, 30)
    arrays = (q, *(x.contiguous() for x in kv.unbind(1)))
    grads, right, bound, _ = _check(
        out, (q, kv), arrays, torch.float32, layout="thd", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
        causal="bottom_right" if causal else None,
    )  # fmt: skip
    for a, b in zip(grads, (right[0], torch.stack(right[1:], 1))):
        assert relative_l2(a, b) <= bound
    qkv = torch.randn(30, 3, 2, 16)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts_q, 23, causal=causal)
    one = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), starts_q, starts_q, 23, 23, causal=causal)
    assert torch.equal(packed, one)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_probabilities(causal):
    """S_dmask explains the output: P / (1 − p) where positive, times v."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 19, 4, 16) for _ in range(3))
    out, _, signed = flash_attn.flash_attn_func(
        q, k, v, dropout_p=0.3, causal=causal, window_size=(9, -1), softcap=4.0, alibi_slopes=torch.rand(4),
        return_attn_probs=True,
    )  # fmt: skip
    assert torch.allclose(signed.abs().sum(-1), torch.ones(2, 4, 19), atol=1e-5)
    kept = signed.clamp(min=0) / 0.7
    assert relative_l2(out, torch.einsum("bhqk,bkhd->bqhd", kept, v)) <= 3e-6
    starts = torch.tensor([0, 5, 19]).int()
    out, _, signed = flash_attn.flash_attn_varlen_func(
        q[0], k[0], v[0], starts, starts, 14, 14, dropout_p=0.3, causal=causal, return_attn_probs=True
    )  # fmt: skip
    for i, (a, b) in enumerate(((0, 5), (5, 19))):
        kept = signed[i, :, : b - a, : b - a].clamp(min=0) / 0.7
        assert relative_l2(out[a:b], torch.einsum("hqk,khd->qhd", kept, v[0, a:b])) <= 3e-6


@pytest.mark.parametrize("paged", [False, True])
def test_kvcache(paged):
    """Decoding step by step with a cache is the causal attention of the whole sequence."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 12, 4, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    table = torch.tensor([[3, 0, 5, 6], [1, 2, 7, 4]]).int() if paged else None
    k_cache, v_cache = (torch.zeros(8, 4, 2, 16) if paged else torch.zeros(2, 16, 2, 16) for _ in range(2))
    for start, end in ((0, 7), (7, 8), (8, 12)):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q[:, start:end], k_cache, v_cache, k[:, start:end], v[:, start:end],
            cache_seqlens=torch.tensor([start, start]).int(), block_table=table, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[:, start:end])
        assert lse.shape == (2, 4, end - start)
    if not paged:
        torch.testing.assert_close(k_cache[:, :12], k)
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=9, block_table=table)


@pytest.mark.parametrize("interleaved", [False, True])
def test_kvcache_rotary(interleaved):
    """A rotation of q and k at the same position leaves their product: position differences alone count."""
    torch.manual_seed(0)
    angles = torch.outer(torch.arange(32.0), 0.5 ** torch.arange(8.0))
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in range(3))
    caches = torch.zeros(2, 1, 16, 2, 16)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=0,
        rotary_interleaved=interleaved, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse[0, :, 0], (q * k).sum(-1)[0, 0] / 4)


def test_padding():
    torch.manual_seed(0)
    x = torch.randn(3, 7, 4, requires_grad=True)
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, :5] = mask[2, 2:] = True
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, mask)
    assert rows.shape == (10, 4) and starts.tolist() == [0, 5, 5, 10] and longest == 5 and used.tolist() == [5, 0, 5]
    padded = bert_padding.pad_input(rows, indices, 3, 7)
    assert torch.equal(padded, x * mask[..., None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand(3, 7, 4).float())
    several = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [0] * 7, [1, 4, 2, 0, 0, 0, 0]])
    for call in (
        lambda: bert_padding.unpad_input(x, torch.ones(3, 6)),
        lambda: bert_padding.unpad_input(x, torch.ones(3, 7), torch.ones(2, 7)),
        lambda: bert_padding.unpad_input_for_concatenated_sequences(x, torch.ones(3, 6)),
    ):
        with pytest.raises(ValueError, match=r"must be \(3, 7\)"):
            call()
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, several)
    assert indices.tolist() == [*range(5), *range(14, 21)] and starts.tolist() == [0, 2, 5, 6, 10, 12] and longest == 4
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_wrong_calls_are_sentences():
    q = torch.randn(1, 5, 2, 8)
    for call, error, sentence in (
        (lambda: flash_attn.flash_attn_func([1.0], q, q), TypeError, "q is of type list"),
        (lambda: flash_attn.flash_attn_func(q, q, q, dropout_p="a"), TypeError, "dropout_p is 'a'; it must be a number"),
        (lambda: flash_attn.flash_attn_func(q, q, q, window_size=3), TypeError, r"window is 3; it must be a pair"),
        (lambda: flash_attn.flash_attn_qkvpacked_func(q), ValueError, r"qkv has shape .* it must be \[..., 3, heads, D\]"),
        (lambda: flash_attn.flash_attn_kvpacked_func(q, None), TypeError, "kv is of type NoneType"),
        (lambda: flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 5]), torch.tensor([0, 5]), "a", 5),
         TypeError, "max_seqlen_q is 'a'; it must be an int"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, None, q), TypeError, "k_cache is of type NoneType"),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()


def test_alias():
    """Code written for flash-attn runs unchanged after one call."""
    code = """
import fa2_cpu.flash_attn
fa2_cpu.flash_attn.install_as_flash_attn()
fa2_cpu.flash_attn.install_as_flash_attn()
import importlib.util
import torch
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
assert importlib.util.find_spec("flash_attn") is not None and flash_attn.__version__.startswith("2.")
q = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16, requires_grad=True)
flash_attn_func(q, q, q, causal=True).sum().backward()
assert q.grad.shape == q.shape
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    refused = """
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
import fa2_cpu.flash_attn
try:
    fa2_cpu.flash_attn.install_as_flash_attn()
except RuntimeError as error:
    assert "imported already" in str(error)
else:
    raise SystemExit("not refused")
"""
    subprocess.run([sys.executable, "-c", refused], check=True)


def test_cuda_tensors_are_refused():
    q = torch.empty(1, 5, 2, 8, device="meta")
    with pytest.raises(TypeError, match="must be on the CPU"):
        flash_attn.flash_attn_func(q, q, q)
