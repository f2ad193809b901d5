# SPDX-License-Identifier: Apache-2.0
"""The options that attention and its reference share: one place for their names, types and defaults."""

from __future__ import annotations

import inspect
import operator
from typing import Any, Callable, Literal, Optional, TypedDict, TypeVar, get_type_hints

from fa2_cpu._arrays import Array, core_array
from fa2_cpu._block_mask import BlockMask, core_block_mask

Layout = Literal["bhsd", "bshd", "thd"]
Causal = Literal["top_left", "bottom_right"]
Precision = Literal["fast", "high", "exact"]
TorchPrecision = Literal["torch", "fast", "high", "exact"]

class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of attention_forward (documented there)."""

    layout: Layout
    scale: Optional[float]
    causal: Optional[Causal]
    window: tuple[int, int]
    bias: Optional[Array]
    block_mask: Optional[BlockMask]
    softcap: float
    alibi_slopes: Optional[Array]
    sinks: Optional[Array]
    dropout_p: float
    philox_seed: int
    philox_offset: int
    cu_seqlens_q: Optional[Array]
    cu_seqlens_k: Optional[Array]
    precision: Precision
    num_threads: Optional[int]


class BackwardOptions(AttentionOptions, total=False):
    """Keyword arguments of attention_backward (documented there)."""

    dlse: Optional[Array]
    grad_dtype: Any
    want_dbias: bool


DEFAULTS: dict[str, Any] = {
    "layout": "bhsd", "scale": None, "causal": None, "window": (-1, -1), "bias": None, "block_mask": None, "softcap": 0.0,
    "alibi_slopes": None, "sinks": None, "dropout_p": 0.0, "philox_seed": 0, "philox_offset": 0,
    "cu_seqlens_q": None, "cu_seqlens_k": None, "precision": "fast", "num_threads": None,
}  # fmt: skip
BACKWARD_DEFAULTS: dict[str, Any] = {**DEFAULTS, "dlse": None, "grad_dtype": None, "want_dbias": False}

Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(kind: type, defaults: dict[str, Any]) -> Callable[[Function], Function]:
    """Spells out **options in a function's signature, for help() and editors, and checks their names."""

    def decorate(function: Function) -> Function:
        positional = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        types = get_type_hints(kind)
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name]
            )
            for name, default in defaults.items()
        ]
        function.__signature__ = inspect.signature(function).replace(parameters=[*positional, *keywords])
        return function

    return decorate


def fill(function: str, options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """options with defaults for what is not given."""
    unknown = options.keys() - defaults.keys()
    if unknown:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {min(unknown)!r}; it takes {', '.join(defaults)}"
        )
    return {**defaults, **options}


def number(name: str, value: Any) -> float:
    """value as a float, or a TypeError."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an int") from None


def unsigned(name: str, value: Any) -> int:
    value = integer(name, value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} is {value}; it must be from 0 to 2**64 - 1")
    return value


def fitting(name: str, value: Any, bits: int) -> int:
    """value as an int of so many bits, or a TypeError or ValueError."""
    value = integer(name, value)
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError(f"{name} is {value}; it must fit {bits} bits")
    return value


def window_pair(window: Any) -> tuple[int, int]:
    """(left, right) of a window, or a TypeError or ValueError."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window is {window!r}; it must be a pair (left, right)") from None
    return fitting("window's left", left, 64), fitting("window's right", right, 64)


def core_options(options: dict[str, Any]) -> dict[str, Any]:
    """The core's keyword arguments, of filled options."""
    for name in ("layout", "precision"):
        if not isinstance(options[name], str):
            raise TypeError(f"{name} is {options[name]!r}; it must be a str")
    causal = options["causal"]
    if causal is not None and not isinstance(causal, str):
        raise TypeError(f'causal is {causal!r}; it must be None, "top_left" or "bottom_right"')
    left, right = window_pair(options["window"])
    if options["layout"] == "thd" and (options["cu_seqlens_q"] is None or options["cu_seqlens_k"] is None):
        raise ValueError('layout is "thd" without cu_seqlens_q and cu_seqlens_k, which say where sequences start')
    scale, num_threads = options["scale"], options["num_threads"]
    return {
        "layout": options["layout"],
        "scale": None if scale is None else number("scale", scale),
        "causal": causal,
        "window": (left, right),
        "block_mask": core_block_mask(options["block_mask"]),
        "softcap": number("softcap", options["softcap"]),
        "dropout_p": number("dropout_p", options["dropout_p"]),
        "philox_seed": unsigned("philox_seed", options["philox_seed"]),
        "philox_offset": unsigned("philox_offset", options["philox_offset"]),
        "precision": options["precision"],
        "num_threads": None if num_threads is None else fitting("num_threads", num_threads, 32),
        **{name: core_array(name, options[name]) for name in
           ("bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")},
    }  # fmt: skip
