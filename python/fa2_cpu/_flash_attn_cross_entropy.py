# SPDX-License-Identifier: Apache-2.0
"""flash_attn.losses.cross_entropy on fa2's kernel: CrossEntropyLoss of flash-attn 2.8.3."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from fa2_cpu import torch as fa2

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, precomputed_lse: Optional[Tensor] = None, label_smoothing: float = 0.0,
    logit_scale: float = 1.0, lse_square_scale: float = 0.0, ignore_index: int = -100, inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, its part lse_square_scale · logsumexp²), each f32 [N], of logits [N, C] and labels [N].

    precomputed_lse and inplace_backward, which save a GPU time and memory, change nothing. process_group (a
    vocabulary in parts) is refused.
    """
    if process_group is not None:
        raise NotImplementedError("process_group is given; fa2 has the loss of a whole vocabulary only")
    scaled = logits if logit_scale == 1.0 else logits * logit_scale
    loss = fa2.cross_entropy(
        scaled, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
    )  # fmt: skip
    with torch.no_grad():
        z_loss = torch.zeros_like(loss)
        if lse_square_scale > 0.0:
            z_loss = lse_square_scale * torch.logsumexp(scaled.to(loss.dtype), -1).square()
            z_loss = z_loss.masked_fill(labels == ignore_index, 0.0)
    return loss, z_loss


class CrossEntropyLoss(nn.Module):
    """The loss of logits [N, C] and labels [N]; the arguments are those of cross_entropy_loss.

    Args:
      reduction: "mean" over the labels that are not ignore_index, "sum" or "none".
      return_z_loss: return also the part that lse_square_scale adds, without a gradient.
    """

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, inplace_backward: bool = False, process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f'reduction is {reduction!r}; it must be "mean", "none" or "sum"')
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward, self.process_group, self.return_z_loss = inplace_backward, process_group, return_z_loss

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Optional[Tensor] = None) -> Any:
        losses = cross_entropy_loss(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, self.inplace_backward, self.process_group,
        )  # fmt: skip
        if self.reduction != "none":
            losses = tuple(x.sum() for x in losses)
        if self.reduction == "mean":
            losses = tuple(x / (target != self.ignore_index).sum() for x in losses)
        return losses if self.return_z_loss else losses[0]
