# SPDX-License-Identifier: Apache-2.0
"""replace_flex_attention: PyTorch's functions and transformers' models on fa2; torch.compile around them."""

import warnings

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import fa2_cpu.torch as fa2  # noqa: E402
from conftest import relative_l2  # noqa: E402


def test_replaces_and_gives_back():
    q = torch.randn(1, 2, 160, 16, requires_grad=True)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    code = flex_attention.__code__
    with fa2.replace_flex_attention() as outer:
        inner = fa2.replace_flex_attention()
        inner.remove()
        inner.remove()
        mask = create_block_mask(causal, None, None, 160, 160, device="cpu")
        out = flex_attention(q, q, q, block_mask=mask)
        out.sum().backward()
        assert "remove() ends it" in repr(outer)
    expected = torch.nn.functional.scaled_dot_product_attention(*(q.detach(),) * 3, is_causal=True)
    assert relative_l2(out.detach(), expected) <= 1e-5
    assert flex_attention.__code__ is code and not hasattr(flex, "_fa2_flex_attention")
    with pytest.raises(Exception, match="CPU"):  # PyTorch's has no gradient on a CPU
        flex_attention(q, q, q)


def test_masks_are_made_where_pytorch_makes_them(monkeypatch):
    """Without a device: on the accelerator, where there is one."""
    with fa2.replace_flex_attention():
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        devices = [create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64).kv_indices.device.type]
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        devices.append(create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64).kv_indices.device.type)
    assert devices == ["cpu", "meta"]


def test_compiled_before():
    """What was compiled before, as recipes do when they are imported, runs on fa2 while it is in place."""
    compiled = torch.compile(flex_attention, backend="aot_eager")
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    with fa2.replace_flex_attention():
        (gradient,) = torch.autograd.grad(compiled(q, q, q).sum(), q)
    (expected,) = torch.autograd.grad(fa2.flex_attention(q, q, q).sum(), q)
    assert torch.equal(gradient, expected)
    with pytest.raises(Exception, match="CPU"):
        compiled(q, q, q)


def test_compiled():
    """A function that torch.compile compiled: the call breaks its graph, results and gradients are those of an eager one."""
    q, k = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(2))
    bias = torch.randn(64, requires_grad=True)

    def layer(q, k):
        out = fa2.flex_attention(q * 2, k, k, lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx])
        return out.sin()

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        out = function(q, k)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), (q, k, bias))])
    for x, y in zip(*results):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_compiled_itself(dynamic):
    """torch.compile(flex_attention), as it is usually called: nothing of fa2 is compiled, whatever the shapes."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fa2.flex_attention, backend=backend, dynamic=dynamic)
    make_mask = torch.compile(fa2.create_block_mask, backend=backend, dynamic=dynamic)
    for n in range(40, 200, 16):  # more shapes than are compiled before PyTorch gives up with a warning
        q = torch.randn(1, 2, n, 16, requires_grad=True)
        mask = make_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, n, n)
        scale = torch.rand(2, requires_grad=True)
        got = compiled(q, q, q, lambda score, b, h, q_idx, kv_idx: score * scale[h], block_mask=mask)
        expected = fa2.flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score * scale[h], block_mask=mask)
        assert torch.equal(got, expected)
        for x, y in zip(*(torch.autograd.grad(out.sum(), (q, scale)) for out in (got, expected))):
            assert torch.equal(x, y)
    assert not graphs


def test_transformers_llama_trains():
    """attn_implementation="flex_attention" gives the loss and the gradients of "sdpa", with padding too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(64, (2, 140))
    padding = torch.ones(2, 140, dtype=torch.long)
    padding[1, 100:] = 0
    labels = ids.masked_fill(padding == 0, -100)
    results = []
    for kind in ("sdpa", "flex_attention"):
        torch.manual_seed(1)
        config._attn_implementation = kind
        model = transformers.LlamaForCausalLM(config).double().train()
        with fa2.replace_flex_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(input_ids=ids, attention_mask=padding, labels=labels).loss
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert model.config._attn_implementation == "flex_attention"
    for x, y in zip(*results):
        assert relative_l2(y, x) <= 1e-10
