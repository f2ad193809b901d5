# SPDX-License-Identifier: Apache-2.0
"""fa2 inside training runs: a compiled step, DataLoader workers."""

import os

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import fa2_cpu.torch  # noqa: E402


class Block(torch.nn.Module):
    """A causal self-attention layer with the projections around it."""

    def __init__(self, attention=fa2_cpu.torch.scaled_dot_product_attention):
        super().__init__()
        self.attention = attention
        self.qkv = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.layer_norm(x, (32,))


def _losses(model, steps=6):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 17, 32, generator=generator)
        loss = (model(x)[:, :-1] - x[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _model(attention=fa2_cpu.torch.scaled_dot_product_attention):
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(attention), Block(attention))


def test_training_follows_pytorch():
    expected = _losses(_model(F.scaled_dot_product_attention))
    assert _losses(_model()) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def test_compiled_training_step():
    model = _model()
    assert _losses(torch.compile(model, fullgraph=True)) == pytest.approx(_losses(_model()), rel=1e-4)


class _Attending(torch.utils.data.Dataset):
    """Items that a worker process computes with fa2."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        q = torch.full((1, 2, 64, 16), float(index))
        return fa2_cpu.torch.scaled_dot_product_attention(q, q, q)[0]


def test_fork_after_a_call():
    """DataLoader workers, forked after this process has used its threads, compute; so does their parent after."""
    q = torch.randn(2, 4, 256, 16)
    before = fa2_cpu.torch.scaled_dot_product_attention(q, q, q)
    loader = torch.utils.data.DataLoader(_Attending(), batch_size=2, num_workers=2, timeout=60)
    batches = list(loader)
    assert len(batches) == 4
    for i, item in enumerate(torch.cat(batches)):
        torch.testing.assert_close(item, torch.full_like(item, float(i)))
    assert torch.equal(fa2_cpu.torch.scaled_dot_product_attention(q, q, q), before)
    # A fork that uses as many threads as its parent.
    child = os.fork()
    if child == 0:
        same = torch.equal(torch.from_numpy(fa2_cpu.attention_forward(*[q.numpy()] * 3)[0]), before)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
