# SPDX-License-Identifier: Apache-2.0
"""What attention gets and returns in a live training run, written as cases for `fa2 verify`.

    import fa2_cpu as fa2

    with fa2.capture("run.safetensors", calls=4):
        loss = model(batch)
        loss.backward()
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fa2_cpu import _safetensors
from fa2_cpu._capture_calls import Target, named_function, targets
from fa2_cpu._capture_dropout import keep_mask, rng_state

__all__ = ["capture"]


class _Tap(torch.autograd.Function):
    """The identity; its backward hands the gradient of this one use to `record`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, record: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.record = record
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.record(gradient)
        return gradient, None


def _write(path: str | os.PathLike[str], cases: list[dict[str, Any]]) -> None:
    tensors = {f"call{n}/{name}": x for n, case in enumerate(cases) for name, x in case["tensors"].items()}
    _safetensors.write(path, tensors, {f"call{n}": json.dumps(case["options"]) for n, case in enumerate(cases)})


class _Recorder:
    """One function's calls, appended to `recorded` until it holds `limit`."""

    def __init__(self, target: Target, recorded: list[dict[str, Any]], limit: int) -> None:
        self.original = getattr(target.module, target.name)
        self.target, self.recorded, self.limit = target, recorded, limit

    def wrapped(self) -> Callable:
        """What stands in the function's place."""

        @functools.wraps(self.original)
        def recording(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs)

        return recording

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.recorded) >= self.limit:
            return self.original(*args, **kwargs)
        bound = self.target.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        described = self.target.describe(call)
        if described is None:
            warnings.warn(
                f"a call of {self.target.name} is not recorded: no case can say what it does (a score_mod that does more "
                "than add to the scores, dropout or pages of packed sequences)",
                stacklevel=3,
            )
            return self.original(*args, **kwargs)
        options, extra = described
        case: dict[str, Any] = {
            "options": {name: value for name, value in options.items() if value is not None},
            "tensors": {},
        }
        result = self._run(case, call, extra)
        self.recorded.append(case)
        return result

    def _run(self, case: dict[str, Any], call: dict[str, Any], extra: dict[str, torch.Tensor]) -> Any:
        kept, options = case["tensors"], case["options"]

        def save(name: str, tensor: torch.Tensor) -> None:
            kept[name] = tensor.detach().to("cpu", copy=True)

        names = list(self.target.signature.parameters)[:3]
        inputs = {}
        for short, name in zip("qkv", names):
            tensor = call[name]
            save(short, tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor = _Tap.apply(tensor, functools.partial(save, f"d{short}"))
            inputs[name] = tensor
        for name, tensor in extra.items():
            save(name, tensor)
        rest = {name: value for name, value in call.items() if name not in names}
        mask = call.get("attn_mask")  # an additive one may be trained
        if isinstance(mask, torch.Tensor) and mask.requires_grad and torch.is_grad_enabled():
            rest["attn_mask"] = _Tap.apply(mask, functools.partial(save, "dbias"))
        state = rng_state(call[names[0]].device) if options.get("dropout_p") else None
        result = self.original(*inputs.values(), **rest)
        if state is not None:
            save("keep", keep_mask(self.original, call, names, state, options.get("layout", "bhsd")))
        several = isinstance(result, tuple)
        out = result[0] if several else result
        save("out", out)
        # Beside out, a function may give its row statistics.
        q = call[names[0]]
        heads_first = options.get("layout", "bhsd") == "bhsd"
        statistics = q.shape[:-1] if heads_first else (*q.shape[:-3], q.shape[-2], q.shape[-3])
        lse = getattr(result[1], "lse", result[1]) if several else None
        if isinstance(lse, torch.Tensor) and lse.shape == torch.Size(statistics):
            save("lse", lse)
        if out.requires_grad:
            out.register_hook(functools.partial(save, "dout"))
        return result


@contextlib.contextmanager
def capture(
    path: str | os.PathLike[str],
    *,
    calls: int = 8,
    function: tuple[Any, str] | None = None,
    options: dict[str, Any] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Records attention's inputs, outputs and gradients, and writes them when the block ends.

    Args:
      path: the safetensors file, with a case "call0", "call1", ... for each call.
      calls: how many to record; later calls run as ever.
      function: (module, name) of another function whose first arguments are q, k, v and which gives out or a tuple
        that begins with it; without it, torch.nn.functional.scaled_dot_product_attention,
        torch.nn.attention.flex_attention.flex_attention, flash_attn.flash_attn_func and flash_attn_varlen_func, where
        a model looks them up by module and name.
      options: of `function`, as fa2_cpu.verify takes them.
    With dropout the mask is recorded too: further calls with the same random numbers, one for every D keys, show it.
    flex_attention's mask and what its score_mod adds are recorded as a bias; a call whose score_mod does anything else
    is not recorded, with a warning. Yields the list of recorded cases.
    """
    recorded: list[dict[str, Any]] = []
    wanted = targets() if function is None else [named_function(*function, dict(options or {}))]
    recorders = [_Recorder(target, recorded, calls) for target in wanted]
    try:
        for recorder in recorders:
            setattr(recorder.target.module, recorder.target.name, recorder.wrapped())
        yield recorded
    finally:
        for recorder in recorders:
            setattr(recorder.target.module, recorder.target.name, recorder.original)
    _write(path, recorded)
