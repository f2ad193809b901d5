# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: a sliding-window model from a config, trained and asked to generate on a CPU."""

import argparse

import torch
from transformers import AutoModelForCausalLM, MistralConfig

import fa2_cpu.hf

fa2_cpu.hf.register()


def train(implementation: str, steps: int):
    """Losses of learning a period of 6 tokens, from padded batches, and the model."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(3, 64, (8, 6)).repeat(1, 6)
        mask = torch.ones_like(ids)
        mask[0, 24:] = 0
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval()


def main(steps: int) -> None:
    eager, _ = train("eager", steps)
    losses, model = train("fa2", steps)
    print(f"loss after {steps} steps: eager {eager[-1]:.4f}, fa2 {losses[-1]:.4f}")
    assert abs(eager[-1] - losses[-1]) < 2e-2 and losses[-1] < losses[0]
    prompt = torch.tensor([[9, 20, 31, 42, 53, 60] * 3])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    print("continued:", generated[0, prompt.shape[1] :].tolist())
    assert generated.shape[1] > prompt.shape[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
