# SPDX-License-Identifier: Apache-2.0
"""fa2's attention on DTensors: placements by heads and by batch, which need no communication.

The rows of a sequence that is sharded are refused: fa2_cpu.distributed.attention is for these.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fa2_cpu.torch import _derivatives  # noqa: F401: registers the operators

# The positions of batch and heads in q, k and v, and in lse.
_BATCH_HEADS = {"bhsd": (0, 1), "bshd": (0, 2), "thd": (None, 1)}
_LSE = {"bhsd": (0, 1), "bshd": (0, 1), "thd": (None, 0)}
_OPTIONS = 10  # non-tensors behind the tensors


def _check(q: Any, k: Any, v: Any, layout: str, dropout_p: float) -> None:
    batch, heads = _BATCH_HEADS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        for dim, placement in enumerate(x.placements):
            if isinstance(placement, Shard):
                if placement.dim not in (batch, heads):
                    raise ValueError(
                        f"{name} is a DTensor with the placements {x.placements}; it may be sharded along its batch or "
                        "heads only (rows: fa2_cpu.distributed.attention)"
                    )
                if dropout_p > 0.0:
                    raise ValueError(
                        f"dropout_p is {dropout_p} and {name} is a DTensor with the placements {x.placements}; with "
                        "dropout, whose mask counts all batches and heads, it must be replicated"
                    )
                if placement.dim == heads and k.shape[heads] % x.mesh.size(dim):
                    raise ValueError(
                        f"{name} is a DTensor with the placements {x.placements}, and k has {k.shape[heads]} heads; they "
                        f"must be a multiple of the {x.mesh.size(dim)} ranks"
                    )


def _along(x: Optional[Any], dim_from_end: int) -> Any:
    """The placement of an input that q's sharded dimension may broadcast: sharded with it, or whole."""
    if x is None:
        return None
    if len(x.shape) >= dim_from_end and x.shape[-dim_from_end] > 1:
        return Shard(len(x.shape) - dim_from_end)
    return Replicate()


def _kinds(q, k, v, bias, slopes, sinks, cu_q, cu_k, philox, layout: str):
    """(placement of q, k, v and out; of lse; of bias, slopes, sinks, cu_seqlens_q and _k, philox) for each way."""
    whole = [Replicate() if x is not None else None for x in (bias, slopes, sinks, cu_q, cu_k, philox)]
    yield Replicate(), Replicate(), whole
    batch, heads = _BATCH_HEADS[layout]
    lse_batch, lse_heads = _LSE[layout]
    yield Shard(heads), Shard(lse_heads), [_along(bias, 3), _along(slopes, 1), _along(sinks, 1), *whole[3:]]
    if batch is not None:
        slopes_too = _along(slopes, 2) if slopes is not None else None
        yield Shard(batch), Shard(lse_batch), [_along(bias, 4), slopes_too, *whole[2:]]


def _forward(q, k, v, bias, slopes, sinks, cu_q, cu_k, philox, layout, scale, causal, left, right, softcap, dropout_p, *rest):
    _check(q, k, v, layout, dropout_p)
    return [
        ([x, lse], [x, x, x, *others, *[None] * _OPTIONS])
        for x, lse, others in _kinds(q, k, v, bias, slopes, sinks, cu_q, cu_k, philox, layout)
    ]


def _backward(
    dout, q, k, v, out, lse, dlse, bias, slopes, sinks, cu_q, cu_k, philox, layout, scale, causal, left, right, softcap,
    dropout_p, max_q, max_k, precision, wanted,
):  # fmt: skip
    _check(q, k, v, layout, dropout_p)
    result = []
    for x, rows, others in _kinds(q, k, v, bias, slopes, sinks, cu_q, cu_k, philox, layout):
        grads = []
        for n, placement in enumerate((x, x, x, *others[:3])):
            # What every rank has whole gets a share of its gradient from each.
            share = Partial() if isinstance(placement, Replicate) and not isinstance(x, Replicate) else placement
            grads.append(share if wanted[n] and placement is not None else Replicate())
        result.append((grads, [x, x, x, x, x, rows, None if dlse is None else rows, *others, *[None] * (_OPTIONS + 1)]))
    return result


def register() -> None:
    for op, strategy, tensors in (
        (torch.ops.fa2.attention.default, _forward, 9), (torch.ops.fa2.attention_backward.default, _backward, 13),
    ):  # fmt: skip
        register_sharding(op)(strategy)
        # Strategies are cached by the arguments from the first int on; layout, a str before it, changes them too.
        propagator = DTensor._op_dispatcher.sharding_propagator
        info = propagator.op_to_schema_info.get(op)
        if info is not None:
            info.static_argnum = tensors
