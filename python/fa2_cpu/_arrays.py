# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library: what goes into the core, and results in the caller's library.

Inputs are handed over by DLPack, without a copy. Results are allocated here, in the library of the
first input, and written by the core.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from fa2_cpu import _core


class Array(Protocol):
    """An array on the CPU of any library: NumPy, PyTorch, JAX, or whatever offers __dlpack__."""

    @property
    def shape(self) -> Any: ...

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)

_LONG_NAMES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}


def _torch_tensor(x: Array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _jax_array(x: Array) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def _jax_tracer(x: Array) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def core_array(name: str, x: Array | None) -> Array | None:
    """x as the core reads it: the same memory, except for NumPy arrays that are misaligned or byte-swapped."""
    if x is None:
        return None
    if isinstance(x, np.ndarray):
        if x.dtype.name == "uint16":
            raise TypeError(f"{name} is uint16; bf16 data must be viewed as ml_dtypes.bfloat16")
        if not x.flags.aligned or not x.dtype.isnative or any(s % x.itemsize for s in x.strides):
            x = x.astype(x.dtype.newbyteorder("="), order="C")
        # NumPy knows ml_dtypes.bfloat16 only as an extension type, which it does not export.
        return x.view(np.uint16) if x.dtype.name == "bfloat16" else x
    if _torch_tensor(x):
        check_dense_tensor(name, x)
        return x.detach().resolve_conj().resolve_neg()
    if _jax_tracer(x):
        raise TypeError(f"{name} is traced by JAX; use fa2_cpu.jax inside jax.jit and jax.grad")
    check_array(name, x)
    return x


def check_array(name: str, x: Any) -> None:
    """TypeError for what offers no __dlpack__."""
    if not hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{name} is of type {type(x).__name__}; it must be an array on the CPU that offers __dlpack__"
        )


def check_dense_tensor(name: str, x: Any) -> None:
    """TypeError for a tensor of PyTorch that is elsewhere, sparse, nested, quantised or inside torch.func."""
    if not x.is_cpu:
        raise TypeError(f"{name} is on device {x.device}; it must be on the CPU, where fa2 computes")
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else f"of layout {x.layout}"
        raise TypeError(f"{name} is {kind}; it must be a dense (strided) tensor")
    if x.is_quantized:
        raise TypeError(f"{name} is quantised ({x.dtype}); it must be dequantised first")


def check_plain_tensor(name: str, x: Any, function: str, differentiable: str) -> None:
    """TypeError for a tensor through which PyTorch would differentiate: function cuts the graph."""
    if not _torch_tensor(x):
        return
    torch = sys.modules["torch"]
    if torch.is_grad_enabled() and x.requires_grad:
        raise TypeError(
            f"{name} requires grad, and fa2_cpu.{function} is not differentiable; use {differentiable}, "
            f"or pass {name}.detach()"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise TypeError(
            f"{name} is traced by torch.func, where fa2_cpu.{function} is not differentiable; use {differentiable}"
        )


def check_one_dtype(**arrays: Array | None) -> None:
    """TypeError unless all arrays that are given have the dtype of the first."""
    dtypes = {name: describe(name, x)[0] for name, x in arrays.items() if x is not None}
    if len(set(dtypes.values())) > 1:
        names, values = list(dtypes), list(dtypes.values())
        raise TypeError(
            f"{', '.join(names[:-1])} and {names[-1]} are {', '.join(values[:-1])} and {values[-1]}; "
            "they must have one dtype"
        )


def dtype_name(dtype: Any) -> str:
    """ "float32" for torch.float32, np.float32, np.dtype("float32"), "f32" and the like."""
    if isinstance(dtype, str):
        return _LONG_NAMES.get(dtype, dtype)
    if isinstance(dtype, type):
        return np.dtype(dtype).name
    return str(getattr(dtype, "name", dtype)).rsplit(".", 1)[-1]


def describe(name: str, x: Array) -> tuple[str, tuple[int, ...]]:
    """dtype ("float32", "bfloat16", ...) and shape of an array."""
    check_array(name, x)
    if _torch_tensor(x):
        check_dense_tensor(name, x)
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return dtype_name(x.dtype), tuple(x.shape)
    dtype, shape = _core.describe(x, name)
    return _LONG_NAMES.get(dtype, dtype), tuple(shape)


def _numpy_dtype(dtype: str) -> np.dtype:
    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise TypeError("bf16 results in NumPy need the package ml_dtypes") from error
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


class Results:
    """Allocates results in the library of `like` (NumPy where that library is not known)."""

    def __init__(self, like: Array) -> None:
        self._like = like
        self._torch = sys.modules["torch"] if _torch_tensor(like) else None

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """An array for the core to write, by core_array; finish() makes it the caller's."""
        if self._torch is not None:
            return self._torch.empty(tuple(shape), dtype=getattr(self._torch, dtype))
        return np.empty(tuple(shape), dtype=_numpy_dtype(dtype))

    def finish(self, x: Array | None) -> Array | None:
        if x is None or self._torch is not None or isinstance(self._like, np.ndarray):
            return x
        if _jax_array(self._like):
            return sys.modules["jax"].numpy.asarray(x)
        for module in self._modules():
            from_dlpack = getattr(module, "from_dlpack", None)
            if from_dlpack is not None:
                return from_dlpack(x)
        return x

    def _modules(self) -> list[Any]:
        modules = []
        if hasattr(self._like, "__array_namespace__"):
            modules.append(self._like.__array_namespace__())
        modules.append(sys.modules.get(type(self._like).__module__.partition(".")[0]))
        return modules
