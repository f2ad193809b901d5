# SPDX-License-Identifier: Apache-2.0
"""Cross entropy with class weights and label smoothing together, of one chunk of logits: the core has each, not both.

With lse = logsumexp(logits), log p = logits − lse, class weights w of sum W, the target t, smoothing ε of C classes
and z-loss z, a position's loss is

    −(1 − ε) w_t log p_t − (ε / C) Σ w_c log p_c + z w_t lse²

and its gradient p ((1 − ε) w_t + (ε / C) W + 2 z w_t lse) − (ε / C) w, less (1 − ε) w_t at t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def losses_and_gradients(
    logits: Tensor, target: Tensor, ignore_index: int, class_weight: Tensor, label_smoothing: float, z_loss: float,
    factor: Tensor, losses: Tensor, want_gradient: bool,
) -> Tensor:  # fmt: skip
    """Writes losses, and the gradients (or anything) over the logits; returns the part of the losses' sum that z_loss added.

    Args:
      logits: [positions, C]. class_weight: [C] in the dtype of losses, f32 or f64.
      target: int [positions], each in [0, C) or ignore_index.
      factor: [positions], or [1] for all, by which losses and gradients are multiplied.
    """
    counts = target != ignore_index
    t = target.masked_fill(~counts, 0).long().unsqueeze(1)
    factor = (factor * counts).unsqueeze(1).to(losses.dtype)
    own = class_weight[t] * factor
    smooth = factor * (label_smoothing / logits.shape[1])
    wide = logits.to(losses.dtype)
    lse = torch.logsumexp(wide, 1, keepdim=True)
    log_p = wide.sub_(lse)  # the logits themselves in f32 and f64, which are not needed any more
    z = z_loss * own * lse.square()
    smoothed = torch.mv(log_p, class_weight).unsqueeze(1)
    losses.copy_((z - (1 - label_smoothing) * own * log_p.gather(1, t) - smooth * smoothed).squeeze(1))
    losses.masked_fill_(~counts, 0.0)
    if want_gradient:
        gradient = log_p.exp_().mul_((1 - label_smoothing) * own + smooth * class_weight.sum() + 2 * z_loss * own * lse)
        gradient.sub_(smooth * class_weight).scatter_add_(1, t, -(1 - label_smoothing) * own)
        logits.copy_(gradient.masked_fill_(~counts.unsqueeze(1), 0.0))
    return z.masked_fill(~counts.unsqueeze(1), 0.0).sum()
