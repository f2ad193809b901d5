# SPDX-License-Identifier: Apache-2.0
"""flex_attention: PyTorch's function for CPU tensors, with a gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
import torch.nn.attention.flex_attention as pytorch
from torch import Tensor

from fa2_cpu import BlockMask
from fa2_cpu.torch._block_lists import BlockLists
from fa2_cpu.torch._flex import _by_blocks, _fused
from fa2_cpu.torch._flex._blocks import Call
from fa2_cpu.torch._flex._forms import Form, Unrecognised, form_of
from fa2_cpu.torch._flex._graph import Graph, trace
from fa2_cpu.torch._flex._of_pytorch import lists_of
from fa2_cpu.torch._flex._original import flex_attention as pytorch_flex_attention
from fa2_cpu.torch._flex._terms import captured_by
from fa2_cpu.torch._not_compiled import not_compiled
from fa2_cpu.torch._sdpa import autocast
from fa2_cpu.torch._tensors import FLOATS, check_tensor, transformed

_LARGE = 1 << 30  # of a block: PyTorch's mask of none


@not_compiled
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Optional[Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = None,
    block_mask: Union[pytorch.BlockMask, BlockMask, None] = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[dict[str, Any]] = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention for CPU tensors, differentiable.

    out = softmax(score_mod(scale · q kᵀ)) v over the keys that block_mask shows. Blocks that it hides are not computed.

    Args:
      query: [B, Hq, L, E]; key [B, Hkv, S, E]; value [B, Hkv, S, Ev]; f32, bf16, f16 or f64. B of key and value may be 1.
      score_mod: of score, b, h, q_idx and kv_idx, tensors of no dimension. What the kernels have as an option is given
        to them (docs/flex_attention.md lists it); anything else runs block by block in PyTorch, and a warning says why.
        Tensors that it captures get their gradients.
      block_mask: of PyTorch's or fa2's create_block_mask, or of BlockMask.from_kv_blocks. Its mask_mod is evaluated
        once, inside partial blocks, and kept with it. Or a fa2_cpu.BlockMask, which has bits instead.
      scale: None is 1/√E.
      enable_gqa: Hq may be a multiple of Hkv.
      return_lse: also lse, [B, Hq, L] in f32 (f64 for f64).
      kernel_options: of no effect.
      return_aux: an AuxRequest; max_scores is computed block by block in PyTorch.

    Returns:
      out [B, Hq, L, Ev]; (out, lse) with return_lse; (out, AuxOutput) with return_aux. A row that sees no key is 0, its
      lse -inf. Tensors on other devices, subclasses of Tensor and the transforms of torch.func are PyTorch's.

    Raises:
      TypeError: an argument that is no dense tensor, or dtypes that differ.
      ValueError: shapes that do not fit, or a score_mod that is not made of PyTorch's operators.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
      >>> mask = fa2.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256)
      >>> fa2.flex_attention(q, k, v, block_mask=mask).sum().backward()
      >>> q.grad.shape
      torch.Size([1, 2, 256, 16])
    """
    if _is_pytorchs(query, key, value):
        others = {} if return_aux is None else {"return_aux": return_aux}
        return pytorch_flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **others
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux are both given; return_aux says it all")
    query, key, value = (autocast(x) for x in (query, key, value))
    _check(query, key, value, enable_gqa, block_mask)
    batch, heads = query.shape[:2]
    if key.shape[0] != batch:
        key, value = (x.expand(batch, *x.shape[1:]) for x in (key, value))
    lists = None
    if isinstance(block_mask, BlockMask):
        lists = BlockLists.of(block_mask, key.shape[2])
    elif not _hides_nothing(block_mask):
        lists = lists_of(block_mask, batch, heads)
    scale = 1.0 / math.sqrt(max(1, query.shape[3])) if scale is None else float(scale)
    greatest = return_aux is not None and getattr(return_aux, "max_scores", False)
    with torch.autocast("cpu", enabled=False):
        out, lse, most = _compute(query, key, value, score_mod, lists, scale, greatest)
    if return_aux is not None:
        return out, pytorch.AuxOutput(lse=lse if return_aux.lse else None, max_scores=most)
    return (out, lse) if return_lse else out


