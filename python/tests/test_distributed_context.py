# SPDX-License-Identifier: Apache-2.0
"""context_parallel around functions and unchanged transformers models, against one process."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import torch.nn.functional as F

from fa2_cpu import distributed as fd
from ranks import Ranks


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def sdpa(rank, world, options, shards):
    from torch.nn.functional import scaled_dot_product_attention as imported

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 13, 8, dtype=torch.float64) for h in (4, 2, 2))
    mask = torch.rand(13, 13) > 0.3 if options.pop("mask", False) else None
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)
    if mask is not None:
        mask = fd.shard(mask, dim=0, shards=shards)
    parts = fd.shard((q, k, v), dim=2, shards=shards)
    with fd.context_parallel(shards=shards):
        out = imported(*parts, mask, enable_gqa=True, **options)
    outside = imported(*parts, enable_gqa=True)
    whole = fd.unshard(out, dim=2, shards=shards)
    return float((whole - expected).abs().max()), outside.shape == out.shape and not torch.equal(outside, out)


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(scale=0.2), dict(mask=True)], ids=str)
@pytest.mark.parametrize("shards", ["zigzag", "contiguous"])
def test_functional_attention(two, options, shards):
    for error, changed in two.run(sdpa, options, shards):
        assert error < 1e-13 and changed


def model_of(kind, implementation):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                 num_hidden_layers=2, vocab_size=40)  # fmt: skip
    torch.manual_seed(1)
    import fa2_cpu.hf

    fa2_cpu.hf.register()
    if kind == "mistral":
        config = transformers.MistralConfig(**sizes, sliding_window=5)
    else:
        config = transformers.LlamaConfig(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()


def train(rank, world, kind, implementation, shards, packed=False, checkpointing=False):
    """Greatest differences of loss and gradients from those of one process."""
    batch = 1 if packed else 2
    ids = torch.randint(40, (batch, 19), generator=torch.Generator().manual_seed(2))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    extra = {}
    if packed:
        ends = torch.tensor([0, 4, 11, 19], dtype=torch.int32)
        extra = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=8, max_length_k=8)
        positions = torch.cat([torch.arange(n) for n in (4, 7, 8)])[None]
    model = model_of(kind, implementation)
    if checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model.train()
    loss_of = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    given = {**extra, **(dict(position_ids=positions) if packed else {})}
    loss = loss_of(model(ids, **given).logits, labels)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    own_ids, own_labels = fd.shard((ids, labels), shards=shards)
    if packed:
        given["position_ids"] = fd.shard(positions, shards=shards)
    with fd.context_parallel(shards=shards):
        own_loss = loss_of(model(own_ids, **given).logits, own_labels)
        if checkpointing:
            own_loss.backward()
    if not checkpointing:
        own_loss.backward()
    total = own_loss.detach().clone()
    dist.all_reduce(total)
    errors = [abs(float(total - loss))]
    for p, e in zip(model.parameters(), expected):
        dist.all_reduce(p.grad)
        errors.append(float((p.grad - e).abs().max()))
    return max(errors)


@pytest.mark.parametrize("kind, implementation, shards", [
    ("llama", "fa2", "zigzag"), ("llama", "fa2", "contiguous"), ("llama", "sdpa", "zigzag"), ("mistral", "fa2", "zigzag"),
])  # fmt: skip
def test_transformers_model(two, kind, implementation, shards):
    pytest.importorskip("transformers")
    # Rotary embeddings are computed in f32.
    assert max(two.run(train, kind, implementation, shards)) < 1e-9


def test_packed_documents(two):
    pytest.importorskip("transformers")
    assert max(two.run(train, "llama", "fa2", "zigzag", True)) < 1e-9


def test_gradient_checkpointing(two):
    pytest.importorskip("transformers")
    assert max(two.run(train, "llama", "fa2", "zigzag", False, True)) < 1e-9


def checkpointed(rank, world):
    """Largest differences of gradients with checkpoints of both kinds, backward inside the block and after it."""
    from torch.utils.checkpoint import checkpoint

    generator = torch.Generator().manual_seed(5)
    q, k, v = (fd.shard(torch.randn(1, 2, 12, 4, generator=generator), dim=2).requires_grad_() for _ in range(3))
    attention = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    with fd.context_parallel():
        expected = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    differences = []
    for reentrant in (False, True):
        for inside in (False, True):
            q.grad = k.grad = v.grad = None
            with fd.context_parallel():
                total = checkpoint(attention, q, k, v, use_reentrant=reentrant).square().sum()
                if inside:
                    total.backward()
            if not inside:
                total.backward()
            differences += [float((x.grad - y).abs().max()) for x, y in zip((q, k, v), expected)]
    plain = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    return max(differences), plain.__module__ == "torch.utils.checkpoint"


def test_backward_of_checkpoints_after_the_block(two):
    assert two.run(checkpointed) == [(0.0, True)] * 2


def refused(rank, world, kind, implementation, given):
    model = model_of(kind, implementation)
    ids = torch.zeros(1, 8, dtype=torch.long)
    with fd.context_parallel():
        model(given.pop("input_ids", ids), **given)


REFUSED = {
    "padding": ("llama", "fa2", dict(attention_mask=torch.tensor([[0] + [1] * 7])), "attention_mask hides tokens"),
    "labels": ("llama", "fa2", dict(labels=torch.zeros(1, 8, dtype=torch.long)), "labels is given, which the model shifts"),
    "eager": ("llama", "eager", {}, 'LlamaForCausalLM has attn_implementation="eager"'),
    "window by a mask": ("mistral", "sdpa", {}, 'it must be a sliding window with attn_implementation="fa2"'),
    "positions of documents": ("llama", "fa2", dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])), "position_ids start anew"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(two, name):
    pytest.importorskip("transformers")
    *arguments, sentence = REFUSED[name]
    assert all(sentence in text for _, text in two.refusals(refused, *arguments))


def wrong_on_one(rank, world, transformers_model):
    """Rank 1 alone hides a token, or has another dtype for its keys."""
    with fd.context_parallel():
        if transformers_model:
            mask = torch.ones(1, 8, dtype=torch.long)
            mask[0, 0] = rank == 0
            model_of("llama", "fa2")(torch.zeros(1, 8, dtype=torch.long), attention_mask=mask)
        else:
            q = torch.ones(1, 2, 8, 4)
            F.scaled_dot_product_attention(q, q.double() if rank == 1 else q, q)


@pytest.mark.parametrize("transformers_model", [False, True])
def test_what_one_rank_has_wrong_is_said_on_all(two, transformers_model):
    if transformers_model:
        pytest.importorskip("transformers")
    sentence = "attention_mask hides tokens" if transformers_model else "query, key and value are torch.float32, torch.float64"
    said = two.refusals(wrong_on_one, transformers_model)
    assert all(f"on rank 1 of the group: {sentence}" in text for _, text in said), said


def left_alone(rank, world):
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = model_of("llama", "fa2")
    ids = torch.arange(8)[None]
    before = model(ids).logits
    with pytest.raises(ValueError):
        with fd.context_parallel():
            model(ids, attention_mask=torch.zeros(1, 8))
    kept = "__call__" not in vars(transformers.PreTrainedModel)
    kept &= "fa2" not in ALL_ATTENTION_FUNCTIONS._local_mapping
    kept &= "sdpa" not in ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    return kept and torch.equal(before, model(ids).logits)


def test_nothing_is_left_behind(two):
    pytest.importorskip("transformers")
    assert all(two.run(left_alone))
