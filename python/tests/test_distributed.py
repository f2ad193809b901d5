# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.distributed against the same call in one process: every option, results and gradients."""

import os

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import fa2_cpu.torch as fa2
from conftest import BOUNDS
from fa2_cpu import distributed as fd
from ranks import Ranks

B, H, HKV, D, DV = 2, 4, 2, 8, 5


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


PHILOX = (11, 2**61 + 3)

# Queries, keys, and options; tensors by their shapes.
OPTIONS = {
    "plain": (37, 29, {}),
    "causal": (37, 37, dict(causal="top_left")),
    "bottom right, more keys": (29, 45, dict(causal="bottom_right")),
    "top left, more queries": (45, 29, dict(causal="top_left")),
    "bottom right, more queries": (45, 29, dict(causal="bottom_right")),
    "window": (37, 41, dict(window=(5, 3))),
    "causal window": (37, 37, dict(window=(7, -1), causal="top_left")),
    "softcap, sinks": (37, 37, dict(softcap=2.0, sinks=(H,), causal="top_left", scale=0.4)),
    "alibi": (37, 37, dict(alibi_slopes=(H,))),
    "alibi of each batch": (29, 45, dict(alibi_slopes=(B, H), causal="top_left")),
    "alibi, window": (29, 45, dict(alibi_slopes=(H,), window=(9, 4))),
    "bias": (37, 37, dict(bias=(B, H, 37, 37), causal="top_left")),
    "bias for all heads": (37, 29, dict(bias=(37, 29))),
    "bias of one row": (37, 29, dict(bias=(1, H, 1, 29))),
    "bias, alibi": (37, 37, dict(bias=(1, 1, 37, 37), alibi_slopes=(H,))),
    "dropout": (37, 37, dict(dropout_p=0.3, causal="top_left")),
    "dropout, bias": (37, 29, dict(dropout_p=0.3, bias=(1, H, 37, 29))),
    "documents": (60, 60, dict(lengths=(7, 0, 23, 4, 5, 21), causal="top_left")),
    "documents, more keys": (60, 75, dict(lengths=(7, 0, 23, 4, 5, 21), lengths_k=(9, 3, 20, 0, 12, 31),
                                          causal="bottom_right", window=(11, -1), sinks=(H,))),
    "documents, dropout": (60, 60, dict(lengths=(7, 0, 23, 4, 5, 21), dropout_p=0.4, max_seqlen_q=25, max_seqlen_k=30)),
    "documents, alibi": (60, 60, dict(lengths=(17, 1, 42), alibi_slopes=(H,), causal="bottom_right")),
}  # fmt: skip


def make(nq, nk, options, dtype, heads=H, kv_heads=HKV):
    """(q, k, v), other tensors that have gradients, options, the dimension of rows."""
    generator = torch.Generator().manual_seed(3)
    options = dict(options)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    packed = "lengths" in options
    shape = (lambda h, n, d: (n, h, d)) if packed else (lambda h, n, d: (B, h, n, d))
    q, k, v = draw(*shape(heads, nq, D)), draw(*shape(kv_heads, nk, D)), draw(*shape(kv_heads, nk, DV))
    extra = {}
    if "bias" in options:
        extra["bias"] = draw(*options.pop("bias")).to(dtype)
    if "alibi_slopes" in options:
        extra["alibi_slopes"] = 0.3 * draw(*options.pop("alibi_slopes")).abs().float()
    if "sinks" in options:
        extra["sinks"] = draw(*options.pop("sinks")).float()
    if packed:
        lengths = options.pop("lengths")
        lengths_k = options.pop("lengths_k", lengths)
        for name, x in (("cu_seqlens_q", lengths), ("cu_seqlens_k", lengths_k)):
            options[name] = torch.tensor([0, *x]).cumsum(0).to(torch.int32)
        options["layout"] = "thd"
    if options.get("dropout_p"):
        options["philox"] = torch.tensor(PHILOX)
    return [x.to(dtype) for x in (q, k, v)], extra, options, 0 if packed else 2


def leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def finite(lse):
    return torch.where(lse.isinf(), 0.0, lse)


def relative_error(x, expected):
    x, expected = x.double(), expected.double()
    norm = expected.norm()
    return float((x - expected).norm() / norm) if norm > 0 else float(x.norm())


