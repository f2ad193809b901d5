# SPDX-License-Identifier: Apache-2.0
"""A Llama of transformers trained on documents that are spread over processes: FSDP2 and context parallelism.

    torchrun --nproc-per-node=2 examples/python/long_context.py --tokens 32768

Each process holds its part of every document (zigzag) and of every parameter. The losses are those of one process
(--compare runs it too, in each process, and asserts it); without torchrun there is one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import fa2_cpu.distributed as fd
import fa2_cpu.hf

VOCABULARY = 256


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20,
    )  # fmt: skip
    config._attn_implementation = "fa2"
    return LlamaForCausalLM(config)


def document(step: int, tokens: int) -> torch.Tensor:
    """[1, tokens]: each token is one of four after the one before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(4, (1, tokens), generator=generator).cumsum(1) % VOCABULARY


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over this process's rows. Labels are shifted before they are sharded."""
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train(model: LlamaForCausalLM, tokens: int, steps: int, parallel: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids = document(step, tokens)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        if parallel:
            ids, labels = fd.shard((ids, labels))
            with fd.context_parallel():
                total = loss_of(model, ids, labels)
            # FSDP2 averages gradients over processes, whose losses are parts of one sum.
            (total * dist.get_world_size() / (tokens - 1)).backward()
            total = total.detach().clone()
            dist.all_reduce(total)
        else:
            total = loss_of(model, ids, labels)
            (total / (tokens - 1)).backward()
            total = total.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / (tokens - 1))
    return losses


def main(tokens: int, steps: int, compare: bool) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    fa2_cpu.hf.register()
    model = make_model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, tokens, steps, parallel=True)
    if dist.get_rank() == 0:
        print(f"{tokens} tokens on {dist.get_world_size()} processes: losses", *(f"{x:.4f}" for x in losses))
    if compare:
        alone = train(make_model(), tokens, steps, parallel=False)
        difference = max(abs(a - b) for a, b in zip(losses, alone))
        if dist.get_rank() == 0:
            print("one process: losses", *(f"{x:.4f}" for x in alone), f"(difference {difference:.1e})")
        assert difference < 1e-3, difference
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.steps, arguments.compare)
