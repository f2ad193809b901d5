# SPDX-License-Identifier: Apache-2.0
"""fa2 inside training runs: a compiled step, two processes with DistributedDataParallel, DataLoader workers."""

import os
import subprocess
import sys

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


def test_distributed_data_parallel(tmp_path):
    """Two gloo processes: both end with the parameters that one process with both halves gets."""
    code = """
import os, sys, time, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[3])
from test_torch_training import _model
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 17, 32, generator=torch.Generator().manual_seed(1))
for _ in range(3):
    optimizer.zero_grad()
    model(x[2 * rank : 2 * rank + 2]).square().mul(x[2 * rank : 2 * rank + 2]).mean().backward()
    optimizer.step()
torch.save([p.detach() for p in model.parameters()], f"{sys.argv[2]}.{rank}")
# gloo aborts a process whose peer leaves while it still talks to it, or while its own threads end: both wait
# until the other is done, and leave without ending anything.
open(f"{sys.argv[2]}.done.{rank}", "w").close()
while not os.path.exists(f"{sys.argv[2]}.done.{1 - rank}"):
    time.sleep(0.01)
os._exit(0)
"""
    store = str(tmp_path / "store")
    here = os.path.dirname(__file__)
    processes = [subprocess.Popen([sys.executable, "-c", code, str(rank), store, here]) for rank in range(2)]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 17, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mul(x).mean().backward()
        optimizer.step()
    for rank in range(2):
        for a, b in zip(torch.load(f"{store}.{rank}"), model.parameters()):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)


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
