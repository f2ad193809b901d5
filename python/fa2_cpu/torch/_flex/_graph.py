# SPDX-License-Identifier: Apache-2.0
"""score_mod and mask_mod as graphs: what they do with scalars, recorded once as PyTorch's operators run.

A recorder of this kind takes a fifth of the time of make_fx, and models make new functions for each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fa2_cpu.torch._flex._index_functions import ReadByTensor

PLACES = ("b", "h", "q", "k")


class Untraceable(ValueError):
    """Why a function is no graph."""


class Node:
    """An operator and its arguments, an input, or a tensor that the function captured.

    dims: on which of b, h, q, k it depends; scored: whether on the score; learns: whether on a captured tensor that
    requires grad.
    """

    __slots__ = ("op", "args", "kwargs", "name", "tensor", "dims", "scored", "learns")

    def __init__(self, op: Any, args: Sequence[Any] = (), kwargs: Optional[dict[str, Any]] = None) -> None:
        self.op, self.args, self.kwargs = op, tuple(args), kwargs or {}
        self.name, self.tensor = "", None
        inputs = [x for x in tree_flatten((self.args, self.kwargs))[0] if isinstance(x, Node)]
        self.dims = frozenset().union(*(x.dims for x in inputs))
        self.scored = any(x.scored for x in inputs)
        self.learns = any(x.learns for x in inputs)

    @staticmethod
    def input(name: str) -> Node:
        node = Node(None)
        node.name = name
        node.dims, node.scored = (frozenset(), True) if name == "score" else (frozenset(name), False)
        return node

    @staticmethod
    def captured(tensor: Tensor) -> Node:
        node = Node(None)
        node.tensor, node.learns = tensor, tensor.requires_grad
        return node

    @property
    def packet(self) -> str:
        """The operator's name without its overload; "" for inputs and captured tensors."""
        return "" if self.op is None else self.op.overloadpacket.__name__


class Graph:
    """output: the Node of the function's result; captured: the tensors it read besides its arguments."""

    def __init__(self, function: Callable[..., Tensor], score: Optional[torch.dtype]) -> None:
        """score: the dtype of the score; None for a mask_mod, which has none."""
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # so that no id is used twice
        self.captured: list[Node] = []
        values = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in PLACES]
        names = PLACES
        if score is not None:
            values, names = [torch.zeros((), dtype=score, device="cpu"), *values], ("score", *PLACES)
        for name, value in zip(names, values):
            self.put(value, Node.input(name))
        with torch.no_grad(), torch.autocast("cpu", enabled=False), ReadByTensor(), _Recorder(self):
            result = function(*values)
        if not isinstance(result, Tensor) or result.dim() != 0:
            what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise Untraceable(f"it gives {what}; it must give a tensor of no dimension")
        self.output = self.node(result)
        self.dtype = result.dtype
        del self._nodes, self._alive

    def put(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def node(self, tensor: Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            if not tensor.is_cpu:
                raise Untraceable(f"it reads a tensor on {tensor.device}; all must be on the CPU")
            node = Node.captured(tensor)
            self.captured.append(node)
            self.put(tensor, node)
        return node


def trace(score_mod: Callable[..., Tensor], dtype: torch.dtype) -> Graph:
    """The graph of a score_mod, or ValueError with a sentence."""
    try:
        return Graph(score_mod, dtype)
    except Exception as error:
        code = getattr(score_mod, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if inspect.iscode(code) else ""
        raise ValueError(
            f"score_mod{place} cannot be traced: {error}. It must be made of PyTorch's operators on its arguments and "
            "captured tensors, and give a tensor of no dimension"
        ) from error


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        as_node = lambda x: self._graph.node(x) if isinstance(x, Tensor) else x  # noqa: E731
        node = Node(op, tree_map(as_node, list(args)), tree_map(as_node, kwargs))
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Untraceable("it draws random numbers")
        if op is torch.ops.aten._local_scalar_dense.default:
            if node.scored or node.dims:
                raise Untraceable("Python code of it depends on the value of a score or of an index; torch.where chooses")
            return op(*args, **kwargs)
        changed = [i for i, x in enumerate(op._schema.arguments) if x.alias_info is not None and x.alias_info.is_write]
        if changed:
            return self._in_place(op, args, kwargs, node)
        if node.scored or node.dims:
            # The values mean nothing, and an index may be out of range.
            result = _empty_read(args) if op is torch.ops.aten.index.Tensor else None
            result = op(*args, **kwargs) if result is None else result
        else:
            result = op(*args, **kwargs)
        if isinstance(result, Tensor):
            self._graph.put(result, node)
        elif isinstance(result, (tuple, list)):
            for i, x in enumerate(result):
                if isinstance(x, Tensor):
                    part = Node(None, (node, i))
                    part.name = "item"
                    self._graph.put(x, part)
        return result

    def _in_place(self, op, args, kwargs, node: Node) -> Tensor:
        """x.add_(y) is x = x.add(y) from here on."""
        name = op.overloadpacket.__name__
        packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
        if packet is None or op._overloadname not in packet.overloads():
            raise Untraceable(f"it writes by {op}")
        known = self._graph.node(args[0])
        if known.tensor is not None or args[0]._is_view():
            raise Untraceable(f"it changes a captured tensor or a view in place, by {op}")
        node.op = getattr(packet, op._overloadname)
        op(*args, **kwargs)
        self._graph.put(args[0], node)
        return args[0]


def _empty_read(args: Sequence[Any]) -> Optional[Tensor]:
    """What x[i, j] by tensors of no dimension gives, without reading; None for other reads."""
    x, places = args
    if any(i is not None and i.dim() != 0 for i in places):
        return None
    rest = [size for size, i in zip(x.shape, [*places, *[None] * (x.dim() - len(places))]) if i is None]
    return torch.zeros(rest, dtype=x.dtype, device="cpu")


def evaluate(nodes: Sequence[Node], inputs: dict[str, Tensor], captured: Optional[dict[int, Tensor]] = None) -> list[Any]:
    """The values of nodes; captured: tensors instead of the captured ones, by the id of their nodes."""
    values: dict[int, Any] = {}

    def value(x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        if id(x) not in values:
            if x.tensor is not None:
                result = x.tensor if captured is None else captured.get(id(x), x.tensor)
            elif x.name == "item":
                result = value(x.args[0])[x.args[1]]
            elif x.name:
                result = inputs[x.name]
            else:
                result = x.op(*(_map(value, y) for y in x.args), **{k: _map(value, y) for k, y in x.kwargs.items()})
            values[id(x)] = result
        return values[id(x)]

    return [value(x) for x in nodes]


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    return [function(y) for y in x] if isinstance(x, (list, tuple)) else function(x)
