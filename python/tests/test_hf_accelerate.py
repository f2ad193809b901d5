# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.hf.accelerate: whole models of transformers on fa2, and back."""

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fa2_cpu.hf  # noqa: E402

COMMON = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "Llama": {},
    "Mistral": dict(sliding_window=7, head_dim=8),
    "Qwen2": {},
    "Qwen3": dict(head_dim=8),
    "Gemma": dict(head_dim=8),
    "Gemma2": dict(head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "Gemma3": dict(head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "GptOss": dict(head_dim=8, sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
    "Olmo": {},
    "Olmo2": {},
}


def _model(name, dtype=torch.float32):
    special = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = special.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, config)(**COMMON, **MODELS[name])
    torch.manual_seed(0)
    model = getattr(transformers, model)._from_config(config, attn_implementation="eager")
    return model.to(dtype)


def _batches(steps):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (2, 2, 19), generator=generator)
    for step in range(steps):
        labels = ids[step % 2].clone()
        labels[0, :5] = -100
        yield dict(input_ids=ids[step % 2], labels=labels)


def _losses(model, steps=20):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in _batches(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_losses_follow_eager(name):
    model = _model(name)
    eager = copy.deepcopy(model)
    expected = _losses(eager)
    acceleration = fa2_cpu.hf.accelerate(model)
    assert "attention" in acceleration.replaced and "rope" in acceleration.replaced
    assert ("rms_norm" in acceleration.replaced) == (name != "Olmo")
    assert ("swiglu" in acceleration.replaced) == (not name.startswith("Gem") and name != "GptOss")
    assert acceleration.replaced["loss"] == ["cross_entropy" if name == "Gemma2" else "linear_cross_entropy"]
    if name == "Olmo":
        assert "OlmoLayerNorm is no RMSNorm" in acceleration.skipped.values()
    with acceleration:
        assert _losses(model) == pytest.approx(expected, rel=2e-4)
    assert expected[-1] < expected[0]


def test_bf16_losses_follow_eager():
    """bf16 parameters and AdamW: within a rounding of bf16."""
    expected = _losses(_model("Llama", torch.bfloat16))
    model = _model("Llama", torch.bfloat16)
    with fa2_cpu.hf.accelerate(model):
        assert _losses(model) == pytest.approx(expected, rel=2**-8)


def test_remove_gives_everything_back():
    from transformers.models.llama import modeling_llama

    model = _model("Llama")
    batch = next(_batches(1))
    rotary = modeling_llama.apply_rotary_pos_emb
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    expected = model.train()(**batch)
    with fa2_cpu.hf.accelerate(model) as acceleration:
        other = fa2_cpu.hf.accelerate(_model("Llama"), loss=False)
        assert modeling_llama.apply_rotary_pos_emb is not rotary
        assert model.config._attn_implementation == "fa2"
        assert model(**batch).logits is None
        assert "5" in repr(acceleration) and acceleration.skipped == {}
        with pytest.raises(ValueError, match="accelerated already"):
            fa2_cpu.hf.accelerate(model)
    assert modeling_llama.apply_rotary_pos_emb is not rotary  # the other model's
    other.remove()
    other.remove()
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert model.config._attn_implementation == "eager"
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    again = model(**batch)
    assert torch.equal(again.loss, expected.loss) and torch.equal(again.logits, expected.logits)


def test_a_copy_computes_with_its_own_parameters():
    model = _model("Llama").train()
    batch = next(_batches(1))
    with fa2_cpu.hf.accelerate(model):
        expected = model(**batch).loss
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        loss = other(**batch).loss
        loss.backward()
    assert torch.equal(loss, expected) and torch.equal(other(**batch).loss, expected)
    assert all(p.grad is not None for p in other.parameters()) and all(p.grad is None for p in model.parameters())


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles(copied):
    """Each has layers, an acceleration and a share of the rotary embedding of its own."""
    from transformers.models.llama import modeling_llama

    gc.collect()  # what other tests left on fa2
    rotary = modeling_llama.apply_rotary_pos_emb
    model = _model("Llama").train()
    batch = next(_batches(1))
    eager, names = model(**batch), list(model.state_dict())
    on_fa2 = fa2_cpu.hf.accelerate(model)
    expected = model(**batch).loss
    other = copied(model)
    theirs = fa2_cpu.hf.acceleration(other)
    assert theirs is not on_fa2 and theirs.replaced == on_fa2.replaced and list(other.state_dict()) == names
    on_fa2.remove()
    assert modeling_llama.apply_rotary_pos_emb is not rotary  # the copy's
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    result = other(**batch)
    result.loss.backward()
    assert result.logits is None and torch.equal(result.loss, expected)
    assert all(p.grad is not None for p in other.parameters()) and all(p.grad is None for p in model.parameters())
    theirs.remove()
    assert fa2_cpu.hf.acceleration(other) is None and other.config._attn_implementation == "eager"
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert torch.equal(other(**batch).logits, eager.logits)
    third = copied(model)
    with fa2_cpu.hf.accelerate(third):
        fourth = copied(third)
    del third, fourth  # without remove()
    gc.collect()
    assert modeling_llama.apply_rotary_pos_emb is rotary


def test_pickle_in_a_process_that_knows_nothing_of_fa2(tmp_path):
    model = _model("Llama").train()
    batch = next(_batches(1))
    fa2_cpu.hf.accelerate(model)
    torch.save((model, batch, model(**batch).loss), tmp_path / "model.pt")
    model.save_pretrained(tmp_path)
    assert "fa2" not in (tmp_path / "config.json").read_text()
    code = "import sys, torch; model, batch, loss = torch.load(sys.argv[1], weights_only=False)\n"
    code += "result = model(**batch); assert result.logits is None and torch.equal(result.loss, loss)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True, timeout=300)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    fa2_cpu.hf.acceleration(model).remove()


def test_logits_outside_training():
    """Evaluation and generation have their logits; a Trainer finds the signature it looks at."""
    model = _model("Llama")
    batch = next(_batches(1))
    expected = model.eval()(**batch)
    signature = inspect.signature(model.forward)
    with fa2_cpu.hf.accelerate(model):
        assert inspect.signature(model.forward) == signature
        result = model(**batch)
        torch.testing.assert_close(result.logits, expected.logits)
        torch.testing.assert_close(result.loss, expected.loss)
        with torch.no_grad():
            assert model.train()(**batch).logits is not None
        assert model(batch["input_ids"]).logits is not None
        loss, logits, *_ = model(**batch, return_dict=False)
        assert logits is None
        torch.testing.assert_close(loss, model(**batch).loss)
        model.eval()
        ids = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    assert torch.equal(ids, model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False))


