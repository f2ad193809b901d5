# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.distributed.attention: one attention over the parts of a sequence that ranks hold."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import fa2_cpu.torch
from fa2_cpu.distributed import _blocks, _ring
from fa2_cpu.distributed._blocks import Scores, accumulator
from fa2_cpu.distributed._heads import HeadExchange, HeadShares
from fa2_cpu.distributed._options import Agreed, Call, agree, as_bshd, bias4
from fa2_cpu.distributed._ring import RingPlan
from fa2_cpu.distributed._shards import Segments, rows
from fa2_cpu.distributed._team import Team, team_of
from fa2_cpu.distributed._tiles import Documents, Mask
from fa2_cpu.torch._not_compiled import not_compiled

if TYPE_CHECKING:
    from fa2_cpu._options import Causal, Layout, TorchPrecision

Method = Literal["auto", "ring", "ulysses"]
Shards = Literal["zigzag", "contiguous"]


class _Job(NamedTuple):
    """What the derivative needs beside tensors."""

    team: Team
    agreed: Agreed
    exchange_q: HeadExchange
    exchange_k: HeadExchange
    shares: HeadShares
    plan: RingPlan
    layout: str


@functools.lru_cache(maxsize=64)
def _plan(
    queries: tuple[Segments, ...], keys: tuple[Segments, ...], documents: Documents, mask: Mask, join: bool, pack: bool
) -> RingPlan:
    return RingPlan(queries, keys, documents, mask, join, pack)


def _shares(call: Call, team: Team) -> HeadShares:
    q, k = as_bshd(call.q, call.layout), as_bshd(call.k, call.layout)
    return HeadShares(q.shape[2], k.shape[2], team.heads.size)


def _job(call: Call, agreed: Agreed, team: Team) -> _Job:
    ring, heads = team.ring, team.heads
    exchanges = [
        [HeadExchange(heads, s[n * heads.size : (n + 1) * heads.size]) for n in range(ring.size)]
        for s in (agreed.queries, agreed.keys)
    ]
    shares = _shares(call, team)
    o = agreed.options
    counted = agreed.philox is not None
    plan = _plan(
        *(tuple(e.segments if heads.size > 1 else s[n] for n, e in enumerate(side))
          for side, s in zip(exchanges, (agreed.queries, agreed.keys))),
        agreed.documents, Mask(o.causal, o.window_left, o.window_right, call.alibi_slopes is not None),
        call.bias is None and not counted,
        len(agreed.documents) > 1 and not (counted and (heads.size > 1)),
    )  # fmt: skip
    return _Job(team, agreed, exchanges[0][ring.index], exchanges[1][ring.index], shares, plan, call.layout)


def _chosen(call: Call, agreed: Agreed, team: Team) -> str:
    """The method that sends fewer bytes, where both are balanced; see docs/distributed.md."""
    if call.method != "auto":
        return call.method
    q, k, v = (as_bshd(x, call.layout) for x in call.tensors[:3])
    heads, kv_heads, world = q.shape[2], k.shape[2], team.world
    if heads % world or (call.bias is not None and agreed.bias_by_row):
        return "ring"
    ring = _job(call, agreed, team.with_method("ring")).plan
    width = q.shape[3] + v.shape[3]
    ring_bytes = ring.rows_read(world // 2) * kv_heads * width
    part = sum(rows(s) for s in agreed.queries) / world
    key_part = sum(rows(s) for s in agreed.keys) / world
    kv_heads_sent = max(kv_heads, world)
    ulysses_bytes = (world - 1) / world * width * (part * heads + key_part * kv_heads_sent)
    unbalanced = bool(call.causal) and call.shards == "contiguous"
    return "ulysses" if unbalanced or ulysses_bytes <= ring_bytes else "ring"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, slopes, sinks, job: _Job):
        shares, circle = job.shares, job.team.heads
        whole = [as_bshd(x, job.layout) for x in (q, k, v)]
        parts = (
            job.exchange_q.to_heads(whole[0], shares.queries),
            job.exchange_k.to_heads(whole[1], shares.keys),
            job.exchange_k.to_heads(whole[2], shares.keys),
        )
        first, last = shares.queries[circle.index]
        scores = Scores(
            job.agreed.options, job.agreed.documents, shares.runs(circle.index), first, whole[0].shape[2],
            job.agreed.philox, _bias_part(bias, job), None if slopes is None else slopes[..., first:last],
        )  # fmt: skip
        part_sinks = None if sinks is None else sinks[first:last]
        out, lse = _ring.forward(job.team.ring, job.plan, scores, *parts, part_sinks)
        ctx.job, ctx.scores = job, scores._replace(bias=None, slopes=None)
        ctx.shapes = [None if x is None else (x.shape, x.dtype) for x in (bias, slopes, sinks)]
        ctx.save_for_backward(*parts, out, lse, scores.bias, scores.slopes, part_sinks)
        ctx.set_materialize_grads(False)
        heads = whole[0].shape[2]
        out_rows = job.exchange_q.to_rows(out, shares.queries, heads)
        lse_rows = job.exchange_q.to_rows(lse.transpose(1, 2).unsqueeze(-1), shares.queries, heads)[..., 0]
        lse_rows = lse_rows.transpose(1, 2)
        if job.layout == "thd":
            return out_rows[0], lse_rows[0].contiguous()
        # As the single call lays them out.
        return (out_rows.transpose(1, 2) if job.layout == "bhsd" else out_rows), lse_rows.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        return (*_gradients(ctx, dout, dlse), None)


