# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="fa2" in Hugging Face transformers: training and generation against "eager"."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fa2_cpu.hf  # noqa: E402
from fa2_cpu import _hf_attention  # noqa: E402

fa2_cpu.hf.register()

_SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def _config(name):
    if name == "llama":
        return transformers.LlamaConfig(**_SMALL)
    if name == "mistral":
        return transformers.MistralConfig(**_SMALL, sliding_window=9)
    if name == "gemma2":  # softcap, and sliding windows in every other layer
        return transformers.Gemma2Config(
            **_SMALL, head_dim=16, sliding_window=9, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
        )
    return transformers.GptOssConfig(  # sinks
        **_SMALL, head_dim=16, sliding_window=9, num_local_experts=2, num_experts_per_tok=1
    )


NAMES = ("llama", "mistral", "gemma2", "gpt_oss")


def _model(name, implementation, dtype=torch.float32):
    torch.manual_seed(0)
    config = _config(name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.to(dtype)


def _batch(step, padding=None):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 97, (2, 33), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :12] = 0
    elif padding == "right":
        mask[0, 21:] = 0
    return ids, mask


def _losses(model, padding, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for step in range(steps):
        ids, mask = _batch(step, padding)
        # The first token after padding is predicted at a padded position, whose output means nothing.
        follows = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1)
        labels = ids.masked_fill((mask & follows) == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_training_equals_eager(name, padding):
    """20 steps; f32 rounding, amplified by the optimizer, is all that may differ."""
    assert _losses(_model(name, "fa2"), padding) == pytest.approx(_losses(_model(name, "eager"), padding), rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_logits_and_gradients_equal_eager(name, padding):
    results = []
    for implementation in ("eager", "fa2"):
        model = _model(name, implementation)
        ids, mask = _batch(0, padding)
        logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
        results.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (logits, grads), (fa2_logits, fa2_grads) = results
    torch.testing.assert_close(fa2_logits, logits, rtol=1e-4, atol=1e-4)
    assert grads.keys() == fa2_grads.keys()
    for key, grad in grads.items():
        error = (fa2_grads[key] - grad).norm() / grad.norm().clamp(min=1e-6)
        assert error < 1e-3, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_eager(name, cache):
    """Greedy decoding past the sliding window, from prompts of different lengths."""
    ids, mask = _batch(3, "left")
    tokens = []
    for implementation in ("eager", "fa2"):
        model = _model(name, implementation).eval()
        options = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
        tokens.append(
            model.generate(
                ids[:, 13:], attention_mask=mask[:, 13:], max_new_tokens=16, do_sample=False, **options
            )  # fmt: skip
        )
    assert torch.equal(*tokens)


def test_bfloat16():
    ids, mask = _batch(0, "left")
    logits = [
        _model("llama", implementation, torch.bfloat16)(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        for implementation in ("eager", "fa2")
    ]
    assert logits[1].dtype == torch.bfloat16
    torch.testing.assert_close(logits[1].float(), logits[0].float(), rtol=0.05, atol=0.05)


def test_bidirectional_encoder():
    """Padding alone, no causality."""
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )  # fmt: skip
    ids, mask = _batch(0, "right")
    outputs = []
    for implementation in ("eager", "fa2"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
        outputs.append(model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)


def test_masks_are_not_formed():
    """Plain causal batches need no mask, padded ones one row a sequence."""
    keywords = dict(batch_size=2, q_length=33, kv_length=33, config=_config("mistral"), local_size=9)
    assert _hf_attention._mask(**keywords) is None
    _, mask = _batch(0, "left")
    assert _hf_attention._mask(attention_mask=mask.bool(), **keywords).shape == (2, 1, 1, 33)
    assert _hf_attention._mask(attention_mask=torch.ones(2, 33, dtype=torch.bool), **keywords) is None


def test_packed_documents_of_a_collator():
    """cu_seq_lens_q/k of DataCollatorWithFlattening: each document attends to itself alone."""
    q, k, v = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
    starts = torch.tensor([0, 7, 19, 30], dtype=torch.int32)
    module = torch.nn.Module()
    keywords = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=12, max_length_k=12)
    out, _ = _hf_attention._attention_forward(module, q, k, v, None, is_causal=True, **keywords)
    for a, b in zip(starts, starts[1:]):
        one, _ = _hf_attention._attention_forward(module, *(x[:, :, a:b] for x in (q, k, v)), None, is_causal=True)
        torch.testing.assert_close(out[:, a:b], one)
    with pytest.raises(ValueError, match="cu_seq_lens_k end"):
        _hf_attention._attention_forward(module, q[:, :, 1:], k, v, None, is_causal=True, **keywords)


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_told_twice(name):
    """Trainer's way: position_ids and prefix sums, and no cache, so that transformers forms a mask of the documents."""
    model = _model(name, "fa2").eval()
    ids = torch.randint(3, 97, (1, 30))
    lengths = (7, 12, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 7, 19, 30], dtype=torch.int32)
    given = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=12, max_length_k=12)
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    for keywords in (given, dict(position_ids=positions, **given)):
        torch.testing.assert_close(model(ids, use_cache=False, **keywords).logits, alone)


def test_packed_documents_told_differently():
    positions = torch.cat((torch.arange(7), torch.arange(23)))[None]
    ends = torch.tensor([0, 9, 30], dtype=torch.int32)
    with pytest.raises(ValueError, match="are given and differ"):
        _model("llama", "fa2")(
            torch.ones(1, 30, dtype=torch.long), position_ids=positions, use_cache=False, cu_seq_lens_q=ends,
            cu_seq_lens_k=ends, max_length_q=21, max_length_k=21,
        )  # fmt: skip
