# SPDX-License-Identifier: Apache-2.0
"""A block mask as the kernels take it."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from fa2_cpu.torch._compute import AttentionOptions
from fa2_cpu.torch._flex._block_lists import BlockLists


def masked(
    options: AttentionOptions, bias: Optional[Tensor], lists: Optional[BlockLists], q: Tensor, k: Tensor
) -> tuple[Optional[Tensor], AttentionOptions]:
    """bias and options of a call under the mask."""
    if lists is None:
        return bias, options
    places = (slice(0, n) for n in (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    visible = lists.visible(*places)
    if bias is None:
        return visible, options
    return torch.where(visible, bias, -math.inf), options
