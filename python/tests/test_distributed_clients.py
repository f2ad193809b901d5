# SPDX-License-Identifier: Apache-2.0
"""Packages that build on flash-attn's internals, unmodified, over processes of gloo, against one process.

pip install ring-flash-attn yunchang: what is not installed is skipped.
"""

import importlib

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import fa2_cpu.flash_attn
import fa2_cpu.torch as fa2
from conftest import BOUNDS
from ranks import Ranks

B, N, H, HKV, D = 2, 32, 4, 4, 8
# Their partial results are bf16, each rounded: those of up to 4 ranks, beside the single call's own.
BOUND = 3 * BOUNDS["bfloat16"]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def why_not(rank, world, package):
    fa2_cpu.flash_attn.install_as_flash_attn()
    try:
        importlib.import_module(package)
    except ImportError as error:
        return str(error)


def need(ranks, package):
    """ring-flash-attn 0.1 needs a transformers 4 beside it."""
    reason = ranks.run(why_not, package)[0]
    if reason:
        pytest.skip(reason)


def tensors(*leading):
    """q, k, v and dout in bf16, since they take .to(torch.float32) for a copy."""
    torch.manual_seed(0)
    return [torch.randn(*leading, h, D).bfloat16() for h in (H, HKV, HKV, H)]


def relative_error(x, expected):
    x, expected = x.detach().double(), expected.detach().double()
    return float((x - expected).norm() / expected.norm())


def zigzag(x, rank, world):
    pieces = x.chunk(2 * world, 1)
    return torch.cat((pieces[rank], pieces[2 * world - 1 - rank]), 1)


CUTS = {
    "ring_flash_attn_func": lambda x, rank, world: x.chunk(world, 1)[rank],
    "zigzag_ring_flash_attn_func": zigzag,
    "stripe_flash_attn_func": lambda x, rank, world: x[:, rank::world],
}


def check(own, function, expected, leaves, dout, cut):
    """Greatest relative error of out and gradients, cut as the inputs were."""
    own = [x.clone().contiguous().requires_grad_() for x in own]
    out = function(*own)
    grads = torch.autograd.grad(out, own, cut(dout))
    whole = torch.autograd.grad(expected, leaves, dout)
    return max(relative_error(x, cut(y)) for x, y in zip((out, *grads), (expected, *whole)))


def dense(rank, world, name):
    fa2_cpu.flash_attn.install_as_flash_attn()
    import ring_flash_attn

    *inputs, dout = tensors(B, N)
    leaves = [x.requires_grad_() for x in inputs]
    expected, _ = fa2.attention(*leaves, layout="bshd", causal="bottom_right")
    cut = lambda x: CUTS[name](x.detach(), rank, world)
    function = lambda q, k, v: getattr(ring_flash_attn, name)(q, k, v, causal=True)
    return check([cut(x) for x in leaves], function, expected, leaves, dout, cut)


@pytest.mark.parametrize("name", CUTS)
def test_ring_flash_attn(ranks, name):
    need(ranks, "ring_flash_attn")
    assert max(ranks.run(dense, name)) <= BOUND


CU = [0, 5, 18, 32]


def llama3(rank, world):
    fa2_cpu.flash_attn.install_as_flash_attn()
    import ring_flash_attn

    *inputs, dout = tensors(N)
    leaves = [x.requires_grad_() for x in inputs]
    cu = torch.tensor(CU, dtype=torch.int32)
    expected, _ = fa2.attention(*leaves, layout="thd", causal="bottom_right", cu_seqlens_q=cu, cu_seqlens_k=cu)
    cu_q, cu_k, max_q, max_k, rows = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, world)
    function = lambda q, k, v: ring_flash_attn.llama3_flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, heads_k_stride=1, local_k_slice=rows, causal=True
    )
    cut = lambda x: x.detach().chunk(world)[rank]
    return check([cut(x) for x in leaves], function, expected, leaves, dout, cut)


def test_llama3_varlen(ranks):
    need(ranks, "ring_flash_attn")
    assert max(ranks.run(llama3)) <= BOUND


def zigzag_varlen(rank, world):
    fa2_cpu.flash_attn.install_as_flash_attn()
    import ring_flash_attn

    cu = torch.tensor([0, 8, 32], dtype=torch.int32)
    *inputs, dout = tensors(32)
    leaves = [x.requires_grad_() for x in inputs]
    expected, _ = fa2.attention(*leaves, layout="thd", causal="bottom_right", cu_seqlens_q=cu, cu_seqlens_k=cu)

    def cut(x):
        documents = [x.detach()[a:b].unsqueeze(0) for a, b in zip(cu.tolist(), cu.tolist()[1:])]
        return torch.cat([zigzag(d, rank, world)[0] for d in documents])

    function = lambda q, k, v: ring_flash_attn.zigzag_ring_flash_attn_varlen_func(
        q, k, v, (cu // world).to(torch.int32), 24 // world, causal=True
    )
    return check([cut(x) for x in leaves], function, expected, leaves, dout, cut)


def test_zigzag_varlen(ranks):
    need(ranks, "ring_flash_attn")
    assert max(ranks.run(zigzag_varlen)) <= BOUND


def long_context(rank, world, ulysses, kind):
    fa2_cpu.flash_attn.install_as_flash_attn()
    import yunchang
    from yunchang.comm import EXTRACT_FUNC_DICT

    ring = world // ulysses
    yunchang.set_seq_parallel_pg(ulysses, ring, rank, world)
    *inputs, dout = tensors(B, N)
    leaves = [x.requires_grad_() for x in inputs]
    expected, _ = fa2.attention(*leaves, layout="bshd", causal="bottom_right")
    cut = lambda x: EXTRACT_FUNC_DICT[kind](x.detach(), rank, world, rd=ring, ud=ulysses)
    if ring == 1:
        # LongContextAttention's ring of one sends to itself, which gloo has not.
        layer = yunchang.UlyssesAttention(yunchang.globals.PROCESS_GROUP.ULYSSES_PG)
    else:
        layer = yunchang.LongContextAttention(ring_impl_type=kind)
    return check([cut(x) for x in leaves], lambda q, k, v: layer(q, k, v, causal=True), expected, leaves, dout, cut)


@pytest.mark.parametrize("kind", ["basic", "zigzag", "strip"])
@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_yunchang(ranks, ulysses, kind):
    need(ranks, "yunchang")
    if ulysses > ranks.world or (ulysses == ranks.world and kind != "basic"):
        pytest.skip("more heads' ranks than ranks, or no ring")
    assert max(ranks.run(long_context, ulysses, kind)) <= BOUND
