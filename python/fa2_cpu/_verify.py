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
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np

from fa2_cpu import _core, _safetensors
from fa2_cpu._arrays import Array, core_array

__all__ = ["Report", "VerificationError", "converted", "load", "verify"]


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
    """The arrays of an .npz file, or the tensors of a .pt file that holds a dict of them, of dicts for several cases.

    What is a text is options as JSON, by the name of its case or "fa2", as in the header of a safetensors file.
    """
    path = os.fspath(path)
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return {name: str(x) if x.dtype.kind == "U" and x.ndim == 0 else x for name, x in arrays.items()}
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}; it must hold a dict of tensors")
    flat: dict[str, Any] = {}
    for name, value in loaded.items():
        if isinstance(value, Mapping) and any(hasattr(inner, "detach") for inner in value.values()):  # a case
            flat.update({name if key == "fa2" else f"{name}/{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return {name: json.dumps(x) if isinstance(x, Mapping) else x for name, x in flat.items()}


def converted(path: str | os.PathLike[str], folder: str, index: int) -> str:
    """Writes what `load` reads as a safetensors file into `folder` and gives its path."""
    loaded = load(path)
    metadata = {name: x for name, x in loaded.items() if isinstance(x, str)}
    arrays = {name: x for name, x in loaded.items() if hasattr(x, "dtype")}
    # Whatever else lies in the file is nobody's concern.
    kept = {
        name: x
        for name, x in arrays.items()
        if _safetensors.writable(x) or _core.verify_tensor_name(name.rpartition("/")[2])
    }
    result = os.path.join(folder, f"{index}-{os.path.basename(os.fspath(path))}.safetensors")
    _safetensors.write(result, kept, metadata)
    return result


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


def _source(tensors: Source, folder: str, index: int) -> Any:
    """What the core reads: the path of a safetensors file, or cases."""
    if not isinstance(tensors, (str, os.PathLike)):
        return _cases(tensors)
    path = os.fspath(tensors)
    return converted(path, folder, index) if path.endswith((".npz", ".pt", ".pth")) else path


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

    Returns:
      A Report: passed, diagnosis, cases, text and html.

    Raises:
      TypeError: an option that verify does not have.
      ValueError: a tensor or an option is missing or does not fit.
      RuntimeError: this build has no checker.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 2, 8, 16), dtype=np.float32)
      >>> out, lse = fa2.attention_forward(q, k, v, causal="top_left")
      >>> dq, dk, dv, *_ = fa2.attention_backward(dout, q, k, v, out, lse, causal="top_left")
      >>> given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
      >>> fa2.verify(given, causal="top_left").passed
      True
      >>> fa2.verify({**given, "dq": 2 * dq}, causal="top_left").passed
      False
    """
    _require_core()
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"verify() has no option {name!r}; it has {', '.join(sorted(_OPTIONS))}")
    sources = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    if not sources:
        raise ValueError("tensors is empty; it must hold what each rank has")
    # NumPy's and PyTorch's numbers have item().
    text = json.dumps(options, default=lambda number: number.item())
    threads = 0 if num_threads is None else int(num_threads)
    with tempfile.TemporaryDirectory(prefix="fa2-") as folder:
        read = [_source(source, folder, n) for n, source in enumerate(sources)]
        found, lines, html = _core.verify(read, text, shard_by, plain, diagnose, threads)
    return Report(json.loads(found)["cases"], lines, html)
