# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Ulysses on two processes of gloo, with fa2 inside, against one process. Skipped without deepspeed."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

import torch.nn.functional as F

import fa2_cpu.torch as fa2
from ranks import Ranks


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    # The first time on a machine DeepSpeed compiles a library of its own.
    ranks.run(ready, limit=600)
    yield ranks
    ranks.close()


def ready(rank, world):
    import deepspeed.comm

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False)


def relative_error(x, expected):
    return float((x.detach() - expected).norm() / expected.norm())


def distributed_attention(rank, world, heads, kv_heads):
    """Relative errors of out and gradients of deepspeed.sequence.layer.DistributedAttention."""
    from deepspeed.sequence.layer import DistributedAttention

    attention = lambda q, k, v: fa2.attention(q, k, v, layout="bshd", causal="top_left")[0]
    torch.manual_seed(0)
    whole = [torch.randn(2, 12, h, 8, dtype=torch.float64, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
    dout = torch.randn(2, 12, heads, 8, dtype=torch.float64)
    out = attention(*whole)
    expected = (out.detach(), *torch.autograd.grad(out, whole, dout))
    part = lambda x: x.detach().chunk(world, 1)[rank].clone()
    own = [part(x).requires_grad_() for x in whole]
    layer = DistributedAttention(attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    own_out = layer(*own, 0)
    grads = torch.autograd.grad(own_out, own, part(dout))
    return [relative_error(x, part(e)) for x, e in zip((own_out, *grads), expected)]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2)])
def test_distributed_attention(two, heads, kv_heads):
    for errors in two.run(distributed_attention, heads, kv_heads):
        assert max(errors) < 1e-13, errors


def train(rank, world, kv_heads, packed):
    """Greatest differences of loss and gradients of a model under UlyssesSPAttentionHF from those of one process."""
    import transformers
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import fa2_cpu.hf

    fa2_cpu.hf.register()
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2, vocab_size=40)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=kv_heads)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fa2").double()
    ids = torch.randint(40, (1 if packed else 2, 16))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    positions = torch.arange(16).expand(len(ids), -1)
    given = {}
    if packed:
        ends = torch.tensor([0, 5, 16], dtype=torch.int32)
        positions = torch.cat((torch.arange(5), torch.arange(11)))[None]
        given = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=11, max_length_k=11)

    def loss_of(ids, labels, positions):
        logits = model(ids, position_ids=positions, use_cache=False, **given).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return [loss.detach(), *grads]

    expected = loss_of(ids, labels, positions)
    parallel_state_sp._release_sequence_parallel_groups()
    UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="fa2", sequence_parallel_size=world, micro_batch_size=len(ids)
    )
    try:
        own = loss_of(*(x.chunk(world, 1)[rank] for x in (ids, labels, positions)))
    finally:
        del ALL_ATTENTION_FUNCTIONS["fa2"]  # the wrapper around what fa2_cpu.hf registered
    for x in own:
        dist.all_reduce(x)
    return max(relative_error(x, e) for x, e in zip(own, expected))


@pytest.mark.parametrize("kv_heads, packed", [(4, False), (2, False), (1, False), (2, True)])
def test_ulysses_of_transformers(two, kv_heads, packed):
    pytest.importorskip("transformers")
    # Rotary embeddings are computed in f32.
    assert max(two.run(train, kv_heads, packed)) < 1e-6


def small_llama(implementation):
    """A model and four texts, the same on each rank."""
    import transformers

    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                 num_hidden_layers=2, vocab_size=40)  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes), attn_implementation=implementation
    )
    return model, torch.randint(40, (4, 16))


def trained(world, folder, implementation):
    """Weights that transformers.Trainer with accelerate's sequence parallelism makes."""
    import transformers
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp._release_sequence_parallel_groups()
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=implementation)
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=1, num_train_epochs=1, report_to=[], save_strategy="no",
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=1.0, disable_tqdm=True,
        train_sampling_strategy="sequential",
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=world, sp_handler=handler),
        deepspeed=dict(
            train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1, zero_optimization=dict(stage=0),
            gradient_clipping=1.0,
        ),
    )  # fmt: skip
    model, texts = small_llama(implementation)
    data = [dict(input_ids=x, labels=x.clone(), position_ids=torch.arange(16)) for x in texts]
    try:
        transformers.Trainer(model, arguments, train_dataset=data).train()
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]  # DeepSpeed's wrapper
    return [x.detach() for x in model.parameters()]


def trained_alone(world):
    """Weights before and after the same steps in one process, without Trainer, DeepSpeed and fa2.

    The ranks' loaders all give each text, and every rank's texts are trained on in turn: each text `world` times.
    """
    model, texts = small_llama("sdpa")
    before = [x.detach().clone() for x in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x in texts.repeat_interleave(world, 0):
        optimizer.zero_grad()
        logits = model(input_ids=x[None], use_cache=False).logits
        F.cross_entropy(logits[0, :-1], x[1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before, [x.detach() for x in model.parameters()]


def trainer(rank, world, folder):
    """Relative errors of what training changes with flash_attention_2, which is fa2, and with PyTorch's attention."""
    import os

    import fa2_cpu.flash_attn

    before, expected = trained_alone(world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    fa2_cpu.flash_attn.install_as_flash_attn(metadata=True)
    return [
        [relative_error(x - b, e - b) for b, x, e in zip(before, trained(world, folder, implementation), expected)]
        for implementation in ("flash_attention_2", "sdpa")
    ]


def test_trainer_with_sequence_parallelism(two, tmp_path):
    pytest.importorskip("accelerate")
    for fa2_errors, sdpa_errors in two.run(trainer, str(tmp_path)):
        assert max(fa2_errors) < 1e-3, fa2_errors
        assert max(sdpa_errors) < 1e-3, sdpa_errors
