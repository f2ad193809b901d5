# SPDX-License-Identifier: Apache-2.0
"""What a score_mod does, where it is something that the kernels do: a form read from its graph.

    s ↦ softcap · tanh(factor · s / softcap) + Σ terms      where visible, else -inf

factor, terms and visible depend on b, h, q and k, not on s; without a softcap it is factor · s + Σ terms.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional, Union

import torch
from torch import Tensor

from fa2_cpu.torch._flex._graph import Graph, Node, evaluate
from fa2_cpu.torch._flex._lines import line_of

aten = torch.ops.aten


class Unrecognised(Exception):
    """Why a graph is no form; a sentence's end."""


@dataclasses.dataclass(frozen=True)
class Form:
    """factor and outer are Nodes or numbers; capped: whether tanh was taken, of factor · s, and multiplied by outer."""

    factor: Union[Node, float] = 1.0
    capped: bool = False
    outer: float = 1.0
    terms: tuple[Node, ...] = ()
    visible: Optional[Node] = None

    @property
    def softcap(self) -> float:
        """0 is none."""
        return abs(self.outer) if self.capped else 0.0

    @property
    def inner(self) -> Union[Node, float]:
        """The factor of scores before a softcap."""
        return times(self.factor, self.outer) if self.capped else self.factor


def form_of(graph: Graph) -> Form:
    """Raises Unrecognised."""
    if graph.dtype not in (torch.float32, torch.float64):
        raise Unrecognised(f"its result is {graph.dtype}")
    if not graph.output.scored:
        raise Unrecognised("its result does not depend on the score")
    form = _Reader().read(graph.output)
    if form.capped and form.outer == 0.0:
        raise Unrecognised("it multiplies the score by 0")
    return form


def times(a: Any, b: Any) -> Any:
    """A product of Nodes and numbers."""
    if isinstance(a, Node):
        return a if not isinstance(b, Node) and b == 1.0 else Node(aten.mul.Tensor, (a, b))
    if isinstance(b, Node):
        return times(b, a)
    return a * b


def number(x: Any) -> Optional[float]:
    """x where it is one number for all elements that learns nothing."""
    if isinstance(x, Node):
        if x.scored or x.dims or x.learns:
            return None
        (x,) = evaluate([x], {})
        if not isinstance(x, Tensor) or x.numel() != 1:
            return None
        x = x.item()
    return float(x) if isinstance(x, (int, float)) else None


def _invert(condition: Node) -> Node:
    return Node(aten.logical_not.default, (condition,))


def _both(a: Optional[Node], b: Optional[Node]) -> Optional[Node]:
    return a if b is None else b if a is None else Node(aten.logical_and.default, (a, b))


