# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.torch.flex_attention against float64, forward and every gradient."""

import warnings

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import fa2_cpu  # noqa: E402
import fa2_cpu.torch as fa2  # noqa: E402
from conftest import BOUNDS, relative_l2  # noqa: E402
from flex_examples import LENGTH, MASKS, answer, modified, score_mods  # noqa: E402


def tensors(dtype, batch=2, heads=4, kv_heads=2, rows=LENGTH, keys=LENGTH, depth=16):
    shapes = ((batch, heads, rows, depth), (batch, kv_heads, keys, depth), (batch, kv_heads, keys, depth + 8))
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def weights_of(out, lse):
    """Of a loss: both results count, rows that see nothing do not."""
    return [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape) for x in (out, lse)]


def loss_of(out, lse, by):
    finite = torch.isfinite(lse)
    return (out.double() * by[0]).sum() + (lse.double().masked_fill(~finite, 0.0) * by[1]).sum()


def compare(qkv, score_mod, mask, visible, captured=(), factor=1.0, **keywords):
    """fa2 in the tensors' dtype against float64 on the same values."""
    out, lse = fa2.flex_attention(*qkv, score_mod, mask, enable_gqa=True, return_lse=True, **keywords)
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    expected, expected_lse = answer(*doubles, score_mod, visible, keywords.get("scale"))
    by = weights_of(out, lse)
    got = torch.autograd.grad(loss_of(out, lse, by), [*qkv, *captured])
    wanted = torch.autograd.grad(loss_of(expected, expected_lse, by), [*doubles, *captured])
    bound = factor * BOUNDS[str(qkv[0].dtype).removeprefix("torch.")]
    assert out.dtype == qkv[0].dtype
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected_lse))
    seen = torch.isfinite(lse)
    assert not out[~seen].any()
    assert relative_l2(lse[seen].detach(), expected_lse[seen].detach()) <= bound
    for name, x, y in zip(("out", "dq", "dk", "dv", *map(str, range(9))), (out, *got), (expected, *wanted)):
        assert relative_l2(x.detach().double(), y.detach()) <= bound, name


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    torch.manual_seed(0)
    mask_mod = MASKS[name]
    mask = fa2.create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, BLOCK_SIZE=64)
    visible = flex.create_mask(mask_mod, 2, 4, LENGTH, LENGTH, device="cpu")
    compare(tensors(torch.float64), None, mask, visible)


