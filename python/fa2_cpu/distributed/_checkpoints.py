# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpoints made under context_parallel: what they compute again in a backward outside of the block is computed
as within it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as checkpoints

# The two kinds of torch.utils.checkpoint.checkpoint, which it finds by these names when it is called; PyTorch 2.15 has the
# second under another name.
_REENTRANT = "CheckpointFunction"
_OTHERS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")


def install(resume: Callable[[], Any]) -> list[Callable[[], None]]:
    """Puts wrappers in place; the results take them away. resume() is a context manager for what is computed again."""

    def resumed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with resume():
                return function(*args, **kwargs)

        return call

    undo: list[Callable[[], None]] = []
    reentrant = getattr(checkpoints, _REENTRANT, None)
    if reentrant is not None:

        class Resumed:
            @staticmethod
            def apply(function: Callable[..., Any], *args: Any) -> Any:
                return reentrant.apply(resumed(function), *args)

        undo.append(_put(_REENTRANT, Resumed, reentrant))
    for name in _OTHERS:
        other = getattr(checkpoints, name, None)
        if other is not None:
            undo.append(_put(name, _with_first(other, resumed), other))
    return undo


def _with_first(other: Callable[..., Any], resumed: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args, **kwargs: other(resumed(function), *args, **kwargs)


def _put(name: str, new: Any, before: Any) -> Callable[[], None]:
    setattr(checkpoints, name, new)
    return lambda: setattr(checkpoints, name, before)
