# SPDX-License-Identifier: Apache-2.0
"""The distribution flash-attn for importlib.metadata, and transformers' checks for a GPU, answered for a CPU."""

from __future__ import annotations

import email.message
import importlib.metadata
import importlib.util
import sys
from typing import Any


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> Any:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {self._version}\n",
            "top_level.txt": "flash_attn\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flash-attn is fa2 under another name and has no files")

    @property
    def metadata(self) -> email.message.Message:
        return email.message_from_string(self.read_text("METADATA"))

    @property
    def files(self) -> None:
        return None


class _Finder:
    """Only finds distributions; modules are in sys.modules."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Any:
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-") == "flash-attn":
            yield _Distribution(self._version)


def install(version: str) -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(version))
    if importlib.util.find_spec("transformers") is not None:
        _answer_transformers()


def _answer_transformers() -> None:
    """attn_implementation="flash_attention_2" asks for a GPU by these functions."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils, modeling_utils
    from transformers.utils import import_utils

    def available(*args: Any, **kwargs: Any) -> bool:
        return True

    for module in (import_utils, modeling_flash_attention_utils, modeling_utils):
        if hasattr(module, "is_flash_attn_2_available"):
            module.is_flash_attn_2_available = available
    matrix = getattr(modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    if 2 in matrix:
        matrix[2] = {**matrix[2], "general_availability_check": available, "pkg_availability_check": available}
    for name in ("_flash_attn_can_dispatch", "_flash_attn_2_can_dispatch"):
        original = getattr(PreTrainedModel, name, None)
        if original is not None:
            setattr(PreTrainedModel, name, _dispatcher(original, name == "_flash_attn_2_can_dispatch"))


def _dispatcher(original: Any, always_two: bool) -> Any:
    def can_dispatch(self: Any, *args: Any, **kwargs: Any) -> bool:
        version = 2 if always_two else kwargs.get("flash_attn_version", args[0] if args else None)
        supported = getattr(self, "_supports_flash_attn", False) or getattr(self, "_supports_flash_attn_2", False)
        if version == 2 and supported:
            return True
        return original(self, *args, **kwargs)

    return can_dispatch
