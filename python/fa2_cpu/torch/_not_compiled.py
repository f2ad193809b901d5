# SPDX-License-Identifier: Apache-2.0
"""Calls that torch.compile leaves as they are."""

from __future__ import annotations

import functools
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
