# SPDX-License-Identifier: Apache-2.0
"""rms_norm: torch.nn.functional.rms_norm, computed by fa2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._library import by_pytorch, check_float, integer, number, operator, rows, threads, wide


def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _core.rms_norm(rows(x), rows(weight), eps, rows(y), **threads())
    return y


def _backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, wanted: Sequence[bool]) -> tuple[Tensor, Tensor]:
    dx, dweight = _allocate_gradients(dy, x, weight, eps, wanted)
    _core.rms_norm_backward(
        rows(dy), rows(x), rows(weight), eps,
        rows(dx) if wanted[0] else None, dweight if wanted[1] else None, **threads(),
    )  # fmt: skip
    return dx, dweight


def _allocate_gradients(dy, x, weight, eps, wanted):
    return x.new_empty(x.shape if wanted[0] else (0,)), weight.new_empty(weight.shape if wanted[1] else (0,))


_backward_op = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps, bool[2] wanted) -> (Tensor, Tensor)",
    _backward, _allocate_gradients,
)  # fmt: skip


def _save(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx, dy):
    wanted = list(ctx.needs_input_grad[:2])
    grads = _backward_op(dy, *ctx.saved_tensors, ctx.eps, wanted)
    return *(g if want else None for g, want in zip(grads, wanted)), None


_op = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _forward, lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format), _differentiate, _save,
)  # fmt: skip


def _sizes(normalized_shape: Union[int, Sequence[int]]) -> tuple[int, ...]:
    if isinstance(normalized_shape, (int, torch.SymInt)):
        return (normalized_shape,)
    if isinstance(normalized_shape, (list, tuple)):
        return tuple(integer("an element of normalized_shape", n) for n in normalized_shape)
    return (integer("normalized_shape", normalized_shape),)


def rms_norm(
    input: Tensor,
    normalized_shape: Union[int, Sequence[int]],
    weight: Optional[Tensor] = None,
    eps: Optional[float] = None,
    *,
    offset: float = 0.0,
) -> Tensor:
    """input · r · (offset + weight) with r = 1 / √(mean(input²) + eps), over the last dimensions.

    Args:
      input: [..., *normalized_shape]; f32, bf16, f16 or f64, any strides. Arithmetic is in f32 (f64 for
        f64) and the result is rounded once.
      normalized_shape: sizes of the last dimensions, or the last size.
      weight: normalized_shape, any float dtype; None is 1.
      eps: None is torch.finfo(input.dtype).eps.
      offset: 1.0 for models that store the weight less one, as Gemma does.

    Returns:
      input's shape and dtype.

    Raises:
      TypeError: an input that is not on the CPU or not of a float dtype, or an option that is no number.
      ValueError: shapes that do not fit.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
      >>> y = fa2.rms_norm(x, (8,), weight, eps=1e-6)
      >>> torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), weight, eps=1e-6))
      >>> y.sum().backward()  # weight.grad
    """
    check_float("input", input)
    shape = _sizes(normalized_shape)
    offset = number("offset", offset)
    eps = torch.finfo(input.dtype).eps if eps is None else number("eps", eps)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(f"input has shape {tuple(input.shape)}; its last sizes must be normalized_shape, {shape}")
    if weight is None:
        weight = torch.ones(shape, dtype=torch.float32)
    else:
        check_float("weight", weight)
        if tuple(weight.shape) != shape:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be normalized_shape, {shape}")
        if weight.dtype not in (input.dtype, torch.float32) or offset != 0.0:
            weight = weight.to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    if offset != 0.0:
        weight = weight + offset
    if by_pytorch():
        x = wide(input)
        scale = torch.rsqrt(x.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
        return (x * scale * weight).to(input.dtype)
    if len(shape) > 1:
        return _op(input.flatten(-len(shape)), weight.flatten(), eps).unflatten(-1, shape)
    return _op(input, weight, eps)
