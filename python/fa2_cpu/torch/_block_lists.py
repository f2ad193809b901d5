# SPDX-License-Identifier: Apache-2.0
"""Which blocks of scores are visible, as lists for each row of blocks; bits for blocks that are visible in part."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from fa2_cpu import BlockMask
from fa2_cpu.torch._tensors import descriptor


def pack(mask: Tensor) -> Tensor:
    """bool [..., 8 n] as bits: uint8 [..., n], bit j & 7 of byte j >> 3."""
    return torch.from_numpy(np.packbits(mask.contiguous().numpy(), axis=-1, bitorder="little"))


def unpack(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.unpackbits(bits.contiguous().numpy(), axis=-1, bitorder="little")).bool()


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))


class Lists(NamedTuple):
    """count [B or 1, H or 1, rows] and index [B or 1, H or 1, rows, at most columns], i32: the first `count` of a row
    of indices, ascending, are blocks of keys."""

    count: Tensor
    index: Tensor

    def listed(self) -> Tensor:
        """bool of index's shape: which of its entries count."""
        return torch.arange(self.index.shape[-1], device="cpu") < self.count[..., None]

    def dense(self, columns: int) -> Tensor:
        """bool [B or 1, H or 1, rows, columns]."""
        table = torch.zeros(*self.index.shape[:-1], columns + 1, dtype=torch.bool, device="cpu")
        places = torch.where(self.listed(), self.index, columns).long()
        return table.scatter_(-1, places, True)[..., :columns]


def lists_of_table(table: Tensor) -> Lists:
    """The lists of a bool table [..., rows, columns], as torch.nn.attention.flex_attention orders them."""
    count = table.sum(-1, dtype=torch.int32)
    return Lists(count, table.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32))