def _is_pytorchs(*tensors: Any) -> bool:
    if any(isinstance(x, Tensor) and (not x.is_cpu or type(x) not in (Tensor, torch.nn.Parameter)) for x in tensors):
        return True
    return transformed()


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, block_mask: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B, H, N, D]")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; they must have one dtype")
    if query.dtype not in FLOATS:
        raise TypeError(f"query is {query.dtype}; it must be float32, bfloat16, float16 or float64")
    (batch, heads, rows, depth), kv = query.shape, key.shape
    if kv[:3] != value.shape[:3] or kv[3] != depth or kv[0] not in (1, batch):
        raise ValueError(
            f"query, key and value have shapes {tuple(query.shape)}, {tuple(kv)} and {tuple(value.shape)}; they must be "
            "[B, Hq, L, E], [B or 1, Hkv, S, E] and [B or 1, Hkv, S, Ev]"
        )
    if heads != kv[1] and not (enable_gqa and kv[1] and heads % kv[1] == 0):
        raise ValueError(
            f"query has {heads} heads and key {kv[1]}; they must agree, or the first be a multiple with enable_gqa=True"
        )
    if block_mask is None or isinstance(block_mask, BlockMask):
        return
    if not isinstance(block_mask, pytorch.BlockMask):
        raise TypeError(
            f"block_mask is of type {type(block_mask).__name__}; it must be a BlockMask of "
            "torch.nn.attention.flex_attention or fa2_cpu"
        )
    if _hides_nothing(block_mask):
        return
    if tuple(block_mask.seq_lengths) != (rows, kv[2]):
        raise ValueError(
            f"block_mask is for {block_mask.seq_lengths[0]} queries and {block_mask.seq_lengths[1]} keys; it must be for "
            f"{rows} and {kv[2]}, those of query and key"
        )
    for size, name, wanted in zip(block_mask.kv_num_blocks.shape[-3:-1], ("batch elements", "heads"), (batch, heads)):
        if size not in (1, wanted):
            raise ValueError(f"block_mask is for {size} {name}; it must be for 1 or {wanted}, those of query")


def _hides_nothing(block_mask: Any) -> bool:
    return block_mask is None or (min(block_mask.BLOCK_SIZE) >= _LARGE and block_mask.mask_mod is pytorch.noop_mask)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, lists: Optional[BlockLists], scale: float, greatest: bool
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """out, lse and, where wanted, the greatest score of each row."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    graph = None if score_mod is None else trace(score_mod, dtype)
    try:
        if greatest:
            raise Unrecognised("max_scores is wanted, which the kernels do not give")
        form = Form() if graph is None else form_of(graph)
        return (*_fused.attention(q, k, v, form, lists, scale), None)
    except Unrecognised as reason:
        _warn(score_mod, str(reason))
    graph = trace(lambda score, b, h, q_idx, kv_idx: score, dtype) if graph is None else graph
    return _by_blocks_of(graph, q, k, v, lists, scale, greatest)


def _by_blocks_of(graph: Graph, q: Tensor, k: Tensor, v: Tensor, lists: Optional[BlockLists], scale: float, greatest: bool):
    captured = captured_by([graph.output])
    call = Call(graph.output, tuple(captured), lists, scale)
    out, lse, most = _by_blocks.ByBlocks.apply(q, k, v, call, *(x.tensor for x in captured))
    return out, lse, most if greatest else None


_warned: set[tuple[Any, str]] = set()


def _warn(score_mod: Any, reason: str) -> None:
    """Once for a function's code and a reason."""
    code = getattr(score_mod, "__code__", None)
    if (code, reason) in _warned:
        return
    _warned.add((code, reason))
    place = "" if code is None else f" of {code.co_filename}:{code.co_firstlineno}"
    warnings.warn(
        f"flex_attention computes the score_mod{place} block by block in PyTorch, slower than fused, since {reason}",
        stacklevel=5,
    )
