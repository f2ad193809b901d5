# SPDX-License-Identifier: Apache-2.0
"""The scores of one attention call, cut into blocks: some batch elements and heads, some queries, all keys they may see.

PyTorch's products work on such blocks. A block holds all heads of a group (GQA), and with them all that belongs to a
row, so that sums over a row need no second pass. Operands that heads, batch or rows share are [B, Hkv, G, Nq, Nk], each
1 where it is shared; a block of scores is [b, hkv, G, rows, keys].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._tensors import descriptor

# Scores of a block: some of the arrays of so many f32 that are in use at a time stay in the cores' caches.
_ELEMENTS = 1 << 17
_ROWS = 128  # of a group of heads, below which products lose speed


class Block(NamedTuple):
    """Where a block lies: slices of the batch, kv heads, queries and keys."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice


class Sequence(NamedTuple):
    """One dense attention: a whole call, or one sequence of a packed one. Its methods give views.

    Of q, out and their gradients [B, Hkv, G, Nq, D], of k and v [B, Hkv, Nk, D], of lse [B, Hkv, G, Nq, 1], of bias,
    slopes and sinks what all shared operands are; None stays None.
    """

    layout: str
    kv_heads: int
    rows: Optional[slice]  # of a packed call's tensors; None: a dense call
    keys: Optional[slice]
    index: int  # which of the sequences

    def inputs(self, x: Iterable[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """q, k, v, bias, alibi_slopes and sinks, their tangents or their gradients."""
        q, k, v, *others = x
        kinds = ("bias", "alibi_slopes", "sinks")
        return [
            None if q is None else self._grouped(self._heads_first(q, self.rows)),
            *(None if y is None else self._heads_first(y, self.keys) for y in (k, v)),
            *(None if y is None else self._shared(y, kind) for y, kind in zip(others, kinds)),
        ]

    def outputs(self, y: Iterable[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """out and lse, their tangents or their gradients."""
        out, lse = y
        if lse is not None:
            lse = self._grouped(lse if self.rows is None else lse[None, :, self.rows]).unsqueeze(-1)
        return [None if out is None else self._grouped(self._heads_first(out, self.rows)), lse]

    def _heads_first(self, x: Tensor, rows: Optional[slice]) -> Tensor:
        if self.layout == "thd":
            return x[rows].transpose(0, 1)[None]
        return x.transpose(1, 2) if self.layout == "bshd" else x

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.kv_heads, x.shape[1] // self.kv_heads))

    def _shared(self, x: Tensor, kind: str) -> Tensor:
        if kind == "bias":
            x = x[(None,) * (4 - x.dim())]
        else:
            x = (x if x.dim() == 2 else x[None])[..., None, None]
            if self.rows is not None and x.shape[0] != 1:
                x = x[self.index][None]
        return x.unsqueeze(1) if x.shape[1] == 1 else self._grouped(x)


def sequences(
    layout: str, kv_heads: int, cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor]
) -> list[Sequence]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return [Sequence(layout, kv_heads, None, None, 0)]
    starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, keys = ([slice(a, b) for a, b in zip(x, x[1:])] for x in starts)
    return [Sequence(layout, kv_heads, r, k, index) for index, (r, k) in enumerate(zip(rows, keys))]


def extents(all_sequences: list[Sequence], x: list[Optional[Tensor]], options: AttentionOptions) -> tuple[int, int]:
    """By how many queries and keys dropout counts its elements."""
    if all_sequences and all_sequences[0].rows is not None:
        longest = [max(s.stop - s.start for s in sides) for sides in zip(*((y.rows, y.keys) for y in all_sequences))]
    else:
        rows = 1 if options.layout == "bshd" else 2
        longest = [x[0].shape[rows], x[1].shape[rows]]
    return max(longest[0], options.max_seqlen_q), max(longest[1], options.max_seqlen_k)


def part(x: Tensor, block: Block) -> Tensor:
    """What a block needs of a shared operand."""
    places = (block.batch, block.heads, slice(None), block.rows, block.keys)
    return x[tuple(slice(None) if size == 1 else place for size, place in zip(x.shape, places))]


def add_part(total: Tensor, x: Tensor, block: Block) -> None:
    """Adds x, a block of scores, to a shared operand's gradient, summed where the operand is shared."""
    here = part(total, block)
    dims = [dim for dim in range(5) if total.shape[dim] == 1 and x.shape[dim] != 1]
    here.add_(x.sum(dims, keepdim=True) if dims else x)


def _moved(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


class Scores:
    """Blocks of one sequence's scores, and what hides or drops elements of them."""

    def __init__(
        self, q: Tensor, k: Tensor, index: int, counted: tuple[int, int], options: AttentionOptions,
        philox: Optional[Tensor], origin: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """q and k as Sequence gives them; index: that of the sequence; counted: extents(); origin: the sequence's first
        query and key among the packed ones."""
        self.batch, self.kv_heads, self.group, self.nq, _ = q.shape
        self.nk = k.shape[2]
        self._index = index
        self._max_q, self._max_k = counted
        self._options = options
        self._lists = options.block_mask
        self._origin = origin
        self._philox = None if philox is None else philox.tolist()
        shift = self.nk - self.nq
        self._diagonal = 0 if options.causal == "top_left" else shift
        # Query i sees keys from i + diagonal − left to i + diagonal + right.
        self._left = options.window_left if options.window_left >= 0 else None
        self._right = options.window_right if options.window_right >= 0 else None
        if options.causal:
            self._right = 0 if self._right is None else min(self._right, 0)
        # Half of the last square of a block is computed for nothing: of few keys, more than smaller products lose.
        self._rows, self._least = _ROWS, _ELEMENTS if self._right is None else _ELEMENTS // 8
        all_rows = self.batch * self.kv_heads * self.group * (_ROWS // 2)
        if self._right is not None and self.nk <= 1024 and all_rows * self.nk >= _ELEMENTS:
            self._rows = _ROWS // 2

    def heads(self) -> Iterator[tuple[slice, slice]]:
        """Batch elements and kv heads that a block takes together."""
        rows = max(1, min(self.nq, self._rows) * self.group * self.nk)
        count = max(1, _ELEMENTS // rows)
        if count >= self.kv_heads:
            step = max(1, count // max(1, self.kv_heads))
            for b in range(0, self.batch, step):
                yield slice(b, min(b + step, self.batch)), slice(0, self.kv_heads)
        else:
            for b in range(self.batch):
                for h in range(0, self.kv_heads, count):
                    yield slice(b, b + 1), slice(h, min(h + count, self.kv_heads))

    def blocks(self, batch: slice, heads: slice) -> Iterator[Block]:
        """Blocks of queries with the keys that they may see."""
        together = (batch.stop - batch.start) * (heads.stop - heads.start) * self.group
        step = max(-(-self._rows // self.group), self._least // max(1, together * self.nk))
        for i in range(0, self.nq, step):
            end = min(i + step, self.nq)
            first = 0 if self._left is None else max(0, i + self._diagonal - self._left)
            last = self.nk if self._right is None else min(self.nk, end + self._diagonal + self._right)
            if self._lists is not None:
                span = self._lists.span(_moved(slice(i, end), self._origin[0]))
                first, last = max(first, span.start - self._origin[1]), min(last, span.stop - self._origin[1])
            if first >= last:
                first, last = 0, 1  # hidden from all: their rows may still have a sink
            if together:
                yield Block(batch, heads, slice(i, end), slice(first, last))

    def _offsets(self, block: Block, shift: int) -> Tensor:
        """j − i − shift, [rows, keys]."""
        rows, keys = (torch.arange(x.start, x.stop, device="cpu") for x in (block.rows, block.keys))
        return keys - rows[:, None] - shift

    def hidden(self, block: Block) -> Optional[Tensor]:
        """True where causal, window or a block mask hide a score, [rows, keys] or of a block's five dimensions; None where
        they hide none of the block."""
        result = self._hidden_by_offset(block)
        if self._lists is None:
            return result
        heads = slice(block.heads.start * self.group, block.heads.stop * self.group)
        places = (_moved(x, by) for x, by in zip((block.rows, block.keys), self._origin))
        hidden = ~self._lists.visible(block.batch, heads, *places)
        groups = (1, 1) if hidden.shape[1] == 1 else (-1, self.group)
        hidden = hidden.unflatten(1, groups)
        return hidden if result is None else hidden | result

    def hidden_parts(self, block: Block) -> Iterable[tuple[slice, Tensor]]:
        """hidden() in parts: some of the block's keys, counted from its first one, and what is hidden of them."""
        if self._lists is None:
            return self._parts_by_offset(block)
        return [(slice(None), self.hidden(block))]

    def all_rows_see(self, block: Block) -> bool:
        """Whether causal and window let each query of a block see a key; False where a block mask may hide them."""
        first, last = block.rows.start + self._diagonal, block.rows.stop - 1 + self._diagonal
        if self._lists is not None or self._right is not None and first + self._right < 0:
            return False
        return self._left is None or last - self._left < self.nk

    def _hidden_by_offset(self, block: Block) -> Optional[Tensor]:
        """What causal and window hide, [rows, keys]."""
        parts = list(self._parts_by_offset(block))
        if not parts:
            return None
        sizes = (x.stop - x.start for x in (block.rows, block.keys))
        result = torch.zeros(*sizes, dtype=torch.bool, device="cpu")
        for keys, hidden in parts:
            result[:, keys] |= hidden
        return result

    def _parts_by_offset(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        """Of the keys right and left of what every row sees."""
        first, last = block.rows.start + self._diagonal, block.rows.stop - 1 + self._diagonal
        begin = block.keys.start
        if self._right is not None and first + self._right + 1 < block.keys.stop:
            keys = slice(max(begin, first + self._right + 1), block.keys.stop)
            yield _moved(keys, -begin), self._offsets(block._replace(keys=keys), self._diagonal) > self._right
        if self._left is not None and begin < last - self._left:
            keys = slice(begin, min(block.keys.stop, last - self._left))
            yield _moved(keys, -begin), self._offsets(block._replace(keys=keys), self._diagonal) < -self._left

    def distance(self, block: Block, dtype: torch.dtype) -> Tensor:
        """ALiBi's |i + Nk − Nq − j|, [rows, keys]."""
        return self._offsets(block, self.nk - self.nq).abs_().to(dtype)

    def keep(self, block: Block) -> Tensor:
        """Dropout's mask of the block, bit for bit that of the kernels."""
        batch, heads, rows, keys = block
        seed, offset = (x & 0xFFFFFFFFFFFFFFFF for x in self._philox)
        count = rows.stop - rows.start
        all_heads = self.kv_heads * self.group
        h = range(heads.start * self.group, heads.stop * self.group)
        b = range(batch.start + self._index, batch.stop + self._index)
        keep = torch.empty(len(b), len(h), count, self._max_k, dtype=torch.bool, device="cpu")
        for to, numbers in zip(keep, b):
            for row, head in zip(to, h):
                first = ((numbers * all_heads + head) * self._max_q + rows.start) * self._max_k
                at = (offset + first) & 0xFFFFFFFFFFFFFFFF
                _core.philox_keep_mask(descriptor(row), self._options.dropout_p, seed, at)
        return keep[..., keys].unflatten(1, (heads.stop - heads.start, self.group))
