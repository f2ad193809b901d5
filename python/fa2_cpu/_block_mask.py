# SPDX-License-Identifier: Apache-2.0
"""BlockMask: which blocks of queries x keys attention sees, as lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa2_cpu._arrays import Array, core_array
from fa2_cpu._arrays import describe as _describe


def _sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    from fa2_cpu._options import fitting

    try:
        rows, columns = block_size
    except TypeError:
        rows = columns = block_size
    except ValueError:
        raise ValueError(f"block_size is {block_size!r}; it must be an int or a pair (queries, keys)") from None
    rows, columns = fitting("block_size", rows, 64), fitting("block_size", columns, 64)
    for size in (rows, columns):
        if size < 16 or size % 16 or size > 1 << 30:
            raise ValueError(f"block_size is {block_size!r}; sizes must be multiples of 16 from 16 to 2**30")
    return rows, columns


def _list(name: str, x: Array | None, rank: int, shape: str) -> Array | None:
    if x is None:
        return None
    dtype, sizes = _describe(name, x)
    if dtype != ("uint8" if name == "bits" else "int32"):
        raise TypeError(f"{name} is {dtype}; it must be {'uint8' if name == 'bits' else 'int32'}")
    if len(sizes) != rank:
        raise ValueError(f"{name} has shape {sizes}; it must be {shape}")
    return x


class BlockMask:
    """Which blocks of queries x keys are visible, as lists for each row of blocks.

    Hidden blocks cost nothing, in forward and backward, and the mask takes memory for the blocks
    that it lists alone. Attributes are the arguments; block_size is a pair.

    Args:
      kv_num_blocks: i32 [B or 1, Hq or 1, rows], rows = ⌈Nq / block size⌉: how many partial blocks
        each row of blocks has.
      kv_indices: i32 [.., .., rows, ≤ columns]: their columns, the first kv_num_blocks of them
        count and ascend.
      full_kv_num_blocks, full_kv_indices: the same of the blocks that are visible altogether.
      block_size: queries and keys of a block, an int or a pair, multiples of 16.
      bits: u8 [partial blocks, queries · keys / 8]: the pairs that partial blocks show, in the order
        of (batch, head, row, position in the list). A block's rows are its queries, the key j of
        one is bit j & 7 of byte j >> 3. None shows all of them, as far as causal, window and bias
        do.

    In layout "thd" rows and columns count the packed rows of all sequences; pairs of different
    sequences stay hidden.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> i = np.arange(256)
      >>> mask = fa2.BlockMask.from_dense(i[:, None] // 100 == i // 100, block_size=64)
      >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
      ([[[1, 4, 2, 3]]], [[[1, 0, 1, 0]]])
      >>> q = np.random.default_rng(0).standard_normal((1, 2, 256, 16), dtype=np.float32)
      >>> out, lse = fa2.attention_forward(q, q, q, block_mask=mask)
    """

    def __init__(
        self,
        kv_num_blocks: Array,
        kv_indices: Array,
        full_kv_num_blocks: Array | None = None,
        full_kv_indices: Array | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        bits: Array | None = None,
    ) -> None:
        counts, indices = "[B or 1, Hq or 1, rows]", "[B or 1, Hq or 1, rows, columns or fewer]"
        self.block_size = _sizes(block_size)
        self.kv_num_blocks = _list("kv_num_blocks", kv_num_blocks, 3, counts)
        self.kv_indices = _list("kv_indices", kv_indices, 4, indices)
        self.full_kv_num_blocks = _list("full_kv_num_blocks", full_kv_num_blocks, 3, counts)
        self.full_kv_indices = _list("full_kv_indices", full_kv_indices, 4, indices)
        self.bits = _list("bits", bits, 2, "[partial blocks, queries · keys of a block / 8]")
        for name in ("kv_num_blocks", "kv_indices"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} is None; it must be an int32 array")

    @classmethod
    def from_dense(cls, mask: Array, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """The lists of a boolean array, True where a query sees a key.

        Args:
          mask: bool [B or 1, Hq or 1, Nq, Nk], leading dimensions may be left out.
          block_size: as above.

        Returns:
          A mask of NumPy arrays: blocks that are True altogether are full, those that are in part
          have their bits.
        """
        rows, columns = _sizes(block_size)
        dtype, shape = _describe("mask", mask)
        if dtype != "bool" or not 2 <= len(shape) <= 4:
            raise ValueError(f"mask is {dtype} of shape {shape}; it must be bool of [B, Hq, Nq, Nk]")
        dense = np.from_dlpack(mask) if not isinstance(mask, np.ndarray) else mask
        dense = dense.reshape((1,) * (4 - len(shape)) + tuple(shape))
        batch, heads, nq, nk = dense.shape
        counts = [-(-nq // rows), -(-nk // columns)]
        blocks = np.zeros((batch, heads, counts[0] * rows, counts[1] * columns), np.bool_)
        blocks[:, :, :nq, :nk] = dense
        # Pairs past the end do not keep a block from being full.
        there = np.zeros(blocks.shape[2:], np.bool_)
        there[:nq, :nk] = True

        def cut(x):
            x = x.reshape(*x.shape[:-2], counts[0], rows, counts[1], columns)
            return np.moveaxis(x, -2, -3)  # [.., row, column, query, key]

        blocks, there = cut(blocks), cut(there)
        any_visible = blocks.any(axis=(-1, -2))
        full = (blocks | ~there).all(axis=(-1, -2)) & any_visible
        partial = any_visible & ~full

        def listed(which):
            indices = np.argsort(~which, axis=-1, kind="stable").astype(np.int32)
            return which.sum(axis=-1, dtype=np.int32), indices

        bits = np.packbits(blocks[partial], axis=-1, bitorder="little").reshape(-1, rows * columns // 8)
        return cls(*listed(partial), *listed(full), block_size=(rows, columns), bits=bits)


def core_block_mask(mask: Any) -> tuple[Any, ...] | None:
    """What the core takes: block sizes, both lists and bits."""
    if mask is None:
        return None
    if not isinstance(mask, BlockMask):
        raise TypeError(f"block_mask is of type {type(mask).__name__}; it must be a fa2_cpu.BlockMask")
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "bits")
    return (*mask.block_size, *(core_array(f"block_mask.{name}", getattr(mask, name)) for name in names))
