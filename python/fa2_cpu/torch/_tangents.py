# SPDX-License-Identifier: Apache-2.0
"""Directional derivatives of attention and of its gradients, block by block: O(N · block) memory, never N².

Attention maps x = (q, k, v, bias, slopes, sinks) to y = (out, lse); its backward maps (x, w), w = (dout, dlse), to
dx = Jᵀw. Here is what changes when x moves along ẋ and w along ẇ:

    ẏ = J ẋ                       forward-mode AD of attention
    (dx)˙ along (ẋ, ẇ)            forward-mode AD of its backward

and with these the second derivative in reverse mode too. Let u be the gradient of a loss with respect to dx, so that
the loss changes as L = ⟨u, Jᵀw⟩ = ⟨J u, w⟩. Then ∂L/∂w = J u is ẏ along ẋ = u, and ∂L/∂x = ∂⟨w, J u⟩/∂x, a product of
symmetric second derivatives with u, is (dx)˙ along ẋ = u, ẇ = 0.

With X = scale · q kᵀ, t = tanh(X / c), S = c · t + bias − slope · distance (softcap c; without it S starts from X),
P = exp(S − lse), Z dropout's 0 or 1 / (1 − p), row sums Σ over keys and P° = exp(sink − lse):

    Ẋ = scale (q̇ kᵀ + q k̇ᵀ)                   Ṡ = (1 − t²) Ẋ + bias˙ − slope˙ · distance
    lse˙ = Σ P Ṡ + P° sink˙                    Ṗ = P (Ṡ − lse˙)         Ṗ° = P° (sink˙ − lse˙)
    out˙ = (Z Ṗ) v + (Z P) v̇

    dP = Z (dout vᵀ)                           dṖ = Z (dout˙ vᵀ + dout v̇ᵀ)
    δ = Σ P dP − dlse                          δ˙ = Σ (Ṗ dP + P dṖ) − dlse˙
    dS = P (dP − δ)                            dṠ = Ṗ (dP − δ) + P (dṖ − δ˙)
    dX = (1 − t²) dS                           dẊ = (1 − t²) (dṠ − (2 t / c) Ẋ dS)
    dq˙ = scale (dẊ k + dX k̇)                  dk˙ = scale (dẊᵀ q + dXᵀ q̇)
    dv˙ = (Z Ṗ)ᵀ dout + (Z P)ᵀ dout˙           dbias˙ = dṠ, summed where bias is shared
    dslope˙ = −Σ dṠ · distance                 dsink˙ = −Σ over rows of (Ṗ° δ + P° δ˙)

S and lse are computed anew in f32 (f64 for f64), in which all sums are. NaN or infinity in a row of k or v spreads to
what shares a block with it, even where it is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _compute
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._score_blocks import Block, Scores, add_part, extents, part, sequences

Tensors = Sequence[Optional[Tensor]]


def tangents(
    x: Tensors, others: Tensors, options: AttentionOptions, direction: Tensors,
    w: Tensors = (None, None), w_direction: Tensors = (None, None), want_out: bool = True,
    wanted: Sequence[bool] = (False,) * 6,
) -> tuple[Optional[Tensor], ...]:  # fmt: skip
    """out˙, lse˙ and the tangents of dq, dk, dv, dbias, dalibi_slopes and dsinks, None where not wanted.

    Args:
      x: q, k, v, bias, alibi_slopes, sinks.
      others: cu_seqlens_q, cu_seqlens_k, philox.
      direction: ẋ; w and w_direction: (dout, dlse) and its tangent; None is 0 in all three.
      want_out: whether out˙ and lse˙ are wanted; wanted: which of the others.
    """
    q, k, v = x[:3]
    y: list[Optional[Tensor]] = [None, None]
    if want_out:
        y = [z.zero_() for z in _compute.allocate_forward(q, v, options.layout)]
    dx = [None if g is None else g.zero_() for g in _compute.allocate_backward(*x, options.layout, wanted)]
    kv_heads = k.shape[2 if options.layout == "bshd" else 1]
    if kv_heads == 0:
        return (*y, *dx)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sums = [None if g is None else g.new_zeros(g.shape, dtype=dtype) for g in dx[3:]]
    every = sequences(options.layout, kv_heads, *others[:2])
    counted = extents(every, x, options)
    for sequence in every:
        inputs = sequence.inputs(x)
        origin = (0, 0) if sequence.rows is None else (sequence.rows.start, sequence.keys.start)
        scores = Scores(inputs[0], inputs[1], sequence.index, counted, options, others[2], origin)
        derivative = _Derivative(
            scores, options, dtype, inputs, sequence.inputs(direction), sequence.outputs(w),
            sequence.outputs(w_direction), sequence.outputs(y), sequence.inputs((*dx[:3], *sums)),
        )  # fmt: skip
        with torch.autocast("cpu", enabled=False):
            derivative.run()
    for grad, total in zip(dx[3:], sums):
        if grad is not None:
            grad.copy_(total)
    return (*y, *dx)


class _Derivative:
    """The formulas, for one sequence. Names are theirs, with t behind a tangent's and d before a gradient's."""

    def __init__(self, scores: Scores, options: AttentionOptions, dtype, x, xt, w, wt, y, dx) -> None:
        self._scores, self._dtype = scores, dtype
        self._q, self._k, self._v, self._bias, self._slopes, self._sinks = x
        self._qt, self._kt, self._vt, self._biast, self._slopest, self._sinkst = xt
        (self._dout, self._dlse), (self._doutt, self._dlset) = w, wt
        self._y, self._dx = y, dx
        head_dim = self._q.shape[-1]
        self._scale = options.scale if options.scale is not None else 1.0 / math.sqrt(max(1, head_dim))
        self._softcap = options.softcap
        self._dropout_p = options.dropout_p
        self._buffers: dict[str, Tensor] = {}

    def _load(self, x: Optional[Tensor], *places: slice) -> Optional[Tensor]:
        """A part of x in the dtype of the sums, [batch and kv heads, rows of all the group, ...]."""
        if x is None:
            return None
        x = x[places].to(self._dtype)
        return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    def _part(self, x: Optional[Tensor], block: Block) -> Optional[Tensor]:
        return None if x is None else part(x, block).to(self._dtype)

    def run(self) -> None:
        """Writes y, dq, dk and dv, and adds to the rest of dx."""
        if self._scores.nk == 0:
            self._without_keys()
            return
        for batch, heads in self._scores.heads():
            keys = [self._load(x, batch, heads) for x in (self._k, self._kt, self._v, self._vt)]
            # Their transposes: a product whose left factor lies transposed takes a third more time.
            totals = [None if g is None else torch.zeros_like(x.mT) for g, x in zip(self._dx[1:3], (keys[0], keys[2]))]
            for block in self._scores.blocks(batch, heads):
                of_block = [None if x is None else x[:, block.keys] for x in keys]
                self._block(block, of_block, [None if x is None else x[..., block.keys] for x in totals])
            for to, total in zip(self._dx[1:3], totals):
                if to is not None:
                    here = to[batch, heads]
                    here.copy_(total.unflatten(0, here.shape[:2]).mT)

    def _matrix(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Memory for left @ right, of every block the same: new memory would not be in a cache."""
        shape = (*left.shape[:2], right.shape[2])
        count = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < count:
            self._buffers[name] = left.new_empty(count)
        return self._buffers[name][:count].view(shape)

    def _sum_of_products(self, name: str, *pairs: tuple[Optional[Tensor], Optional[Tensor]]) -> Optional[Tensor]:
        """The sum of matrix products; one of a missing factor is 0, and None is a sum of none."""
        total = None
        for a, b in pairs:
            if a is None or b is None:
                continue
            if total is None:
                total = torch.bmm(a, b, out=self._matrix(name, a, b))
            else:
                total.baddbmm_(a, b)
        return total

    def _block(self, block: Block, keys: list[Optional[Tensor]], totals: list[Optional[Tensor]]) -> None:
        (k, kt, v, vt), (dk, dv) = keys, totals
        places = (block.batch, block.heads, slice(None), block.rows)
        q, qt, dout, doutt = (self._load(x, *places) for x in (self._q, self._qt, self._dout, self._doutt))
        dlse, dlset = (self._load(x, *places) for x in (self._dlse, self._dlset))
        q = q * self._scale
        qt = None if qt is None else qt * self._scale
        self._shape = (
            block.batch.stop - block.batch.start, block.heads.stop - block.heads.start, self._scores.group,
            block.rows.stop - block.rows.start, block.keys.stop - block.keys.start,
        )  # fmt: skip
        distance = None if self._slopes is None else self._scores.distance(block, self._dtype)

        xt = self._sum_of_products("xt", (qt, k.mT), (q, None if kt is None else kt.mT))
        p, p_sink, cap = self._probabilities(block, q, k, distance)
        st = xt if xt is None or cap is None else xt * (1 - cap.square())
        st = self._add_shared(st, block, distance)
        pt, p_sinkt, lset = self._probability_tangents(block, p, p_sink, st)

        keep = None
        if self._dropout_p > 0.0:
            kept = 1.0 / (1.0 - self._dropout_p) if self._dropout_p < 1.0 else 0.0
            keep = self._scores.keep(block).to(self._dtype).mul_(kept).view(p.shape)
        zp, zpt = (x if x is None or keep is None else x * keep for x in (p, pt))
        outt = self._sum_of_products("outt", (zpt, v), (None if vt is None else zp, vt))
        for to, value in zip(self._y, (outt, lset)):
            if to is not None and value is not None:
                to[places] = value.view(to[places].shape)
        if dout is None and dlse is None and doutt is None and dlset is None:
            return

        _add_product(dv, zpt, dout)
        _add_product(dv, zp, doutt)
        dp = self._sum_of_products("dp", (dout, v.mT))
        dpt = self._sum_of_products("dpt", (doutt, v.mT), (dout, None if vt is None else vt.mT))
        if keep is not None:
            dp, dpt = (x if x is None else x.mul_(keep) for x in (dp, dpt))
        self._gradients(block, (q, qt, k, kt), (p, p_sink, pt, p_sinkt), (dp, dpt, dlse, dlset), (xt, cap, distance), dk)

    def _probabilities(self, block: Block, q: Tensor, k: Tensor, distance: Optional[Tensor]):
        """P, P° (None without sinks) and t (None without softcap)."""
        s, cap = self._sum_of_products("s", (q, k.mT)), None
        if self._softcap > 0.0:
            cap = s.div_(self._softcap).tanh_()
            s = torch.mul(cap, self._softcap, out=self._matrix("capped", q, k.mT))
        view = s.view(self._shape)
        bias = None if self._bias is None else part(self._bias, block)
        if bias is not None and bias.dtype is torch.bool:
            view.masked_fill_(~bias, -math.inf)
        elif bias is not None:
            view.add_(bias)
        if distance is not None:
            view.sub_(self._part(self._slopes, block) * distance)
        for keys, hidden in self._scores.hidden_parts(block):
            view[..., keys].masked_fill_(hidden, -math.inf)
        p = torch.softmax(s, -1, out=self._matrix("p", q, k.mT))
        if bias is None and self._sinks is None and self._scores.all_rows_see(block):
            return p, None, cap
        greatest = s.amax(-1, keepdim=True)
        empty = greatest == -math.inf
        p.masked_fill_(empty, 0.0)
        if self._sinks is None:
            return p, None, cap
        sink = self._part(self._sinks, block).expand(*self._shape[:-1], 1).reshape(greatest.shape)
        against = sink - greatest + p.amax(-1, keepdim=True).log()  # sink − logsumexp of the row
        p_sink = torch.where(empty, (sink > -math.inf).to(p.dtype), against.sigmoid())
        return p.mul_(torch.where(empty, 0.0, (-against).sigmoid())), p_sink, cap

    def _add_shared(self, st: Optional[Tensor], block: Block, distance: Optional[Tensor]) -> Optional[Tensor]:
        """Ṡ from the part that came through the softcap."""
        biast, slopest = (self._part(x, block) for x in (self._biast, self._slopest))
        added = [] if biast is None else [biast]
        if slopest is not None:
            added.append(-slopest * distance)
        if added and st is None:
            batch, heads, *_, keys = self._shape
            st = added[0].new_zeros(batch * heads, self._shape[2] * self._shape[3], keys)
        for x in added:
            st.view(self._shape).add_(x)
        return st

    def _probability_tangents(self, block: Block, p: Tensor, p_sink: Optional[Tensor], st: Optional[Tensor]):
        """Ṗ, Ṗ° and lse˙; None is 0."""
        pt = lset = sinkt = None
        if st is not None:
            pt = st.mul_(p)
            lset = pt.sum(-1, keepdim=True)
        if self._sinkst is not None:
            sinkt = self._part(self._sinkst, block).expand(*self._shape[:-1], 1).reshape(p_sink.shape)
            lset = p_sink * sinkt if lset is None else lset.add_(p_sink * sinkt)
        if lset is None:
            return None, None, None
        pt = -(p * lset) if pt is None else pt.addcmul_(p, lset, value=-1)
        if p_sink is None:
            return pt, None, lset
        return pt, p_sink * (-lset if sinkt is None else sinkt - lset), lset

    def _gradients(self, block: Block, operands, probabilities, products, scores, dk: Optional[Tensor]) -> None:
        """The tangents of dq, dk, dbias, dslopes and dsinks of a block."""
        (q, qt, k, kt), (p, p_sink, pt, p_sinkt) = operands, probabilities
        (dp, dpt, dlse, dlset), (xt, cap, distance) = products, scores
        delta = None
        if dp is not None:
            delta = torch.mul(p, dp, out=self._matrix("p dp", p, dp)).sum(-1, keepdim=True)
        delta = _difference(delta, dlse)
        shifted = dp if delta is None else -delta if dp is None else dp.sub_(delta)
        dst = None if pt is None or shifted is None else pt.mul_(shifted)
        ds = None if shifted is None else shifted * p if dp is None else shifted.mul_(p)
        if dpt is not None:
            dst = p * dpt if dst is None else dst.addcmul_(p, dpt)
        # Σ (Ṗ dP + P dṖ), from Ṗ (dP − δ) and Σ Ṗ = −Ṗ°.
        deltat = None if dst is None else dst.sum(-1, keepdim=True)
        if deltat is not None and p_sinkt is not None and delta is not None:
            deltat.sub_(delta * p_sinkt)
        deltat = _difference(deltat, dlset)
        if deltat is not None:
            dst = -(p * deltat) if dst is None else dst.addcmul_(p, deltat, value=-1)

        dq, _, _, dbias, dslopes, dsinks = self._dx
        if dst is not None:
            if dbias is not None:
                add_part(dbias, dst.view(self._shape), block)
            if dslopes is not None:
                add_part(dslopes, -(dst.view(self._shape) * distance), block)
        if dsinks is not None:
            total = _sum_of_scaled((p_sinkt, delta), (p_sink, deltat))
            if total is not None:
                add_part(dsinks, -total.view(*self._shape[:-1], 1), block)

        dxs = ds
        if cap is not None:
            slope = 1 - cap.square()
            if ds is not None and xt is not None:
                bent = (cap * xt).mul_(ds).mul_(-2 / self._softcap)
                dst = bent if dst is None else dst.add_(bent)
            dxs, dst = (None if z is None else z * slope for z in (ds, dst))
        _add_product(dk, dst, q)
        _add_product(dk, dxs, qt)
        if dq is not None:
            dqt = self._sum_of_products("dqt", (dst, k), (None if kt is None else dxs, kt))
            if dqt is not None:
                to = dq[block.batch, block.heads, :, block.rows]
                to.copy_(dqt.mul_(self._scale).view(to.shape))

    def _without_keys(self) -> None:
        """run() where there is no key: the softmax sum is the sink's, so that lse is the sink."""
        if self._sinks is None:
            return
        (_, lset), dsinks = self._y, self._dx[5]
        if lset is not None and self._sinkst is not None:
            lset.copy_(self._sinkst.expand(lset.shape))
        if dsinks is not None and self._dlset is not None:
            every = (slice(None),) * 4
            add_part(dsinks, self._dlset.to(self._dtype), Block(*every))


def _sum_of_scaled(*pairs: tuple[Optional[Tensor], Optional[Tensor]]) -> Optional[Tensor]:
    terms = [a * b for a, b in pairs if a is not None and b is not None]
    return sum(terms[1:], terms[0]) if terms else None


def _add_product(total: Optional[Tensor], left: Optional[Tensor], right: Optional[Tensor]) -> None:
    """total += rightᵀ left."""
    if total is not None and left is not None and right is not None:
        total.baddbmm_(right.mT, left)


def _difference(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    if b is None:
        return a
    return -b if a is None else a - b
