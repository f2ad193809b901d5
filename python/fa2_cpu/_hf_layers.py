# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, rotary embeddings and SwiGLU of transformers' models on fa2.

Norms and MLPs are replaced in the instance. The rotary embedding is a function of the modeling module, which
all models of an architecture share: it is replaced there while at least one of them is accelerated.

What is put into a model, and what takes it out again, is made of functions of this package and the model's own modules,
so that copies and pickles of the model have theirs.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from fa2_cpu.torch import apply_rotary_pos_emb, rms_norm, swiglu
from fa2_cpu.torch._tensors import FLOATS

# Folders of transformers.models whose layers compute what is written here.
FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_oss", "olmo", "olmo2"}
)
# These store the norm's weight less one.
_OFFSET_BY_ONE = frozenset({"gemma", "gemma2", "gemma3"})
# These multiply by the weight in f32, where the others return the wider of the two dtypes.
_RETURN_INPUT_DTYPE = _OFFSET_BY_ONE | {"gpt_oss", "olmo2"}

Undo = Callable[[], None]


def family(module: nn.Module) -> Optional[str]:
    """The folder of transformers.models that defines the module's class, where it is one of FAMILIES."""
    parts = type(module).__module__.split(".")
    known = parts[:2] == ["transformers", "models"] and len(parts) > 2 and parts[2] in FAMILIES
    return parts[2] if known else None


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Gives the instance another forward; the result takes it away again."""
    undo = functools.partial(_restore_forward, module, module.__dict__.get("forward"))
    module.forward = forward
    return undo


def _restore_forward(module: nn.Module, before: Optional[Callable[..., Any]]) -> None:
    if before is None:
        del module.forward
    else:
        module.forward = before


def _norm_forward(
    self: nn.Module, hidden_states: Tensor, *, offset: float, keeps_dtype: bool, eps_name: str
) -> Tensor:
    if not keeps_dtype and hidden_states.dtype != self.weight.dtype:
        hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, self.weight.dtype))
    return rms_norm(hidden_states, self.weight.shape, self.weight, getattr(self, eps_name), offset=offset)


def replace_norm(module: nn.Module) -> Optional[Undo | str]:
    """None for what is no norm, a sentence for one that stays."""
    name = type(module).__name__
    if not name.endswith(("RMSNorm", "LayerNorm")):
        return None
    if not name.endswith("RMSNorm"):
        return f"{name} is no RMSNorm"
    kind = family(module)
    eps_name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    if kind is None or getattr(module, "weight", None) is None or not hasattr(module, eps_name):
        return f"{name} is not among the norms that fa2 knows"
    how = dict(offset=float(kind in _OFFSET_BY_ONE), keeps_dtype=kind in _RETURN_INPUT_DTYPE, eps_name=eps_name)
    return replace_forward(module, functools.partial(_norm_forward, module, **how))


def _mlp_forward(self: nn.Module, x: Tensor) -> Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def replace_mlp(module: nn.Module) -> Optional[Undo | str]:
    name = type(module).__name__
    if not name.endswith("MLP"):
        return None
    if family(module) is None or not all(hasattr(module, x) for x in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return f"{name} is not among the layers that fa2 knows"
    if type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(module.act_fn).__name__}, not SiLU"
    return replace_forward(module, functools.partial(_mlp_forward, module))


class _SharedFunctions:
    """apply_rotary_pos_emb of modeling modules, with the number of models that want it replaced."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage within it may release
        self._original: dict[str, Callable[..., Any]] = {}
        self._users: dict[str, int] = {}

    def acquire(self, module_name: str) -> None:
        module = importlib.import_module(module_name)
        with self._lock:
            self._users[module_name] = self._users.get(module_name, 0) + 1
            if self._users[module_name] == 1:
                original = self._original[module_name] = module.apply_rotary_pos_emb
                module.apply_rotary_pos_emb = _rotary(original)

    def release(self, module_name: str) -> None:
        with self._lock:
            self._users[module_name] -= 1
            if self._users[module_name] == 0:
                sys.modules[module_name].apply_rotary_pos_emb = self._original.pop(module_name)


_shared = _SharedFunctions()


class _RotaryUse:
    """One model's use of the replaced function, until it is called or is no more. A copy or pickle of it is one more."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name
        _shared.acquire(module_name)
        self._release = weakref.finalize(self, _shared.release, module_name)
        self._release.atexit = False

    def __call__(self) -> None:
        self._release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _RotaryUse, (self._module_name,)


def _rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        computed = q.device.type == "cpu" and q.dtype in FLOATS and q.dim() == 4 and cos.dim() == 3
        if not computed or (cos.requires_grad and torch.is_grad_enabled()):
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    return apply


def replace_rotary(model: nn.Module) -> Iterator[tuple[str, Undo | str]]:
    """(modeling module, undo or why it stays) for each module whose attention layers the model has."""
    seen = set()
    for layer in model.modules():
        name = type(layer).__module__
        if not type(layer).__name__.endswith("Attention") or name in seen:
            continue
        seen.add(name)
        if family(layer) is None or not hasattr(sys.modules[name], "apply_rotary_pos_emb"):
            yield name, f"{type(layer).__name__} is not among the layers that fa2 knows"
        else:
            yield name, _RotaryUse(name)
