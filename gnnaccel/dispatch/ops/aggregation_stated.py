"""An aggregation inside a host's layer, for tools that explain, compare and measure calls: stated,
planned and run on the side, without counts or records. Calls of a script go by
`aggregation_route.run`.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.ops import aggregation_route
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce, named
from gnnaccel.dispatch.ops.aggregation_route import Asked
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan.planner import Plan
from gnnaccel.dispatch.plan.request import Stated
from gnnaccel.dispatch.policy.config import Config


@dataclass(frozen=True)
class AggregationSpec(Stated):
    """A call without its tensors, as others are stated. ``width``: numbers of a message; ``row``:
    their dtype."""

    reduces: tuple[str, ...]
    weighted: bool
    width: int
    row: torch.dtype
    num_src: int
    num_dst: int
    num_edges: int
    message: str = "x[j]"  # without its weight

    def __str__(self) -> str:
        message = f"{'weight[e] * ' if self.weighted else ''}{self.message}"
        return (f"out[i] = {', '.join(self.reduces)} of {message} over the edges e = (j, i)\n"
                f"{self.width} channels of {str(self.row).removeprefix('torch.')}, "
                f"{self.num_edges} edges from {self.num_src} to "
                f"{self.num_dst} nodes")

    @staticmethod
    def of(inputs: AggregationInputs) -> AggregationSpec:
        graph, first = inputs.graph, inputs.first
        return AggregationSpec(tuple(map(named, inputs.reduces)), first.weight is not None,
                               math.prod(first.shape), first.x.dtype, graph.num_src,
                               graph.num_dst, graph.num_edges,
                               "x[j]" if first.more is None else str(first.more))

    @property
    def out(self) -> torch.dtype:
        return self.row

    def plan(self, inputs: AggregationInputs, config: Config, grad: bool, fresh: bool) -> Plan:
        """The decision on such a call, as a part of training if ``grad``, over a graph that is
        ``fresh`` or comes again."""
        return aggregation_route.decide_all(inputs.graph, inputs.first, inputs.reduces, config,
                                            Asked(grad, fresh)).plan

    def lookup(self, inputs: AggregationInputs) -> tuple[OpGraph, str]:
        """The call's graph, and "hit", "miss" or "none" of its structure."""
        inputs.graph.view()
        return inputs.graph, inputs.graph.cached

    def call(self, graph: OpGraph, plan: Plan) -> AggregationCall:
        return AggregationCall(graph, plan.route == "cuda")

    @staticmethod
    def runner(route: str) -> Callable[[AggregationCall, AggregationInputs], Any]:
        return functools.partial(_run, route)


class AggregationInputs(NamedTuple):
    """The tensors of one call: the ``first`` of its aggregations, which differ in nothing but
    ``reduces``; ``more``: the adapter's own."""

    graph: OpGraph
    first: Aggregation
    reduces: tuple[Reduce, ...]
    more: Any

    @property
    def device(self) -> torch.device:
        return self.first.x.device

    @property
    def edge_index(self) -> Tensor:
        """[2, E]: sources and destinations, in this order."""
        index = self.graph.edge_index
        return index.flip(0) if self.graph.flipped else index


@dataclass
class AggregationCall:
    """One call; ``run`` as of `attention.Call`."""

    graph: OpGraph
    kernels: bool
    run: Any = None

    def __call__(self, inputs: AggregationInputs) -> Any:
        return self.run(self, inputs)


def _run(route: str, call: AggregationCall, inputs: AggregationInputs) -> Any:
    """The result; of several aggregations a list, as of `aggregation_route.decide_all`."""
    if len(inputs.reduces) > 1:
        return aggregation_route.on_all(route, call.graph, inputs.first, inputs.reduces)
    return aggregation_route.on(route, call.graph, inputs.first.by(inputs.reduces[0]))
