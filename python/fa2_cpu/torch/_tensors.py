# SPDX-License-Identifier: Apache-2.0
"""CPU tensors as the core reads them, what is wrong with an argument, and who watches operators run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2_cpu import _core
from fa2_cpu._arrays import check_dense_tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_NUMBERS = {
    getattr(torch, {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "bool": "bool",
                    "i32": "int32", "i64": "int64", "u8": "uint8"}[name]): number
    for name, number in _core.dtype_numbers.items()
}  # fmt: skip


def descriptor(x: Optional[Tensor]) -> Optional[tuple[Any, ...]]:
    """(address, element type, shape, strides, owner): x for the core, without DLPack's 2 µs a tensor."""
    if x is None:
        return None
    if x.is_neg():
        x = x.resolve_neg()
    return x.data_ptr(), _NUMBERS[x.dtype], x.shape, x.stride(), x


def plain(x: Optional[Tensor]) -> Optional[Tensor]:
    """x as DLPack exports it right: without its autograd history and with the negative bit resolved."""
    return None if x is None else x.detach().resolve_neg()


def is_dense(x: Tensor) -> bool:
    """Whether x is a dense tensor on the CPU."""
    return x.is_cpu and x.layout is torch.strided and not x.is_quantized and not x.is_nested


def check_dense(name: str, x: Any) -> None:
    """TypeError unless x is a dense tensor on the CPU."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; it must be a torch.Tensor")
    if not is_dense(x):
        check_dense_tensor(name, x)


def is_readable(x: Any) -> bool:
    """Whether descriptor() can describe x as it is."""
    return isinstance(x, Tensor) and is_dense(x) and x.dtype in _NUMBERS and not x.is_neg()


def check_tensor(name: str, x: Any) -> None:
    """TypeError unless x is a dense tensor on the CPU of an element type that the core knows."""
    check_dense(name, x)
    if x.dtype not in _NUMBERS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NUMBERS)
        raise TypeError(f"{name} is {x.dtype}; it must be one of {known}")


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def untransformed() -> Any:
    """A context in which new tensors are none of the transforms of torch.func under way."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    return torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()


def has_rules() -> bool:
    """Whether the transforms under way are one derivative or two, but for jvp of jvp: fa2 computes these."""
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    if forward_ad._current_level >= 0 and kinds.Jvp not in levels:
        levels.append(kinds.Jvp)
    return len(levels) <= 2 and levels.count(kinds.Jvp) <= 1 and all(k in (kinds.Grad, kinds.Jvp) for k in levels)


def recorded() -> bool:
    """Whether something compiles, traces or records operators."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return torch._C._is_torch_function_mode_enabled() or torch._C._get_tracing_state() is not None


def has_own_rules(tensors: Iterable[Optional[Tensor]]) -> bool:
    """Whether one is of a subclass of Tensor, which may have its own rules for operators."""
    for x in tensors:
        if x is not None and type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return True
    return False


def traced(tensors: Iterable[Optional[Tensor]]) -> bool:
    """Whether something compiles, traces or records operators, or a tensor has its own rules for them."""
    return recorded() or has_own_rules(tensors)


def unwatched(tensors: Iterable[Optional[Tensor]]) -> bool:
    """Whether a call on these may go past PyTorch's dispatcher: nothing traces, transforms or records operators.

    False under torch.compile, torch.func, modes of __torch_function__ and __torch_dispatch__, and for
    subclasses of Tensor. A call past the dispatcher takes some 20 µs less.
    """
    return not transformed() and not traced(tensors)
