# SPDX-License-Identifier: Apache-2.0
"""How the operators of a training step are made: one registration, and what their kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.torch._compute import POOL, num_threads
from fa2_cpu.torch._tensors import FLOATS, check_tensor, plain

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
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"fa2::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"fa2::{name}", backward or _no_derivative(name), setup_context=setup_context, lib=_LIBRARY
    )
    return getattr(torch.ops.fa2, name).default


def _no_derivative(name: str) -> Callable[..., Any]:
    def backward(ctx, *grads):
        raise NotImplementedError(f"fa2::{name} has no derivative; a second derivative needs PyTorch's own operators")

    return backward


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


def number_of(x: Any) -> Optional[Tensor]:
    """A number as a tensor, which a compiled graph takes as an input."""
    return x if x is None or isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
