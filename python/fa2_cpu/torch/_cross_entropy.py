# SPDX-License-Identifier: Apache-2.0
"""cross_entropy: its value and its gradient in one pass over the logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._library import (
    by_pytorch, check_float, check_index, integer, number, number_of, operator, rows, threads,
)  # fmt: skip
from fa2_cpu.torch._tensors import check_dense, unwatched


class Divided(NamedTuple):
    """How a sum of losses becomes the result."""

    count: int  # the core's divisor
    weights: Optional[Tensor]  # factors of positions, f32 or f64 [positions]


def divisor_of(positions_counted: int, weights: Optional[Tensor], reduction: str, num_items: Optional[Tensor]) -> float:
    """num_items for the mean where given, else what counts, weighted; 1 where nothing counts."""
    if reduction != "mean":
        return 1.0
    if num_items is None:
        divisor = float(positions_counted if weights is None else weights.sum())
    else:
        divisor = float(num_items)
        if not (math.isfinite(divisor) and divisor >= 0.0):
            raise ValueError(f"num_items is {divisor}; it must be a finite number, not below 0")
    return divisor if divisor != 0.0 else 1.0


def divide(
    positions_counted: int, weights: Optional[Tensor], reduction: str, num_items: Optional[Tensor], dtype: torch.dtype
) -> Divided:
    """The divisor as the core takes it: an int, or within the weights, which are of dtype."""
    divisor = divisor_of(positions_counted, weights, reduction, num_items)
    if divisor == int(divisor):
        return Divided(int(divisor), weights)
    return Divided(1, torch.tensor([1.0 / divisor], dtype=dtype) if weights is None else weights / divisor)


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Options(NamedTuple):
    """Of both cross entropies, checked."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    num_items: Optional[Tensor]


def check_options(ignore_index: Any, reduction: Any, label_smoothing: Any, z_loss: Any, num_items: Any) -> Options:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction is "{reduction}"; it must be "none", "sum" or "mean"')
    label_smoothing, z_loss = number("label_smoothing", label_smoothing), number("z_loss", z_loss)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1]")
    ignore_index = integer("ignore_index", ignore_index)
    return Options(ignore_index, reduction, label_smoothing, z_loss, number_of("num_items", num_items))


