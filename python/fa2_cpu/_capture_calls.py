# SPDX-License-Identifier: Apache-2.0
"""What a recorded attention call was told, in the words of `fa2 verify`: options, and tensors beside q, k, v."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Target", "named_function", "targets"]

# Of the call's arguments by name: options and further tensors; None where a case cannot say what the call does.
Describe = Callable[[dict[str, Any]], "tuple[dict[str, Any], dict[str, torch.Tensor]] | None"]


class Target(NamedTuple):
    module: Any
    name: str
    signature: inspect.Signature
    describe: Describe


# Its Python signature is not to be had from a builtin.
def _sdpa_signature(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    pass


def _sdpa(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    options = {"layout": "bhsd", "scale": call["scale"], "dropout_p": call["dropout_p"]}
    if call["is_causal"]:
        options["causal"] = "top_left"
    return options, {} if call["attn_mask"] is None else {"bias": call["attn_mask"]}


def _flash(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    options = {
        "layout": "bshd",
        "scale": call.get("softmax_scale"),
        "dropout_p": call.get("dropout_p", 0.0),
        "softcap": call.get("softcap", 0.0),
        "window": list(call.get("window_size", (-1, -1))),
    }
    if call.get("causal"):
        options["causal"] = "bottom_right"
    slopes = call.get("alibi_slopes")
    return options, {} if slopes is None else {"alibi_slopes": slopes}


def _flash_varlen(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    # The mask that dropout draws for packed rows is not had from other calls.
    if call.get("dropout_p") or call.get("block_table") is not None:
        return None
    options, tensors = _flash(call)
    options["layout"] = "thd"
    return options, {**tensors, "cu_seqlens_q": call["cu_seqlens_q"], "cu_seqlens_k": call["cu_seqlens_k"]}


def _added(score_mod: Callable, sizes: tuple[int, int, int, int], device: Any) -> torch.Tensor | None:
    """What score_mod adds to a score, [B, H, Nq, Nk]; None where it does more than add."""
    function = score_mod
    for position in (4, 3, 2, 1):  # keys innermost
        function = torch.vmap(function, in_dims=(0, *(0 if p == position else None for p in range(1, 5))))
    indices = [torch.arange(n, device=device) for n in sizes]

    def at(score: float) -> torch.Tensor:
        return function(torch.full(sizes, score, device=device), *indices).float()

    zero, seen = at(0.0), torch.isfinite(at(0.0))
    for score in (1.0, -3.0):
        if not torch.allclose((at(score) - zero)[seen], torch.tensor(score, device=device), atol=1e-4):
            return None
    return zero


def _flex(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    from torch.nn.attention.flex_attention import create_mask

    query, key = call["query"], call["key"]
    sizes = (*query.shape[:-1], key.shape[-2])
    options = {"layout": "bhsd", "scale": call["scale"]}
    bias = mask = None
    if call["score_mod"] is not None:
        bias = _added(call["score_mod"], sizes, query.device)
        if bias is None:
            return None
    if call["block_mask"] is not None:
        batch, heads = call["block_mask"].kv_num_blocks.shape[:2]
        mask = create_mask(call["block_mask"].mask_mod, batch, heads, *sizes[2:], device=query.device)
    if bias is not None and mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf)
    added = bias if bias is not None else mask
    return options, {} if added is None else {"bias": added}


def named_function(module: Any, name: str, options: dict[str, Any]) -> Target:
    """A function of the caller's, whose options are these in every call."""
    return Target(module, name, inspect.signature(getattr(module, name)), lambda call: (dict(options), {}))


def targets() -> list[Target]:
    """The attention functions that are recorded by themselves, those that are installed."""
    sdpa = torch.nn.functional
    found = [Target(sdpa, "scaled_dot_product_attention", inspect.signature(_sdpa_signature), _sdpa)]

    def add(module: Any, name: str, describe: Describe) -> None:
        found.append(Target(module, name, inspect.signature(getattr(module, name)), describe))

    with contextlib.suppress(ImportError, AttributeError):
        from torch.nn.attention import flex_attention

        add(flex_attention, "flex_attention", _flex)
    with contextlib.suppress(ImportError, AttributeError):
        import flash_attn

        add(flash_attn, "flash_attn_func", _flash)
        add(flash_attn, "flash_attn_varlen_func", _flash_varlen)
    return found
