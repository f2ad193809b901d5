# SPDX-License-Identifier: Apache-2.0
"""replace_flex_attention: PyTorch's functions of that name, for CPU tensors, on fa2."""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch
import torch.nn.attention.flex_attention as pytorch

from fa2_cpu.torch._flex._attention import flex_attention
from fa2_cpu.torch._flex._code import redirect
from fa2_cpu.torch._flex._create import create_block_mask

_lock = threading.Lock()
_users = 0
_undo: list[Callable[[], None]] = []


def _call_flex_attention(*arguments, **keywords):
    return _fa2_flex_attention(*arguments, **keywords)  # noqa: F821: a global of PyTorch's module


def _call_create_block_mask(*arguments, **keywords):
    return _fa2_create_block_mask(*arguments, **keywords)  # noqa: F821: a global of PyTorch's module


def _create_on(mask_mod, B, H, Q_LEN, KV_LEN, device=None, *arguments, **keywords):
    """create_block_mask with PyTorch's default device, the accelerator where there is one."""
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, *arguments, **keywords)


class Replacement:
    """Functions in place: a context manager, or remove() ends it."""

    def __init__(self) -> None:
        global _users
        with _lock:
            _users += 1
            if _users == 1:
                for function, by, to in (
                    (pytorch.flex_attention, _call_flex_attention, flex_attention),
                    (pytorch.create_block_mask, _call_create_block_mask, _create_on),
                ):
                    _undo.append(redirect(function, by, by.__code__.co_names[0], to))
        self._installed = True

    def remove(self) -> None:
        """Gives PyTorch its own functions back, once the last replacement is removed."""
        global _users
        with _lock:
            if self._installed:
                self._installed = False
                _users -= 1
                while _users == 0 and _undo:
                    _undo.pop()()

    def __repr__(self) -> str:
        return "<fa2 computes flex_attention on CPU tensors; remove() ends it>" if self._installed else "<removed>"

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


def replace_flex_attention() -> Replacement:
    """Sends torch.nn.attention.flex_attention's flex_attention and create_block_mask to fa2 for CPU tensors.

    In the whole process, also where the functions were imported by name or are called inside a function that
    torch.compile compiled (transformers' attn_implementation="flex_attention"): the call is a graph break there. Tensors
    on other devices go to PyTorch's. Called plainly it stays; `with replace_flex_attention():` ends with the block;
    remove() on the result ends it too.

    Example:
      >>> import torch, fa2_cpu.torch
      >>> from torch.nn.attention.flex_attention import flex_attention
      >>> q = torch.randn(1, 2, 128, 16, requires_grad=True)
      >>> with fa2_cpu.torch.replace_flex_attention():
      ...     flex_attention(q, q, q).sum().backward()
      >>> q.grad.shape
      torch.Size([1, 2, 128, 16])
    """
    return Replacement()