def test_num_items_and_shift_labels():
    model = _model("Llama").train()
    batch = next(_batches(1))
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    calls = [
        dict(num_items_in_batch=7), dict(num_items_in_batch=torch.tensor(9)), dict(shift_labels=shifted),
    ]  # fmt: skip
    expected = [model(**batch, **call).loss for call in calls]
    with fa2_cpu.hf.accelerate(model):
        for call, want in zip(calls, expected):
            torch.testing.assert_close(model(**batch, **call).loss, want)


def test_gradient_checkpointing_and_compile():
    model = _model("Llama").train()
    batch = next(_batches(1))
    expected = model(**batch).loss
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    with fa2_cpu.hf.accelerate(model):
        for call in (torch.compile(model, backend="aot_eager"), model):
            model.zero_grad()
            if call is model:
                model.gradient_checkpointing_enable()
            loss = call(**batch).loss
            loss.backward()
            torch.testing.assert_close(loss, expected)
            for parameter, want in zip(model.parameters(), gradients):
                torch.testing.assert_close(parameter.grad, want, rtol=1e-3, atol=1e-5)


def test_kinds_can_be_left_out():
    model = _model("Llama")
    with fa2_cpu.hf.accelerate(model, attention=False, rope=False, loss=False) as acceleration:
        assert set(acceleration.replaced) == {"rms_norm", "swiglu"}
        assert len(acceleration.replaced["rms_norm"]) == 5 and len(acceleration.replaced["swiglu"]) == 2
    with pytest.raises(TypeError, match="model is of type Linear; it must be a transformers.PreTrainedModel"):
        fa2_cpu.hf.accelerate(torch.nn.Linear(2, 2))


def test_models_that_are_not_known():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=31)
    model = transformers.GPT2LMHeadModel(config)
    with fa2_cpu.hf.accelerate(model) as acceleration:
        assert acceleration.replaced == {"attention": ["fa2"]}
        assert "GPT2LMHeadModel is not among" in acceleration.skipped["loss"]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_autocast(name):
    model = _model(name).train()
    for batch in _batches(1):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(**batch).loss
            with fa2_cpu.hf.accelerate(model):
                loss = model(**batch).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=2**-8)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
