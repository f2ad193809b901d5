# SPDX-License-Identifier: Apache-2.0
"""Which elements of P a call's dropout kept, read off calls with the same random numbers.

With q = k = 0 every visible P is 1 / N, and with rows of the identity as v, out holds P's columns as dropout left them: where
one is 0, it was dropped. The shapes are the call's own, so that the same kernel draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_mask", "rng_state"]


def rng_state(device: torch.device) -> torch.Tensor:
    """The state that a call on this device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _without_values(x: Any) -> Any:
    """A bias as the mask that it is: its finite elements as 0."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return torch.where(torch.isinf(x), x, torch.zeros_like(x)).detach()
    return x


def keep_mask(
    function: Callable, arguments: dict[str, Any], names: list[str], state: torch.Tensor, layout: str
) -> torch.Tensor:
    """A bool [B, H, Nq, Nk]: what dropout kept in function(**arguments), which drew from `state`.

    Args:
      names: of q, k and v among the arguments.
      layout: "bhsd" or "bshd".
    The generator is left as it was found.
    """
    q, k, v = (arguments[name] for name in names)
    rows = 2 if layout == "bhsd" else 1
    device, keys, width = q.device, k.shape[rows], v.shape[-1]
    rest = {name: _without_values(x) for name, x in arguments.items() if name not in names}
    if "alibi_slopes" in rest:
        rest["alibi_slopes"] = None
    grad = torch.is_grad_enabled() and q.requires_grad
    after = rng_state(device)
    columns = []
    try:
        for begin in range(0, keys, width):
            count = min(width, keys - begin)
            picks = torch.zeros_like(v)
            for column in range(count):
                picks.select(rows, begin + column)[..., column] = 1
            _set_rng_state(device, state)
            zeros = torch.zeros_like(q).requires_grad_(grad)
            result = function(zeros, torch.zeros_like(k), picks, **rest)
            out = result[0] if isinstance(result, tuple) else result
            out = out.detach() if layout == "bhsd" else out.detach().transpose(1, 2)
            columns.append(out[..., :count] != 0)
    finally:
        _set_rng_state(device, after)
    return torch.cat(columns, dim=-1)