def check_class_weight(weight: Optional[Tensor], classes: int) -> None:
    if weight is None:
        return
    check_float("weight", weight)
    if weight.shape != (classes,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be ({classes},), a factor of each class")
    if weight.requires_grad and torch.is_grad_enabled():
        raise TypeError("weight requires grad; the loss has no gradient of class weights")


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def hand_over(ctx: Any, factor: Tensor) -> list[Optional[Tensor]]:
    """ctx.grads, which the forward made, times a number: no pass over them where it is 1, as in most training
    steps, one in place where it is not. A graph that is retained keeps them, and gives copies."""
    if ctx.grads is None:
        raise RuntimeError("backward ran twice through one graph; the first time needs retain_graph=True")
    # Traced tensors are of a type of their own: the compiler fuses the product.
    if type(factor) is not Tensor or _keeps_graph():
        return [None if g is None else g * factor.to(g.dtype) for g in ctx.grads]
    grads, ctx.grads = ctx.grads, None
    number = float(factor)
    if number != 1.0:
        for g in grads:
            if g is not None:
                g.mul_(number)
    return grads


def _allocate(logits, target, weights, ignore_index, reduction, label_smoothing, z_loss, num_items, want_grad):
    dtype = loss_dtype(logits.dtype)
    loss = logits.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    dlogits = logits.new_empty(logits.shape if want_grad else (0,))
    return loss, target.new_empty((), dtype=torch.int64), logits.new_empty((), dtype=dtype), dlogits


def _kernel(logits, target, weights, ignore_index, reduction, label_smoothing, z_loss, num_items, want_grad):
    results = _allocate(
        logits, target, weights, ignore_index, reduction, label_smoothing, z_loss, num_items, want_grad
    )
    loss, counted, z_part, dlogits = results
    counted.copy_((target != ignore_index).sum())
    divided = divide(int(counted), weights, reduction, num_items, loss.dtype)
    factors = divided.weights
    _core.cross_entropy(
        rows(logits), target, ignore_index,
        loss.reshape(1) if reduction != "none" else None,
        dlogits if want_grad else None,
        count=divided.count, label_smoothing=label_smoothing, z_loss=z_loss,
        weights=None if factors is None else factors.expand(target.shape),
        losses=loss if reduction == "none" else None, z_loss_part=z_part.reshape(1), **threads(),
    )  # fmt: skip
    return results


def _save(ctx, inputs, output):
    ctx.reduction = inputs[4]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Not saved tensors: these could not be given away.
    ctx.grads = [output[3] if inputs[8] else None]


def _differentiate(ctx, dloss, *unused):
    nothing = (None,) * 8
    if dloss is None or ctx.grads == [None]:
        return None, *nothing
    if ctx.reduction == "none":
        return ctx.grads[0] * dloss.to(ctx.grads[0].dtype).unsqueeze(1), *nothing
    return *hand_over(ctx, dloss), *nothing


_op = operator(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weights, SymInt ignore_index, str reduction, "
    "float label_smoothing, float z_loss, Tensor? num_items, bool want_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _kernel, _allocate, _differentiate, _save,
)  # fmt: skip


def position_weights(
    weight: Optional[Tensor], target: Tensor, ignore_index: int, dtype: torch.dtype
) -> Optional[Tensor]:
    """The class weight of every position, 0 where ignored."""
    if weight is None:
        return None
    # Targets out of range are left to the core, which names them.
    ignored = (target == ignore_index) | (target < 0) | (target >= weight.shape[0])
    return weight.detach().to(loss_dtype(dtype))[target.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)


def check_range(target: Tensor, ignore_index: int, classes: int) -> None:
    """ValueError for a target that is no class."""
    flat = target.reshape(-1)
    wrong = ((flat != ignore_index) & ((flat < 0) | (flat >= classes))).nonzero()
    if len(wrong):
        raise ValueError(f"targets[{int(wrong[0])}] is {int(flat[wrong[0]])}; it must be in [0, {classes})")


def by_formula(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, num_items):
    """(loss, positions that count, z_loss's part) by PyTorch's operators. The core has no targets that are probabilities, no
    class weights with smoothing, and no rules for torch.func."""
    wide = input.to(loss_dtype(input.dtype))
    classes_dim = 1 if input.dim() > 1 else 0
    weight = None if weight is None else weight.to(wide.dtype)
    z = z_loss * torch.logsumexp(wide, classes_dim).square()
    probabilities = target.is_floating_point()
    if probabilities:
        target = target.to(wide.dtype)
    else:
        if unwatched((target,)):
            check_range(target, ignore_index, input.shape[classes_dim])
        factor = (target != ignore_index).to(wide.dtype)
        if weight is not None:
            factor = factor * weight[target.masked_fill(target == ignore_index, 0)]
        z = z * factor
    counted = torch.tensor(z.numel()) if probabilities else (target != ignore_index).sum()
    if reduction == "none":
        return F.cross_entropy(
            wide, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        ) + z, counted, z.sum()  # fmt: skip
    total = F.cross_entropy(
        wide, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    ) + z.sum()
    divisor = 1.0
    if reduction == "mean":
        divisor = counted if weight is None or probabilities else factor.sum()
        divisor = divisor if num_items is None else num_items
        divisor = torch.where(divisor == 0, 1, divisor).to(wide.dtype)
    return total / divisor, counted, z.sum() / divisor


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    ignore_index: int = -100,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    num_items: Any = None,
    return_stats: bool = False,
) -> Any:
    """torch.nn.functional.cross_entropy, its gradient made in the forward's pass over the logits.

    Args:
      input: logits [C], [N, C] or [N, C, d1, …]; f32, bf16, f16 or f64, any strides. Arithmetic is in f32 (f64
        for f64).
      target: int32 or int64 [], [N] or [N, d1, …], each in [0, C) or ignore_index; or probabilities of input's
        shape, which PyTorch's operators compute, as they do weight together with label_smoothing.
      weight: [C], factor of each class.
      reduction: "none", "sum" or "mean", which divides by the number (with weight, the weights) of positions that
        count. size_average and reduce are its deprecated forms.
      label_smoothing: in [0, 1].
      z_loss: adds z_loss · logsumexp(logits)² to each position that counts.
      num_items: replaces the mean's divisor, for one mean over several calls; a number or a tensor of one.
      return_stats: return (loss, num_items, z_loss) with the number of positions that count, an int64 tensor, and
        the part of the loss that z_loss added, neither with a gradient.

    Returns:
      The loss in f32 (f64 for f64); 0 where nothing counts.

    Raises:
      TypeError: an input that is not on the CPU or not of a float dtype.
      ValueError: shapes or options that do not fit, or a target out of range, by its position and value.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> logits, target = torch.randn(4, 10, requires_grad=True), torch.tensor([1, -100, 9, 0])
      >>> loss, num_items, _ = fa2.cross_entropy(logits, target, return_stats=True)
      >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
      >>> int(num_items)  # position 1 is ignored
      3
      >>> loss.backward()  # logits.grad
    """
    check_float("input", input)
    if input.dim() == 0:
        raise ValueError("input has no dimension; it must be [C], [N, C] or [N, C, d1, …]")
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    options = check_options(ignore_index, reduction, label_smoothing, z_loss, num_items)
    logits = input.unsqueeze(0) if input.dim() == 1 else input.movedim(1, -1)
    check_class_weight(weight, logits.shape[-1])
    check_dense("target", target)
    shape = target.shape
    probabilities = target.is_floating_point()
    if probabilities:
        check_float("target", target)
        if shape != input.shape:
            raise ValueError(f"target has shape {tuple(shape)}; probabilities must be of input's, {tuple(input.shape)}")
    else:
        check_index("target", target)
        if logits.shape[:-1].numel() != target.numel() or (input.dim() > 1 and logits.shape[:-1] != shape):
            raise ValueError(f"target has shape {tuple(shape)}; it must be input's, {tuple(input.shape)}, without C")
    if probabilities or (weight is not None and options.label_smoothing != 0.0) or by_pytorch():
        result = by_formula(input, target, weight, *options)
        return result if return_stats else result[0]
    flat = target.reshape(-1)
    loss, counted, z_part, _ = _op(
        logits.reshape(-1, logits.shape[-1]), flat, position_weights(weight, flat, options.ignore_index, input.dtype),
        *options, input.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip
    loss = loss.reshape(shape) if options.reduction == "none" else loss
    return (loss, counted, z_part) if return_stats else loss
