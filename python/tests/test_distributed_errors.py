# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between ranks is a sentence on every rank, and never a hang."""

import os
import time

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

from fa2_cpu import distributed as fd
from ranks import Ranks


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def tensors(rows=8, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(1, h, rows, 8, generator=generator) for h in (heads, kv_heads, kv_heads)]


def call(rank, world, odd, everywhere):
    """attention, where one rank has other arguments than the rest."""
    q, k, v = tensors(everywhere.pop("rows", 8))
    given = {"causal": "top_left", **everywhere}
    if rank == 2:
        given.update(odd)
    if "q" in given:
        q = given.pop("q")
    if "k" in given:
        k = given.pop("k")
    if given.pop("grad", False):
        q.requires_grad_()
    fd.attention(q, k, v, **given)


THD = torch.tensor([0, 30, 32])
# What rank 2 alone does, what all do, what every rank says.
MISTAKES = {
    "no tensor": (dict(q=[1.0]), {}, "on rank 2 of the group: q is of type list"),
    "dtype": (dict(q=torch.ones(1, 4, 8, 8, dtype=torch.int32)), {}, "on rank 2 of the group: q is torch.int32"),
    "dimensions": (dict(q=torch.ones(4, 8, 8)), {}, "on rank 2 of the group: q has shape (4, 8, 8)"),
    "shape": (dict(k=torch.ones(1, 2, 5, 8)), {}, "on rank 2 of the group: q, k and v have shapes"),
    "heads": (dict(q=torch.ones(1, 6, 8, 8)), {}, "the number of heads of q is 4 on rank 0 of the group and 6 on rank 2"),
    "rows": (dict(q=torch.ones(1, 4, 9, 8)), {}, "q has 8, 8, 9, 8 rows on ranks 0 to 3; zigzag cuts 33 rows into 9, 8, 8, 8"),
    "causal": (dict(causal=None), {}, "causal is top_left on rank 0 of the group and None on rank 2"),
    "window": (dict(window=(4, 4)), {}, "window's left is -1 on rank 0"),
    "scale": (dict(scale=0.5), {}, "scale is None on rank 0 of the group and 0.5 on rank 2"),
    "softcap": (dict(softcap="x"), {}, "on rank 2 of the group: softcap is 'x'; it must be a number"),
    "method": (dict(method="ulysses"), {}, "method is auto on rank 0 of the group and ulysses on rank 2"),
    "unknown method": (dict(method="star"), {}, "on rank 2 of the group: method is 'star'; it must be one of"),
    "gradients": (dict(grad=True), {}, "which of q, k, v, bias, alibi_slopes, sinks require gradients is [] on rank 0"),
    "philox": (dict(philox=torch.tensor([1, 3])), dict(philox=torch.tensor([1, 2]), dropout_p=0.1), "philox's offset is 2 on"),
    "sinks": (dict(sinks=torch.ones(4)), dict(sinks=torch.zeros(4)), "sinks is a tensor with the digest"),
    "bias": (dict(bias=None), dict(bias=torch.zeros(8, 32)), "bias is torch.float32 on rank 0 of the group and absent on rank 2"),
    "bias's keys": ({}, dict(bias=torch.zeros(8, 31)), "bias has 31 keys; it must have all 32 of the group, or 1"),
    "prefix sums": ({}, dict(layout="thd", q=torch.ones(8, 2, 8), k=torch.ones(1, 2, 8), cu_seqlens_q=THD, cu_seqlens_k=THD),
                    "on rank 0 of the group: v has shape (1, 2, 8, 8); it must be [rows, heads, D]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_one_rank(four, name):
    odd, everywhere, sentence = MISTAKES[name]
    said = four.refusals(call, odd, everywhere)
    assert {kind for kind, _ in said} <= {"TypeError", "ValueError"}
    assert all(sentence in text for _, text in said), said[0]


def different_calls(rank, world):
    q, k, v = tensors()
    if rank == 1:
        fd.unshard(q, dim=2)
    fd.attention(q, k, v)


def test_different_calls(four):
    said = four.refusals(different_calls)
    assert all("calls fa2_cpu.distributed.attention where rank 1 calls unshard" in text for _, text in said)


def parts_that_differ(rank, world):
    fd.unshard(torch.ones(2 + (rank == 3), 4), dim=1)


def test_parts_that_do_not_fit(four):
    said = four.refusals(parts_that_differ)
    assert all("a size of x along another dimension than dim is 2 on rank 0" in text for _, text in said)


def still_works(rank, world):
    q, k, v = tensors()
    return fd.attention(q, k, v)[0].isfinite().all().item()


def test_the_group_works_after_errors(four):
    assert four.run(still_works) == [True] * 4


def killed(rank, world, when):
    """Rank 1 ends in the forward's ring or the backward's."""
    from fa2_cpu.distributed import _blocks

    if rank == 1:
        setattr(_blocks, when, lambda *a: os._exit(1))
    q, k, v = (x.requires_grad_() for x in tensors())
    out, _ = fd.attention(q, k, v, method="ring")
    out.sum().backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies(when):
    ranks = Ranks(3, seconds=60)
    try:
        # Others see the broken connection, and need not wait for the timeout.
        start = time.monotonic()
        results = ranks.attempt(killed, when)
        assert results[1] is None
        for ok, result in (results[0], results[2]):
            assert not ok
            assert result[0] == "RuntimeError" and "another rank has ended or failed" in result[1], result
        assert time.monotonic() - start < 50
    finally:
        ranks.close()


def absent(rank, world, folder):
    q, k, v = tensors()
    if rank != 1:
        try:
            fd.attention(q, k, v)
        finally:
            (folder / str(rank)).touch()
    while not all((folder / other).exists() for other in ("0", "2")):
        time.sleep(0.1)
    raise RuntimeError("another rank has ended or failed")


def test_a_rank_that_does_not_come(tmp_path):
    ranks = Ranks(3, seconds=6)
    try:
        said = ranks.refusals(absent, tmp_path)
        assert all("another rank has ended or failed" in text for _, text in said), said
        assert "comparing the arguments of attention between ranks failed" in said[0][1]
    finally:
        ranks.close()


def test_without_a_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        fd.attention(*tensors())
