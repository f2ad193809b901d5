# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: the loss of a language model's last layer without its logits.

Positions go in chunks: the logits of one, their loss and, in place, their gradient, from which the gradients
of the hidden states, the weight and the bias are summed, all in the forward pass. One chunk of logits is all
that is ever held.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from fa2_cpu import _core
from fa2_cpu.torch._cross_entropy import (
    by_formula,
    check_class_weight,
    check_options,
    check_range,
    divide,
    divisor_of,
    hand_over,
    loss_dtype,
    position_weights,
)
from fa2_cpu.torch._library import by_pytorch, check_float, check_index, operator, threads
from fa2_cpu.torch._sdpa import autocast
from fa2_cpu.torch._weighted_smoothing import losses_and_gradients

# Logits of a chunk: products of some 1,000 rows reach the speed of large ones (32k ids in bf16), and a chunk
# is small beside a model with such a vocabulary.
_CHUNK_BYTES = 64 << 20
# bf16 and f16 sums over so many chunks lose less than a bit; more are summed in f32.
_CHUNKS_SUMMED_NARROW = 4
# Below this share of positions that count, the others are left out of the products.
_SHARE_WORTH_GATHERING = 0.9


def _allocate(
    hidden, linear_weight, target, bias, weights, ignore_index, reduction, label_smoothing, z_loss, num_items, wanted,
    class_weight=None,
):  # fmt: skip
    dtype = loss_dtype(hidden.dtype)
    loss = hidden.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    grads = (
        x.new_empty(x.shape) if want and x is not None else hidden.new_empty((0,))
        for x, want in zip((hidden, linear_weight, bias), wanted)
    )
    return loss, target.new_empty((), dtype=torch.int64), hidden.new_empty((), dtype=dtype), *grads


class _WeightGradient:
    """Sums logits' gradients · hidden states over chunks."""

    def __init__(self, dweight: Tensor, chunks: int) -> None:
        self._dweight = dweight
        narrow = dweight.dtype in (torch.bfloat16, torch.float16) and chunks > _CHUNKS_SUMMED_NARROW
        self._sum = torch.zeros_like(dweight, dtype=torch.float32) if narrow else None
        self._empty = True

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        if self._sum is not None:
            self._sum.add_(torch.mm(dlogits.t(), hidden, out=self._dweight))
        elif self._empty:
            torch.mm(dlogits.t(), hidden, out=self._dweight)
        else:
            self._dweight.addmm_(dlogits.t(), hidden)
        self._empty = False

    def finish(self) -> None:
        if self._sum is not None:
            self._dweight.copy_(self._sum)
        elif self._empty:
            self._dweight.zero_()


