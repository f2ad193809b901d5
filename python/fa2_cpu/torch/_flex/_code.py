# SPDX-License-Identifier: Apache-2.0
"""Functions made of others: code changed in place, so that all who imported it by name see the change."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


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
