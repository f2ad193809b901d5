# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.torch.create_block_mask gives PyTorch's BlockMask; and what flex_attention reads from a BlockMask."""

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import fa2_cpu.torch as fa2  # noqa: E402
from fa2_cpu.torch._block_lists import BlockLists, Lists, pack, unpack  # noqa: E402
from fa2_cpu.torch._flex._of_pytorch import lists_of  # noqa: E402
from flex_examples import LENGTH, MASKS  # noqa: E402


def dense(lists, batch, heads, rows, keys):
    mask = lists.visible(slice(0, batch), slice(0, heads), slice(0, rows), slice(0, keys))
    return mask.expand(batch, heads, rows, keys)


@pytest.mark.parametrize("separate", [True, False], ids=["full blocks", "partial blocks alone"])
@pytest.mark.parametrize("size", [64, (32, 128), (48, 16), 100], ids=str)
@pytest.mark.parametrize("name", ["causal", "document", "per head", "empty rows", "neighbours"])
def test_equals_pytorchs(name, size, separate):
    batch, heads = (2, 3) if name == "per head" else (None, None)
    arguments = MASKS[name], batch, heads, LENGTH, LENGTH, "cpu", size
    mask = fa2.create_block_mask(*arguments, separate_full_blocks=separate)
    expected = flex.create_block_mask(*arguments, separate_full_blocks=separate)
    for attribute in flex.BlockMask._TENSOR_ATTRS:
        got, wanted = getattr(mask, attribute), getattr(expected, attribute)
        assert (got is None) == (wanted is None)
        assert got is None or (got.dtype == wanted.dtype and torch.equal(got, wanted)), attribute
    assert mask.BLOCK_SIZE == expected.BLOCK_SIZE and mask.seq_lengths == expected.seq_lengths
    visible = flex.create_mask(MASKS[name], batch, heads, LENGTH, LENGTH, device="cpu")
    for x in (mask, expected):  # bits that were kept, and bits of partial blocks alone
        assert torch.equal(dense(lists_of(x, batch or 1, heads or 1), batch or 1, heads or 1, LENGTH, LENGTH), visible)


def test_rectangles_and_chunks(monkeypatch):
    """Fewer queries than keys, and few rows of blocks at a time: the order of partial blocks is that of the whole."""
    from fa2_cpu.torch._flex import _of_pytorch, _table

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx + 70 >= kv_idx) & (kv_idx % (h + 2) != b)

    arguments = mask_mod, 2, 3, 130, 210, "cpu", 32
    expected = flex.create_block_mask(*arguments)
    visible = flex.create_mask(*arguments[:5], device="cpu")
    monkeypatch.setattr(_table, "_ELEMENTS", 1)
    monkeypatch.setattr(_table, "_EVALUATED", 6 * 210 * 5)  # five queries
    monkeypatch.setattr(_of_pytorch, "_ELEMENTS", 3 * 32 * 32)
    mask = fa2.create_block_mask(*arguments)
    assert torch.equal(mask.kv_indices, expected.kv_indices)
    for x in (mask, expected):
        assert torch.equal(dense(lists_of(x, 2, 3), 2, 3, 130, 210), visible)
    lists = lists_of(mask, 2, 3).part(slice(64, 130))
    assert torch.equal(dense(lists, 2, 3, 66, 210), visible[:, :, 64:])


def test_mask_mod_is_evaluated_once():
    """Not again by flex_attention; for PyTorch's own mask inside partial blocks; anew for another mask_mod."""
    calls = []

    def mask_mod(b, h, q_idx, kv_idx):
        calls.append(1)
        return q_idx >= kv_idx

    q = torch.randn(1, 2, 256, 16)
    mask = fa2.create_block_mask(mask_mod, None, None, 256, 256)
    count = len(calls)
    expected = fa2.flex_attention(q, q, q, block_mask=mask)
    assert len(calls) == count
    own = flex.create_block_mask(mask_mod, None, None, 256, 256, device="cpu")
    assert torch.equal(fa2.flex_attention(q, q, q, block_mask=own), expected)
    kept = len(calls)
    fa2.flex_attention(q, q, q, block_mask=own)
    assert len(calls) == kept
    own.mask_mod = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + 1
    assert not torch.equal(fa2.flex_attention(q, q, q, block_mask=own), expected)


