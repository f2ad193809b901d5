# SPDX-License-Identifier: Apache-2.0
"""Whether the gradients of an attention kernel are right, and what is wrong with them.

    import fa2_cpu as fa2
    report = fa2.verify({"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse,
                         "dq": dq, "dk": dk, "dv": dv}, causal="bottom_right")
    print(report)
    report.raise_if_failed()

The judgement is that of the command `fa2 verify`: float64 answers, bounds from a rounding twin, known mistakes
named. docs/check_gpu_port.md describes tensors and options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np

from fa2_cpu import _core
from fa2_cpu._arrays import Array, core_array

__all__ = ["Report", "VerificationError", "load", "verify"]


class VerificationError(AssertionError):
    """A candidate failed; the message is the report as text."""


class Report:
    """What `fa2 verify` found.

    Attributes:
      passed: whether every case passed.
      cases: a list of dicts, as `fa2 verify --json` writes them: name, verdict, tensors, unchecked, diagnosis.
      text: the same for people.
      html: the same as one page that needs no other file: error maps by head and tile, histograms.
    """

    def __init__(self, cases: list[dict[str, Any]], text: str, html: str) -> None:
        self.cases = cases
        self.text = text
        self.html = html

    @property
    def passed(self) -> bool:
        return all(case["verdict"] == "pass" for case in self.cases)

    @property
    def diagnosis(self) -> list[str]:
        """The ids of the mistakes that were named, over all cases."""
        return [found["id"] for case in self.cases for found in case["diagnosis"]]

    def json(self) -> str:
        return json.dumps({"cases": self.cases}, indent=1)

    def raise_if_failed(self) -> None:
        """Raises VerificationError, an AssertionError, unless every case passed."""
        if not self.passed:
            raise VerificationError("\n" + self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<fa2_cpu.Report: {len(self.cases)} cases, {'passed' if self.passed else 'failed'}>"


def _require_core() -> None:
    if not hasattr(_core, "verify"):
        raise RuntimeError(
            "this build of fa2_cpu has no checker: install nlohmann_json (nlohmann-json3-dev) and build it again"
        )


def _dense(name: str, x: Array) -> Array:
    """On the CPU, without gaps, as the core reads it."""
    if hasattr(x, "detach"):  # a PyTorch tensor, on any device
        x = x.detach().cpu().contiguous()
        # The checker knows no other integers than prefix sums; a mask of bytes is one of bools.
        if str(x.dtype) == "torch.uint8":
            x = x.bool()
        return core_array(name, x)
    if not isinstance(x, np.ndarray):
        x = np.asarray(x)
    if x.dtype == np.uint8:
        x = x.astype(bool)
    # A copy: read-only arrays are no DLPack.
    return core_array(name, np.array(x, order="C"))


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of an .npz file, or the tensors of a .pt file that holds a dict of them.

    "fa2" among them may be options as JSON, as in the header of a safetensors file.
    """
    path = os.fspath(path)
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}; it must hold a dict of tensors")
    flat: dict[str, Any] = {}
    for name, value in loaded.items():
        if isinstance(value, Mapping) and name != "fa2":  # a case
            flat.update({f"{name}/{inner}": tensor for inner, tensor in value.items()})
        else:
            flat[name] = json.dumps(value) if isinstance(value, Mapping) else value
    return flat


def _cases(tensors: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Dense arrays by name by case."""
    cases: dict[str, dict[str, Array]] = {}
    for name, value in tensors.items():
        prefix, _, inner = str(name).rpartition("/")
        if value is not None and _core.verify_tensor_name(inner):
            cases.setdefault(prefix, {})[inner] = _dense(inner, value)
    if not cases:
        raise ValueError("no tensor has a name that is known: q, k, v, dout, out, lse, dq, dk, dv, ...")
    return cases


_OPTIONS = (
    *("layout", "causal", "window", "scale", "softcap", "dropout_p"),
    *("philox_seed", "philox_offset", "lse_base", "precision"),
)

Source = Union[Mapping[str, Array], str, "os.PathLike[str]"]


def _source(tensors: Source, options: dict[str, Any]) -> Any:
    """What the core reads: a path, or cases; options that the arrays came with are added to `options`."""
    if isinstance(tensors, (str, os.PathLike)):
        path = os.fspath(tensors)
        if not path.endswith((".npz", ".pt", ".pth")):
            return path
        tensors = load(path)
        found = json.loads(str(tensors.pop("fa2", "{}")))
        options.update({name: value for name, value in found.items() if name not in options})
    return _cases(tensors)


def verify(
    tensors: Source | Sequence[Source],
    *,
    shard_by: str = "sequence",
    plain: bool = False,
    diagnose: bool = True,
    num_threads: int | None = None,
    **options: Any,
) -> Report:
    """Judges the outputs and gradients of an attention kernel.

    Args:
      tensors: arrays of any library by name (q, k, v, dout, out, lse, dq, dk, dv, bias, ..., or a synonym such as
        grad_query), "CASE/q" for several cases; or the path of a .safetensors, .npz or .pt file; or a list of either,
        what each rank of a distributed run holds, in order.
      shard_by: what the ranks of a list have cut: "sequence", "zigzag" (of 2 n runs rank r has r and 2 n - 1 - r),
        "striped" (every n-th row), "heads" or "batch".
      plain: answers by plain float64 loops instead of fa2's float64 kernels.
      diagnose: whether the known mistakes are tried on what fails.
      num_threads: None for all cores.
      **options: layout ("bhsd", "bshd", "thd"), causal (None, "top_left", "bottom_right"), window (left, right),
        scale, softcap, dropout_p, philox_seed, philox_offset, lse_base ("e" or 2), precision ("bf16", "f16", "f32",
        "tf32", "f64").
    Raises:
      ValueError: a tensor or an option is missing or does not fit.
    """
    _require_core()
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"verify() has no option {name!r}; it has {', '.join(sorted(_OPTIONS))}")
    sources = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    if not sources:
        raise ValueError("tensors is empty; it must hold what each rank has")
    read = [_source(source, options) for source in sources]
    text = json.dumps({name: list(v) if isinstance(v, tuple) else v for name, v in options.items()})
    threads = 0 if num_threads is None else int(num_threads)
    found, lines, html = _core.verify(read, text, shard_by, plain, diagnose, threads)
    return Report(json.loads(found)["cases"], lines, html)
