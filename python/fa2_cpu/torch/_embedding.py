# SPDX-License-Identifier: Apache-2.0
"""embedding: torch.nn.functional.embedding with fa2's gradient of the table."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._library import by_pytorch, check_float, check_index, integer, operator, rows, threads


def _forward(ids: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    try:
        return torch.embedding(weight.detach(), ids)
    except IndexError:
        wrong = ids[(ids < 0) | (ids >= weight.shape[0])][0]
        raise ValueError(f"input has {int(wrong)}; ids must be in [0, {weight.shape[0]}), the rows of weight") from None


def _backward(dy: Tensor, ids: Tensor, num_embeddings: int, padding_idx: int) -> Tensor:
    dweight = dy.new_empty((num_embeddings, dy.shape[-1]))
    _core.embedding_backward(rows(dy), ids.reshape(-1), dweight, **threads())
    if padding_idx >= 0:
        dweight[padding_idx].zero_()
    return dweight


_backward_op = operator(
    "embedding_backward(Tensor dy, Tensor ids, SymInt num_embeddings, SymInt padding_idx) -> Tensor",
    _backward,
    lambda dy, ids, num_embeddings, padding_idx: dy.new_empty((num_embeddings, dy.shape[-1])),
)


def _save(ctx, inputs, output):
    ids, weight, ctx.padding_idx = inputs
    ctx.num_embeddings = weight.shape[0]
    ctx.save_for_backward(ids)


def _differentiate(ctx, dy):
    return None, _backward_op(dy, *ctx.saved_tensors, ctx.num_embeddings, ctx.padding_idx), None


_op = operator(
    "embedding(Tensor ids, Tensor weight, SymInt padding_idx) -> Tensor",
    _forward,
    lambda ids, weight, padding_idx: weight.new_empty((*ids.shape, weight.shape[1])),
    _differentiate,
    _save,
)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: Optional[int] = None,
    max_norm: Optional[float] = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """weight[input], with a gradient of the table that sums in f32 and rounds once.

    input: int32 or int64 ids of any shape, each in [0, num_embeddings); weight [num_embeddings, D] in
    f32, bf16, f16 or f64. padding_idx (may be negative) gets no gradient. max_norm,
    scale_grad_by_freq and sparse are left to PyTorch's function.

    Raises:
      TypeError: a weight that is not on the CPU or not of a float dtype, or ids that are no integers.
      ValueError: a weight of other than two dimensions, or an id or a padding_idx out of range.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> table = torch.randn(10, 4, requires_grad=True)
      >>> fa2.embedding(torch.tensor([3, 3, 7]), table).sum().backward()
      >>> table.grad[[2, 3, 7], 0].tolist()
      [0.0, 2.0, 1.0]
    """
    check_index("input", input)
    check_float("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [num_embeddings, D]")
    if max_norm is not None or scale_grad_by_freq or sparse or by_pytorch():
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    size = weight.shape[0]
    padding_idx = None if padding_idx is None else integer("padding_idx", padding_idx)
    if padding_idx is not None and not -size <= padding_idx < size:
        raise ValueError(f"padding_idx is {padding_idx}; it must be in [-{size}, {size})")
    padding = -1 if padding_idx is None else padding_idx % size
    return _op(input, weight, padding)
