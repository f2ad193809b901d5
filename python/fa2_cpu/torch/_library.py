# SPDX-License-Identifier: Apache-2.0
"""How the operators of a training step are made: one registration, and what their kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu import _options
from fa2_cpu.torch._compute import POOL, num_threads, under_its_name
from fa2_cpu.torch._tensors import FLOATS, check_tensor, plain, transformed

_LIBRARY = torch.library.Library("fa2", "FRAGMENT")


def operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Optional[Callable[..., Any]] = None,
    setup_context: Optional[Callable[..., None]] = None,
) -> Callable[..., Any]:
    """Registers fa2::<schema> for CPU tensors; without `backward` it refuses to be differentiated."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    # PyTorch runs the kernel of a differentiable operator in a function called GeneratedBackwardFor….
    _LIBRARY.impl(name, under_its_name(f"fa2::{name}", kernel), "CPU")
    torch.library.register_fake(f"fa2::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"fa2::{name}", backward or _no_derivative(name), setup_context=setup_context, lib=_LIBRARY
    )
    return getattr(torch.ops.fa2, name).default


def _no_derivative(name: str) -> Callable[..., Any]:
    def backward(ctx, *grads):
        raise NotImplementedError(f"fa2::{name} has no derivative; a second derivative needs PyTorch's own operators")

    return backward


def by_pytorch() -> bool:
    """Whether torch.func or forward-mode AD is under way: the operators here have no rules for these, PyTorch's have."""
    return not torch.compiler.is_compiling() and transformed()


def wide(x: Tensor) -> Tensor:
    """x in the dtype of sums, f32 or f64."""
    return x if x.dtype == torch.float64 else x.float()


def threads() -> dict[str, Any]:
    """Keyword arguments of every core call: whose threads it runs on."""
    return {"num_threads": num_threads(), "pool": POOL}


def rows(x: Tensor) -> Tensor:
    """x as the core reads rows: at most four dimensions, the last one contiguous."""
    x = plain(x)
    if x.dim() == 0:
        return x.unsqueeze(0)
    if x.dim() > 4:
        x = x.reshape(-1, x.shape[-1])
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def check_float(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} is {x.dtype}; it must be float32, bfloat16, float16 or float64")


def check_same(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    check_float(name, x)
    if x.dtype != like.dtype:
        raise TypeError(f"{name} is {x.dtype}; it must be {like.dtype}, the dtype of {like_name}")
    if x.shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {tuple(like.shape)}, that of {like_name}")


def check_index(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {x.dtype}; it must be int32 or int64")


# Numbers that a compiled graph holds as symbols are numbers already.


def number(name: str, x: Any) -> float:
    """x as a float, or a TypeError."""
    return x if torch.compiler.is_compiling() else _options.number(name, x)


def integer(name: str, x: Any) -> int:
    """x as an int, or a TypeError."""
    return int(x) if torch.compiler.is_compiling() else _options.integer(name, x)


def number_of(name: str, x: Any) -> Optional[Tensor]:
    """A number as a tensor of one element, which a compiled graph takes as an input."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        return torch.tensor(number(name, x), dtype=torch.float64)
    check_tensor(name, x)
    if x.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be a number or a tensor of one")
    return x
