# SPDX-License-Identifier: Apache-2.0
"""The loss of transformers' causal language models on fa2.

While a model trains with labels, its last layer hands on the hidden states, and the loss makes the logits of
one chunk of positions after the other; outputs.logits is None then. Where something is done to the logits
before the loss, they are formed and fa2's cross entropy reads them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa2_cpu._hf_layers import Undo, family, replace_forward
from fa2_cpu.torch import cross_entropy, linear_cross_entropy

_FLAG = "_fa2_hands_on_hidden_states"


def _shifted(labels: Optional[Tensor], shift_labels: Optional[Tensor], ignore_index: int) -> Tensor:
    """Position n is compared with label n + 1."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels


class _LossFunction:
    """The model's loss function. An object, so that a copy or pickle of the model has one with a head of its own."""

    def __init__(self, head: Optional[nn.Module]) -> None:
        self._head = head

    def __call__(
        self,
        logits: Tensor,
        labels: Optional[Tensor],
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Optional[Tensor] = None,
        **keywords: Any,
    ) -> Tensor:
        head = self._head
        target = _shifted(labels, shift_labels, ignore_index).reshape(-1)
        flat = logits.reshape(-1, logits.shape[-1])
        if head is not None and getattr(head, _FLAG):
            return linear_cross_entropy(
                flat, head.weight, target, linear_bias=head.bias, ignore_index=ignore_index, num_items=num_items_in_batch
            )
        return cross_entropy(flat, target, ignore_index=ignore_index, num_items=num_items_in_batch)


def _head_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    if getattr(self, _FLAG):
        return hidden_states
    return F.linear(hidden_states, self.weight, self.bias)


class _ModelForward:
    """The model's forward, which hands on hidden states where the loss takes them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = model.__dict__.get("forward")  # None: that of its class

    def _original(self) -> Callable[..., Any]:
        return functools.partial(type(self._model).forward, self._model) if self._before is None else self._before

    @property
    def __signature__(self) -> inspect.Signature:
        """The old one's, by which trainers choose what to pass."""
        return inspect.signature(self._original())

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        model, call = self._model, self._original()
        labels = keywords.get("labels")
        if labels is None or not model.training or not torch.is_grad_enabled():
            return call(*args, **keywords)
        setattr(model.lm_head, _FLAG, True)
        try:
            outputs = call(*args, **keywords)
        finally:
            setattr(model.lm_head, _FLAG, False)
        if isinstance(outputs, tuple):
            return outputs[0], None, *outputs[2:]
        outputs.logits = None
        return outputs


def _reads_logits(model: nn.Module) -> Optional[str]:
    """Why the logits have to be formed."""
    head = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return "lm_head is no plain torch.nn.Linear"
    if head._forward_hooks or head._forward_pre_hooks:
        return "lm_head has hooks"
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "the model caps its logits"
    return None


def replace_loss(model: nn.Module) -> tuple[str, Undo | str]:
    """(what was put in, undo) or ("", why nothing was)."""
    name = type(model).__name__
    if family(model) is None or not name.endswith("ForCausalLM"):
        return "", f"{name} is not among the causal language models that fa2 knows"
    if "_loss_function" in model.__dict__:
        return "", "the model has a loss function of its own"
    undo = []
    head = None
    if _reads_logits(model) is None:
        head = model.lm_head
        setattr(head, _FLAG, False)
        undo = [
            functools.partial(delattr, head, _FLAG),
            replace_forward(head, functools.partial(_head_forward, head)),
            replace_forward(model, _ModelForward(model)),
        ]
    model._loss_function = _LossFunction(head)
    undo.append(functools.partial(delattr, model, "_loss_function"))
    return ("cross_entropy" if head is None else "linear_cross_entropy"), functools.partial(_undo_all, undo)


def _undo_all(steps: list[Undo]) -> None:
    for step in reversed(steps):
        step()