def compare(rank, world, nq, nk, given, dtype, method, shards, sizes=(H, HKV), mesh=None, parts=None):
    """Relative errors by name. parts: this group's cut of contiguous rows, where it is not the even one."""
    dtype = getattr(torch, dtype)
    group = None
    if mesh is not None:
        group = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("ring", "ulysses"))
    qkv, extra, options, dim = make(nq, nk, given, dtype, *sizes)
    lse_dim = 1 if dim == 0 else 2

    def part(x, along):
        if parts is not None:
            return x.split(parts, along)[rank].contiguous()
        return fd.shard(x, dim=along, group=group, shards=shards)

    def whole(x, along):
        return fd.unshard(x.detach(), dim=along, group=group, shards=shards)

    inputs = leaves(qkv)
    others = dict(zip(extra, leaves(extra.values())))
    out, lse = fa2.attention(*inputs, **others, **options)
    generator = torch.Generator().manual_seed(4)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype)
    expected = torch.autograd.grad(
        (out * dout).sum() + (finite(lse) * dlse).sum(), [*inputs, *others.values()]
    )
    own = leaves(part(x, dim) for x in qkv)
    by_row = "bias" in extra and extra["bias"].shape[-2] != 1
    own_others = dict(zip(extra, leaves(
        part(x, -2) if name == "bias" and by_row else x for name, x in extra.items()
    )))  # fmt: skip
    own_out, own_lse = fd.attention(*own, group=group, method=method, shards=shards, **own_others, **options)
    grads = torch.autograd.grad(
        (own_out * part(dout, dim)).sum() + (finite(own_lse) * part(dlse, lse_dim)).sum(),
        [*own, *own_others.values()],
    )
    errors = {"out": relative_error(whole(own_out, dim), out), "lse": relative_error(
        whole(finite(own_lse), lse_dim), finite(lse))}  # fmt: skip
    for name, x, y in zip(("dq", "dk", "dv"), grads, expected):
        errors[name] = relative_error(whole(x, dim), y)
    for name, x, y in zip(extra, grads[3:], expected[3:]):
        if name == "bias" and by_row:
            x = whole(x, -2)
        else:
            x = x.clone()
            dist.all_reduce(x)
        errors["d" + name] = relative_error(x, y)
    return errors


def within(results, dtype="float64"):
    # Slopes and sinks are f32 in calls of any dtype.
    for errors in results:
        for name, error in errors.items():
            bound = BOUNDS[dtype] if name not in ("dalibi_slopes", "dsinks") else max(BOUNDS[dtype], BOUNDS["float32"])
            assert error <= bound, (name, error)


FEW = os.environ.get("FA2_TEST_FEW_CASES") == "1"


