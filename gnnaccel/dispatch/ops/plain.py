"""A plain layer's call as the router and the planner see it: one operation over one graph, of
`OPERATIONS`."""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ops import gated_sums, neighbours, outer_sums, several
from gnnaccel.dispatch.ops.graph import JoinedGraph, OpGraph
from gnnaccel.dispatch.plan.request import Stated

#: modules of the operations, by name
OPERATIONS = {"sum": neighbours, "max": neighbours, "gated": gated_sums, "several": several,
              "several with edges": several, "outer": outer_sums}


class PlainRequest(NamedTuple):
    """Everything a plan depends on; the memo key. Sizes are classes of magnitude (bits)."""

    native: str
    reduce: str
    weighted: bool
    width: int
    row: torch.dtype
    device: str
    src_bits: int
    dst_bits: int
    edge_bits: int
    grad: bool
    fresh: bool
    parts: int = 1  # as of a `PlainSpec`

    @property
    def out(self) -> torch.dtype:
        return self.row


@dataclass(frozen=True)
class PlainSpec(Stated):
    """A call that the adapter understood, without its tensors. ``native``: the host layer's class;
    ``reduce``: of `OPERATIONS`; ``weighted``: by edge; ``width``: channels of the rows that travel;
    ``row``: their dtype; ``parts``: number of results that the host computes one by one."""

    native: str
    reduce: str
    weighted: bool
    width: int
    row: torch.dtype
    num_src: int
    num_dst: int
    num_edges: int
    on_cpu: bool
    parts: int = 1

    def __str__(self) -> str:
        formula = operation(self.reduce).FORMULAS[self.reduce.partition(":")[0]]
        weighted = ", weighted" if self.weighted else ""
        return (f"{formula}, over the edges e = (j, i)\n{self.reduce}{weighted}: "
                f"{self.width} channels of "
                f"{str(self.row).removeprefix('torch.')}, {self.num_edges} edges "
                f"from {self.num_src} to {self.num_dst} nodes")

    @property
    def out(self) -> torch.dtype:
        return self.row

    @property
    def around(self) -> bool:
        """Whether staying native is no fallback: on a CPU the host's own kernels are the ones to
        take."""
        return self.on_cpu and not driver.placed()

    def request(self, device: str, grad: bool, fresh: int) -> PlainRequest:
        return PlainRequest(self.native, self.reduce, self.weighted, self.width, self.row, device,
                            self.num_src.bit_length(), self.num_dst.bit_length(),
                            self.num_edges.bit_length(), grad, fresh > 0, self.parts)

    def peek(self, inputs: PlainInputs) -> bool:
        """Whether the structure of the call's graph is there."""
        return cache.peek(inputs.edge_index, self.num_src, self.num_dst)

    def lookup(self, inputs: PlainInputs) -> tuple[OpGraph, str]:
        """The call's graph, and "hit", "miss" or "none" of its structure."""
        graph = OpGraph(inputs.edge_index, self.num_src, self.num_dst)
        graph.view()
        return graph, graph.cached

    @staticmethod
    def held(graph: OpGraph) -> GraphView:
        """Structure of the call's graph that the structure cache holds."""
        return graph.view()

    def over(self, held: GraphView, inputs: PlainInputs) -> OpGraph:
        """The graph of a call on these tensors, whose structure is ``held``."""
        return OpGraph(inputs.edge_index, self.num_src, self.num_dst, view=held)

    def call(self, graph: OpGraph, plan: Any) -> PlainCall:
        return PlainCall(graph, self.reduce, plan.route == "cuda")

    @staticmethod
    def runner(route: str) -> Callable[[PlainCall, dict[str, Tensor | None]], Any]:
        return functools.partial(_run, "by_kernels" if route == "cuda" else "by_operations")


@dataclass(frozen=True)
class JoinedPlainSpec(PlainSpec):
    """`PlainSpec` over a graph that is put together from several of the caller's tensors;
    ``join``: as of a `JoinedView`. Its tensors are a `RelationalInputs`."""

    join: Any = None

    def request(self, device: str, grad: bool, fresh: int) -> PlainRequest:
        # a class of magnitude
        return super().request(device, grad,
                               fresh)._replace(parts=1 << len(self.join.parts).bit_length())

    def peek(self, given: Any) -> bool:
        return JoinedGraph(given.structure, self.num_src, self.num_dst, self.join).known()

    def lookup(self, given: Any) -> tuple[OpGraph, str]:
        graph = JoinedGraph(given.structure, self.num_src, self.num_dst, self.join)
        graph.view()
        return graph, graph.cached

    def over(self, held: GraphView, given: Any) -> OpGraph:
        return JoinedGraph(given.structure, self.num_src, self.num_dst, self.join, held)


class PlainInputs(NamedTuple):
    """The tensors of one call; ``operands``: the adapter's own."""

    edge_index: Tensor
    device: torch.device
    operands: Any

    @property
    def structure(self) -> tuple[Tensor, ...]:
        """The tensors that the graph's structure is made of."""
        return (self.edge_index,)


@dataclass
class PlainCall:
    """One call; ``run`` as of `attention.Call`."""

    graph: OpGraph
    reduce: str
    kernels: bool
    run: Any = None

    def __call__(self, tensors: dict[str, Tensor | None]) -> Any:
        return self.run(self, tensors)


def operation(name: str) -> Any:
    """The module that computes ``name``, which may say more after a colon."""
    return OPERATIONS[name.partition(":")[0]]


def in_degrees(graph: OpGraph, kernels: bool) -> Tensor:
    """[num_dst]: number of edges that enter each node; ``kernels``: the structure that kernels read
    is there."""
    if kernels:
        return graph.view().csc(places=False).indptr.diff()
    return torch.bincount(graph.index("v"), minlength=graph.num_dst)


def _run(way: str, call: PlainCall, tensors: dict[str, Tensor | None]) -> Any:
    module = operation(call.reduce)
    return getattr(module, way)(call.graph, call.reduce,
                                *[tensors.get(name) for name in module.OPERANDS])
