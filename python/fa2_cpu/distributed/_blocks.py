# SPDX-License-Identifier: Apache-2.0
"""A tile computed by the core, and its results put together with those of other tiles.

Partial results merge through lse (Milakov and Gimelshein 2018; Dao 2022): with m = logaddexp(lse₁, lse₂) the whole is
exp(lse₁ − m) out₁ + exp(lse₂ − m) out₂. In the backward every tile has the whole's lse and delta, so its gradients are
its share of the whole's, and sums of them are exact.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fa2_cpu import _core
from fa2_cpu.distributed._heads import HeadRun
from fa2_cpu.distributed._tiles import Documents, Tile
from fa2_cpu.torch._compute import AttentionOptions, _core_options
from fa2_cpu.torch._tensors import descriptor

# A bias that stands for ALiBi is formed for so many bytes of scores at a time.
_BIAS_BYTES = 32 << 20


class Scores(NamedTuple):
    """What scores are made with, beside queries and keys, for the heads that this rank computes."""

    options: AttentionOptions  # scale, softcap, dropout, precision; masks are the tiles'
    documents: Documents
    runs: tuple[HeadRun, ...]
    first_head: int  # of all query heads, and their number: dropout counts them
    all_heads: int
    philox: Optional[tuple[int, int]]
    bias: Optional[Tensor]  # [B or 1, H or 1, rows of the queries or 1, keys of the whole or 1]
    slopes: Optional[Tensor]  # [H] or [B, H]


class Part(NamedTuple):
    """A tile of some heads, batches and rows: one call."""

    tile: Tile
    run: HeadRun
    batch: slice
    philox: Optional[Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(tile: Tile, scores: Scores, batch: int, chunk: bool) -> list[Part]:
    """Calls of a tile. Dropout counts batches and heads of the whole: where a call has a part of the heads only,
    the number of its first element says it for one batch at a time."""
    dropout = scores.philox is not None
    some_heads = any(run.queries != scores.all_heads for run in scores.runs)
    batches = [slice(b, b + 1) for b in range(batch)] if dropout and some_heads else [slice(0, batch)]
    rows = tile.queries
    if chunk:
        widest = max((run.queries for run in scores.runs), default=1)
        rows = max(1, _BIAS_BYTES // max(1, 8 * widest * tile.keys * batch))
    pieces = [tile] if rows >= tile.queries else [
        tile.rows(first, min(tile.queries, first + rows)) for first in range(0, tile.queries, rows)
    ]  # fmt: skip
    result = []
    for run in scores.runs:
        for at in batches:
            for piece in pieces:
                if piece is not None:
                    result.append(Part(piece, run, at, _philox(piece, run, at, scores)))
    return result


def _philox(tile: Tile, run: HeadRun, batch: slice, scores: Scores) -> Optional[Tensor]:
    """Seed and offset with which a call draws its part of the whole's mask."""
    if scores.philox is None:
        return None
    seed, offset = scores.philox
    documents = scores.documents
    sequence = tile.document if len(documents) > 1 else batch.start
    head = sequence * scores.all_heads + scores.first_head + run.q0
    element = (head * documents.longest_q + tile.query) * documents.longest_k + tile.key
    return torch.tensor(signed(seed, offset + element), dtype=torch.int64)


def signed(*numbers: int) -> list[int]:
    """Unsigned 64-bit numbers as an int64 tensor holds them."""
    return [((n + (1 << 63)) & 0xFFFFFFFFFFFFFFFF) - (1 << 63) for n in numbers]


