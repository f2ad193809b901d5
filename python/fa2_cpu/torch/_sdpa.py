# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention, computed by fa2."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2_cpu.torch import _plain
from fa2_cpu.torch._ops import dense_attention
from fa2_cpu.torch._tensors import FLOATS, check_tensor, has_rules, transformed


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of that name, with its arguments and semantics; differentiable.

    Args:
      query: [..., Hq, L, E]; key [..., H, S, E]; value [..., H, S, Ev]; leading dimensions broadcast.
      attn_mask: bool (True takes part) or float (added to the scores, may require a gradient),
        broadcastable to [..., Hq, L, S].
      dropout_p: applied whenever it is > 0; the mask follows torch.manual_seed.
      is_causal: query i sees keys j ≤ i (top-left); not with attn_mask.
      scale: None is 1/√E.
      enable_gqa: Hq may be a multiple of H.

    Returns:
      [..., Hq, L, Ev]. A row that sees no key is 0. Second derivatives, torch.func.grad and jvp are fa2's
      too; under vmap, jvp of jvp and third derivatives by torch.func PyTorch's own function computes.

    Raises:
      TypeError: an argument that is no dense CPU tensor, or dtypes that differ.
      ValueError: shapes that do not fit, or attn_mask with is_causal.

    Example:
      >>> import torch, fa2_cpu.torch
      >>> q, k, v = (torch.randn(2, 4, 7, 16) for _ in range(3))
      >>> out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
      >>> torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    """
    out = _plain.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out is not None:
        return out
    problem = refusal(query, key, value, attn_mask, is_causal)
    if problem is not None:
        raise problem
    if not torch.compiler.is_compiling() and transformed() and not has_rules():
        return pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return compute(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def refusal(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor], is_causal: bool
) -> Optional[Exception]:
    """What is wrong with the tensors, if anything: TypeError or ValueError."""
    try:
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, x)
        if attn_mask is not None:
            check_tensor("attn_mask", attn_mask)
    except TypeError as error:
        return error
    if query.dtype is not key.dtype or query.dtype is not value.dtype:
        return TypeError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; they must have one dtype"
        )
    if query.dtype not in FLOATS:
        return TypeError(f"query is {query.dtype}; it must be float32, bfloat16, float16 or float64")
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        return ValueError(
            f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions; "
            "each must have at least 2"
        )
    if attn_mask is not None:
        if is_causal:
            return ValueError("attn_mask is given and is_causal is True; one of them must be left out")
        if attn_mask.dtype is not torch.bool and attn_mask.dtype not in FLOATS:
            return TypeError(f"attn_mask is {attn_mask.dtype}; it must be bool or a float dtype")
        if attn_mask.dim() < 1:
            return ValueError("attn_mask has no dimension; it must be broadcastable to [..., Hq, L, S]")
    return None


def pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    """PyTorch's own function, for transforms that only it has rules for."""
    if forward_ad._current_level >= 0:
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return torch.ops.aten.scaled_dot_product_attention.default.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def compute(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    """The function on fa2, of tensors that refusal() has nothing against."""
    query, key, value = (autocast(x) for x in (query, key, value))
    causal = "top_left" if is_causal else ""
    if query.dim() == 4 and key.dim() == 4 and value.dim() == 4:
        batch = query.shape[0] == key.shape[0] and query.shape[0] == value.shape[0]
        heads = key.shape[1] == value.shape[1] and (query.shape[1] == key.shape[1] or enable_gqa)
        mask = attn_mask is None or (attn_mask.dim() <= 4 and _plain.within(attn_mask, *query.shape[:2]))
        if batch and heads and mask:
            return dense_attention(query, key, value, attn_mask, causal, scale, dropout_p)
    query, key, value, attn_mask, leading = _broadcast(query, key, value, attn_mask, enable_gqa)
    out = dense_attention(query, key, value, attn_mask, causal, scale, dropout_p)
    return out.reshape(*leading, *out.shape[-2:])


def autocast(x: Tensor) -> Tensor:
    """x as torch.autocast passes it to a product; f64 stays."""
    if not torch.is_autocast_enabled("cpu") or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


def _common(what: str, shapes) -> tuple[int, ...]:
    """The shape that all broadcast to."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(
            f"the {what} of query, key, value and attn_mask are {', '.join(str(tuple(s)) for s in shapes)}; "
            "they must broadcast to one shape"
        ) from None


def _broadcast(query, key, value, mask, enable_gqa):
    """The tensors as [B, H, N, D] with one batch, and the leading dimensions of the result."""
    drop = max(0, 3 - max(query.dim(), key.dim(), value.dim(), 0 if mask is None else mask.dim()))
    query, key, value = (x if x.dim() > 2 else x.unsqueeze(0) for x in (query, key, value))
    if mask is not None and mask.dim() < 3:
        mask = mask[(None,) * (3 - mask.dim())]
    batches = [x.shape[:-3] for x in (query, key, value)]
    heads = [query.shape[-3], key.shape[-3], value.shape[-3]]
    if mask is not None:
        batches.append(mask.shape[:-3])
    batch = _common("leading dimensions", batches)
    if enable_gqa:
        for name, number in (("key", heads[1]), ("value", heads[2])):
            if number == 0 or heads[0] % number:
                raise ValueError(f"query has {heads[0]} heads and {name} {number}; the first must be a multiple")
        if heads[1] != heads[2]:
            key = key.repeat_interleave(heads[0] // heads[1], -3)
            value = value.repeat_interleave(heads[0] // heads[2], -3)
    else:
        if len({h for h in heads if h != 1}) > 1:
            raise ValueError(
                f"query has {heads[0]} heads, key {heads[1]} and value {heads[2]}; they must agree, "
                "unless enable_gqa=True is given"
            )
        all_heads = heads if mask is None else [*heads, mask.shape[-3]]
        (number,) = _common("heads", [(h,) for h in all_heads])
        query = query.expand(*query.shape[:-3], number, -1, -1)
        if heads[1] != heads[2] or heads[1] not in (1, number):
            key = key.expand(*key.shape[:-3], number, -1, -1)
            value = value.expand(*value.shape[:-3], number, -1, -1)
    query, key, value = (x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    if mask is not None:
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*batch, *mask.shape[-3:])
        mask = mask.reshape(-1, *mask.shape[-3:])
    leading = (*batch, query.shape[1])[drop:]
    return query, key, value, mask, leading
