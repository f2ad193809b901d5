# SPDX-License-Identifier: Apache-2.0
"""The blocks that a mask_mod leaves visible, found chunk by chunk of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch._block_lists import BlockLists, lists_of_table, pack
from fa2_cpu.torch._flex._index_functions import mask_of_ranges

# Elements of the mask that exist at a time, and for which a mask_mod is evaluated, in int64 mostly: they stay in caches.
_ELEMENTS = 1 << 22
_EVALUATED = 1 << 20


def block_lists(
    source: Callable[[slice], Tensor], heads: int, q_len: int, kv_len: int, sizes: tuple[int, int], separate: bool = True
) -> BlockLists:
    """The lists and bits of a mask.

    Args:
      source: gives bool [B, H, rows, kv_len] of some queries; a dimension of stride 0 becomes 1.
      heads: about B · H, by which the number of queries at a time is chosen.
      sizes: queries and keys of a block.
      separate: whether blocks that are all visible are full ones.
    """
    block_q, block_k = sizes
    step = max(1, _ELEMENTS // max(1, block_q * kv_len * heads)) * block_q
    partial, full, bits = [], [], []
    for row in range(0, q_len, step):
        blocks = _Blocks(source(slice(row, min(row + step, q_len))), sizes)
        some, every = blocks.seen()
        if not separate:
            every = torch.zeros_like(every)
        partial.append(some & ~every)
        full.append(every)
        bits.append(blocks.bits(partial[-1]))
    partial, full = (torch.cat(x, 2) for x in (partial, full))
    return BlockLists(
        block_q, block_k, -(-kv_len // block_k), lists_of_table(partial), lists_of_table(full) if separate else None,
        _in_order(bits, partial, step // block_q),
    )  # fmt: skip


def of_mask_mod(mask_mod: Callable[..., Tensor], batch: int, heads: int, kv_len: int) -> Callable[[slice], Tensor]:
    """A mask_mod as a source of block_lists."""
    b, h, k = (torch.arange(n, device="cpu") for n in (batch, heads, kv_len))
    step = max(1, _EVALUATED // (batch * heads * kv_len))

    def source(rows: slice) -> Tensor:
        result = None
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            part = _without_copies(mask_of_ranges(mask_mod, b, h, torch.arange(first, last, device="cpu"), k))
            if last - first == rows.stop - rows.start:
                return part
            if result is None:
                result = part.new_empty(*part.shape[:2], rows.stop - rows.start, kv_len)
            result[:, :, first - rows.start : last - rows.start] = part
        return result

    return source


def _without_copies(mask: Tensor) -> Tensor:
    """The mask with one batch element or head where all are the same memory."""
    for dim in (0, 1):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _in_order(bits: list[Optional[Tensor]], partial: Tensor, step: int) -> Optional[Tensor]:
    """Bits of chunks of rows, each in the order of (batch, head, row, column), in this order altogether."""
    if bits[0] is None:
        return None
    together = torch.cat(bits)
    if len(bits) == 1 or partial.shape[0] * partial.shape[1] == 1:
        return together
    numbers = torch.zeros(partial.shape, dtype=torch.int64, device="cpu")
    count = 0
    for row in range(0, partial.shape[2], step):
        here = partial[:, :, row : row + step]
        found = int(here.sum())
        numbers[:, :, row : row + step][here] = torch.arange(count, count + found, device="cpu")
        count += found
    return together[numbers[partial]]


class _Blocks:
    """A mask [B, H, Q, K] cut into blocks, padded with False."""

    def __init__(self, mask: Tensor, sizes: tuple[int, int]) -> None:
        mask = _without_copies(mask)
        block_q, block_k = sizes
        pad = (-mask.shape[3] % block_k, -mask.shape[2] % block_q)
        mask = torch.nn.functional.pad(mask, (0, pad[0], 0, pad[1])) if any(pad) else mask.contiguous()
        self._mask = mask.unflatten(2, (-1, block_q))  # [B, H, rows, block_q, K]
        self._block_k = block_k

    def seen(self) -> tuple[Tensor, Tensor]:
        """bool [B, H, rows, columns]: whether any and whether every element of a block is True."""
        bytes_ = self._mask.view(torch.uint8)
        some = bytes_.amax(3).unflatten(3, (-1, self._block_k)).amax(4)
        every = bytes_.amin(3).unflatten(3, (-1, self._block_k)).amin(4)
        return some.bool(), every.bool()

    def bits(self, which: Tensor) -> Optional[Tensor]:
        """[blocks, block_q, block_k / 8] of those blocks; None where bytes do not divide a block's rows."""
        if self._block_k % 8:
            return None
        return pack(self._mask.unflatten(4, (-1, self._block_k)).transpose(3, 4)[which])
