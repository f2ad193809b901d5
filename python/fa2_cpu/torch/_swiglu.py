# SPDX-License-Identifier: Apache-2.0
"""swiglu: silu(gate) · up in one pass, with its backward in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._library import by_pytorch, check_float, check_same, operator, rows, threads, wide


def _like(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = _like(gate, up)
    _core.swiglu(rows(gate), rows(up), rows(y), **threads())
    return y


def _allocate_gradients(dy, gate, up, wanted):
    return tuple(gate.new_empty(gate.shape if want else (0,)) for want in wanted)


def _backward(dy: Tensor, gate: Tensor, up: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensor]:
    grads = _allocate_gradients(dy, gate, up, wanted)
    outputs = [rows(g) if want else None for g, want in zip(grads, wanted)]
    _core.swiglu_backward(rows(dy), rows(gate), rows(up), *outputs, **threads())
    return grads


_backward_op = operator(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up, bool[2] wanted) -> (Tensor, Tensor)",
    _backward, _allocate_gradients,
)  # fmt: skip


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy):
    wanted = list(ctx.needs_input_grad)
    grads = _backward_op(dy, *ctx.saved_tensors, wanted)
    return tuple(g if want else None for g, want in zip(grads, wanted))


_op = operator("swiglu(Tensor gate, Tensor up) -> Tensor", _forward, _like, _differentiate, _save)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(−gate)) · up (Shazeer 2020, arXiv:2002.05202).

    gate and up have one shape and one dtype (f32, bf16, f16 or f64), any strides; so has the result,
    dense. silu(gate) is not stored: the backward computes it again.

    Raises:
      TypeError: dtypes that differ, or an input that is not on the CPU.
      ValueError: shapes that differ.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> gate, up = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
      >>> y = fa2.swiglu(gate, up)
      >>> torch.testing.assert_close(y, torch.nn.functional.silu(gate) * up)
      >>> y.sum().backward()  # gate.grad
    """
    check_float("gate", gate)
    check_same("up", up, "gate", gate)
    if by_pytorch():
        return (F.silu(wide(gate)) * up).to(gate.dtype)
    return _op(gate, up)
