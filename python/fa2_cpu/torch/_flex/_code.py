# SPDX-License-Identifier: Apache-2.0
"""Functions made of others: code changed in place, so that all who imported it by name see the change; and calls that
torch.compile leaves as they are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.decorators import skip


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """function as a graph break, also where it is what torch.compile is given: torch.compile(x) undoes
    torch.compiler.disable(x) and would compile what x is made of, for minutes."""
    disabled = torch.compiler.disable(function)

    @skip  # else each shape is one more compilation of this line
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return disabled(*arguments, **keywords)

    return call


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same code, which stays when that of the first changes."""
    result = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def redirect(function: Callable[..., Any], by: Callable[..., Any], name: str, to: Callable[..., Any]) -> Callable[[], None]:
    """Gives function the code of `by`, which calls the global `name`, there `to`, until the result is called."""
    code = function.__code__
    function.__globals__[name] = to
    function.__code__ = by.__code__

    def undo() -> None:
        function.__code__ = code
        del function.__globals__[name]

    return undo
