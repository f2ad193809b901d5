# SPDX-License-Identifier: Apache-2.0
"""PyTorch's BlockMask as BlockLists: lists sorted, mask_mod evaluated inside partial blocks once, and kept."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.attention.flex_attention as pytorch
from torch import Tensor

from fa2_cpu.torch._block_lists import BlockLists, Lists, pack
from fa2_cpu.torch._flex._graph import PLACES, Graph
from fa2_cpu.torch._flex._index_functions import mask_of_blocks
from fa2_cpu.torch._flex._table import block_lists, of_mask_mod

_KEPT = "_fa2_block_lists"
# Elements of mask_mod's result at a time.
_ELEMENTS = 1 << 22


def _sources(mask: pytorch.BlockMask) -> tuple[Any, ...]:
    """What the lists are made of: they are made anew when one of these is another."""
    tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return (mask.mask_mod, mask.seq_lengths, *tensors, *(None if x is None else x._version for x in tensors))


def keep_lists(mask: pytorch.BlockMask, lists: Optional[BlockLists], heads: Optional[tuple[int, int]] = None) -> None:
    """heads: the batch and heads that the lists are for alone; None: any."""
    setattr(mask, _KEPT, (_sources(mask), heads, lists))


def lists_of(mask: pytorch.BlockMask, batch: int, heads: int) -> BlockLists:
    """The BlockLists of a mask for so many batch elements and query heads."""
    kept = getattr(mask, _KEPT, None)
    if kept is not None:
        sources, made_for, lists = kept
        same = all(a is b or (isinstance(a, (int, tuple)) and a == b) for a, b in zip(sources, _sources(mask)))
        if same and made_for in (None, (batch, heads)):
            return lists
    sizes, lengths, mask_mod = mask.BLOCK_SIZE, mask.seq_lengths, mask.mask_mod
    columns = -(-lengths[1] // sizes[1])
    partial = _sorted("kv", mask.kv_num_blocks, mask.kv_indices, columns)
    full = None
    if mask.full_kv_num_blocks is not None:
        full = _sorted("full_kv", mask.full_kv_num_blocks, mask.full_kv_indices, columns)
        _refuse_both(partial, full, columns)
    made_for = None
    if mask_mod is pytorch.noop_mask:
        mask_mod = None
    else:
        wanted = [n if name in _dims(mask_mod) else 1 for name, n in (("b", batch), ("h", heads))]
        if any(size < n for size, n in zip(partial.count.shape, wanted)):
            made_for = (batch, heads)
            partial = Lists(*(_expanded(x, wanted) for x in partial))
            full = None if full is None else Lists(*(_expanded(x, wanted) for x in full))
    if sizes[0] % 16 or sizes[1] % 16 or sizes[0] * sizes[1] > _ELEMENTS:
        lists = _in_other_blocks(partial, full, mask_mod, sizes, lengths)
    else:
        bits = None if mask_mod is None else _bits(mask_mod, partial, sizes, lengths)
        lists = BlockLists(*sizes, columns, partial, full, bits)
    keep_lists(mask, lists, made_for)
    return lists


def _dims(mask_mod: Any) -> frozenset[str]:
    """Of b, h, q and k those that mask_mod reads; all where no graph tells."""
    try:
        return Graph(mask_mod, None).output.dims
    except Exception:  # what is wrong with it shows when it is evaluated
        return frozenset(PLACES)


def _expanded(x: Tensor, sizes: list[int]) -> Tensor:
    shape = [max(size, old) for size, old in zip(sizes, x.shape)]
    return x.expand(*shape, *x.shape[2:])


def _in_other_blocks(partial: Lists, full: Optional[Lists], mask_mod: Any, sizes, lengths) -> BlockLists:
    """The mask in blocks of 128 by 128, where its own are of a size that the kernels do not take."""
    columns = -(-lengths[1] // sizes[1])
    tables = [None if x is None else x.dense(columns) for x in (partial, full)]

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        places = [b if tables[0].shape[0] > 1 else 0, h if tables[0].shape[1] > 1 else 0, q // sizes[0], k // sizes[1]]
        result = tables[0][tuple(places)]
        if mask_mod is not None:
            result = result & mask_mod(b, h, q, k)
        return result if tables[1] is None else result | tables[1][tuple(places)]

    batch, heads = tables[0].shape[:2]
    return block_lists(of_mask_mod(seen, batch, heads, lengths[1]), batch * heads, *lengths, (128, 128))


def _sorted(name: str, count: Tensor, index: Tensor, columns: int) -> Lists:
    """The lists [B, H, rows] and [B, H, rows, columns] with what counts in order; ValueError where something is wrong."""
    for what, x in ((f"{name}_num_blocks", count), (f"{name}_indices", index)):
        if not x.is_cpu:
            raise ValueError(f"block_mask.{what} is on {x.device}; it must be on the CPU, as query is")
    while index.dim() < 4:
        count, index = count[None], index[None]
    lists = Lists(count.to(torch.int32), index.to(torch.int32))
    width = index.shape[-1]
    _refuse(f"{name}_num_blocks", count, (count < 0) | (count > width), f"it must be 0 to {width}, the width of {name}_indices")
    listed = lists.listed()
    beyond = listed & ((index < 0) | (index >= columns))
    _refuse(f"{name}_indices", index, beyond, f"it must be 0 to {columns - 1}, a column of blocks of the keys")
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(listed, lists.index, last).sort(-1).values
    twice = torch.zeros_like(listed)
    twice[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & listed[..., 1:]
    _refuse(f"{name}_indices", ordered, twice, "the row has it twice, where each may come once (positions: in order)")
    return Lists(lists.count, torch.where(ordered == last, 0, ordered))


def _refuse(name: str, x: Tensor, bad: Tensor, must: str) -> None:
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"block_mask.{name}{place} is {int(x[tuple(place)])}; {must}")


def _refuse_both(partial: Lists, full: Lists, columns: int) -> None:
    if partial.index.shape[:3] != full.index.shape[:3]:
        return  # of shapes that broadcast, or that the core refuses
    both = partial.dense(columns) & full.dense(columns)
    if bool(both.any()):
        *row, column = both.nonzero()[0].tolist()
        raise ValueError(
            f"block_mask.full_kv_indices{row} lists column {column}, which is in kv_indices too; a block must be partial or full"
        )


def _bits(mask_mod: Any, partial: Lists, sizes: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
    """mask_mod inside the partial blocks: uint8 [blocks, block_q, block_k / 8]."""
    listed = partial.listed()
    b, h, row, _ = listed.nonzero(as_tuple=True)
    column = partial.index[listed].long()
    parts = [torch.empty(0, sizes[0], sizes[1] // 8, dtype=torch.uint8, device="cpu")]
    step = max(1, _ELEMENTS // (sizes[0] * sizes[1]))
    within = [torch.arange(size, device="cpu") for size in sizes]
    for first in range(0, len(b), step):
        here = slice(first, first + step)
        q, k = (x[here, None] * size + w for x, size, w in zip((row, column), sizes, within))
        # Captured tensors have no elements past the last query and key.
        inside = [x < length for x, length in zip((q, k), lengths)]
        q, k = (x.clamp_(max=length - 1) for x, length in zip((q, k), lengths))
        mask = mask_of_blocks(mask_mod, b[here], h[here], q, k)
        parts.append(pack(mask & inside[0][:, :, None] & inside[1][:, None]))
    return torch.cat(parts)