@pytest.mark.parametrize("name", score_mods(4, 3, 3))
@pytest.mark.parametrize("masked", [False, True], ids=["all", "causal"])
def test_score_mods(name, masked, monkeypatch):
    from fa2_cpu.torch._flex import _attention

    monkeypatch.setattr(_attention, "_warned", set())  # a warning is given once
    torch.manual_seed(0)
    rows, keys = (150, 150) if masked else (70, 90)
    score_mod, captured, fused = score_mods(4, rows, keys)[name]
    mask = visible = None
    if masked:
        mask = fa2.create_block_mask(MASKS["causal"], None, None, rows, keys, BLOCK_SIZE=32)
        visible = torch.ones(rows, keys, dtype=torch.bool).tril()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(tensors(torch.float64, rows=rows, keys=keys), score_mod, mask, visible, captured, scale=0.3)
    assert fused == (not [w for w in caught if "block by block" in str(w.message)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["identity", "sum", "square", "alibi learned"])
def test_dtypes(dtype, name):
    torch.manual_seed(0)
    score_mod, captured, _ = score_mods(4, LENGTH, LENGTH)[name]
    mask = fa2.create_block_mask(MASKS["sinks"], None, None, LENGTH, LENGTH)
    visible = flex.create_mask(MASKS["sinks"], 1, 1, LENGTH, LENGTH, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(tensors(dtype), score_mod, mask, visible, captured, factor=1.0 if dtype is torch.float32 else 2.0)


def test_broadcast_and_odd_sizes():
    """One batch element of keys and values; a mask of each batch element, uneven lengths, several block sizes."""
    torch.manual_seed(0)
    mask_mod = MASKS["prefix"]
    for size, rows, keys in ((128, 130, 97), ((32, 80), 61, 129), (100, 90, 200)):
        q, k, v = tensors(torch.float64, rows=rows, keys=keys)
        k, v = (x[:1].detach().requires_grad_() for x in (k, v))
        mask = fa2.create_block_mask(mask_mod, 2, None, rows, keys, BLOCK_SIZE=size)
        compare([q, k, v], None, mask, flex.create_mask(mask_mod, 2, 1, rows, keys, device="cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_random_lists(seed):
    """Lists that PyTorch's create_block_mask would not make: of each head, with bits, with rows that see nothing."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    batch, heads = ((1, 1), (2, 1), (1, 4), (2, 4))[seed]
    sizes = (32, 16, 64, 48)[seed], (16, 64, 32, 16)[seed]
    rows, columns = -(-150 // sizes[0]), -(-170 // sizes[1])
    kinds = torch.randint(4, (batch, heads, rows, columns), generator=generator)  # 2 is partial, 3 full
    lists = []
    for kind in (2, 3):
        table = (kinds == kind).int()
        lists += [table.sum(-1, dtype=torch.int32), table.argsort(dim=-1, descending=True, stable=True).int()]
    bits = torch.rand(150, 170, generator=generator) > 0.5
    mask = flex.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=sizes, mask_mod=lambda b, h, q_idx, kv_idx: bits[q_idx, kv_idx], seq_lengths=(150, 170))
    kinds = kinds.repeat_interleave(sizes[0], 2)[:, :, :150].repeat_interleave(sizes[1], 3)[..., :170]
    visible = (kinds == 3) | ((kinds == 2) & bits)
    name = ("identity", "alibi", "relative", "square")[seed]
    score_mod, captured, _ = score_mods(4, 150, 170)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(tensors(torch.float64, rows=150, keys=170), score_mod, mask, visible, captured)


def test_block_mask_of_fa2():
    """fa2_cpu.BlockMask, in flex_attention and in attention: the same bits as PyTorch's mask."""
    torch.manual_seed(0)
    qkv = tensors(torch.float32)
    visible = flex.create_mask(MASKS["per head"], 1, 4, LENGTH, LENGTH, device="cpu")
    mask = fa2_cpu.BlockMask.from_dense(visible, (32, 64))
    own = fa2.create_block_mask(MASKS["per head"], None, 4, LENGTH, LENGTH, BLOCK_SIZE=(32, 64))
    expected = fa2.flex_attention(*qkv, block_mask=own, enable_gqa=True)
    assert torch.equal(fa2.flex_attention(*qkv, block_mask=mask, enable_gqa=True), expected)
    assert torch.equal(fa2.attention(*qkv, block_mask=mask)[0], expected)
    score_mod, captured, _ = score_mods(4, LENGTH, LENGTH)["relative"]
    compare(qkv, score_mod, mask, visible, captured)
    with pytest.raises(TypeError, match="must be a fa2_cpu.BlockMask"):
        fa2.attention(*qkv, block_mask=own)


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_second_derivatives_under_a_mask(layout):
    """Of a fused call, against those of PyTorch's operators in float64."""
    torch.manual_seed(0)
    q, k, v = tensors(torch.float64, batch=1, rows=50, keys=50)
    bias = torch.randn(50, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(1, 4, 50, 50) > 0.4
    visible[..., 7, :] = False
    cu = torch.tensor([0, 50] if layout == "bhsd" else [0, 18, 50])
    if layout == "thd":
        document = torch.arange(50) >= 18
        visible[:] = visible[:, :1] & (document[:, None] == document)
        mask = fa2_cpu.BlockMask.from_dense(visible[:, :1], 16)
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        out = fa2.attention(*packed, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, block_mask=mask)[0]
        out, term, leaves = out.transpose(0, 1)[None], None, [q, k, v]
    else:
        mask = fa2_cpu.BlockMask.from_dense(visible, 16)
        term, leaves = lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx], [q, k, v, bias]
        out = fa2.flex_attention(q, k, v, term, mask, enable_gqa=True)
    results = []
    for y in (out, answer(q, k, v, term, visible, None)[0]):
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for x, y in zip(*results):
        assert relative_l2(x, y) <= 1e-11


def test_bias_of_n_squared_in_chunks(monkeypatch):
    """The relative bias and its gradient do not depend on how many queries have theirs at a time."""
    from fa2_cpu.torch._flex import _bias_chunks

    monkeypatch.setattr(_bias_chunks, "_ELEMENTS", 1)
    for name, masked in (("relative", False), ("sum", True)):
        torch.manual_seed(0)
        score_mod, captured, _ = score_mods(4, LENGTH, LENGTH)[name]
        mask = fa2.create_block_mask(MASKS["window"], None, None, LENGTH, LENGTH, BLOCK_SIZE=32) if masked else None
        visible = flex.create_mask(MASKS["window"], 1, 1, LENGTH, LENGTH, device="cpu") if masked else None
        compare(tensors(torch.float64), score_mod, mask, visible, captured)


def test_as_pytorchs_own_forward():
    """What PyTorch computes without compiling, on a CPU, forward only."""
    q, k, v = (x.detach() for x in tensors(torch.float64, heads=2, rows=64, keys=64))
    score_mod = score_mods(2, 64, 64)["softcap"][0]
    mask = flex.create_block_mask(MASKS["causal"], None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
        with torch.no_grad():
            expected = flex.flex_attention(q, k, v, score_mod, mask)
    assert relative_l2(fa2.flex_attention(q, k, v, score_mod, mask), expected) <= 1e-13


def test_aux(monkeypatch):
    from fa2_cpu.torch._flex import _attention

    monkeypatch.setattr(_attention, "_warned", set())
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this PyTorch has no AuxRequest")
    q, k, v = tensors(torch.float64, heads=2, rows=64, keys=64)
    score_mod = score_mods(2, 64, 64)["softcap"][0]
    mask = fa2.create_block_mask(MASKS["causal"], None, None, 64, 64, BLOCK_SIZE=32)
    out, lse = fa2.flex_attention(q, k, v, score_mod, mask, return_lse=True)
    fused, aux = fa2.flex_attention(q, k, v, score_mod, mask, return_aux=flex.AuxRequest(lse=True))
    assert torch.equal(fused, out) and torch.equal(aux.lse, lse) and aux.max_scores is None
    with pytest.warns(UserWarning, match="max_scores is wanted"):
        blocks, aux = fa2.flex_attention(q, k, v, score_mod, mask, return_aux=flex.AuxRequest(max_scores=True))
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    scores = modified(score_mod, q @ k.mT / 4).masked_fill(hidden, -float("inf"))
    assert relative_l2(blocks.detach(), out.detach()) <= 1e-13 and aux.lse is None
    assert relative_l2(aux.max_scores, scores.amax(-1).detach()) <= 1e-13 and not aux.max_scores.requires_grad
    with pytest.raises(ValueError, match="both given"):
        fa2.flex_attention(q, k, v, return_lse=True, return_aux=flex.AuxRequest())


def test_autocast():
    q, k, v = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa2.flex_attention(q, k, v, enable_gqa=True)
        assert out.dtype == torch.bfloat16
        (out.float().sum()).backward()
    assert q.grad.dtype == torch.float32


def test_one_warning_names_the_reason():
    q = torch.randn(1, 1, 32, 16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score.sigmoid()

    with pytest.warns(UserWarning, match="block by block.*it applies sigmoid to the score"):
        fa2.flex_attention(q, q, q, score_mod)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa2.flex_attention(q, q, q, score_mod)


def _branches(score, b, h, q_idx, kv_idx):
    return score if q_idx >= kv_idx else -score


@pytest.mark.parametrize("score_mod, sentence", [
    (_branches, "depends on the value of a score or of an index"),
    (lambda score, b, h, q, k: score + torch.rand(()), "draws random numbers"),
    (lambda score, b, h, q, k: 3.0, "it gives float"),
    (lambda score, b, h, q, k: score.expand(4), "it gives a tensor of shape"),
], ids=["branch", "random", "number", "shape"])  # fmt: skip
def test_what_cannot_be_traced(score_mod, sentence):
    q = torch.randn(1, 1, 32, 16)
    with pytest.raises(ValueError, match=f"cannot be traced: .*{sentence}"):
        fa2.flex_attention(q, q, q, score_mod)


def test_errors():
    q = torch.randn(1, 4, 32, 16)
    with pytest.raises(TypeError, match="one dtype"):
        fa2.flex_attention(q, q.double(), q)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        fa2.flex_attention(q, q[:, :2], q[:, :2])
    with pytest.raises(ValueError, match=r"\[B, H, N, D\]"):
        fa2.flex_attention(q[0], q, q)
    with pytest.raises(ValueError, match="have shapes"):
        fa2.flex_attention(q, q[..., :8], q)
