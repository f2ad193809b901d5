# SPDX-License-Identifier: Apache-2.0
"""BlockMask: lists of dense masks, results beside the mask as an array, arrays of other libraries, errors."""

import numpy as np
import pytest

import fa2_cpu as fa2
from conftest import BOUNDS, relative_l2

NAMES = ("dq", "dk", "dv")


def _documents(n, m, length):
    return np.arange(n)[:, None] // length == np.arange(m) // length


def _check(q, k, v, mask, **options):
    """Forward and backward beside the float64 oracle with the same lists."""
    out, lse = fa2.attention_forward(q, k, v, block_mask=mask, **options)
    expected, expected_lse = fa2.reference.attention_forward(q, k, v, block_mask=mask, **options)
    assert relative_l2(out, expected) <= BOUNDS["float32"]
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(expected_lse))
    grads = fa2.attention_backward(out, q, k, v, out, lse, block_mask=mask, **options)
    right = fa2.reference.attention_backward(out, q, k, v, out, lse, block_mask=mask, **options)
    for name, x, y in zip(NAMES, grads, right):
        assert relative_l2(x, y) <= BOUNDS["float32"], name
    return out, lse, grads


@pytest.mark.parametrize("block_size", [32, (64, 16), 128])
@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_from_dense(rng, block_size, planes):
    n, m = 150, 117
    q = rng.standard_normal((2, 4, n, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, m, 16), dtype=np.float32)
    dense = rng.random((*planes, n, m)) < 0.3
    dense[..., :64, :32] = True
    dense[..., 64:128, 32:] = False
    mask = fa2.BlockMask.from_dense(dense, block_size)
    out, lse, _ = _check(q, k, v, mask, causal="bottom_right", dropout_p=0.2, philox_seed=3)
    options = dict(causal="bottom_right", dropout_p=0.2, philox_seed=3)
    by_array, lse_by_array = fa2.reference.attention_forward(q, k, v, bias=dense, **options)
    assert relative_l2(out, by_array) <= BOUNDS["float32"]
    finite = np.isfinite(lse_by_array)
    np.testing.assert_array_equal(np.isfinite(lse), finite)


def test_lists_of_dense():
    dense = np.zeros((70, 50), bool)
    dense[:32, :16] = True  # full
    dense[64:, 48:] = True  # full, at both ends
    dense[33, 17] = True
    mask = fa2.BlockMask.from_dense(dense, (32, 16))
    assert mask.block_size == (32, 16)
    assert mask.kv_num_blocks.tolist() == [[[0, 1, 0]]] and mask.full_kv_num_blocks.tolist() == [[[1, 0, 1]]]
    assert mask.kv_indices[0, 0, 1, 0] == 1
    assert mask.full_kv_indices[0, 0, 0, 0] == 0 and mask.full_kv_indices[0, 0, 2, 0] == 3
    assert mask.bits.shape == (1, 64) and mask.bits.dtype == np.uint8
    assert mask.bits.nonzero()[1].tolist() == [2] and mask.bits[0, 2] == 2


def test_without_bits_and_full(rng):
    q, k, v = rng.standard_normal((3, 1, 2, 96, 16), dtype=np.float32)
    counts = np.array([[[1, 2, 0]]], np.int32)
    indices = np.array([[[[2, -1], [0, 1], [9, 9]]]], np.int32)
    mask = fa2.BlockMask(counts, indices, block_size=32)
    dense = np.zeros((3, 32, 3, 32), bool)
    for row, column in ((0, 2), (1, 0), (1, 1)):
        dense[row, :, column] = True
    out, lse, grads = _check(q, k, v, mask)
    expected, _ = fa2.attention_forward(q, k, v, bias=dense.reshape(96, 96))
    assert relative_l2(out, expected) <= BOUNDS["float32"]
    assert np.all(out[:, :, 64:] == 0) and np.all(np.isneginf(lse[:, :, 64:])) and np.all(grads.dq[:, :, 64:] == 0)


def test_packed_sequences(rng):
    # Blocks over the packed rows, whose ends are not those of the sequences.
    lengths = [41, 0, 77, 30]
    total = sum(lengths)
    q, k, v = rng.standard_normal((3, total, 2, 16), dtype=np.float32)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    dense = rng.random((total, total)) < 0.5
    dense[:32] = True
    mask = fa2.BlockMask.from_dense(dense, 32)
    _check(q, k, v, mask, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends)


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    from fa2_cpu.torch import _compute
    from fa2_cpu.torch._block_lists import BlockLists

    q, k, v = (torch.from_numpy(x) for x in rng.standard_normal((3, 1, 2, 130, 16), dtype=np.float32))
    numpy_mask = fa2.BlockMask.from_dense(_documents(130, 130, 50), 64)
    lists = [torch.from_numpy(x) for x in (numpy_mask.kv_num_blocks, numpy_mask.kv_indices,
                                           numpy_mask.full_kv_num_blocks, numpy_mask.full_kv_indices)]  # fmt: skip
    bits = torch.from_numpy(numpy_mask.bits)
    mask = fa2.BlockMask(*lists, block_size=64, bits=bits)
    expected, expected_lse = fa2.attention_forward(q, k, v, block_mask=numpy_mask)
    out, lse = fa2.attention_forward(q, k, v, block_mask=mask)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    options = _compute.AttentionOptions(precision="fast").masked_by(BlockLists.of(mask, 130))
    rest = (None, None, None, None, None, None, options)
    again, lse_again = _compute.forward(q, k, v, *rest)
    assert relative_l2(again.numpy(), expected.numpy()) <= BOUNDS["float32"]
    grads = _compute.backward(out, q, k, v, again, lse_again, None, *rest, [True] * 3 + [False] * 3)
    right = fa2.attention_backward(out, q, k, v, out, lse, block_mask=mask)
    for name, x, y in zip(NAMES, grads, right):
        assert relative_l2(x.numpy(), y.numpy()) <= BOUNDS["float32"], name


def test_errors(rng):
    q, k, v = rng.standard_normal((3, 1, 2, 96, 16), dtype=np.float32)
    counts, indices = np.ones((1, 1, 3), np.int32), np.zeros((1, 1, 3, 3), np.int32)
    with pytest.raises(ValueError, match="multiples of 16"):
        fa2.BlockMask(counts, indices, block_size=100)
    with pytest.raises(TypeError, match="kv_num_blocks is int64; it must be int32"):
        fa2.BlockMask(counts.astype(np.int64), indices)
    with pytest.raises(ValueError, match=r"kv_indices has shape \(1, 3, 3\)"):
        fa2.BlockMask(counts, indices[0])
    with pytest.raises(TypeError, match="block_mask is of type list; it must be a fa2_cpu.BlockMask"):
        fa2.attention_forward(q, k, v, block_mask=[counts, indices])
    indices[0, 0, 1, 0] = 5
    with pytest.raises(ValueError, match=r"block_mask.kv_indices\[0, 0, 1, 0\] is 5; it must be 0 to 2"):
        fa2.attention_forward(q, k, v, block_mask=fa2.BlockMask(counts, indices, block_size=32))
    with pytest.raises(ValueError, match="mask is float32"):
        fa2.BlockMask.from_dense(q)
