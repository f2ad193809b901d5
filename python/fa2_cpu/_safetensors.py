# SPDX-License-Identifier: Apache-2.0
"""Tensors of NumPy or PyTorch as a safetensors file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["writable", "write"]

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "|V2": "BF16",  # what NumPy makes of it in a file
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def writable(x: Any) -> bool:
    """Whether `write` knows the dtype."""
    return _dtype(x) in _NAMES


def _bytes(x: Any) -> bytes:
    if hasattr(x, "detach"):  # PyTorch, on any device
        import torch

        return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(x).tobytes()


def write(path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes the file whole or not at all.

    Args:
      tensors: by name.
      metadata: strings by name, for the header.
    Raises:
      ValueError: a dtype is none of float64, float32, bfloat16, float16, int64, int32, uint8, bool.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks, end = [], 0
    for name, tensor in tensors.items():
        dtype = _dtype(tensor)
        if dtype not in _NAMES:
            known = ", ".join(known for known in _NAMES if known.isalnum())
            raise ValueError(f"tensor {name} has dtype {dtype}; it must be one of {known}")
        data = _bytes(tensor)
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(data)],
        }
        chunks.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = f"{os.fspath(path)}.part"
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.writelines(chunks)
    os.replace(part, path)
