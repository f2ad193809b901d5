# SPDX-License-Identifier: Apache-2.0
"""Attention of plain CPU tensors: results allocated, the core called. Nothing here is differentiable."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fa2_cpu import _core
from fa2_cpu.torch._block_lists import BlockLists
from fa2_cpu.torch._tensors import FLOATS, descriptor

_profiling = torch._C._autograd._profiler_enabled


class AttentionOptions(NamedTuple):
    """What fa2::attention and fa2::attention_backward take beside tensors, in their order."""

    layout: str = "bhsd"
    scale: Optional[float] = None
    causal: str = ""  # "" is None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    precision: str = "torch"

    @property
    def block_mask(self) -> Optional[BlockLists]:
        return None

    def masked_by(self, lists: Optional[BlockLists]) -> Union[AttentionOptions, MaskedOptions]:
        """The same under a block mask, which those operators do not take."""
        return self if lists is None else MaskedOptions(self, lists)


class MaskedOptions:
    """AttentionOptions and a block mask. No tuple: torch.func makes new tuples, of their elements alone."""

    def __init__(self, options: AttentionOptions, block_mask: BlockLists) -> None:
        self._options, self.block_mask = options, block_mask

    def masked_by(self, lists: Optional[BlockLists]) -> Union[AttentionOptions, MaskedOptions]:
        return self._options.masked_by(lists)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._options)

    def __getitem__(self, i: int) -> Any:
        return self._options[i]


# PyTorch's threads: they spin on the cores for milliseconds after each of its operators, where others
# would have to wait for them.
POOL = "openmp"


@functools.cache
def _threads_by_environment() -> bool:
    return bool(os.environ.get("FA2_NUM_THREADS"))


def num_threads() -> Optional[int]:
    """PyTorch's number of threads, unless FA2_NUM_THREADS decides."""
    return None if _threads_by_environment() else torch.get_num_threads()


def resolve_precision(precision: str, dtype: torch.dtype) -> str:
    """ "torch" follows torch.get_float32_matmul_precision() for f32, as PyTorch's own products do."""
    if precision != "torch":
        return precision
    if dtype == torch.float32:
        return "exact" if torch.get_float32_matmul_precision() == "highest" else "high"
    return "fast"


def _core_options(q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options: AttentionOptions):
    """The core's arguments behind the tensors, by position: keywords would take a microsecond more."""
    (layout, scale, causal, left, right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision) = options
    seed, offset = (0, 0) if philox is None else philox.tolist()
    return (
        layout, scale, causal or None, (left, right), descriptor(bias), softcap, descriptor(alibi_slopes),
        descriptor(sinks), dropout_p, seed & 0xFFFFFFFFFFFFFFFF, offset & 0xFFFFFFFFFFFFFFFF,
        descriptor(cu_seqlens_q), descriptor(cu_seqlens_k), max_seqlen_q, max_seqlen_k,
        resolve_precision(precision, q.dtype), num_threads(), POOL,
    )  # fmt: skip


def _block_mask(options: AttentionOptions) -> dict:
    """The core's keyword for a block mask, if there is one."""
    return {} if options.block_mask is None else {"block_mask": options.block_mask.descriptors()}


def empty_in_order(x: Tensor, shape: Sequence[int], layout: str) -> Tensor:
    """A dense tensor whose dimensions lie in memory as x's do, so that a [B, H, N, D] view of
    [B, N, H, D] data leads to another one, and merging the heads afterwards copies nothing."""
    if layout == "bhsd" and x.stride(1) < x.stride(2):
        b, h, n, d = shape
        return x.new_empty((b, n, h, d)).transpose(1, 2)
    return x.new_empty(shape)


def allocate_forward(q: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """out and lse, not written yet."""
    rank = 3 if layout == "thd" else 4
    for name, x in (("q", q), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; layout {layout} needs {rank} dimensions")
    if q.dtype not in FLOATS:
        raise TypeError(f"q is {q.dtype}; it must be float32, bfloat16, float16 or float64")
    q_shape = q.shape
    if layout == "thd":
        lse_shape: tuple[int, ...] = (q_shape[1], q_shape[0])
    elif layout == "bshd":
        lse_shape = (q_shape[0], q_shape[2], q_shape[1])
    else:
        lse_shape = q_shape[:3]
    out = empty_in_order(q, (*q_shape[:-1], v.shape[-1]), layout)
    lse = q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse


def allocate_backward(q, k, v, bias, alibi_slopes, sinks, layout, wanted) -> list[Optional[Tensor]]:
    """dq, dk, dv, dbias, dalibi_slopes, dsinks, not written yet; None where not wanted."""
    grads = [empty_in_order(x, x.shape, layout) if want else None for x, want in zip((q, k, v), wanted)]
    for x, want in zip((bias, alibi_slopes, sinks), wanted[3:]):
        grads.append(q.new_empty(x.shape, dtype=x.dtype) if want and x is not None else None)
    return grads


def _bias_gradient_buffer(dbias: Tensor, q: Tensor) -> Tensor:
    """Where the core writes dbias: f64 sums are stored as f64 or f32, others as f32, bf16 or f16."""
    if q.dtype == torch.float64:
        return dbias if dbias.dtype in (torch.float64, torch.float32) else dbias.new_empty(dbias.shape, dtype=q.dtype)
    return dbias if dbias.dtype != torch.float64 else dbias.new_empty(dbias.shape, dtype=torch.float32)


def named(name: str, function, *arguments, **keywords) -> None:
    """Runs function so that a profiler shows its time under an operator's name."""
    if _profiling():
        with record_function(name):
            function(*arguments, **keywords)
    else:
        function(*arguments, **keywords)


def under_its_name(name: str, function):
    """function, whose time a profiler shows under an operator's name."""

    def call(*arguments):
        if not _profiling():
            return function(*arguments)
        with record_function(name):
            return function(*arguments)

    return call


def forward(
    q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    out, lse = allocate_forward(q, v, options[0])
    named(
        "fa2::attention", _core.attention_forward,
        *map(descriptor, (q, k, v, out, lse)),
        *_core_options(q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options),
        **_block_mask(options),
    )  # fmt: skip
    return out, lse


def backward(
    dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox,
    options: AttentionOptions, wanted: Sequence[bool],
) -> tuple[Optional[Tensor], ...]:  # fmt: skip
    """dq, dk, dv, dbias, dalibi_slopes, dsinks; None where not wanted."""
    grads = allocate_backward(q, k, v, bias, alibi_slopes, sinks, options[0], wanted)
    outputs = list(grads)
    if outputs[3] is not None:
        outputs[3] = _bias_gradient_buffer(outputs[3], q)
    named(
        "fa2::attention_backward", _core.attention_backward,
        *map(descriptor, (dout, q, k, v, out, lse, dlse)), None, *map(descriptor, outputs),
        *_core_options(q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, options),
        **_block_mask(options),
    )  # fmt: skip
    if outputs[3] is not None and outputs[3] is not grads[3]:
        grads[3].copy_(outputs[3])
    return tuple(grads)
