# SPDX-License-Identifier: Apache-2.0
"""transformers models under context_parallel: attention, masks and position_ids of a part of the sequence."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from fa2_cpu.distributed import _agree
from fa2_cpu.distributed._shards import segments_of_parts
from fa2_cpu.torch._sdpa import autocast

_IMPLEMENTATIONS = ("sdpa", "fa2")


def install(settings: Any) -> list[Callable[[], None]]:
    """Puts the functions in place; the results take them away."""
    from transformers import PreTrainedModel, masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    undo: list[Callable[[], None]] = []
    # Entries of the instances come before those that are registered for all.
    for name in _IMPLEMENTATIONS:
        undo.append(_put(ALL_MASK_ATTENTION_FUNCTIONS, name, _mask(name)))
    undo.append(_put(ALL_ATTENTION_FUNCTIONS, "fa2", _attention(settings)))
    # Zigzag positions step over pieces, which reads as several documents.
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        find = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        undo.append(lambda: setattr(masking_utils, "find_packed_sequence_indices", find))
    had = PreTrainedModel.__dict__.get("__call__")
    PreTrainedModel.__call__ = _with_positions(settings, PreTrainedModel.__call__)
    undo.append(lambda: setattr(PreTrainedModel, "__call__", had) if had else delattr(PreTrainedModel, "__call__"))
    return undo


def _put(functions: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """An entry of a registry of transformers."""
    own = functions._local_mapping
    before = own.get(name)
    own[name] = function

    def undo() -> None:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before

    return undo


_HIDES = (
    "attention_mask hides tokens; under context_parallel it must be left out (pack documents without padding, and give "
    "cu_seq_lens_q and cu_seq_lens_k)"
)


def _hides(attention_mask: Any) -> bool:
    return isinstance(attention_mask, Tensor) and not bool(attention_mask.all())


def _mask(name: str) -> Callable[..., None]:
    def mask(
        *args: Any, attention_mask: Optional[Tensor] = None, local_size: Optional[int] = None, config: Any = None,
        **keywords: Any,
    ) -> None:  # fmt: skip
        """No mask: causality and window are told by the layer."""
        if _hides(attention_mask):
            raise ValueError(_HIDES)
        if local_size is not None:
            plain = getattr(config, "sliding_window", None) == local_size
            if name == "sdpa" or not plain or getattr(config, "attention_chunk_size", None):
                raise ValueError(
                    f'a layer sees {local_size} keys only, which attn_implementation="{name}" says by a mask; under '
                    'context_parallel it must be a sliding window with attn_implementation="fa2"'
                )

    return mask


def _attention(settings: Any) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
        scaling: Optional[float] = None, dropout: float = 0.0, is_causal: Optional[bool] = None,
        sliding_window: Optional[int] = None, softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
        position_bias: Optional[Tensor] = None, cu_seq_lens_q: Optional[Tensor] = None,
        cu_seq_lens_k: Optional[Tensor] = None, max_length_q: Optional[int] = None,
        max_length_k: Optional[int] = None, **keywords: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        for name, x in (("attention_mask", attention_mask), ("position_bias", position_bias)):
            if x is not None:
                settings.refuse(ValueError(f"{name} is an array; under context_parallel it must be left out"))
        query, key, value = (autocast(x) for x in (query, key, value))
        if query.dtype != value.dtype:
            query, key = query.to(value.dtype), key.to(value.dtype)
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = dict(
            scale=scaling, causal="top_left" if is_causal else None, softcap=softcap or 0.0, dropout_p=dropout,
            window=(-1, -1) if sliding_window is None else (sliding_window - 1, -1),
            sinks=None if s_aux is None else s_aux.float(),
        )  # fmt: skip
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            return settings.attention(query, key, value, **options).transpose(1, 2).contiguous(), None
        if query.shape[0] != 1:
            settings.refuse(
                ValueError(f"cu_seq_lens_q is given with a batch of {query.shape[0]}; packed documents are one row")
            )
        out = settings.attention(
            *(x[0].transpose(0, 1) for x in (query, key, value)), layout="thd", cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k, max_seqlen_q=int(max_length_q or 0), max_seqlen_k=int(max_length_k or 0),
            **options,
        )  # fmt: skip
        return out.unsqueeze(0), None

    return attention


def _with_positions(settings: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """PreTrainedModel.__call__ with position_ids; models inside models get them from those around."""
    depth = 0

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth > 0:
            return call(self, *args, **kwargs)
        names = inspect.signature(self.forward).parameters
        given = inspect.signature(self.forward).bind_partial(*args, **kwargs).arguments
        positions = _positions(settings, self, names, {**given, **given.get("kwargs", {})})
        if given.get("position_ids") is None:
            kwargs["position_ids"] = positions
        if "use_cache" in names and "use_cache" not in given:
            kwargs["use_cache"] = False
        depth += 1
        try:
            return call(self, *args, **kwargs)
        finally:
            depth -= 1

    return wrapped


def _positions(settings: Any, model: Any, names: Any, given: dict[str, Any]) -> Tensor:
    """[1, rows]: the places of this rank's rows, by the rows of all."""
    team = settings.team
    position_ids = given.get("position_ids")
    inputs = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    packed = given.get("cu_seq_lens_q") is not None

    def prepare() -> list[int]:
        name = type(model).__name__
        if model.config._attn_implementation not in _IMPLEMENTATIONS:
            raise ValueError(
                f'{name} has attn_implementation="{model.config._attn_implementation}"; under context_parallel it must '
                'be "fa2" or "sdpa"'
            )
        if "position_ids" not in names or getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"the forward of {name} takes no position_ids, or it has an encoder and a decoder; its "
                             "positions under context_parallel are not known")  # fmt: skip
        if packed and model.config._attn_implementation != "fa2":
            raise ValueError('cu_seq_lens_q is given; under context_parallel it needs attn_implementation="fa2"')
        if inputs is None or inputs.dim() < 2:
            raise ValueError("neither input_ids nor inputs_embeds is given; one must be, [B, rows] or [B, rows, C]")
        for other in ("past_key_values", "cache"):
            if given.get(other) is not None:
                raise ValueError(f"{other} is given; under context_parallel it must be left out")
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise ValueError(
                "labels is given, which the model shifts by one row, beyond the part that this rank has; give "
                "shift_labels, shifted before they are sharded, or compute the loss of the logits"
            )
        if _hides(given.get("attention_mask")):
            raise ValueError(_HIDES)
        if inputs.shape[1] < 2:
            raise ValueError(f"input_ids has {inputs.shape[1]} rows; each rank must have at least 2")
        return [inputs.shape[1], position_ids is not None]

    table = _agree.exchange(team, "context_parallel", prepare)
    _agree.same(table, 1, "position_ids", lambda x: "given" if x else "absent")
    segments = segments_of_parts([row[0] for row in table], settings.shards)
    if isinstance(segments, str):
        raise ValueError(f"input_ids {segments}")
    own = [torch.arange(start, stop) for start, stop in segments[team.rank]]

    def check() -> list[int]:
        if position_ids is not None and position_ids.dim() == 2 and not packed:
            row = 0
            for part in own:
                steps = position_ids[:, row : row + len(part)].diff(dim=1)
                if bool((steps != 1).any()):
                    raise ValueError(
                        "position_ids start anew within this rank's rows, as of packed documents; they must be "
                        "those of one sequence, sharded, or cu_seq_lens_q and cu_seq_lens_k must be given"
                    )
                row += len(part)
        return []

    if position_ids is not None:
        _agree.exchange(team, "context_parallel", check)
    return torch.cat(own).unsqueeze(0)