@pytest.mark.parametrize("shards", ["zigzag"] if FEW else ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_on_two_ranks(two, name, method, shards):
    within(two.run(compare, *OPTIONS[name], "float64", method, shards))


@pytest.mark.parametrize("name", ["causal", "alibi, window", "dropout, bias", "documents, more keys"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "mesh"])
def test_options_on_four_ranks(four, name, method):
    mesh = (2, 2) if method == "mesh" else None
    within(four.run(compare, *OPTIONS[name], "float64", "auto" if mesh else method, "zigzag", (H, HKV), mesh))


@pytest.mark.parametrize("heads", [(6, 3), (4, 1), (1, 1)])
def test_heads_that_ranks_do_not_divide(four, heads):
    nq, nk, options = 21, 21, dict(causal="top_left", dropout_p=0.2)
    within(four.run(compare, nq, nk, options, "float64", "ulysses", "zigzag", heads))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_dtypes(two, dtype, method):
    # Both sides are rounded: twice the bound of one.
    for errors in two.run(compare, 128, 128, dict(causal="top_left", sinks=(H,)), dtype, method, "zigzag"):
        assert max(errors.values()) <= 2 * BOUNDS[dtype], errors


@pytest.mark.parametrize("parts", [(9, 0, 27, 1), (0, 0, 37, 0)])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_parts_of_any_length(four, parts, method):
    within(four.run(compare, 37, 37, dict(causal="top_left"), "float64", method, "contiguous", (H, HKV), None, parts))


def one_rank(rank, world):
    group = [dist.new_group([n]) for n in range(world)][rank]
    q, k, v = make(9, 9, {}, torch.float64)[0]
    out, lse = fd.attention(q, k, v, group=group, causal="top_left")
    expected = fa2.attention(q, k, v, causal="top_left")
    return torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_group_of_one(two):
    assert two.run(one_rank) == [True, True]


def sub_group(rank, world):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    (q, k, v), *_ = make(9, 9, {}, torch.float64)
    group = groups[rank % 2]
    x = fd.shard([q, k, v], dim=2, group=group)
    out = fd.unshard(fd.attention(*x, group=group, causal="top_left")[0], dim=2, group=group)
    return relative_error(out, fa2.attention(q, k, v, causal="top_left")[0])


def test_groups_of_some_ranks(four):
    assert max(four.run(sub_group)) <= BOUNDS["float64"]


def repeated(rank, world):
    (q, k, v), *_ = make(64, 64, {}, torch.float32)
    q, k, v = leaves(fd.shard((q, k, v), dim=2))
    results = []
    for _ in range(3):
        out, lse = fd.attention(q, k, v, causal="top_left", method="ring")
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    return all(torch.equal(a, b) for again in results[1:] for a, b in zip(again, results[0]))


def test_the_same_bits_in_every_run(four):
    assert all(four.run(repeated))


def drawn(rank, world):
    (q, k, v), *_ = make(16, 16, {}, torch.float64)
    torch.manual_seed(5 + rank)
    out, _ = fd.attention(*fd.shard((q, k, v), dim=2), dropout_p=0.5)
    torch.manual_seed(5)
    return relative_error(fd.unshard(out, dim=2), fa2.attention(q, k, v, dropout_p=0.5)[0])


def test_dropout_is_drawn_on_the_first_rank(two):
    assert max(two.run(drawn)) <= BOUNDS["float64"]


def checkpointed(rank, world):
    from torch.utils.checkpoint import checkpoint

    (q, k, v), *_ = make(16, 16, {}, torch.float64)
    q, k, v = leaves(fd.shard((q, k, v), dim=2))
    function = lambda *x: fd.attention(*x, causal="top_left", dropout_p=0.3)[0].square().sum()
    torch.manual_seed(1)
    plain = torch.autograd.grad(function(q, k, v), (q, k, v))
    torch.manual_seed(1)
    again = torch.autograd.grad(checkpoint(function, q, k, v, use_reentrant=False), (q, k, v))
    return all(map(torch.equal, plain, again))


def test_gradient_checkpointing(two):
    assert all(two.run(checkpointed))


def second_derivative(rank, world):
    """A gradient penalty: refused, for what it adds would be missing. Of parts put together as well."""
    (q, k, v), *_ = make(16, 16, {}, torch.float64)
    q, k, v = leaves(fd.shard((q, k, v), dim=2))
    said = []
    for out in (fd.attention(q, k, v, causal="top_left")[0], fd.unshard(q, dim=2)):
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        try:
            (out.sum() + grad.square().sum()).backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_second_derivatives_are_refused(two):
    for said in two.run(second_derivative):
        assert len(said) == 2 and all("differentiate twice" in sentence for sentence in said), said


def compiled(rank, world):
    (q, k, v), *_ = make(16, 16, {}, torch.float64)
    q, k, v = leaves(fd.shard((q, k, v), dim=2))
    function = lambda *x: 2 * fd.attention(*(3 * y for y in x), causal="top_left")[0]
    expected = function(q, k, v)
    out = torch.compile(function, backend="aot_eager")(q, k, v)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (expected, out)]
    graphs = []  # of the call itself: none
    whole = torch.compile(fd.attention, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    same = torch.equal(whole(q, k, v)[0], fd.attention(q, k, v)[0])
    return same and not graphs and torch.equal(out, expected) and all(map(torch.equal, *grads))


def test_compile_around_it(two):
    assert all(two.run(compiled))


def blocks_of(rank, world, shards):
    """Key rows received of all others in a forward of 8 windows' length."""
    received = []
    original = dist.irecv
    dist.irecv = lambda x, *a, **k: (received.append(x.numel()), original(x, *a, **k))[1]
    try:
        (q, k, v), *_ = make(64, 64, {}, torch.float64)
        fd.attention(*fd.shard((q, k, v), dim=2, shards=shards), window=(3, 0), method="ring", shards=shards)
    finally:
        dist.irecv = original
    return sum(received) // (B * HKV * (D + DV))


def test_only_what_is_seen_is_sent(four):
    # Contiguous: 3 keys before a part's first row. Zigzag: before each of two pieces; ranks 3's pieces are neighbours.
    assert four.run(blocks_of, "contiguous") == [0, 3, 3, 3]
    assert four.run(blocks_of, "zigzag") == [3, 6, 6, 3]


def parts_of(rank, world):
    x = torch.arange(22.0).reshape(2, 11)
    given = {"x": x, "list": [x, None], "tuple": (x[0],)}
    part = fd.shard({"x": x, "list": [x, None]}, dim=1)
    whole = fd.unshard(part, dim=1)
    ok = torch.equal(whole["x"], x) and torch.equal(whole["list"][0], x) and whole["list"][1] is None
    own = torch.full((rank,), float(rank), requires_grad=True)
    together = fd.unshard(own, dim=0, shards="contiguous")
    (grad,) = torch.autograd.grad((together * (rank + 1)).sum(), own)
    ok &= torch.equal(together, torch.tensor([1.0, 2.0, 2.0, 3.0, 3.0, 3.0]))
    return bool(ok and torch.equal(grad, torch.full((rank,), 10.0)) and given["x"] is x), part["x"][0].tolist()


def test_shard_and_unshard(four):
    results = four.run(parts_of)
    assert [ok for ok, _ in results] == [True] * 4
    # 11 rows in 8 pieces: the first three have two.
    assert [x for _, x in results] == [[0, 1, 10], [2, 3, 9], [4, 5, 8], [6, 7]]