def _bias(part: Part, scores: Scores, like: Tensor, row_wise: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """(bias of the call, what it leaves out of each row's lse [b, h, rows])."""
    tile, run = part.tile, part.run
    bias = scores.bias
    if bias is not None:
        bias = bias if bias.shape[0] == 1 else bias[part.batch]
        bias = bias if bias.shape[1] == 1 else bias[:, run.q0 : run.q1]
        bias = bias if bias.shape[2] == 1 else bias[:, :, tile.q0 : tile.q1]
        bias = bias if bias.shape[3] == 1 else bias[..., tile.key : tile.key + tile.keys]
    if scores.slopes is None or tile.side == 0:
        return bias, None
    slopes = _slopes(part, scores).to(accumulator(like.dtype))
    slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
    rows = torch.arange(tile.queries, dtype=slopes.dtype).reshape(-1, 1)
    keys = torch.arange(tile.keys, dtype=slopes.dtype)
    if row_wise:
        alibi = -slopes * (rows + tile.diagonal - keys).abs()
        if bias is None:
            return alibi, None
        return (torch.where(bias, alibi, -torch.inf) if bias.dtype == torch.bool else bias + alibi), None
    # −slope · side · (i + diagonal − j) as a term of the key and a term of the row, neither above 0 for slopes above 0.
    anchor = tile.keys - 1 if tile.side > 0 else 0
    return slopes * tile.side * (keys - anchor), (-slopes * tile.side * (rows + tile.diagonal - anchor))[..., 0]


def _slopes(part: Part, scores: Scores) -> Tensor:
    slopes = scores.slopes
    if slopes.dim() == 2 and slopes.shape[0] > 1:
        slopes = slopes[part.batch]
    return slopes[..., part.run.q0 : part.run.q1]


def _call_options(part: Part, scores: Scores, q: Tensor, bias: Optional[Tensor]):
    tile = part.tile
    slopes = _slopes(part, scores) if scores.slopes is not None and tile.side == 0 else None
    packed = tile.cu_q is not None
    cu = [torch.tensor(x, dtype=torch.int64) if packed else None for x in (tile.cu_q, tile.cu_k)]
    counted = scores.philox is not None
    causal, left, right = tile.core_mask
    options = scores.options._replace(
        layout="thd" if packed else "bshd", causal=causal, window_left=left, window_right=right,
        max_seqlen_q=scores.documents.longest_q if counted else 0,
        max_seqlen_k=scores.documents.longest_k if counted else 0,
    )  # fmt: skip
    return _core_options(q, bias, slopes, None, *cu, part.philox, options)


def _row_wise(tile: Tile, scores: Scores, slopes_wanted: bool) -> bool:
    """Whether ALiBi has to be an array of the tile's scores."""
    return scores.slopes is not None and tile.side != 0 and (slopes_wanted or scores.bias is not None)


def _cut(x: Tensor, part: Part, keys: bool) -> Tensor:
    """x [B, rows, H, D] as the call has it; [rows, H, D] of packed documents."""
    tile, run = part.tile, part.run
    rows, heads = (slice(tile.k0, tile.k1), slice(run.k0, run.k1)) if keys else (
        slice(tile.q0, tile.q1), slice(run.q0, run.q1))  # fmt: skip
    x = x[part.batch, rows, heads]
    return x[0] if tile.cu_q is not None else x


def _cut_rows(x: Tensor, part: Part) -> Tensor:
    """x [B, H, rows] as the call has it."""
    tile, run = part.tile, part.run
    x = x[part.batch, run.q0 : run.q1, tile.q0 : tile.q1]
    return x[0] if tile.cu_q is not None else x


class Sums:
    """out [B, rows, H, Dv] and lse [B, H, rows] as tiles come in; rows that none has written hold nothing yet."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        batch, count, heads, _ = q.shape
        dtype = accumulator(q.dtype)
        self.out = q.new_empty((batch, count, heads, v.shape[-1]), dtype=dtype)
        self.lse = q.new_full((batch, heads, count), -torch.inf, dtype=dtype)
        self._unwritten = [(0, count)]

    def _claim(self, first: int, last: int) -> list[tuple[int, int]]:
        """Which of the rows nothing has written; they are taken as written from now on."""
        left, taken = [], []
        for a, b in self._unwritten:
            c, d = max(a, first), min(b, last)
            if c >= d:
                left.append((a, b))
                continue
            taken.append((c, d))
            left += [piece for piece in ((a, c), (d, b)) if piece[0] < piece[1]]
        self._unwritten = left
        return taken

    def fresh(self, first: int, last: int) -> bool:
        """Whether a tile may write these rows; where some are written and some not, the latter become zero."""
        taken = self._claim(first, last)
        if taken == [(first, last)]:
            return True
        self._zero(taken)
        return False

    def _zero(self, ranges: list[tuple[int, int]]) -> None:
        for a, b in ranges:
            self.out[:, a:b].zero_()

    def finish(self) -> None:
        """Rows that see no key are 0."""
        self._zero(self._unwritten)
        self._unwritten = []


def forward(tile: Tile, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sums: Sums) -> None:
    """Adds the tile to sums."""
    row_wise = _row_wise(tile, scores, False)
    parts = _parts(tile, scores, q.shape[0], row_wise)
    fresh = sums.fresh(tile.q0, tile.q1)
    if fresh and row_wise:  # in pieces that may leave rows out
        sums.out[:, tile.q0 : tile.q1].zero_()
        fresh = False
    for part in parts:
        queries, keys, values = _cut(q, part, False), _cut(k, part, True), _cut(v, part, True)
        into, into_lse = _cut(sums.out, part, False), _cut_rows(sums.lse, part)
        out, lse = (into, into_lse) if fresh else (into.new_empty(into.shape), into_lse.new_empty(into_lse.shape))
        bias, row_term = _bias(part, scores, q, row_wise)
        with record_function("fa2::distributed block"):
            _core.attention_forward(
                *map(descriptor, (queries, keys, values, out, lse)), *_call_options(part, scores, queries, bias)
            )
        if row_term is not None:
            lse += row_term
        if not fresh:
            _merge(into, into_lse, out, lse)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """out [..., rows, H, D] and lse [..., H, rows] become those of both."""
    both = torch.logaddexp(lse, other_lse)
    # exp(−∞ − −∞): rows that have seen no key yet.
    weights = [torch.exp(x - both).masked_fill_(x == -torch.inf, 0.0) for x in (lse, other_lse)]
    mine, others = (w.transpose(-1, -2).unsqueeze(-1) for w in weights)
    out.mul_(mine).addcmul_(other, others)
    lse.copy_(both)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """exp(sink) joins each softmax sum, with no value."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out.mul_(torch.exp(lse - both).transpose(1, 2).unsqueeze(-1))
    lse.copy_(both)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, dlse: Optional[Tensor]) -> Tensor:
    """[H]: the sink's probability times (dlse − delta), over all rows."""
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return (p * (-delta if dlse is None else dlse - delta)).sum((0, 2))


