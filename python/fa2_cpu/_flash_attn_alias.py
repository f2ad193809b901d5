# SPDX-License-Identifier: Apache-2.0
"""The import name flash_attn for fa2_cpu.flash_attn."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_MARK = "__fa2_alias__"


def _module(name: str, is_package: bool) -> ModuleType:
    module = ModuleType(name, "fa2 under the name of the flash-attn package.")
    module.__spec__ = ModuleSpec(name, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []
    setattr(module, _MARK, True)
    return module


def install(source_name: str) -> None:
    present = sys.modules.get("flash_attn")
    if present is not None:
        if hasattr(present, _MARK):
            return
        raise RuntimeError(
            "another flash_attn is imported already; install_as_flash_attn() must be called before its first import"
        )
    from fa2_cpu import (
        _flash_attn_cross_entropy, _flash_attn_interface, _flash_attn_rms_norm, _flash_attn_rotary, bert_padding,
    )  # fmt: skip

    source = sys.modules[source_name]
    package = _module("flash_attn", is_package=True)
    package.__version__ = source.__version__
    interface = _module("flash_attn.flash_attn_interface", is_package=False)
    for name in source.__all__:
        if name != "install_as_flash_attn":
            setattr(package, name, getattr(source, name))
            setattr(interface, name, getattr(source, name))
    for name in _flash_attn_interface.INTERNALS:
        setattr(interface, name, getattr(_flash_attn_interface, name))
    modules = {
        "flash_attn": package,
        "flash_attn.flash_attn_interface": interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.layers": _module("flash_attn.layers", is_package=True),
        "flash_attn.layers.rotary": _flash_attn_rotary,
        "flash_attn.ops": _module("flash_attn.ops", is_package=True),
        "flash_attn.ops.rms_norm": _flash_attn_rms_norm,
        "flash_attn.losses": _module("flash_attn.losses", is_package=True),
        "flash_attn.losses.cross_entropy": _flash_attn_cross_entropy,
    }
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
