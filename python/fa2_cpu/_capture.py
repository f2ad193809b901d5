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
import inspect
import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["capture"]

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.bool: "BOOL",
}


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


def _write(path: str, cases: list[dict[str, Any]]) -> None:
    """A safetensors file, written whole or not at all."""
    header: dict[str, Any] = {"__metadata__": {}}
    chunks, end = [], 0
    for index, case in enumerate(cases):
        name = f"call{index}"
        header["__metadata__"][name] = json.dumps(case["options"])
        for key, tensor in case["tensors"].items():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            header[f"{name}/{key}"] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + len(data)],
            }
            chunks.append(data)
            end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{path}.part", "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.writelines(chunks)
    os.replace(f"{path}.part", path)


def _sdpa_options(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    options = {"layout": "bhsd", "scale": call["scale"], "dropout_p": call["dropout_p"]}
    if call["is_causal"]:
        options["causal"] = "top_left"
    return options, {} if call["attn_mask"] is None else {"bias": call["attn_mask"]}


def _flash_options(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
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


def _targets() -> list[tuple[Any, str, Callable]]:
    found = [(torch.nn.functional, "scaled_dot_product_attention", _sdpa_options)]
    with contextlib.suppress(ImportError):
        import flash_attn

        found.append((flash_attn, "flash_attn_func", _flash_options))
    return found


# Its Python signature is not to be had from a builtin.
def _sdpa_signature(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    pass


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
        that begins with it; without it, torch.nn.functional.scaled_dot_product_attention and
        flash_attn.flash_attn_func, where a model looks them up by module and name.
      options: of `function`, as fa2_cpu.verify takes them.
    Calls with dropout are not recorded, since their mask is unknown. Yields the list of recorded cases.
    """
    recorded: list[dict[str, Any]] = []

    def wrap(original: Callable, options_of: Callable) -> Callable:
        builtin = original is torch.nn.functional.scaled_dot_product_attention
        signature = inspect.signature(_sdpa_signature if builtin else original)

        @functools.wraps(original)
        def recording(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            described, extra = options_of(dict(bound.arguments))
            if len(recorded) >= calls or described.get("dropout_p"):
                return original(*args, **kwargs)
            described = {name: value for name, value in described.items() if value is not None}
            names = list(signature.parameters)[:3]
            case: dict[str, Any] = {"options": described, "tensors": {}}
            keep = case["tensors"]

            def save(name: str, tensor: torch.Tensor) -> None:
                keep[name] = tensor.detach().to("cpu", copy=True)

            inputs = {}
            for short, name in zip("qkv", names):
                tensor = bound.arguments[name]
                save(short, tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor = _Tap.apply(tensor, functools.partial(save, f"d{short}"))
                inputs[name] = tensor
            for name, tensor in extra.items():
                save(name, tensor)
            call = {**bound.arguments, **inputs}
            positional = [call.pop(name) for name in names]
            result = original(*positional, **call)
            out = result[0] if isinstance(result, tuple) else result
            save("out", out)
            if out.requires_grad:
                out.register_hook(functools.partial(save, "dout"))
            recorded.append(case)
            return result

        return recording

    if function is not None:
        targets = [(*function, lambda call: (dict(options or {}), {}))]
    else:
        targets = _targets()
    originals = [(module, name, getattr(module, name)) for module, name, _ in targets]
    try:
        for (module, name, options_of), (_, _, original) in zip(targets, originals):
            setattr(module, name, wrap(original, options_of))
        yield recorded
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    _write(os.fspath(path), recorded)