class Gradients:
    """Sums of a rank's gradients, in f32 (f64 for f64)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, wanted: tuple[bool, ...]) -> None:
        dtype = accumulator(q.dtype)
        self.dq = q.new_zeros(q.shape, dtype=dtype) if wanted[0] else None
        self.dk = k.new_zeros(k.shape, dtype=dtype) if wanted[1] else None
        self.dv = v.new_zeros(v.shape, dtype=dtype) if wanted[2] else None
        self.dbias = scores.bias.new_zeros(scores.bias.shape, dtype=dtype) if wanted[3] else None
        self.dslopes = scores.slopes.new_zeros(scores.slopes.shape, dtype=dtype) if wanted[4] else None


def backward(
    tile: Tile, scores: Scores, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dlse: Optional[Tensor],
    delta: Tensor, grads: Gradients, dk: Optional[Tensor], dv: Optional[Tensor],
) -> None:  # fmt: skip
    """Adds the tile's gradients to grads, and to dk and dv, which lie as k and v do."""
    row_wise = _row_wise(tile, scores, grads.dslopes is not None)
    for part in _parts(tile, scores, q.shape[0], row_wise):
        queries, keys, values = _cut(q, part, False), _cut(k, part, True), _cut(v, part, True)
        bias, row_term = _bias(part, scores, q, row_wise)
        part_lse = _cut_rows(lse, part)
        if row_term is not None:
            part_lse = part_lse - row_term
        sums = [None if x is None else _cut(x, part, is_key) for x, is_key in ((grads.dq, False), (dk, True), (dv, True))]
        slopes_inside = grads.dslopes is not None and tile.side == 0
        dbias = None
        if grads.dbias is not None or (grads.dslopes is not None and row_wise):
            dbias = torch.zeros(bias.shape, dtype=accumulator(q.dtype))
        dslopes = torch.empty(_slopes(part, scores).shape) if slopes_inside else None
        with record_function("fa2::distributed block"):
            _core.attention_backward(
                *map(descriptor, (_cut(dout, part, False), queries, keys, values)), None, descriptor(part_lse),
                descriptor(None if dlse is None else _cut_rows(dlse, part)), descriptor(_cut_rows(delta, part)),
                *map(descriptor, (*sums, dbias, dslopes, None)), *_call_options(part, scores, queries, bias),
                accumulate=True,
            )  # fmt: skip
        if dslopes is None and grads.dslopes is not None:
            dslopes = _slope_gradient(part, dbias)
        if dslopes is not None:
            _add_reduced(_slopes(part, scores._replace(slopes=grads.dslopes)), dslopes)
        if grads.dbias is not None:
            _add_reduced(_bias(part, scores._replace(bias=grads.dbias, slopes=None), q, False)[0], dbias)


def _slope_gradient(part: Part, dscores: Tensor) -> Tensor:
    """Of −slope · |i + diagonal − j|: [b, h]."""
    tile = part.tile
    rows = torch.arange(tile.queries, dtype=dscores.dtype).reshape(-1, 1)
    distance = (rows + tile.diagonal - torch.arange(tile.keys, dtype=dscores.dtype)).abs()
    return -(dscores * distance).sum((2, 3))


def _add_reduced(total: Tensor, x: Tensor) -> None:
    """Adds x, summed over the dimensions that total does not have or has as 1."""
    total.add_(x.sum_to_size(total.shape) if x.shape != total.shape else x)
