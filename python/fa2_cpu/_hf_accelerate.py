# SPDX-License-Identifier: Apache-2.0
"""accelerate: the layers of a transformers model on fa2, and back."""

from __future__ import annotations

import functools
from typing import Any, Optional

from fa2_cpu._hf_attention import register
from fa2_cpu._hf_layers import Undo, replace_mlp, replace_norm, replace_rotary
from fa2_cpu._hf_loss import replace_loss

_MARK = "_fa2_acceleration"


class Acceleration:
    """What accelerate() did to a model. A context manager: the end of the block is remove().

    Copies and pickles of the model are on fa2 too, and have one of their own; acceleration() gives it.

    replaced: for each of "attention", "rms_norm", "rope", "swiglu" and "loss" the names of what was replaced:
      modules by their path, rope by the modeling module, attention and loss by what took their place.
    skipped: names of what was left as it is, with the reason.
    """

    def __init__(self, model: Any) -> None:
        self.replaced: dict[str, list[str]] = {}
        self.skipped: dict[str, str] = {}
        self._model = model
        self._undo: list[Undo] = []
        setattr(model, _MARK, self)

    def _note(self, kind: str, name: str, result: Undo | str | None) -> None:
        if result is None:
            return
        if isinstance(result, str):
            self.skipped[name] = result
        else:
            self._undo.append(result)
            self.replaced.setdefault(kind, []).append(name)

    def _replace_attention(self) -> None:
        register()
        model = self._model
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation("fa2")
        except ValueError as error:
            self.skipped["attention"] = str(error)
            return
        self._note("attention", "fa2", functools.partial(model.set_attn_implementation, before))

    def remove(self) -> None:
        """Gives the model its own layers back."""
        while self._undo:
            self._undo.pop()()
        if getattr(self._model, _MARK, None) is self:
            delattr(self._model, _MARK)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Perhaps in a process that knows nothing of fa2 yet.
        self.__dict__.update(state)
        if "attention" in self.replaced:
            register()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        counts = ", ".join(f"{kind}: {len(names)}" for kind, names in self.replaced.items())
        return f"<fa2 acceleration of {type(self._model).__name__}: {counts or 'nothing'}; {len(self.skipped)} skipped>"


def accelerate(
    model: Any,
    *,
    attention: bool = True,
    rms_norm: bool = True,
    rope: bool = True,
    swiglu: bool = True,
    loss: bool = True,
) -> Acceleration:
    """Puts the layers of a transformers model (4.56 or newer) on fa2, in place.

    Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, gpt-oss, OLMo and OLMo2 models, with any head on them;
    of other models only the attention is replaced. Parameters and results stay what they are, within rounding.
    While the model trains with labels its logits are never whole, and outputs.logits is None.

    Args:
      model: a transformers.PreTrainedModel on the CPU.
      attention, rms_norm, rope, swiglu, loss: which kinds of layers to replace. rope replaces a function of the
        modeling module, for all models of that architecture in the process.

    Returns:
      An Acceleration: `replaced`, `skipped` with reasons, remove(); also a context manager.

    Raises:
      TypeError: a model that is no PreTrainedModel.
      ValueError: a model that is accelerated already.

    Example:
      >>> import fa2_cpu.hf, torch, transformers
      >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=50)
      >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1))
      >>> ids = torch.arange(10)[None]
      >>> with fa2_cpu.hf.accelerate(model) as acceleration:
      ...     model(ids, labels=ids).loss.backward()
      >>> sorted(acceleration.replaced)
      ['attention', 'loss', 'rms_norm', 'rope', 'swiglu']
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is of type {type(model).__name__}; it must be a transformers.PreTrainedModel")
    if acceleration(model) is not None:
        raise ValueError("model is accelerated already; call fa2_cpu.hf.acceleration(model).remove() first")
    result = Acceleration(model)
    try:
        if attention:
            result._replace_attention()
        if loss:
            name, undo = replace_loss(model)
            result._note("loss", name or "loss", undo)
        if rope:
            for name, undo in replace_rotary(model):
                result._note("rope", name, undo)
        for name, module in model.named_modules():
            if rms_norm:
                result._note("rms_norm", name, replace_norm(module))
            if swiglu:
                result._note("swiglu", name, replace_mlp(module))
    except BaseException:
        result.remove()
        raise
    return result


def acceleration(model: Any) -> Optional[Acceleration]:
    """The Acceleration of a model, also of a copy of one that accelerate() was given, or one from a pickle; None: it has none.

    copy.deepcopy, torch.save and pickle take a model that is on fa2. torch.load(file, weights_only=False) gives one that
    is, and puts the rotary embedding of its architecture on fa2 in the process. state_dict and save_pretrained have
    nothing of fa2 in them.

    Args:
      model: any object.

    Example:
      >>> import copy, fa2_cpu.hf, transformers
      >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=50)
      >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1))
      >>> on_fa2 = fa2_cpu.hf.accelerate(model)
      >>> other = copy.deepcopy(model)
      >>> on_fa2.remove()
      >>> fa2_cpu.hf.acceleration(model) is None, fa2_cpu.hf.acceleration(other) is None
      (True, False)
      >>> fa2_cpu.hf.acceleration(other).remove()
    """
    return getattr(model, _MARK, None)