def test_unsorted_lists_and_no_mask_mod():
    """Lists in any order; entries past the count mean nothing; without a mask_mod partial blocks are visible."""
    count = torch.tensor([[[2, 1]]], dtype=torch.int32)
    index = torch.tensor([[[[3, 0, 7, 7], [2, 9, 9, 9]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[1], [5]]]], dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(count, index, *full, BLOCK_SIZE=16, seq_lengths=(25, 64), compute_q_blocks=False)
    visible = torch.zeros(25, 64, dtype=torch.bool)
    visible[:16, :32] = visible[:16, 48:] = visible[16:, 32:48] = True
    assert torch.equal(dense(lists_of(mask, 1, 1), 1, 1, 25, 64)[0, 0], visible)


def test_mask_mod_of_heads_behind_shared_lists():
    """Lists of one head, a mask_mod that differs by head: each head has its bits, as in PyTorch's kernels."""
    count = torch.full((1, 1, 2), 2, dtype=torch.int32)
    index = torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2)

    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx + h

    mask = flex.BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=32, mask_mod=mask_mod)
    expected = flex.create_mask(mask_mod, 2, 3, 64, 64, device="cpu")
    assert torch.equal(dense(lists_of(mask, 2, 3), 2, 3, 64, 64), expected)
    assert torch.equal(dense(lists_of(mask, 2, 1), 2, 1, 64, 64), expected[:, :1])


def test_pack():
    mask = torch.rand(3, 5, 48) > 0.5
    bits = pack(mask)
    assert bits.shape == (3, 5, 6) and torch.equal(unpack(bits), mask)
    assert bool(bits[1, 2, 4] >> 3 & 1) == bool(mask[1, 2, 35])


def test_below_the_diagonal():
    lists = lists_of(fa2.create_block_mask(MASKS["document"], None, None, LENGTH, LENGTH, BLOCK_SIZE=32), 1, 1)
    assert lists.below(0) and lists.below(3) and not lists.below(-1)
    assert not lists_of(fa2.create_block_mask(MASKS["prefix"], 2, None, LENGTH, LENGTH), 2, 1).below(0)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    full = BlockLists(16, 16, 4, Lists(one * 0, one[None] * 0), Lists(one, one[None]), None)
    assert full.below(31) and not full.below(30) and full.span(slice(0, 16)) == slice(16, 32)


@pytest.mark.parametrize("lists, sentence", [
    (([1, 3], [[0, 0], [1, 0]]), r"kv_num_blocks\[0, 0, 1\] is 3; it must be 0 to 2"),
    (([1, -1], [[0, 0], [1, 0]]), r"kv_num_blocks\[0, 0, 1\] is -1"),
    (([1, 2], [[0, 7], [1, 2]]), r"kv_indices\[0, 0, 1, 1\] is 2; it must be 0 to 1"),
    (([1, 1], [[-3, 7], [1, 2]]), r"kv_indices\[0, 0, 0, 0\] is -3"),
    (([1, 2], [[0, 7], [1, 1]]), r"kv_indices\[0, 0, 1, 1\] is 1; the row has it twice"),
    (([1, 1], [[0, 7], [1, 0]], [0, 1], [[0, 0], [1, 0]]), r"full_kv_indices\[0, 0, 1\] lists column 1, which is in kv_indices"),
], ids=["count", "negative count", "column", "negative column", "twice", "both"])  # fmt: skip
@pytest.mark.parametrize("block_size", [64, 60])
def test_bad_lists(lists, sentence, block_size):
    tensors = [torch.tensor([[x]], dtype=torch.int32) for x in lists]
    mask = flex.BlockMask.from_kv_blocks(
        *tensors, BLOCK_SIZE=block_size, mask_mod=MASKS["causal"], seq_lengths=(100, 100), compute_q_blocks=False)
    q = torch.randn(1, 1, 100, 16)
    with pytest.raises(ValueError, match=sentence):
        fa2.flex_attention(q, q, q, block_mask=mask)


def test_errors():
    with pytest.raises(TypeError, match="mask_mod gives torch.float32"):
        fa2.create_block_mask(lambda b, h, q, k: (q - k) * 0.5, None, None, 64, 64)
    with pytest.raises(ValueError, match="Q_LEN is 0"):
        fa2.create_block_mask(MASKS["causal"], None, None, 0, 64)
    q = torch.randn(1, 2, 64, 16)
    mask = fa2.create_block_mask(MASKS["causal"], None, None, 128, 128)
    with pytest.raises(ValueError, match="block_mask is for 128 queries"):
        fa2.flex_attention(q, q, q, block_mask=mask)
    with pytest.raises(ValueError, match="block_mask is for 3 heads"):
        fa2.flex_attention(q, q, q, block_mask=fa2.create_block_mask(MASKS["causal"], None, 3, 64, 64))
    with pytest.raises(TypeError, match="block_mask is of type Tensor"):
        fa2.flex_attention(q, q, q, block_mask=torch.ones(64, 64))
