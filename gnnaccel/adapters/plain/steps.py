"""The `Steps` of the ``forward`` of a plain module, while it is traced."""
from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.plain.effects import NodeEffect
from gnnaccel.adapters.tracing.graph_functions import GraphFunctions
from gnnaccel.adapters.tracing.layer.traced_layer import Layer
from gnnaccel.adapters.tracing.nodes import node_values, reduced
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue
from gnnaccel.adapters.tracing.nodes.nodes_read import node_rows
from gnnaccel.adapters.tracing.rows import pieces, pointwise
from gnnaccel.adapters.tracing.rows.specials import Special


class Ways(NamedTuple):
    """``flipped``: the lists of edges that go to the first of their ends; ``first``: which of the
    lists, in the order in which they are met, is the one that results are sums over."""

    flipped: frozenset[int] = frozenset()
    first: int = 0


class Forward(GraphFunctions):
    """The `Steps` of one run of a ``forward``. ``gathered``: the ends of the edges that have rows
    of arguments, by the names of these; ``by_source``: whether something was to be reduced by the
    end that the edges of a list are taken to come from, by their numbers; ``sends``: as of
    `tracing.Found`; ``reached``: the values per node of which messages are made."""

    square = counts_results = wholes = True
    sends = False

    def __init__(self, layer: Layer):
        super().__init__(layer)
        self.by_source: frozenset[int] = frozenset()
        self.gathered: dict[tuple[str, str], pointwise.Rows] = {}
        self.reached: list[NodeValue] = []
        self._given: dict[int, str] = {}  # names of arguments, by the places of their steps
        self._picked: dict[tuple[int, str], pointwise.Rows] = {}

    def argument(self, name: str, meta: Tensor) -> NodeValue:
        """The stand-in for an argument with a row for each node."""
        rows = pointwise.rows("i", itemgetter(name), meta, name)
        self._given[len(self.done)] = name
        self.done.append((_itself, (node_values.Given(rows, itemgetter(name), name),), {}))
        return NodeValue(self, meta)

    def at_end(self, value: NodeValue, end: str) -> pointwise.Rows:
        """Each edge's row of values per node; of an argument as it is the argument's."""
        key = value.at, end
        self.sends |= end == "j"
        self.reached.append(value.as_now())
        if key not in self._picked:
            name = self._given.get(value.at)
            if name is None:
                with torch.enable_grad():  # it is kept, for where gradients are on
                    self._picked[key] = reduced.at_end(value, end)
            else:
                rows = pointwise.rows(end, node_rows(itemgetter(name), end), value.meta,
                                      f"nodes.{name}")
                self._picked[key] = self.gathered[name, end] = rows
        rows = self._picked[key]
        return pieces.recorded(pointwise.Rows(rows.tree, rows.meta))

    def effect(self, function: Callable, args: tuple, meta: Tensor) -> NodeValue:
        result = self.made(function, args, {}, meta)
        NodeEffect(result)
        result.alone = True
        return result

    def new_ends(self, flipped: bool) -> list[Special]:
        """What stands for the ends of a list of edges."""
        ends = [Special(name, (), self) for name in ("edge_index_j", "edge_index_i")]
        for one in ends:
            object.__setattr__(one, "steps", self)
        return ends[::-1] if flipped else ends

    def other_ways(self, ways: Ways, out: Any = None) -> Ways | None:
        """Others in which the ``forward`` may be followed, which gave ``out`` unless it ended; None
        if these are right."""
        turned = self.by_source - ways.flipped
        if turned and not (out is not None and self.reductions):
            return ways._replace(flipped=ways.flipped | turned)
        return None

    def check(self, out: Any) -> None:
        """Unseen where the result ``out`` needs more than can be computed."""

    def _note_source(self, index: Any) -> None:
        if type(index) is Special and index.end == "j":
            self.by_source |= {0}

    def scatter(self, src: Any, index: Any, dim: Any = 0, dim_size: Any = None,
                reduce: Any = "sum") -> Any:
        self._note_source(index)
        return super().scatter(src, index, dim, dim_size, reduce)

    def into(self, number: float, src: Any, index: Any, *rest: Any) -> Any:
        self._note_source(index)
        return super().into(number, src, index, *rest)

    def softmax(self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None,
                dim: Any = 0) -> Any:
        if type(index) is Special and self._counts(num_nodes, index.end):
            num_nodes = None  # which gives the same
        return super().softmax(src, index, ptr, num_nodes, dim)


def _itself(t: Tensor) -> Tensor:
    return t
