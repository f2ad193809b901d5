# SPDX-License-Identifier: Apache-2.0
"""The loss of transformers' causal language models on fa2.

While a model trains with labels, its last layer hands on the hidden states, and the loss makes the logits of
one chunk of positions after the other; outputs.logits is None then. Where something is done to the logits
before the loss, they are formed and fa2's cross entropy reads them.
"""

from __future__ import annotations

import functools
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
    """The model's loss function. An object, so that a deep copy of the model has one with a head of its own."""

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


def _model_forward(original: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    # A method of the model is called with self, which is another model where this one was copied.
    function = original.__func__ if getattr(original, "__self__", None) is model else None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        call = original if function is None else functools.partial(function, self)
        labels = keywords.get("labels")
        if labels is None or not self.training or not torch.is_grad_enabled():
            return call(*args, **keywords)
        setattr(self.lm_head, _FLAG, True)
        try:
            outputs = call(*args, **keywords)
        finally:
            setattr(self.lm_head, _FLAG, False)
        if isinstance(outputs, tuple):
            return outputs[0], None, *outputs[2:]
        outputs.logits = None
        return outputs

    # The method takes self besides.
    del forward.__wrapped__
    return forward


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
            lambda: delattr(head, _FLAG),
            replace_forward(head, _head_forward),
            replace_forward(model, _with_signature(model.forward, model)),
        ]
    model._loss_function = _LossFunction(head)
    undo.append(lambda: delattr(model, "_loss_function"))

    def undo_all() -> None:
        for step in reversed(undo):
            step()

    return ("cross_entropy" if head is None else "linear_cross_entropy"), undo_all


def _with_signature(original: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """The new forward with the old one's parameters, by which trainers choose what to pass."""
    import inspect

    forward = _model_forward(original, model)
    signature = inspect.signature(original)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = list(signature.parameters.values())
    forward.__signature__ = signature.replace(parameters=[self_parameter, *parameters])
    return forward
