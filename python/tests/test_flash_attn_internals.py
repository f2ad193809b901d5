# SPDX-License-Identifier: Apache-2.0
"""What other packages import of flash_attn below its public functions, against the public ones and PyTorch."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import fa2_cpu.torch as fa2
from fa2_cpu import _flash_attn_cross_entropy, _flash_attn_interface as internal, _flash_attn_rms_norm, _flash_attn_rotary


def tensors(nq=9, nk=13, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 8, dtype=dtype) for n, h in ((nq, 4), (nk, 2), (nk, 2))]


# flash-attn 2.8.3's argument lists: other packages call by position.
SIGNATURES = {
    "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "return_softmax",
    "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False block_table=None "
    "leftpad_k=None seqused_k=None zero_tensors=False",
    "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state=None",
    "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic "
    "rng_state=None zero_tensors=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_argument_lists(name):
    parameters = inspect.signature(getattr(internal, name)._init_fn).parameters.values()
    listed = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(listed) == SIGNATURES[name]


@pytest.mark.parametrize("wrapped", ["", "_wrapped"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_forward_and_backward(wrapped, dropout_p):
    q, k, v = tensors()
    slopes = torch.rand(4)
    forward, backward = (getattr(internal, wrapped + name) for name in ("_flash_attn_forward", "_flash_attn_backward"))
    out, lse, mask, state = forward(q, k, v, dropout_p, 0.3, True, 5, -1, 2.0, slopes, True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = fa2.attention(
        *leaves, layout="bshd", scale=0.3, causal="bottom_right", window=(5, -1), softcap=2.0, alibi_slopes=slopes,
        dropout_p=dropout_p, philox=state,
    )  # fmt: skip
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert mask.shape == ((2, 4, 9, 13) if dropout_p else (0,))
    dout = torch.randn_like(out)
    # Views of one tensor, as packed functions have them.
    dkv = torch.full((2, 13, 2, 2, 8), torch.nan, dtype=q.dtype)
    dq, dk, dv = torch.empty_like(q), dkv[:, :, 0], dkv[:, :, 1]
    d = backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, 0.3, True, 5, -1, 2.0, slopes, False, state)
    for x, y in zip((dq, dk, dv), torch.autograd.grad(expected, leaves, dout)):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    assert d.shape == (2, 4, 128) and d.dtype == torch.float32
    torch.testing.assert_close(d[..., :9], (out * dout).sum(-1).transpose(1, 2).float())


def test_varlen():
    torch.manual_seed(1)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((10, 4), (17, 2), (17, 2)))
    cu_q, cu_k = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 9, 17], dtype=torch.int32)
    out, lse, _, state = internal._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 6, 9, 0.0, 0.3, causal=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = dict(layout="thd", scale=0.3, causal="bottom_right", cu_seqlens_q=cu_q)
    expected, expected_lse = fa2.attention(*leaves, cu_seqlens_k=cu_k, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    d = internal._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, cu_q, cu_k, 6, 9, 0.0, 0.3, True, -1, -1, 0.0, None, False, state
    )
    for x, y in zip(grads, torch.autograd.grad(expected, leaves, dout)):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    assert d.shape == (4, 10 + 256)
    torch.testing.assert_close(d[:, 4 + 128 : 10 + 128], (out * dout).sum(-1).T[:, 4:].float())
    used = internal._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 6, 9, 0.0, 0.3, True, leftpad_k=torch.tensor([1, 0]), seqused_k=torch.tensor([9, 5])
    )[0]
    rows = torch.tensor([*range(1, 9), *range(9, 14)])
    again, _ = fa2.attention(q, k[rows], v[rows], cu_seqlens_k=torch.tensor([0, 8, 13]), **options)
    assert torch.equal(used, again)


@pytest.mark.parametrize("name", ["_flash_attn_forward", "_flash_attn_backward"])
def test_operators_have_fakes(name):
    q, k, v = tensors(dtype=torch.float32)
    out, lse, *_ = internal._flash_attn_forward(q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    arguments = (q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    if name == "_flash_attn_backward":
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        arguments = (out, q, k, v, out, lse, *grads, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    torch.library.opcheck(getattr(torch.ops.flash_attn, name).default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary(interleaved, inplace):
    rotary = _flash_attn_rotary
    torch.manual_seed(2)
    angles = torch.outer(torch.arange(20.0), torch.rand(3))
    cos, sin = angles.cos().double(), angles.sin().double()
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    for offsets, rows in ((0, [range(7)] * 2), (5, [range(5, 12)] * 2), (torch.tensor([1, 9]), [range(1, 8), range(9, 16)])):
        index = torch.tensor([list(r) for r in rows])
        y = rotary.apply_rotary_emb(1 * x, cos, sin, interleaved, inplace, offsets)
        expected = rotary.apply_rotary_emb_torch(x, cos[index], sin[index], interleaved)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*(torch.autograd.grad(z.square().sum(), x)[0] for z in (y, expected)))
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    packed = rotary.apply_rotary_emb(x[0], cos, sin, interleaved, cu_seqlens=cu, max_seqlen=4)
    index = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    torch.testing.assert_close(packed, rotary.apply_rotary_emb_torch(x[0], cos[index], sin[index], interleaved))


def test_rotary_embedding():
    torch.manual_seed(3)
    module = _flash_attn_rotary.RotaryEmbedding(8)
    qkv = torch.randn(2, 5, 3, 2, 8)
    before = qkv.clone()
    angles = torch.outer(torch.arange(5.0), module.inv_freq)
    q, k, v = module(qkv).unbind(2)
    torch.testing.assert_close(v, before[:, :, 2])
    for x, y in ((q, before[:, :, 0]), (k, before[:, :, 1])):
        torch.testing.assert_close(x, _flash_attn_rotary.apply_rotary_emb_torch(y, angles.cos(), angles.sin()))
    grouped = torch.cat((before[:, :, 0], before[:, :, 1, :1], before[:, :, 2, :1]), 2)
    again = module(grouped.clone(), num_heads_q=2)
    torch.testing.assert_close(again, torch.cat((q, k[:, :, :1], v[:, :, :1]), 2))
    alone, kv = module(before[:, :, 0].clone(), before[:, :, 1:].clone())
    torch.testing.assert_close(torch.cat((alone.unsqueeze(2), kv), 2), qkv)
    scaled = _flash_attn_rotary.RotaryEmbedding(8, scale_base=512)
    q, k, _ = scaled(before.clone()).unbind(2)
    # XPos: products of turned rows depend on distances alone.
    row_q, row_k = torch.randn(8).expand(1, 5, 1, 8), torch.randn(8).expand(1, 5, 1, 8)
    turned = scaled(torch.stack((row_q, row_k, row_k), 2))
    scores = torch.einsum("bihd,bjhd->ij", turned[:, :, 0], turned[:, :, 1])
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)


def test_rms_norm():
    torch.manual_seed(4)
    x, residual = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    module = _flash_attn_rms_norm.DropoutAddRMSNorm(16, prenorm=True, eps=1e-6)
    torch.nn.init.normal_(module.weight)
    out, total = module(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + residual, (16,), module.weight, 1e-6))
    plain = _flash_attn_rms_norm.RMSNorm(16)
    torch.testing.assert_close(plain(x), torch.nn.functional.rms_norm(x, (16,), plain.weight, 1e-5))
    out, keep = _flash_attn_rms_norm.dropout_add_rms_norm(
        x, None, module.weight, None, 0.5, 1e-6, rowscale=torch.full((3, 5), 2.0), return_dropout_mask=True
    )
    kept = x * keep * 4.0
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(kept, (16,), module.weight, 1e-6))
    assert 0.3 < keep.float().mean() < 0.7


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction):
    torch.manual_seed(5)
    logits = torch.randn(6, 11, requires_grad=True)
    labels = torch.tensor([3, -100, 0, 10, 5, -100])
    loss, z = _flash_attn_cross_entropy.CrossEntropyLoss(
        reduction=reduction, label_smoothing=0.1, logit_scale=0.5, lse_square_scale=1e-2, return_z_loss=True
    )(logits, labels)
    rows = torch.nn.functional.cross_entropy(0.5 * logits, labels, reduction="none", label_smoothing=0.1)
    z_rows = (1e-2 * torch.logsumexp(0.5 * logits, -1).square()) * (labels >= 0)
    reduce = dict(mean=lambda x: x.sum() / 4, sum=torch.sum, none=lambda x: x)[reduction]
    torch.testing.assert_close(z, reduce(z_rows).detach())
    torch.testing.assert_close(loss, reduce(rows + z_rows))
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (loss, reduce(rows + z_rows))]
    torch.testing.assert_close(*grads)
    with pytest.raises(NotImplementedError, match="process_group"):
        _flash_attn_cross_entropy.CrossEntropyLoss(process_group=1)(logits, labels)


SCRIPT = """
import importlib.metadata
import torch
import fa2_cpu.flash_attn
fa2_cpu.flash_attn.install_as_flash_attn(metadata=True)
assert importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn") == "2.8.3"
assert importlib.metadata.version("torch")
from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_varlen_backward
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.ops.rms_norm import RMSNorm
from flash_attn.losses.cross_entropy import CrossEntropyLoss
import flash_attn
assert flash_attn.losses.cross_entropy.CrossEntropyLoss is CrossEntropyLoss
try:
    import transformers
except ImportError:
    raise SystemExit
sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
models = []
for name in ("flash_attention_2", "sdpa"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, vocab_size=40)
    models.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).double())
assert models[0].config._attn_implementation == "flash_attention_2"
ids = torch.randint(40, (2, 12))
mask = torch.ones(2, 12, dtype=torch.long)
mask[0, :3] = 0
for given in ({}, dict(attention_mask=mask)):
    labels = ids if not given else ids.masked_fill(mask == 0, -100)
    for model in models:
        model.zero_grad()
        model(ids, labels=labels, **given).loss.backward()
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-9)
"""


def test_install_with_metadata():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
