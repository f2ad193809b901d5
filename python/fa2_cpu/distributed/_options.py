# SPDX-License-Identifier: Apache-2.0
"""A call's arguments: checked on each rank, compared between all, and what follows from them together."""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from fa2_cpu._options import fitting, number, window_pair
from fa2_cpu.distributed import _agree
from fa2_cpu.distributed._agree import content, float_bits, same
from fa2_cpu.distributed._shards import SHARDS, Segments, segments_of_parts
from fa2_cpu.distributed._team import Team
from fa2_cpu.distributed._tiles import Documents
from fa2_cpu.torch._compute import AttentionOptions, resolve_precision
from fa2_cpu.torch._ops import _check, draw_philox
from fa2_cpu.torch._tensors import FLOATS

METHODS = ("auto", "ring", "ulysses")
_LAYOUTS = ("bhsd", "bshd", "thd")
_CAUSAL = (None, "top_left", "bottom_right")
_PRECISIONS = ("fast", "high", "exact")


class Call(NamedTuple):
    """The arguments of attention, as given on this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    sinks: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    philox: Optional[Tensor]
    layout: str
    scale: Optional[float]
    causal: Optional[str]
    window: Any
    softcap: float
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_k: int
    precision: str
    method: str
    shards: str

    @property
    def tensors(self) -> tuple[Optional[Tensor], ...]:
        return self[:9]


class Agreed(NamedTuple):
    """What all ranks know of a call after comparing."""

    options: AttentionOptions
    queries: tuple[Segments, ...]
    keys: tuple[Segments, ...]
    documents: Documents
    philox: Optional[tuple[int, int]]
    bias_by_row: bool  # whether each rank's bias has the rows of its queries; else one row for all


def as_bshd(x: Tensor, layout: str) -> Tensor:
    """A view [B, rows, H, D]."""
    return x.transpose(1, 2) if layout == "bhsd" else x.unsqueeze(0) if layout == "thd" else x


def _choice(name: str, value: Any, choices: tuple) -> int:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return choices.index(value)


def _check_shapes(call: Call) -> None:
    rank, wanted = {"bhsd": (4, "[B, heads, rows, D]"), "bshd": (4, "[B, rows, heads, D]"),
                    "thd": (3, "[rows, heads, D]")}[call.layout]  # fmt: skip
    for name, x in zip("qkv", call.tensors):
        if x.dim() != rank:
            raise ValueError(f'{name} has shape {tuple(x.shape)}; it must be {wanted} (layout "{call.layout}")')
    q, k, v = (as_bshd(x, call.layout).shape for x in (call.q, call.k, call.v))
    if k[:3] != v[:3] or k[0] != q[0] or k[3] != q[3]:
        raise ValueError(
            f"q, k and v have shapes {tuple(call.q.shape)}, {tuple(call.k.shape)} and {tuple(call.v.shape)}; k and v "
            "must agree in all but the last dimension, q and k in batch and last dimension"
        )
    if k[2] == 0 or q[2] % k[2]:
        raise ValueError(f"q has {q[2]} heads and k {k[2]}; the first must be a multiple of the second")
    for name, x in (("alibi_slopes", call.alibi_slopes), ("sinks", call.sinks)):
        shapes = [(q[2],)] if name == "sinks" else [(q[2],), (q[0], q[2]), (1, q[2])]
        if x is not None and (x.dtype is not torch.float32 or tuple(x.shape) not in shapes):
            raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be float32 {list(shapes[0])}")
    if call.bias is not None:
        if call.layout == "thd":
            raise ValueError('bias is given with layout "thd"; packed sequences take no bias')
        if call.bias.dim() > 4:
            raise ValueError(f"bias has shape {tuple(call.bias.shape)}; it must have at most 4 dimensions")
        shape = bias4(call.bias).shape
        if shape[0] not in (1, q[0]) or shape[1] not in (1, q[2]) or shape[2] not in (1, q[1]):
            raise ValueError(
                f"bias has shape {tuple(call.bias.shape)}; it must be [{q[0]} or 1, {q[2]} or 1, {q[1]} or 1, all keys "
                "or 1], the rows being those of this rank's queries"
            )


def bias4(bias: Tensor) -> Tensor:
    return bias[(None,) * (4 - bias.dim())]


def _prepare(call: Call, rank: int) -> list[int]:
    """The numbers that are compared."""
    _check(call.tensors, call.layout, call.causal)
    _check_shapes(call)
    method, shards = _choice("method", call.method, METHODS), _choice("shards", call.shards, SHARDS)
    _choice("precision", call.precision, ("torch", *_PRECISIONS))
    left, right = window_pair(call.window)
    if left < -1 or right < -1:
        raise ValueError(f"window is ({left}, {right}); each must be at least -1")
    dropout = number("dropout_p", call.dropout_p)
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout_p is {dropout}; it must be in [0, 1]")
    softcap = number("softcap", call.softcap)
    philox = call.philox
    if philox is None and dropout > 0.0 and rank == 0:
        philox = draw_philox()
    seed, offset = (0, 0) if philox is None else philox.tolist()
    q, k = as_bshd(call.q, call.layout), as_bshd(call.k, call.layout)
    bias = None if call.bias is None else bias4(call.bias)
    bias_rows = -1 if bias is None else bias.shape[2]
    grads = sum(1 << n for n, x in enumerate(call.tensors[:6]) if x is not None and x.requires_grad)
    return [
        _LAYOUTS.index(call.layout), FLOATS.index(q.dtype), q.shape[0], q.shape[1], k.shape[1], q.shape[2],
        k.shape[2], q.shape[3], call.v.shape[-1], float_bits(None if call.scale is None else number("scale", call.scale)),
        _CAUSAL.index(call.causal), left, right, float_bits(softcap), float_bits(dropout),
        call.philox is not None, seed, offset, _PRECISIONS.index(resolve_precision(call.precision, q.dtype)),
        fitting("max_seqlen_q", call.max_seqlen_q, 64), fitting("max_seqlen_k", call.max_seqlen_k, 64),
        content(call.cu_seqlens_q), content(call.cu_seqlens_k), content(call.alibi_slopes), content(call.sinks),
        -1 if bias is None else FLOATS.index(bias.dtype) if bias.dtype in FLOATS else 9, bias_rows,
        0 if bias is None else bias.shape[3], 0 if bias is None else bias.shape[1],
        content(bias) if bias_rows == 1 else 0, grads if torch.is_grad_enabled() else 0, method, shards,
        0 if bias is None else bias.shape[0],
    ]  # fmt: skip


def agree(call: Call, team: Team) -> Agreed:
    """Raises, alike on every rank, where the ranks' arguments do not fit each other."""
    table = _agree.exchange(team, "attention", lambda: _prepare(call, team.rank))
    show = {0: _LAYOUTS.__getitem__, 1: FLOATS.__getitem__, 10: _CAUSAL.__getitem__, 18: _PRECISIONS.__getitem__,
            31: METHODS.__getitem__, 32: SHARDS.__getitem__}  # fmt: skip
    numbers = {0: "layout", 1: "the dtype of q", 2: "the batch of q", 5: "the number of heads of q",
               6: "the number of heads of k", 7: "the last dimension of q", 8: "the last dimension of v", 10: "causal",
               11: "window's left", 12: "window's right", 18: "precision", 19: "max_seqlen_q", 20: "max_seqlen_k",
               27: "the number of keys of bias", 28: "the number of heads of bias", 31: "method", 32: "shards",
               33: "the batch of bias"}  # fmt: skip
    same(table, 25, "bias", lambda x: "absent" if x < 0 else f"{'bool' if x == 9 else FLOATS[x]}")
    for column, name in numbers.items():
        same(table, column, name, show.get(column, lambda x: x))
    for column, name in ((9, "scale"), (13, "softcap"), (14, "dropout_p")):
        same(table, column, name, _float)
    for column, name in ((21, "cu_seqlens_q"), (22, "cu_seqlens_k"), (23, "alibi_slopes"), (24, "sinks")):
        same(table, column, name, lambda x: "absent" if x == 0 else f"a tensor with the digest {x:x}")
    same(table, 30, "which of q, k, v, bias, alibi_slopes, sinks require gradients",
         lambda bits: [n for i, n in enumerate(("q", "k", "v", "bias", "alibi_slopes", "sinks")) if bits >> i & 1])  # fmt: skip
    same(table, 15, "philox", lambda given: "given" if given else "absent")
    if table[0][15]:
        same(table, 16, "philox's seed")
        same(table, 17, "philox's offset")
    by_row = table[0][25] >= 0 and not (all(r[26] == 1 for r in table) and any(r[3] != 1 for r in table))
    if by_row:
        for rank, r in enumerate(table):
            if r[26] != r[3]:
                raise ValueError(
                    f"bias has {r[26]} rows on rank {rank} of the group, where q has {r[3]}; it must have one row on "
                    "all ranks, or the rows of the queries on each"
                )
    elif table[0][25] >= 0:
        same(table, 29, "bias of one row", lambda x: f"a tensor with the digest {x:x}")
    segments = []
    for name, column in (("q", 3), ("k", 4)):
        found = segments_of_parts([r[column] for r in table], call.shards)
        if isinstance(found, str):
            raise ValueError(f"{name} {found}")
        segments.append(found)
    totals = [sum(r[column] for r in table) for column in (3, 4)]
    if table[0][25] >= 0 and table[0][27] not in (1, totals[1]):
        raise ValueError(f"bias has {table[0][27]} keys; it must have all {totals[1]} of the group, or 1")
    documents = _documents(call, *totals)
    left, right = window_pair(call.window)
    philox = None
    if number("dropout_p", call.dropout_p) > 0.0:
        philox = tuple(x & 0xFFFFFFFFFFFFFFFF for x in table[0][16:18])
    options = AttentionOptions(
        "bshd", None if call.scale is None else float(call.scale), call.causal or "", left, right,
        float(call.softcap), float(call.dropout_p), 0, 0, call.precision,
    )  # fmt: skip
    return Agreed(options, *segments, documents, philox, by_row)


