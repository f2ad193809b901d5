# SPDX-License-Identifier: Apache-2.0
"""softmax: torch.nn.functional.softmax, computed by fa2."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._library import by_pytorch, check_float, integer, operator, rows, threads
from fa2_cpu.torch._tensors import FLOATS, check_dense


def _like(x: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(x: Tensor) -> Tensor:
    y = _like(x)
    _core.softmax(rows(x), rows(y), **threads())
    return y


def _backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = _like(y)
    _core.softmax_backward(rows(dy), rows(y), rows(dx), **threads())
    return dx


_backward_op = operator(
    "softmax_backward(Tensor dy, Tensor y) -> Tensor", _backward, lambda dy, y: _like(y)
)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)


_op = operator(
    "softmax(Tensor x) -> Tensor", _forward, _like, lambda ctx, dy: _backward_op(dy, *ctx.saved_tensors), _save
)


def softmax(input: Tensor, dim: int = -1, dtype: Optional[torch.dtype] = None) -> Tensor:
    """exp(input − max) / Σ exp(input − max) along `dim`.

    Args:
      input: any shape; f32, bf16, f16 or f64, any strides.
      dim: the dimension that sums to 1. The last one is read where it lies, others are copied.
      dtype: input is converted to it first; None keeps input's.

    Returns:
      input's shape, in dtype. A slice of only -inf becomes NaN.

    Raises:
      TypeError: an input that is not on the CPU or not of a float dtype.
      ValueError: a dim that input does not have.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> x = torch.randn(3, 5)
      >>> torch.testing.assert_close(fa2.softmax(x), torch.softmax(x, -1))
    """
    if dtype is not None:
        if dtype not in FLOATS:
            raise TypeError(f"dtype is {dtype!r}; it must be torch.float32, bfloat16, float16 or float64")
        check_dense("input", input)
        if input.is_complex():
            raise TypeError(f"input is {input.dtype}; it must be real")
        input = input.to(dtype)
    check_float("input", input)
    dim, dims = integer("dim", dim), max(1, input.dim())
    if not -dims <= dim < dims:
        raise ValueError(f"dim is {dim}; it must be in [{-dims}, {dims}), as input has shape {tuple(input.shape)}")
    if by_pytorch():
        return torch.softmax(input, dim)
    if dim in (-1, dims - 1):
        return _op(input)
    return _op(input.movedim(dim, -1)).movedim(-1, dim)
