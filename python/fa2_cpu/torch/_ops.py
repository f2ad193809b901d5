# SPDX-License-Identifier: Apache-2.0
"""fa2::attention and fa2::attention_backward: operators of torch.library with autograd and fake kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu import _core

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _plain(x: Optional[Tensor]) -> Optional[Tensor]:
    """The tensor without its autograd history, which DLPack refuses to export."""
    return x.detach() if x is not None and x.requires_grad else x


def _num_threads() -> Optional[int]:
    """PyTorch's number of threads, unless FA2_NUM_THREADS decides."""
    return None if os.environ.get("FA2_NUM_THREADS") else torch.get_num_threads()


def _resolve_precision(precision: str, dtype: torch.dtype) -> str:
    """ "torch" follows torch.get_float32_matmul_precision() for f32, as PyTorch's own products do."""
    if precision != "torch":
        return precision
    if dtype == torch.float32:
        return "exact" if torch.get_float32_matmul_precision() == "highest" else "high"
    return "fast"


def _check_cpu(**tensors: Optional[Tensor]) -> None:
    for name, x in tensors.items():
        if x is not None and x.device.type != "cpu":
            raise TypeError(f"{name} is on device {x.device}; it must be on the CPU, where fa2 computes")


def _options(
    q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, layout, scale, causal,
    window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision,
) -> dict:  # fmt: skip
    seed, offset = (0, 0) if philox is None else philox.tolist()
    return {
        "layout": layout,
        "scale": scale,
        "causal": causal or None,
        "window": (window_left, window_right),
        "bias": _plain(bias),
        "softcap": softcap,
        "alibi_slopes": _plain(alibi_slopes),
        "sinks": _plain(sinks),
        "dropout_p": dropout_p,
        "philox_seed": seed & 0xFFFFFFFFFFFFFFFF,
        "philox_offset": offset & 0xFFFFFFFFFFFFFFFF,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "precision": _resolve_precision(precision, q.dtype),
        "num_threads": _num_threads(),
    }


def _empty_in_order(x: Tensor, shape: Sequence[int], layout: str, dtype: Optional[torch.dtype] = None) -> Tensor:
    """A dense tensor whose dimensions lie in memory as x's do, so that a [B, H, N, D] view of
    [B, N, H, D] data leads to another one, and merging the heads afterwards copies nothing."""
    if layout == "bhsd" and x.stride(1) < x.stride(2):
        b, h, n, d = shape
        return x.new_empty((b, n, h, d), dtype=dtype).transpose(1, 2)
    return x.new_empty(shape, dtype=dtype)


