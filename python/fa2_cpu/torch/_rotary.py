# SPDX-License-Identifier: Apache-2.0
"""apply_rotary_emb and apply_rotary_pos_emb: rotary position embedding with its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._compute import empty_in_order
from fa2_cpu.torch._library import by_pytorch, check_float, operator, rows, threads, wide


def _allocate(x, cos, sin, interleaved, back):
    return empty_in_order(x, x.shape, "bhsd")


def _kernel(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    y = _allocate(x, cos, sin, interleaved, back)
    _core.rotary_embedding(rows(x), rows(cos), rows(sin), interleaved, back, y, **threads())
    return y


def _save(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, dy):
    return _op(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.back), None, None, None, None


# back: by the negative angle, which is the gradient.
_op = operator(
    "rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    _kernel, _allocate, _differentiate, _save,
)  # fmt: skip


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """The operator by PyTorch's."""
    half = cos.shape[-1]
    turned = wide(x[..., : 2 * half])
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def _angles(name: str, angles: Tensor, x: Tensor, length: int) -> Tensor:
    """cos or sin as [1 or B, 1, N, R/2], in a dtype that the core reads beside x's."""
    check_float(name, angles)
    if angles.requires_grad and torch.is_grad_enabled():
        raise TypeError(f"{name} requires grad; fa2 has no gradient of the angles")
    fits = angles.dim() == 2 or (angles.dim() == 3 and angles.shape[0] in (1, x.shape[0]))
    if not fits or angles.shape[-2] != length or angles.shape[-1] > x.shape[-1] // 2:
        raise ValueError(
            f"{name} has shape {tuple(angles.shape)}; it must be [N, R/2] or [B, N, R/2] with B = {x.shape[0]}, "
            f"N = {length} and R ≤ {x.shape[-1]}"
        )
    if angles.dtype not in (x.dtype, torch.float32):
        angles = angles.to(torch.float32)
    return angles[None, None] if angles.dim() == 2 else angles[:, None]


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, layout: str = "bhsd"
) -> Tensor:
    """Turns pairs of the first R elements of each head by the angle of its position (Su et al. 2021).

    Args:
      x: [B, H, N, D] (layout "bhsd") or [B, N, H, D] ("bshd"); f32, bf16, f16 or f64, any strides.
      cos, sin: [N, R/2] or [B, N, R/2] with R ≤ D, any float dtype. They get no gradient.
      interleaved: pairs are elements (2i, 2i + 1); else (i, i + R/2), as in GPT-NeoX and transformers.

    Returns:
      x's shape and dtype; elements from R on are copied.

    Raises:
      TypeError: dtypes or devices that fa2 does not compute on, or angles that require grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> angles = torch.outer(torch.arange(6.0), 100 ** (-torch.arange(4) / 4))  # [N, R/2]
      >>> x = torch.randn(2, 3, 6, 8)
      >>> y = fa2.apply_rotary_emb(x, angles.cos(), angles.sin())
      >>> torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))  # turned, no longer
      >>> torch.testing.assert_close(y[:, :, 0], x[:, :, 0])  # position 0 stays
    """
    check_float("x", x)
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'layout is {layout!r}; it must be "bhsd" or "bshd"')
    if not isinstance(interleaved, (bool, int)):
        raise TypeError(f"interleaved is {interleaved!r}; it must be True or False")
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must have 4 dimensions")
    heads_first = layout == "bhsd"
    length = x.shape[2 if heads_first else 1]
    cos = _angles("cos", cos, x, length)
    sin = _angles("sin", sin, x, length)
    if cos.shape[-1] != sin.shape[-1]:
        raise ValueError(f"cos and sin have last sizes {cos.shape[-1]} and {sin.shape[-1]}; they must have one")
    if sin.dtype != cos.dtype:
        cos, sin = cos.float(), sin.float()
    turn = _turned if by_pytorch() else _op
    if heads_first:
        return turn(x, cos, sin, bool(interleaved), False)
    return turn(x.transpose(1, 2), cos, sin, bool(interleaved), False).transpose(1, 2)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """apply_rotary_emb on q and k, as transformers' function of that name.

    Args:
      q, k: [B, H, N, D] with unsqueeze_dim 1, [B, N, H, D] with 2.
      cos, sin: [B, N, D], whose second half repeats the first, or only [B, N, D/2].

    Returns:
      q and k turned, in their dtypes.

    Raises:
      TypeError: dtypes or devices that fa2 does not compute on, or angles that require grad.
      ValueError: shapes that do not fit, or another unsqueeze_dim.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> angles = torch.outer(torch.arange(6.0), 100 ** (-torch.arange(4) / 4)).repeat(1, 2)[None]  # [1, N, D]
      >>> q, k = torch.randn(1, 3, 6, 8), torch.randn(1, 1, 6, 8)
      >>> q, k = fa2.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim is {unsqueeze_dim!r}; it must be 1 for [B, H, N, D] or 2 for [B, N, H, D]")
    layout = "bhsd" if unsqueeze_dim == 1 else "bshd"
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_float(name, x)
    whole = q.shape[-1] if q.dim() else 0
    half = whole // 2
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dim() < 2 or x.shape[-1] not in (whole, half):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [B, N, {whole}] or [B, N, {half}]")
    cos, sin = cos[..., :half], sin[..., :half]
    return apply_rotary_emb(q, cos, sin, layout=layout), apply_rotary_emb(k, cos, sin, layout=layout)