def _kernel(
    hidden, linear_weight, target, bias, weights, ignore_index, reduction, label_smoothing, z_loss, num_items, wanted,
    class_weight=None,
):  # fmt: skip
    results = _allocate(
        hidden, linear_weight, target, bias, weights, ignore_index, reduction, label_smoothing, z_loss, num_items,
        wanted,
    )  # fmt: skip
    loss, counted, z_part, dhidden, dlinear_weight, dbias = results
    hidden, linear_weight = hidden.detach(), linear_weight.detach()
    bias = None if bias is None else bias.detach()
    counts = target != ignore_index
    counted.copy_(counts.sum())
    if class_weight is None:
        count, factors = divide(int(counted), weights, reduction, num_items, loss.dtype)
    else:
        check_range(target, ignore_index, linear_weight.shape[0])
        own = position_weights(class_weight, target, ignore_index, hidden.dtype)
        factors = torch.ones(1, dtype=loss.dtype) if weights is None else weights
        count, factors = 1, factors / divisor_of(int(counted), own, reduction, num_items)
    if factors is not None:
        factors = factors.expand(target.shape)
    losses = torch.zeros(target.shape, dtype=loss.dtype)
    out = dhidden
    gathered = None
    if int(counted) < _SHARE_WORTH_GATHERING * target.numel():
        gathered = counts.nonzero().squeeze(1)
        hidden, target = hidden[gathered], target[gathered]
        factors = None if factors is None else factors[gathered]
        out = dhidden.new_empty(hidden.shape) if wanted[0] else dhidden
    part = torch.zeros(target.shape, dtype=loss.dtype)

    vocab = linear_weight.shape[0]
    positions = target.numel()
    chunk = max(1, min(positions, _CHUNK_BYTES // max(1, vocab * hidden.element_size())))
    buffer = hidden.new_empty((chunk, vocab))
    gradient = _WeightGradient(dlinear_weight, -(-positions // chunk)) if wanted[1] else None
    bias_sum = torch.zeros(dbias.shape, dtype=loss.dtype) if wanted[2] else None
    z = torch.zeros(1, dtype=loss.dtype)
    z_part.zero_()
    for start in range(0, positions, chunk):
        rows = slice(start, min(start + chunk, positions))
        here = hidden[rows]
        logits = buffer[: here.shape[0]]
        if bias is None:
            torch.mm(here, linear_weight.t(), out=logits)
        else:
            torch.addmm(bias, here, linear_weight.t(), out=logits)
        if class_weight is not None:
            z_part.add_(losses_and_gradients(
                logits, target[rows], ignore_index, class_weight, label_smoothing, z_loss, factors[rows], part[rows],
                any(wanted),
            ))  # fmt: skip
        else:
            _core.cross_entropy(
                logits, target[rows], ignore_index, None, logits if any(wanted) else None,
                count=count, label_smoothing=label_smoothing, z_loss=z_loss,
                weights=None if factors is None else factors[rows], losses=part[rows], z_loss_part=z, **threads(),
            )  # fmt: skip
            z_part.add_(z[0])
        if wanted[0]:
            torch.mm(logits, linear_weight, out=out[rows])
        if gradient is not None:
            gradient.add(logits, here)
        if bias_sum is not None:
            bias_sum.add_(logits.sum(0, dtype=loss.dtype))
    if gradient is not None:
        gradient.finish()
    if bias_sum is not None:
        dbias.copy_(bias_sum)
    if gathered is None:
        losses = part
    else:
        losses[gathered] = part
        if wanted[0]:
            dhidden.zero_()
            dhidden[gathered] = out
    loss.copy_(losses if reduction == "none" else losses.sum(dtype=torch.float64) / count)
    return results


def _save(ctx, inputs, output):
    hidden, linear_weight, target, bias, weights, *ctx.options, wanted, class_weight = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.by_position = ctx.options[1] == "none"
    if ctx.by_position:
        ctx.save_for_backward(hidden, linear_weight, target, bias, weights, class_weight)
    ctx.grads = [g if want else None for g, want in zip(output[3:], wanted)]


def _differentiate(ctx, dloss, *unused):
    if dloss is None:
        return (None,) * 12
    if ctx.by_position:
        # The factor of each position is known only now: the pass is made again, with it.
        hidden, linear_weight, target, bias, weights, class_weight = ctx.saved_tensors
        ignore_index, _, label_smoothing, z_loss, num_items = ctx.options
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        results = _op(
            hidden, linear_weight, target, bias, dloss if weights is None else weights * dloss,
            ignore_index, "sum", label_smoothing, z_loss, num_items, wanted, class_weight,
        )  # fmt: skip
        grads = [g if want else None for g, want in zip(results[3:], wanted)]
    else:
        grads = hand_over(ctx, dloss)
    return grads[0], grads[1], None, grads[2], *(None,) * 8


_op = operator(
    "linear_cross_entropy(Tensor hidden, Tensor linear_weight, Tensor target, Tensor? bias, Tensor? weights, "
    "SymInt ignore_index, str reduction, float label_smoothing, float z_loss, Tensor? num_items, bool[3] wanted, "
    "Tensor? class_weight=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kernel, _allocate, _differentiate, _save,
)  # fmt: skip


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: Any = None,
    return_stats: bool = False,
) -> Any:
    """cross_entropy(input @ linear_weight.T + linear_bias, target) with one chunk of logits at a time.

    Args:
      input: hidden states [..., H]; f32, bf16, f16 or f64. Under torch.autocast it and linear_weight are converted
        as for a linear layer.
      linear_weight: [C, H] in input's dtype.
      target: int32 or int64 [...], each in [0, C) or ignore_index.
      linear_bias: [C] in input's dtype.
      weight: [C], factor of each class.
      reduction, ignore_index, label_smoothing, z_loss, num_items, return_stats: as in cross_entropy. With
        reduction "none" the backward makes the products again.

    Returns:
      The loss as cross_entropy returns it. Memory beside the gradients: 64 MiB of logits, or one row.

    Raises:
      TypeError: dtypes that differ, or an input that is not on the CPU.
      ValueError: shapes that do not fit, or a target out of range.

    Example:
      >>> import torch, fa2_cpu.torch as fa2
      >>> hidden, head, target = torch.randn(4, 8), torch.randn(10, 8, requires_grad=True), torch.tensor([1, 3, 9, 0])
      >>> loss = fa2.linear_cross_entropy(hidden, head, target)
      >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ head.T, target))
      >>> loss.backward()  # head.grad
    """
    check_float("input", input)
    check_float("linear_weight", linear_weight)
    options = check_options(ignore_index, reduction, label_smoothing, z_loss, num_items)
    check_index("target", target)
    if linear_bias is not None:
        check_float("linear_bias", linear_bias)
    if input.dim() == 0:
        raise ValueError("input has no dimension; it must be [..., D]")
    input, linear_weight = autocast(input), autocast(linear_weight)
    bias = None if linear_bias is None else autocast(linear_bias)
    for name, x in (("linear_weight", linear_weight), ("linear_bias", bias)):
        if x is not None and x.dtype != input.dtype:
            raise TypeError(f"{name} is {x.dtype}; it must be {input.dtype}, the dtype of input")
    if linear_weight.dim() != 2 or input.shape[-1:] != linear_weight.shape[1:]:
        raise ValueError(
            f"linear_weight has shape {tuple(linear_weight.shape)}; it must be [C, {input.shape[-1]}], input's last size"
        )
    if bias is not None and bias.shape != linear_weight.shape[:1]:
        raise ValueError(f"linear_bias has shape {tuple(bias.shape)}; it must be ({linear_weight.shape[0]},)")
    check_class_weight(weight, linear_weight.shape[0])
    if input.shape[:-1] != target.shape:
        raise ValueError(f"target has shape {tuple(target.shape)}; it must be {tuple(input.shape[:-1])}")
    flat = target.reshape(-1)
    if by_pytorch():
        result = by_formula(F.linear(input, linear_weight, bias).flatten(0, -2), flat, weight, *options)
        loss = result[0].reshape(target.shape) if options.reduction == "none" else result[0]
        return (loss, *result[1:]) if return_stats else loss
    differentiable = options.reduction != "none" and torch.is_grad_enabled()
    wanted = [differentiable and x is not None and x.requires_grad for x in (input, linear_weight, bias)]
    weights = class_weight = None
    if weight is not None and options.label_smoothing != 0.0:
        class_weight = weight.detach().to(loss_dtype(input.dtype))
    else:
        weights = position_weights(weight, flat, options.ignore_index, input.dtype)
    loss, counted, z_part, *_ = _op(
        input.reshape(-1, input.shape[-1]), linear_weight, flat, bias, weights, *options, wanted, class_weight,
    )  # fmt: skip
    loss = loss.reshape(target.shape) if options.reduction == "none" else loss
    return (loss, counted, z_part) if return_stats else loss