class BlockLists:
    """A block mask: `partial` and `full` lists of blocks of block_q queries by block_k keys.

    bits is uint8 [partial blocks, block_q, block_k / 8], the blocks in the order of (batch, head, row, place in the
    list); None: partial blocks are all visible. Elements past the last query or key are hidden or of no account.
    """

    def __init__(
        self, block_q: int, block_k: int, columns: int, partial: Lists, full: Optional[Lists], bits: Optional[Tensor]
    ) -> None:
        self.block_q, self.block_k, self.columns = block_q, block_k, columns
        self.partial, self.full, self.bits = partial, full, bits
        self._tables: Optional[tuple[Tensor, Optional[Tensor]]] = None
        self._spans: Optional[tuple[Tensor, Tensor]] = None
        self._below: dict[int, bool] = {}
        self._tensors: Optional[list[Optional[Tensor]]] = None

    @classmethod
    def of(cls, mask: BlockMask, keys: int) -> BlockLists:
        """Those of a fa2_cpu.BlockMask of NumPy arrays or tensors, for so many keys."""
        lists = [
            None if count is None else Lists(_tensor(count), _tensor(index))
            for count, index in (
                (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices),
            )
        ]  # fmt: skip
        block_q, block_k = mask.block_size
        bits = None if mask.bits is None else _tensor(mask.bits).view(-1, block_q, block_k // 8)
        return cls(block_q, block_k, -(-keys // block_k), *lists, bits)

    def descriptors(self) -> tuple[Any, ...]:
        """The mask as the core takes it."""
        if self._tensors is None:
            lists = (*self.partial, *(self.full or (None, None)))
            bits = None if self.bits is None else self.bits.flatten(1)
            self._tensors = [None if x is None else x.contiguous() for x in (*lists, bits)]
        return (self.block_q, self.block_k, *map(descriptor, self._tensors))

    def _numbers(self) -> tuple[Tensor, Optional[Tensor]]:
        """[.., rows, columns]: which partial block, counted from 1, and 0 where there is none; and whether it is full."""
        if self._tables is None:
            numbers = torch.zeros(*self.partial.index.shape[:-1], self.columns + 1, dtype=torch.int64, device="cpu")
            listed = self.partial.listed()
            values = listed.reshape(-1).cumsum(0).view(listed.shape)
            numbers.scatter_(-1, torch.where(listed, self.partial.index, self.columns).long(), values)
            full = None if self.full is None else self.full.dense(self.columns)
            self._tables = numbers[..., : self.columns], full
        return self._tables

    def span(self, rows: slice) -> slice:
        """From the first to the last key that any head sees of these queries; empty where there is none."""
        if self._spans is None:
            numbers, full = self._numbers()
            seen = (numbers != 0).flatten(0, 1).any(0)
            if full is not None:
                seen = seen | full.flatten(0, 1).any(0)
            places = torch.arange(self.columns, device="cpu")
            first = torch.where(seen, places, self.columns).amin(-1)
            self._spans = first, torch.where(seen, places + 1, 0).amax(-1)
        blocks = slice(rows.start // self.block_q, -(-rows.stop // self.block_q))
        first, last = int(self._spans[0][blocks].amin()), int(self._spans[1][blocks].amax())
        return slice(first * self.block_k, max(first, last) * self.block_k)

    def visible(self, batch: slice, heads: slice, rows: slice, keys: slice) -> Tensor:
        """bool [batch or 1, heads or 1, rows, keys]."""
        numbers, full = self._numbers()
        row_blocks = slice(rows.start // self.block_q, -(-rows.stop // self.block_q))
        key_blocks = slice(keys.start // self.block_k, -(-keys.stop // self.block_k))

        def here(table: Tensor) -> Tensor:
            places = [s if size > 1 else slice(None) for s, size in zip((batch, heads), table.shape)]
            return table[(*places, row_blocks, key_blocks)]

        number = here(numbers)
        seen = number != 0
        inside = seen[..., None, None].expand(*seen.shape, self.block_q, self.block_k)
        if self.bits is not None:
            inside = inside.clone()
            inside[seen] = unpack(self.bits[number[seen] - 1])
        if full is not None:
            inside = inside | here(full)[..., None, None]
        b, h, r, c = seen.shape
        mask = inside.transpose(3, 4).reshape(b, h, r * self.block_q, c * self.block_k)
        top, left = rows.start - row_blocks.start * self.block_q, keys.start - key_blocks.start * self.block_k
        return mask[:, :, top : top + rows.stop - rows.start, left : left + keys.stop - keys.start]

    def below(self, diagonal: int) -> bool:
        """Whether query i sees no key beyond i + diagonal."""
        if diagonal not in self._below:
            self._below[diagonal] = all(self._list_below(*x, diagonal) for x in ((self.partial, self.bits), (self.full, None)))
        return self._below[diagonal]

    def _list_below(self, lists: Optional[Lists], bits: Optional[Tensor], diagonal: int) -> bool:
        if lists is None:
            return True
        listed = lists.listed()
        first_row = listed.nonzero(as_tuple=True)[2] * self.block_q
        first_key = lists.index[listed] * self.block_k
        over = first_key + self.block_k - 1 > first_row + diagonal
        if bits is None or not over.any():
            return not over.any()
        rows, keys = (torch.arange(n, device="cpu") for n in (self.block_q, self.block_k))
        for block in over.nonzero()[:, 0].split(1024):
            beyond = (first_key[block, None, None] + keys) > (first_row[block, None, None] + rows[:, None] + diagonal)
            if (unpack(bits[block]) & beyond).any():
                return False
        return True

    def part(self, rows: slice) -> BlockLists:
        """The lists of some queries: whole blocks, but for the last."""
        blocks = slice(rows.start // self.block_q, -(-rows.stop // self.block_q))
        lists = [None if x is None else Lists(x.count[:, :, blocks], x.index[:, :, blocks]) for x in (self.partial, self.full)]
        bits = self.bits
        if bits is not None:
            ends = self.partial.count.reshape(-1).cumsum(0).view(self.partial.count.shape)[:, :, blocks]
            starts = ends - lists[0].count
            places = torch.arange(lists[0].index.shape[-1], device="cpu") + starts[..., None]
            bits = bits[places[lists[0].listed()]]
        return BlockLists(self.block_q, self.block_k, self.columns, lists[0], lists[1], bits)
