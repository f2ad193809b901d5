# SPDX-License-Identifier: Apache-2.0
"""A form of score_mod as options of the kernels."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _derivatives
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._flex import _bias_chunks
from fa2_cpu.torch._block_lists import BlockLists
from fa2_cpu.torch._flex._forms import Form, Unrecognised, alibi_of, number
from fa2_cpu.torch._flex._graph import Node
from fa2_cpu.torch._flex._table import block_lists
from fa2_cpu.torch._flex._terms import Ranges, captured_by, ranges, total, values, whole_table


def attention(
    q: Tensor, k: Tensor, v: Tensor, form: Form, lists: Optional[BlockLists], scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse); raises Unrecognised where the kernels have no such option."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    where = ranges(*(slice(0, n) for n in sizes))
    q, k, scale = _with_factor(form, q, k, scale, where)
    if form.visible is not None:
        lists = _with_condition(lists, form.visible, sizes)
    rows, keyed = _split(form.terms, where)
    options = AttentionOptions("bhsd", scale, softcap=form.softcap).masked_by(lists)

    keyed, slopes, shift = _with_slopes(keyed, lists, sizes, where, dtype)
    bias = None
    if keyed:
        dims = frozenset().union(*(x.dims for x in keyed))
        table = whole_table(keyed[0], sizes) if len(keyed) == 1 else None
        if table is not None:
            bias = table
        elif not dims >= {"q", "k"}:
            bias = total(keyed, where, dtype)
        else:
            keyed = [x for x in form.terms if x not in rows]
            captured = captured_by(keyed)
            call = _bias_chunks.Call(tuple(keyed), tuple(captured), options)
            out, lse = _bias_chunks.BiasChunks.apply(q, k, v, call, *(x.tensor for x in captured))
            return out, _with_rows(lse, rows, where, dtype)
    out, lse = _derivatives.call((q, k, v, bias, slopes, None, None, None, None), options)
    if shift is not None:
        lse = lse + shift
    return out, _with_rows(lse, rows, where, dtype)


def _with_factor(form: Form, q: Tensor, k: Tensor, scale: float, where: Ranges) -> tuple[Tensor, Tensor, float]:
    """q, k and scale whose scores have the factor."""
    factor = form.inner
    value = number(factor)
    if value is not None:
        return q, k, scale * value
    x = values(factor, where)
    if "k" not in factor.dims:
        return (q * x).to(q.dtype), k, scale
    if "q" not in factor.dims and ("h" not in factor.dims or q.shape[1] == k.shape[1]):
        return q, (k * x.mT).to(k.dtype), scale
    raise Unrecognised("it multiplies scores by something of each query and key, or of each key and head of a group")


def _with_condition(lists: Optional[BlockLists], condition: Node, sizes: tuple[int, int, int, int]) -> BlockLists:
    """The mask with what a condition hides."""

    def source(rows: slice) -> Tensor:
        places = (slice(0, sizes[0]), slice(0, sizes[1]), rows, slice(0, sizes[3]))
        visible = values(condition, ranges(*places)).bool()
        visible = visible.expand(*visible.shape[:2], rows.stop - rows.start, sizes[3])
        return visible if lists is None else visible & lists.visible(*places)

    blocks = (128, 128) if lists is None else (lists.block_q, lists.block_k)
    return block_lists(source, sizes[0] * sizes[1], *sizes[2:], blocks)


def _split(terms: tuple[Node, ...], where: Ranges) -> tuple[list[Node], list[Node]]:
    """Terms that a row shares, which change lse alone, and the others."""
    rows = [x for x in terms if "k" not in x.dims]
    # A row of -inf sees nothing, one of NaN is NaN: a bias says so.
    rows = [x for x in rows if bool(torch.isfinite(values(x, where).detach()).all())]
    return rows, [x for x in terms if x not in rows]


def _with_rows(lse: Tensor, rows: list[Node], where: Ranges, dtype: torch.dtype) -> Tensor:
    return lse + total(rows, where, dtype)[..., 0] if rows else lse


def _with_slopes(terms: list[Node], lists: Optional[BlockLists], sizes, where: Ranges, dtype: torch.dtype):
    """The terms without the one that is ALiBi's, its slopes, and what lse lacks for it."""
    shift = sizes[3] - sizes[2]
    for term in terms:
        found = alibi_of(term)
        if found is None:
            continue
        slope, distance = found
        # The kernels take |i + Nk − Nq − j|: the distance where Nk is Nq, and i − j plus a number where no key is beyond.
        if shift != 0 if distance else lists is None or not lists.below(shift):
            continue
        if isinstance(slope, Node):
            slopes = values(slope, where).to(dtype)
        else:
            slopes = torch.full((1, 1, 1, 1), slope, dtype=dtype, device="cpu")
        if dtype == torch.float64 and (slopes.requires_grad or not torch.equal(slopes.float().double(), slopes)):
            continue  # slopes are f32
        slopes = slopes[..., 0, 0].expand(-1, sizes[1])
        slopes = slopes.float().expand(sizes[0], -1) if slopes.shape[0] > 1 else slopes.float()[0]
        missing = None if shift == 0 else (slopes * shift)[..., None].to(dtype)
        return [x for x in terms if x is not term], slopes.contiguous(), missing
    return terms, None, None