class _Reader:
    """Forms of nodes that depend on the score."""

    def __init__(self) -> None:
        self._forms: dict[int, Form] = {}

    def read(self, node: Node) -> Form:
        if id(node) not in self._forms:
            self._forms[id(node)] = self._read(node)
        return self._forms[id(node)]

    def _read(self, node: Node) -> Form:
        if node.name == "score":
            return Form()
        rule = getattr(self, "_" + node.packet.strip("_"), None) if node.packet else None
        if rule is None:
            raise Unrecognised(f"it applies {node.packet or node.name} to the score")
        return rule(*node.args, **node.kwargs)

    @staticmethod
    def _scored(x: Any) -> bool:
        return isinstance(x, Node) and x.scored

    # Operators, by name.

    def _clone(self, x: Node, **_: Any) -> Form:
        return self.read(x)

    _alias = _contiguous = _clone

    def _to_copy(self, x: Node, dtype: Optional[torch.dtype] = None, **_: Any) -> Form:
        if dtype not in (None, torch.float32, torch.float64):
            raise Unrecognised(f"it rounds the score to {dtype}")
        return self.read(x)

    def _add(self, a: Any, b: Any, alpha: Any = 1) -> Form:
        if self._scored(a) and self._scored(b):
            raise Unrecognised("it adds functions of the score")
        if self._scored(b):
            form, term = self.read(b), a
            if alpha != 1:
                form = self._scaled(form, alpha)
        else:
            form, term = self.read(a), times(b, alpha)
        return self._plus(form, term)

    def _sub(self, a: Any, b: Any, alpha: Any = 1) -> Form:
        return self._add(a, b, alpha=-alpha)

    def _rsub(self, a: Any, b: Any, alpha: Any = 1) -> Form:
        return self._add(b, a, alpha=-alpha)

    def _neg(self, a: Node) -> Form:
        return self._scaled(self.read(a), -1.0)

    def _mul(self, a: Any, b: Any) -> Form:
        if self._scored(a) and self._scored(b):
            raise Unrecognised("it multiplies functions of the score")
        return self._scaled(self.read(a), b) if self._scored(a) else self._scaled(self.read(b), a)

    def _div(self, a: Any, b: Any, rounding_mode: Optional[str] = None) -> Form:
        if self._scored(b) or rounding_mode is not None:
            raise Unrecognised("it divides by a function of the score")
        value = number(b)
        if value is not None:
            return self._scaled(self.read(a), 1.0 / value if value else math.inf)
        return self._scaled(self.read(a), Node(aten.reciprocal.default, (b,)))

    def _tanh(self, a: Node) -> Form:
        form = self.read(a)
        if form.capped or form.terms or form.visible is not None:
            raise Unrecognised("it takes the tanh of more than a multiple of the score")
        return dataclasses.replace(form, capped=True)

    def _where(self, condition: Any, a: Any, b: Any) -> Form:
        if self._scored(condition):
            raise Unrecognised("it has a condition on the score")
        if self._scored(a) and self._scored(b):
            return self._either(condition, self.read(a), self.read(b))
        form, other = (self.read(a), b) if self._scored(a) else (self.read(b), a)
        if number(other) != -math.inf:
            raise Unrecognised("it replaces scores by values other than -inf")
        return self._hidden(form, condition if self._scored(a) else _invert(condition))

    def _masked_fill(self, a: Any, condition: Any, value: Any) -> Form:
        return self._where(condition, value, a)

    # What they are made of.

    def _scaled(self, form: Form, by: Any) -> Form:
        value = number(by)
        if value is not None and not (math.isfinite(value) and value):
            raise Unrecognised(f"it multiplies the score by {value}")
        if form.visible is not None and (value is None or value < 0):
            raise Unrecognised("it multiplies -inf by a number that may be negative")
        terms = tuple(times(x, by if value is None else value) for x in form.terms)
        if form.capped:
            if value is None:
                raise Unrecognised("it multiplies a softcap by something that is not one number")
            return dataclasses.replace(form, outer=form.outer * value, terms=terms)
        return dataclasses.replace(form, factor=times(form.factor, by if value is None else value), terms=terms)

    def _plus(self, form: Form, term: Any) -> Form:
        if not isinstance(term, Node):
            if term == 0:
                return form
            term = Node(aten.scalar_tensor.default, (float(term),), {"dtype": torch.float64, "device": "cpu"})
        if term.packet == "where":
            condition, a, b = term.args
            for kept, hidden, inverted in ((a, b, False), (b, a, True)):
                if number(hidden) == -math.inf:
                    form = self._hidden(form, _invert(condition) if inverted else condition)
                    return self._plus(form, number(kept) if number(kept) is not None else kept)
        return dataclasses.replace(form, terms=(*form.terms, term))

    def _hidden(self, form: Form, visible: Node) -> Form:
        return dataclasses.replace(form, visible=_both(form.visible, visible))

    def _either(self, condition: Node, a: Form, b: Form) -> Form:
        """a where condition, else b: one form if they differ in terms and visibility alone."""
        same = a.factor is b.factor or (number(a.factor) is not None and number(a.factor) == number(b.factor))
        if not same or a.capped != b.capped or a.outer != b.outer:
            raise Unrecognised("it chooses between different functions of the score")
        form = dataclasses.replace(a, terms=(), visible=None)
        if a.terms or b.terms:
            form = self._plus(form, Node(aten.where.self, (condition, *map(_sum, (a.terms, b.terms)))))
        if a.visible is not None:
            form = self._hidden(form, Node(aten.logical_or.default, (_invert(condition), a.visible)))
        if b.visible is not None:
            form = self._hidden(form, Node(aten.logical_or.default, (condition, b.visible)))
        return form


def _sum(terms: tuple[Node, ...]) -> Node:
    total = terms[0] if terms else Node(aten.scalar_tensor.default, (0.0,), {"dtype": torch.float32, "device": "cpu"})
    for x in terms[1:]:
        total = Node(aten.add.Tensor, (total, x))
    return total


def capped_sum(softcap: float, terms: tuple[Node, ...]) -> Node:
    """The score, capped unless softcap is 0, plus terms."""
    score = Node.input("score")
    if softcap:
        score = times(Node(aten.tanh.default, (times(score, 1.0 / softcap),)), softcap)
    return _sum((score, *terms))


def alibi_of(term: Node) -> Optional[tuple[Any, bool]]:
    """(slope, distance) of a term -slope · (q - k), or -slope · |q - k| where distance; slope depends on b and h alone."""
    if term.packet in ("neg", "mul", "div"):
        if term.packet == "neg":
            pairs = [(-1.0, term.args[0])]
        elif term.packet == "div":
            if not isinstance(term.args[0], Node) or term.kwargs.get("rounding_mode") is not None:
                return None
            by = term.args[1]
            pairs = [(Node(aten.reciprocal.default, (by,)) if isinstance(by, Node) else 1.0 / by, term.args[0])]
        else:
            pairs = [term.args[:2], term.args[1::-1]]
        for factor, rest in pairs:
            if isinstance(factor, Node) and not factor.dims <= {"b", "h"}:
                continue
            found = alibi_of(rest) if isinstance(rest, Node) else None
            if found is not None:
                return times(found[0], factor), found[1]
        return None
    line = line_of(term)
    if line in ((1, -1, 0), (-1, 1, 0)):
        return (-1.0 if line[0] == 1 else 1.0), False
    if term.packet == "abs" and line_of(term.args[0]) in ((1, -1, 0), (-1, 1, 0)):
        return -1.0, True
    return None
