# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own attention operators, for CPU tensors, on fa2: the dispatcher overrides and their switches."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from fa2_cpu.torch import _aten_efficient, _aten_flash, _plain, _sdpa


def _sdpa_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """fa2, or PyTorch where it is asked for, where only it has a rule, and to explain what is wrong."""
    fused = torch.backends.cuda.flash_sdp_enabled()  # False inside sdpa_kernel(SDPBackend.MATH)
    if fused:
        out = _plain.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    pytorch = (
        not fused
        or _sdpa.refusal(query, key, value, attn_mask, is_causal) is not None
        or min(query.dim(), key.dim(), value.dim()) < 3
        or torch._C._are_functorch_transforms_active()
    )
    compute = _sdpa.pytorch if pytorch else _sdpa.compute
    return compute(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class _Override:
    """The overrides while they are in place; counts its users, so that activations may nest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._undo:
                    self._undo.pop()()

    @property
    def active(self) -> bool:
        return self._users > 0

    def _install(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        self._undo.append(library._destroy)
        # The operator has no kernel of its own for autograd: it is made of differentiable ones, as
        # the kernel here is, so one function serves both keys (CPU is what inference mode sees).
        for key in ("AutogradCPU", "CPU"):
            library.impl("scaled_dot_product_attention", _sdpa_kernel, key)
        for name, kernel in (*_aten_flash.KERNELS.items(), *_aten_efficient.KERNELS.items()):
            if hasattr(torch.ops.aten, name):
                library.impl(name, kernel, "CPU")
        _aten_efficient.derivative_has_window()
        # nn.MultiheadAttention in eval mode would go to a kernel that forms all scores.
        fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._undo.append(lambda: torch.backends.mha.set_fastpath_enabled(fastpath))
        # Compiled graphs on disk are found by the graph before the dispatcher has seen it.
        config = getattr(torch.compiler, "config", None)
        if hasattr(config, "cache_key_tag"):
            tag = config.cache_key_tag
            config.cache_key_tag = tag + "+fa2"
            self._undo.append(lambda: setattr(config, "cache_key_tag", tag))


_override = _Override()


class Replacement:
    """An installed override: a context manager, or remove() ends it."""

    def __init__(self) -> None:
        _override.acquire()
        self._installed = True

    def remove(self) -> None:
        """Gives PyTorch its own kernels back, once the last replacement is removed."""
        if self._installed:
            self._installed = False
            _override.release()

    def __repr__(self) -> str:
        if self._installed:
            return "<fa2 computes PyTorch's attention on CPU tensors; remove() ends it>"
        return "<removed; " + ("another replacement is active>" if is_active() else "PyTorch computes its attention>")

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


def replace_sdpa() -> Replacement:
    """Sends PyTorch's attention operators to fa2 for CPU tensors, in the whole process.

    That is F.scaled_dot_product_attention in every variant, nn.MultiheadAttention through it,
    torch.nn.attention.varlen.varlen_attn, and aten::_flash_attention_forward/backward and
    aten::_efficient_attention_forward/backward, which PyTorch has for other devices only. Other
    devices, and blocks under torch.nn.attention.sdpa_kernel without FLASH_ATTENTION, keep PyTorch's
    kernels. Called plainly it stays; `with replace_sdpa():` ends with the block; remove() on the
    result ends it too. Functions compiled by torch.compile keep what was in place when they were
    compiled.

    Example:
      >>> import torch, fa2_cpu.torch
      >>> with fa2_cpu.torch.replace_sdpa():
      ...     fa2_cpu.torch.is_active()
      True
      >>> fa2_cpu.torch.is_active()
      False
    """
    return Replacement()


def is_active() -> bool:
    """Whether PyTorch's attention operators are sent to fa2 for CPU tensors, by replace_sdpa() or an activation.

    Example:
      >>> import torch, fa2_cpu.torch
      >>> replacement = fa2_cpu.torch.replace_sdpa()
      >>> fa2_cpu.torch.is_active()
      True
      >>> replacement.remove()
      >>> fa2_cpu.torch.is_active()
      False
    """
    return _override.active


def register_implementation() -> None:
    """Offers "fa2" to torch.nn.attention.activate_flash_attention_impl, where PyTorch has it."""
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is not None:
        register("fa2", register_fn=replace_sdpa)
