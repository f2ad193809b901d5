# SPDX-License-Identifier: Apache-2.0
"""PyTorch: a small transformer trained as it is, with every attention of the process on fa2.

Shows fa2_cpu.torch.replace_sdpa() around code that knows nothing of fa2, torch.compile and autocast.
"""

import argparse

import torch
import torch.nn.functional as F

import fa2_cpu.torch


class Block(torch.nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(dim) for _ in range(2))
        self.qkv = torch.nn.Linear(dim, 3 * dim)
        self.out = torch.nn.Linear(dim, dim)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, vocab: int = 32, dim: int = 64, heads: int = 4, layers: int = 2, length: int = 64):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocab, dim)
        self.positions = torch.nn.Parameter(torch.randn(length, dim) * 0.02)
        self.blocks = torch.nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = torch.nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(steps: int, compiled: bool, autocast: bool) -> list[float]:
    """Losses of learning to repeat a period of 8 tokens."""
    torch.manual_seed(0)
    model = Model()
    step_model = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 32, (8, 8)).repeat(1, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = step_model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int) -> None:
    pytorch = train(steps, compiled=False, autocast=False)
    with fa2_cpu.torch.replace_sdpa():
        replaced = train(steps, compiled=False, autocast=False)
        compiled = train(steps, compiled=True, autocast=False)
        bf16 = train(steps, compiled=False, autocast=True)
    print(f"{'':14} first   last")
    rows = (("PyTorch", pytorch), ("fa2", replaced), ("fa2, compiled", compiled), ("fa2, bf16", bf16))
    for name, losses in rows:
        print(f"{name:14} {losses[0]:.4f}  {losses[-1]:.4f}")
    assert all(abs(a - b) < 2e-2 for a, b in zip(pytorch, replaced))
    assert replaced[-1] < replaced[0] and bf16[-1] < bf16[0] and compiled[-1] < compiled[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