def _gradients(ctx, dout: Optional[Tensor], dlse: Optional[Tensor]) -> list[Optional[Tensor]]:
    job, shares, circle = ctx.job, ctx.job.shares, ctx.job.team.heads
    q, k, v, out, lse, bias, slopes, sinks = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:6]
    first, last = shares.queries[circle.index]
    local = rows(job.agreed.queries[job.team.rank])
    batch, heads = q.shape[0], ctx.scores.all_heads
    # A gradient that is None on one rank may be a tensor on another: all take part in the exchange.
    if dout is None:
        dout = out.new_zeros((batch, local, heads, out.shape[-1]))
    else:
        dout = as_bshd(dout, job.layout)
    dout = job.exchange_q.to_heads(dout, shares.queries)
    if circle.size > 1 and dlse is None:
        dlse = lse.new_zeros((batch, heads, local))
    if dlse is not None:
        dlse = dlse.unsqueeze(0) if job.layout == "thd" else dlse
        dlse = job.exchange_q.to_heads(dlse.transpose(1, 2).unsqueeze(-1), shares.queries)[..., 0].transpose(1, 2)
    wide = accumulator(q.dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    scores = ctx.scores._replace(bias=bias, slopes=slopes)
    grads = _ring.backward(job.team.ring, job.plan, scores, dout, q, k, v, lse, dlse, delta, wanted[:5])
    results: list[Optional[Tensor]] = []
    for x, exchange, ranges, like, number in (
        (grads.dq, job.exchange_q, shares.queries, q, heads),
        (grads.dk, job.exchange_k, shares.keys, k, heads // shares.per_key),
        (grads.dv, job.exchange_k, shares.keys, v, heads // shares.per_key),
    ):
        if x is None:
            results.append(None)
            continue
        if like is q or not shares.shared:  # nothing is left to add
            x = x.to(like.dtype)
        x = exchange.to_rows(x, ranges, number).to(like.dtype)
        results.append(x.transpose(1, 2) if job.layout == "bhsd" else x[0] if job.layout == "thd" else x)
    results.append(_bias_gradient(grads.dbias, ctx.shapes[0], job) if wanted[3] else None)
    dsinks = _blocks.sink_gradient(sinks, lse, delta, dlse) if wanted[5] else None
    for x, shape in ((grads.dslopes, ctx.shapes[1]), (dsinks, ctx.shapes[2])):
        if x is None:
            results.append(None)
            continue
        whole = torch.zeros(shape[0], dtype=shape[1])
        whole[..., first:last] = x
        results.append(whole)
    return results


def _bias_part(bias: Optional[Tensor], job: _Job) -> Optional[Tensor]:
    """The bias of this rank's heads and the rows of its circle."""
    if bias is None or job.team.heads.size == 1:
        return None if bias is None else bias4(bias.detach())
    bias = bias4(bias.detach())
    shares, own = job.shares, job.shares.queries[job.team.heads.index]
    if not job.agreed.bias_by_row:
        return bias if bias.shape[1] == 1 else bias[:, slice(*own)]
    ranges = shares.queries if bias.shape[1] > 1 else [(0, 1)] * job.team.heads.size
    sent = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
    part = job.exchange_q.to_heads(sent.transpose(1, 2), ranges).transpose(1, 2)
    return part.view(torch.bool) if bias.dtype == torch.bool else part


def _bias_gradient(dbias: Tensor, given: tuple[torch.Size, torch.dtype], job: _Job) -> Tensor:
    shape, dtype = given
    if job.team.heads.size > 1:
        heads = shape[-3] if len(shape) >= 3 else 1
        shares = job.shares
        if job.agreed.bias_by_row:
            ranges = shares.queries if heads > 1 else [(0, 1)] * job.team.heads.size
            dbias = job.exchange_q.to_rows(dbias.transpose(1, 2), ranges, heads).transpose(1, 2)
        elif heads > 1:
            whole = dbias.new_zeros((dbias.shape[0], heads, *dbias.shape[2:]))
            whole[:, slice(*shares.queries[job.team.heads.index])] = dbias
            dbias = whole
    return dbias.reshape(shape).to(dtype)


@not_compiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    method: Method = "auto",
    shards: Shards = "zigzag",
    layout: Layout = "bhsd",
    scale: Optional[float] = None,
    causal: Optional[Causal] = None,
    window: tuple[int, int] = (-1, -1),
    bias: Optional[Tensor] = None,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    philox: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    precision: TorchPrecision = "torch",
) -> tuple[Tensor, Tensor]:
    """fa2_cpu.torch.attention of a sequence whose rows are spread over the ranks of a process group; differentiable.

    Every rank calls it with its own part, and with the same options. The result is what one process would compute of
    the whole, within rounding, and the same bits in every run. Masks, windows, ALiBi and dropout go by places in
    the whole. Gradients are those of the sum of all ranks' losses.

    Args:
      q, k, v: this rank's rows, in `layout`. With shards "zigzag" a sequence of N rows is cut into 2·world pieces, of
        which the first N mod 2·world are one longer, and rank r has pieces r and 2·world − 1 − r; "contiguous" parts
        lie in the order of the ranks and may have any lengths, also none. With "thd" the packed total is cut. See
        shard.
      group: a ProcessGroup (None: all processes), a DeviceMesh of one dimension, or one with the dimensions ("ring",
        "ulysses"), whose ranks in row-major order have the parts; there method must be "auto".
      method: "ring" sends keys and values round while blocks are computed, and computes what a causal mask leaves
        in balance with zigzag; "ulysses" exchanges rows for heads before and after; "auto" takes the one that sends
        less.
      bias: the rows of this rank's queries, or one row, the same on all ranks; the columns of all keys.
      cu_seqlens_q, cu_seqlens_k: of the whole batch, the same on all ranks.
      philox: seed and offset, the same on all ranks; drawn on the group's first rank where dropout_p > 0 and none is
        given.
      alibi_slopes, sinks: the same on all ranks; their gradients are each rank's share, whose sum is the whole's,
        as is that of a bias of one row.
      The rest: as for fa2_cpu.torch.attention.

    Returns:
      out and lse of this rank's queries.

    Raises:
      TypeError, ValueError: on every rank alike, also where one rank alone is wrong; nothing has then been sent
        but the comparison.
      RuntimeError: a rank ended, failed, or did not make this call within the group's timeout; a second derivative.

    Example (a group of one process; torchrun starts one for each rank):
      >>> import torch, torch.distributed as dist, fa2_cpu.distributed as fd
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: "gloo" alone
      >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
      >>> part = [x.requires_grad_() for x in fd.shard((q, k, v), dim=2)]  # this rank's rows
      >>> out, lse = fd.attention(*part, causal="top_left")
      >>> out.sum().backward()
      >>> fd.unshard(out, dim=2).shape, part[0].grad.shape
      (torch.Size([1, 2, 10, 8]), torch.Size([1, 2, 10, 8]))
      >>> dist.destroy_process_group()
    """
    team = team_of(group)
    call = Call(
        q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, layout, scale, causal, window, softcap,
        dropout_p, max_seqlen_q, max_seqlen_k, precision, method, shards,
    )  # fmt: skip
    return run(call, team)


def run(call: Call, team: Team) -> tuple[Tensor, Tensor]:
    agreed = agree(call, team)
    if team.world == 1:
        return _alone(call, agreed)
    if team.two_dimensional:
        if call.method != "auto":
            raise ValueError(
                f'method is {call.method!r}; on a DeviceMesh of two dimensions, which says it, it must be "auto"'
            )
    else:
        team = team.with_method(_chosen(call, agreed, team))
    return _Attention.apply(*call.tensors[:6], _job(call, agreed, team))


def _alone(call: Call, agreed: Agreed) -> tuple[Tensor, Tensor]:
    philox = call.philox
    if agreed.philox is not None:
        philox = torch.tensor(_blocks.signed(*agreed.philox), dtype=torch.int64)
    return fa2_cpu.torch.attention(
        call.q, call.k, call.v, layout=call.layout, scale=call.scale, causal=call.causal, window=call.window,
        bias=call.bias, softcap=call.softcap, alibi_slopes=call.alibi_slopes, sinks=call.sinks,
        dropout_p=call.dropout_p, philox=philox, cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k, precision=call.precision,
    )  # fmt: skip