def _allocate_forward(q: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    rank = 3 if layout == "thd" else 4
    for name, x in (("q", q), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; layout {layout} needs {rank} dimensions")
    if q.dtype not in _FLOATS:
        raise TypeError(f"q is {q.dtype}; it must be float32, bfloat16, float16 or float64")
    if layout == "thd":
        total, heads, _ = q.shape
        lse_shape: tuple[int, ...] = (heads, total)
    elif layout == "bshd":
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    else:
        lse_shape = tuple(q.shape[:3])
    out = _empty_in_order(q, (*q.shape[:-1], v.shape[-1]), layout)
    lse = q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse


def _allocate_backward(q, k, v, bias, alibi_slopes, sinks, layout, wanted) -> list[Tensor]:
    """dq, dk, dv, dbias, dalibi_slopes, dsinks; without elements where not wanted."""
    grads = [
        _empty_in_order(x, x.shape, layout) if want else x.new_empty((0,)) for x, want in zip((q, k, v), wanted)
    ]
    for x, want in zip((bias, alibi_slopes, sinks), wanted[3:]):
        grads.append(q.new_empty(x.shape, dtype=x.dtype) if want and x is not None else q.new_empty((0,)))
    return grads


def _bias_gradient_buffer(dbias: Tensor, q: Tensor) -> Tensor:
    """Where the core writes dbias: f64 sums are stored as f64 or f32, others as f32, bf16 or f16."""
    if q.dtype == torch.float64:
        return dbias if dbias.dtype in (torch.float64, torch.float32) else dbias.new_empty(dbias.shape, dtype=q.dtype)
    return dbias if dbias.dtype != torch.float64 else dbias.new_empty(dbias.shape, dtype=torch.float32)


@torch.library.custom_op("fa2::attention", mutates_args=(), device_types="cpu")
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    philox: Optional[Tensor],
    layout: str,
    scale: Optional[float],
    causal: str,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of fa2_cpu.attention_forward; philox is int64 [2]: seed and offset; causal "" is None."""
    out, lse = _allocate_forward(q, v, layout)
    options = _options(
        q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, layout, scale, causal,
        window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision,
    )  # fmt: skip
    _core.attention_forward(_plain(q), _plain(k), _plain(v), out, lse, **options)
    return out, lse


@attention_op.register_fake
def _attention_fake(
    q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, layout, scale, causal,
    window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision,
):  # fmt: skip
    return _allocate_forward(q, v, layout)


@torch.library.custom_op("fa2::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Optional[Tensor],
    bias: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    philox: Optional[Tensor],
    layout: str,
    scale: Optional[float],
    causal: str,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    precision: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of fa2::attention: dq, dk, dv, dbias, dalibi_slopes, dsinks, empty where not wanted."""
    grads = _allocate_backward(q, k, v, bias, alibi_slopes, sinks, layout, wanted)
    given = (q, k, v, bias, alibi_slopes, sinks)
    outputs = [g if want and x is not None else None for g, want, x in zip(grads, wanted, given)]
    if outputs[3] is not None:
        outputs[3] = _bias_gradient_buffer(outputs[3], q)
    options = _options(
        q, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, layout, scale, causal,
        window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision,
    )  # fmt: skip
    _core.attention_backward(
        _plain(dout), _plain(q), _plain(k), _plain(v), _plain(out), _plain(lse), _plain(dlse), None,
        *outputs, **options,
    )  # fmt: skip
    if outputs[3] is not None and outputs[3] is not grads[3]:
        grads[3].copy_(outputs[3])
    return tuple(grads)


@attention_backward_op.register_fake
def _attention_backward_fake(
    dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox,
    layout, scale, causal, window_left, window_right, softcap, dropout_p, max_seqlen_q, max_seqlen_k,
    precision, wanted,
):  # fmt: skip
    return tuple(_allocate_backward(q, k, v, bias, alibi_slopes, sinks, layout, wanted))


def _setup_context(ctx, inputs, output):
    (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, *options) = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, out, lse)
    ctx.options = options
    ctx.set_materialize_grads(False)  # lse is rarely used, and then costs no gradient of zeros


def _backward(ctx, dout, dlse):
    (q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, out, lse) = ctx.saved_tensors
    not_differentiable = [None] * (3 + len(ctx.options))
    if dout is None and dlse is None:
        return (None,) * 6 + tuple(not_differentiable)
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[:6])
    grads = attention_backward_op(
        dout, q, k, v, out, lse, dlse, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox,
        *ctx.options, wanted,
    )  # fmt: skip
    return tuple(g if want else None for g, want in zip(grads, wanted)) + tuple(not_differentiable)


attention_op.register_autograd(_backward, setup_context=_setup_context)


def _refuse_double_backward(ctx, *grads):
    raise NotImplementedError(
        "fa2 has no second derivative of attention; use "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where create_graph=True is needed"
    )


attention_backward_op.register_autograd(_refuse_double_backward)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bhsd",
    scale: Optional[float] = None,
    causal: Optional[str] = None,
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
    precision: str = "torch",
) -> tuple[Tensor, Tensor]:
    """fa2_cpu.attention_forward as a differentiable PyTorch function: (out, lse).

    The arguments are those of fa2_cpu.attention_forward, where q, k, v, bias, alibi_slopes and sinks may
    require gradients and lse may be used in the loss. Differences: precision "torch" is "exact" for
    f32 if torch.get_float32_matmul_precision() is "highest", else "high" (other dtypes: "fast");
    philox is an int64 tensor [seed, offset], drawn from PyTorch's generator when dropout_p > 0 and
    none is given; max_seqlen_q and max_seqlen_k are the extents by which varlen dropout counts its
    random numbers (0: the longest sequence).
    """
    _check_cpu(q=q, k=k, v=v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks)
    if dropout_p > 0.0 and philox is None:
        philox = draw_philox()
    return torch.ops.fa2.attention(
        q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, philox, layout, scale,
        causal or "", window[0], window[1], softcap, dropout_p, max_seqlen_q, max_seqlen_k, precision,
    )  # fmt: skip


def draw_philox() -> Tensor:
    """A seed and an offset from PyTorch's CPU generator, int64 [2]."""
    # 2⁶² leaves room for counting an offset on without a carry into the sign.
    return torch.randint(1 << 62, (2,), dtype=torch.int64, device="cpu")
