# SPDX-License-Identifier: Apache-2.0
"""flash_attn.ops.rms_norm on fa2's kernel: the functions and modules of flash-attn 2.8.3."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from fa2_cpu import torch as fa2

__all__ = ["DropoutAddRMSNorm", "RMSNorm", "dropout_add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x · weight / √(mean(x²) + epsilon) over the last dimension."""
    return fa2.rms_norm(x, weight.shape, weight, epsilon)


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Optional[Tensor],
    weight: Tensor,
    bias: Optional[Tensor],
    dropout_p: float,
    epsilon: float,
    rowscale: Optional[Tensor] = None,
    layerscale: Optional[Tensor] = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """rms_norm of x = dropout(x0 · rowscale · layerscale) + residual.

    Returns out; (out, x) with prenorm; with return_dropout_mask also the mask, uint8, 1 where x0 is kept. x has the dtype
    of residual, or, without one, f32 with residual_in_fp32, else that of x0; out has that of x0.
    """
    x = x0
    if rowscale is not None:
        x = x * rowscale.unsqueeze(-1)
    if layerscale is not None:
        x = x * layerscale
    keep = torch.ones(x0.shape, dtype=torch.bool)
    if dropout_p > 0.0:
        keep = torch.rand(x0.shape) >= dropout_p
        x = torch.where(keep, x / (1.0 - dropout_p), 0.0)
    dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x0.dtype
    x = x.to(dtype) if residual is None else x.to(dtype) + residual
    out = fa2.rms_norm(x, weight.shape, weight, epsilon).to(x0.dtype)
    if bias is not None:
        out = out + bias
    results = [out, *([x] if prenorm else []), *([keep.to(torch.uint8)] if return_dropout_mask else [])]
    return results[0] if len(results) == 1 else tuple(results)


class RMSNorm(nn.Module):
    """rms_norm with a weight [hidden_size]."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(RMSNorm):
    """dropout_add_rms_norm with a weight; dropout while training."""

    def __init__(
        self, hidden_size: int, prenorm: bool = False, p: float = 0.0, eps: float = 1e-5, residual_in_fp32: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, device, dtype)
        self.prenorm, self.p, self.residual_in_fp32 = prenorm, p, residual_in_fp32

    def forward(self, x0: Tensor, residual: Optional[Tensor] = None) -> Any:
        return dropout_add_rms_norm(
            x0, residual, self.weight, None, self.p if self.training else 0.0, self.eps, prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )  # fmt: skip
