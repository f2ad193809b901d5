# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own ways to train on several processes around a model on fa2: DDP, FSDP2, DTensor."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import fa2_cpu.distributed  # noqa: F401: DTensors on fa2's operators
import fa2_cpu.torch as fa2
from ranks import Ranks


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).unbind(2)
        return self.out(fa2.attention(q, k, v, layout="bshd", causal="top_left")[0].flatten(-2))


def data_parallel(rank, world, kind):
    """Greatest difference of a parameter after three steps on parts of a batch from those of steps on the whole."""
    torch.manual_seed(0)
    model, alone = Model(), Model()
    alone.load_state_dict(model.state_dict())
    if kind == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    x = torch.randn(4, 9, 32)
    for module, batch in ((wrapped, x.chunk(world)[rank]), (alone, x)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    own = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return max(float((x - p.detach()).abs().max()) for x, p in zip(own, alone.parameters()))


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_data_parallel(two, kind):
    if kind == "FSDP2" and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    assert max(two.run(data_parallel, kind)) < 1e-6


def sharded(rank, world, layout, along):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    batch, heads = dict(bhsd=(0, 1), bshd=(0, 2))[layout]
    shape = lambda h: (2, h, 7, 8) if layout == "bhsd" else (2, 7, h, 8)
    tensors = [torch.randn(*shape(h), dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    bias = torch.randn(1, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)
    leaves = [*tensors, bias, slopes, sinks]
    call = lambda q, k, v, bias, slopes, sinks: fa2.attention(
        q, k, v, layout=layout, causal="top_left", bias=bias, alibi_slopes=slopes, sinks=sinks
    )
    out, lse = call(*leaves)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)
    placement = [Shard(heads if along == "heads" else batch)]
    own = [distribute_tensor(x.detach(), mesh, placement).requires_grad_() for x in tensors]
    own += [distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_() for x in (bias, slopes, sinks)]
    own_out, own_lse = call(*own)
    kept = own_out.placements == tuple(placement)
    whole = lambda x: distribute_tensor(x, mesh, [Replicate()])
    loss = (own_out * whole(dout)).sum() + (own_lse * whole(dlse)).sum()
    grads = torch.autograd.grad(loss, own)
    errors = [float((g.full_tensor() - e).abs().max()) for g, e in zip((own_out, *grads), (out, *expected))]
    return kept, errors


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("along", ["heads", "batch"])
def test_dtensor(two, layout, along):
    pytest.importorskip("torch.distributed.tensor")
    for kept, errors in two.run(sharded, layout, along):
        # Slopes and sinks are f32.
        assert kept and max(errors[:5]) < 1e-12 and max(errors) < 1e-5, errors


def refused(rank, world, dim, heads, options):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (world,))
    if options:
        options["philox"] = distribute_tensor(torch.tensor([1, 2]), mesh, [Replicate()])
    q, k, v = (distribute_tensor(torch.ones(2, h, 8, 8), mesh, [Shard(dim)]) for h in heads)
    fa2.attention(q, k, v, **options)


@pytest.mark.parametrize("dim, heads, options, sentence", [
    (2, (4, 2, 2), {}, "it may be sharded along its batch or heads only (rows: fa2_cpu.distributed.attention)"),
    (1, (4, 2, 2), dict(dropout_p=0.5), "with dropout, whose mask counts all batches and heads, it must be replicated"),
    (1, (6, 3, 3), {}, "k has 3 heads; they must be a multiple of the 2 ranks"),
])  # fmt: skip
def test_placements_that_cannot_work(two, dim, heads, options, sentence):
    pytest.importorskip("torch.distributed.tensor")
    assert all(sentence in text for _, text in two.refusals(refused, dim, heads, options))