def _float(bits: int) -> Any:
    return None if bits == float_bits(None) else struct.unpack("<d", struct.pack("<q", bits))[0]


def _documents(call: Call, total_q: int, total_k: int) -> Documents:
    """The same error on every rank: prefix sums are the same."""
    starts = [] if call.layout == "thd" else [(0, total_q), (0, total_k)]
    sums_of = (("cu_seqlens_q", call.cu_seqlens_q, total_q), ("cu_seqlens_k", call.cu_seqlens_k, total_k))
    for name, x, total in sums_of if call.layout == "thd" else ():
        sums = tuple(x.tolist()) if x.dim() == 1 and x.dtype in (torch.int32, torch.int64) else ()
        if len(sums) < 1 or sums[0] != 0 or sums[-1] != total or any(a > b for a, b in zip(sums, sums[1:])):
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}, {list(sums[:3])} … {list(sums[-1:])}; it must be int32 "
                f"or int64 prefix sums of the whole batch, from 0 to the {total} rows of all ranks"
            )
        starts.append(sums)
    if len(starts[0]) != len(starts[1]):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k have {len(starts[0])} and {len(starts[1])} prefix sums; they must have as many"
        )
    documents = documents_of(*starts)
    given = {"max_seqlen_q": (call.max_seqlen_q, documents.longest_q),
             "max_seqlen_k": (call.max_seqlen_k, documents.longest_k)}  # fmt: skip
    for name, (value, longest) in given.items():
        if value and value < longest:
            raise ValueError(f"{name} is {value}; it must be 0 or at least the longest sequence, {longest}")
    if any(value for value, _ in given.values()):
        documents = Documents(*starts)
        documents.longest_q = max(call.max_seqlen_q, documents.longest_q)
        documents.longest_k = max(call.max_seqlen_k, documents.longest_k)
    return documents


@functools.lru_cache(maxsize=64)
def documents_of(starts_q: tuple[int, ...], starts_k: tuple[int, ...]) -> Documents:
    return Documents(starts_q, starts_k)
