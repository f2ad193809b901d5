# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.torch.attention: every option of the library, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from fa2_cpu import BlockMask
from fa2_cpu._options import fitting, number, window_pair
from fa2_cpu.torch import _derivatives
from fa2_cpu.torch._block_lists import BlockLists
from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._tensors import FLOATS, check_tensor, untransformed

if TYPE_CHECKING:
    from fa2_cpu._options import Causal, Layout, TorchPrecision

_NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "philox")


def _check(tensors: tuple[Optional[Tensor], ...], layout: str, causal: Optional[str]) -> None:
    for name, x in zip(_NAMES, tensors):
        if x is not None or name in ("q", "k", "v"):
            check_tensor(name, x)
    q, k, v, bias, *_, cu_seqlens_q, cu_seqlens_k, philox = tensors
    if q.dtype not in FLOATS:
        raise TypeError(f"q is {q.dtype}; it must be float32, bfloat16, float16 or float64")
    if q.dtype is not k.dtype or q.dtype is not v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must have one dtype")
    if bias is not None and bias.dtype is not torch.bool and bias.dtype not in FLOATS:
        raise TypeError(f"bias is {bias.dtype}; it must be bool, float32, bfloat16, float16 or float64")
    if philox is not None and (philox.dtype is not torch.int64 or philox.shape != (2,)):
        raise ValueError(f"philox is {philox.dtype} of shape {tuple(philox.shape)}; it must be int64 [2]")
    if layout not in ("bhsd", "bshd", "thd"):
        raise ValueError(f'layout is {layout!r}; it must be "bhsd", "bshd" or "thd"')
    if layout == "thd" and (cu_seqlens_q is None or cu_seqlens_k is None):
        raise ValueError('layout is "thd" without cu_seqlens_q and cu_seqlens_k, which say where sequences start')
    if causal not in (None, "top_left", "bottom_right"):
        raise ValueError(f'causal is {causal!r}; it must be None, "top_left" or "bottom_right"')


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout = "bhsd",
    scale: Optional[float] = None,
    causal: Optional[Causal] = None,
    window: tuple[int, int] = (-1, -1),
    bias: Optional[Tensor] = None,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    philox: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    block_mask: Optional[BlockMask] = None,
    precision: TorchPrecision = "torch",
) -> tuple[Tensor, Tensor]:
    """fa2_cpu.attention_forward as a differentiable PyTorch function.

    The arguments are those of fa2_cpu.attention_forward, where q, k, v, bias, alibi_slopes and sinks may
    require gradients and lse may be used in the loss. There are second derivatives (create_graph=True), and
    torch.func's grad, jvp and vmap. Differences:

    Args:
      precision: "torch" is "exact" for f32 if torch.get_float32_matmul_precision() is "highest", else
        "high"; for other dtypes "fast".
      philox: int64 [2], seed and offset; drawn from PyTorch's generator when dropout_p > 0 and none is
        given.
      block_mask: also of tensors. Under torch.compile a call with one is a graph break.
      max_seqlen_q, max_seqlen_k: the extents by which dropout counts its random numbers (0: the
        longest sequence).

    Returns:
      out and lse, as fa2_cpu.attention_forward.

    Raises:
      TypeError: an argument that is no dense CPU tensor, or dtypes that differ.
      ValueError: shapes or options that do not fit.
      NotImplementedError: third derivatives.

    Example:
      >>> import torch, fa2_cpu.torch
      >>> q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
      >>> out, lse = fa2_cpu.torch.attention(q, k, v, causal="top_left")
      >>> out.shape, lse.shape
      (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5]))
      >>> out.sum().backward()
      >>> q.grad.shape
      torch.Size([1, 2, 5, 8])
    """
    if philox is None and number("dropout_p", dropout_p) > 0.0:
        philox = draw_philox()
    tensors = (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox)
    _check(tensors, layout, causal)
    if precision not in ("torch", "fast", "high", "exact"):
        raise ValueError(f'precision is {precision!r}; it must be "torch", "fast", "high" or "exact"')
    # Numbers that a compiled graph holds as symbols are numbers already.
    if not torch.compiler.is_compiling():
        window = window_pair(window)
        scale = None if scale is None else number("scale", scale)
        softcap, dropout_p = number("softcap", softcap), number("dropout_p", dropout_p)
        max_seqlen_q = fitting("max_seqlen_q", max_seqlen_q, 64)
        max_seqlen_k = fitting("max_seqlen_k", max_seqlen_k, 64)
    left, right = window
    options = AttentionOptions(
        layout, scale, causal or "", left, right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision
    )
    return _derivatives.call(tensors, options) if block_mask is None else _masked(tensors, options, block_mask)


@torch.compiler.disable
def _masked(
    tensors: tuple[Optional[Tensor], ...], options: AttentionOptions, block_mask: BlockMask
) -> tuple[Tensor, Tensor]:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is of type {type(block_mask).__name__}; it must be a fa2_cpu.BlockMask")
    keys = tensors[1].shape[{"bhsd": 2, "bshd": 1, "thd": 0}[options.layout]]
    with untransformed():
        lists = BlockLists.of(block_mask, keys)
    return _derivatives.call(tensors, options.masked_by(lists))


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], causal: str, scale: Optional[float], dropout_p: float
) -> Tensor:
    """out of [B, H, N, D] tensors that a caller has checked already."""
    if not torch.compiler.is_compiling():
        scale = None if scale is None else number("scale", scale)
        dropout_p = number("dropout_p", dropout_p)
    philox = draw_philox() if dropout_p > 0.0 else None
    tensors = (q, k, v, bias, None, None, None, None, philox)
    return _derivatives.call(tensors, AttentionOptions("bhsd", scale, causal, dropout_p=dropout_p))[0]


def draw_philox() -> Tensor:
    """A seed and an offset from PyTorch's CPU generator, int64 [2]."""
    # 2⁶² leaves room for counting an offset on without a carry into the sign.
    return torch.randint(1 << 62, (2,), dtype=torch.int64, device="cpu")
