"""The planner's input (`Request`), an adapter's statement of a call (`CallSpec`), and its tensors
(`CallInputs`)."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.structures.bands import LONG
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.graph.joining import JoinedView, flipped, flipped_sizes
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.run import attention


#: calls that a structure is expected to serve as long as no earlier graph has shown how many:
#: layers and directions of one step, at the least
EXPECTED = 8


class Request(NamedTuple):
    """Everything a plan depends on; the memo key. Sizes are classes of magnitude (bits), so that
    mini-batches whose sizes differ a little share a plan."""

    program: Program
    native: str  # the host layer's class, for its cost
    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    device: str
    src_bits: int
    dst_bits: int
    edge_bits: int
    grad: bool
    fresh: int  # how many calls the graph's structure may serve if it is built now; 0: it is there
    part_bits: int = 1  # of the tensors that its edges are put together from
    loops: bool = False  # the host adds self loops
    long: bool = True  # on both sides so many edges a node that bands may pay

    @property
    def parts(self) -> int:
        return 1 << self.part_bits

    @property
    def num_src(self) -> int:
        return 1 << self.src_bits

    @property
    def num_dst(self) -> int:
        return 1 << self.dst_bits

    @property
    def num_edges(self) -> int:
        return 1 << self.edge_bits


class Stated:
    """What a host call without its tensors has, whatever it computes: sizes of its graph, the dtype
    ``row`` of its rows, and what follows."""

    num_src: int
    num_dst: int
    num_edges: int
    #: whether layers inside stay native where the whole does, over a new graph on a GPU: a
    #: structure for each costs more than one for all
    together: bool = False
    #: (held, given) -> the graph of a call on these tensors; None: it is the result of `held`
    over: Any = None
    #: whether the graph decides which kernels run, beside sizes
    by_graph: ClassVar[bool] = False

    def kept(self) -> Any:
        """This statement as the layer's memory keeps it."""
        return self

    @staticmethod
    def held(graph: Any) -> Any:
        """The part of the call's graph that the structure cache holds: all of it."""
        return graph

    def facts(self) -> dict[str, Any]:
        """Sizes of the graph, for records."""
        return dict(num_src=self.num_src, num_dst=self.num_dst, num_edges=self.num_edges)


@dataclass(frozen=True)
class CallSpec(Stated):
    """A host call that the adapter understood, without its tensors: its Program, sizes and dtypes.

    ``native``: the host layer's class; ``loops``: nodes that get a self loop; ``exposed`` as in
    `attention.Call`; ``folded``: the adapter moved linear maps off the edges; ``around``: the layer
    holds others, which are routed by themselves where it stays native; ``flipped``: the second row
    of the edges holds the sources.
    """

    program: Program
    native: str
    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    num_src: int
    num_dst: int
    num_edges: int
    loops: int
    exposed: bool
    folded: bool = False
    around: bool = False
    flipped: bool = False

    def request(self, device: str, grad: bool, fresh: int) -> Request:
        edges = self.num_edges + self.loops
        return Request(self.program, self.native, self.heads, self.width, self.row, self.out,
                       device, self.num_src.bit_length(), self.num_dst.bit_length(),
                       edges.bit_length(), grad, fresh, loops=self.loops > 0,
                       long=edges >= LONG * self.num_src and edges >= LONG * self.num_dst)

    def peek(self, inputs: CallInputs) -> bool:
        """Whether the structure of the call's graph is there."""
        return cache.peek_many((inputs.edge_index,),
                               flipped_sizes(self.num_src, self.num_dst, self.loops)
                               if self.flipped else (self.num_src, self.num_dst, self.loops))

    def lookup(self, inputs: CallInputs) -> tuple[GraphView, str]:
        """The structure of the call's graph, and "hit", "miss" or "none"."""
        return (flipped if self.flipped else cache.lookup)(inputs.edge_index, self.num_src,
                                                           self.num_dst, self.loops)

    def call(self, graph: GraphView, plan) -> attention.Call:
        """The call over ``graph`` by ``plan``, for the `runner` of a route."""
        return attention.Call(self.program,
                              programs.attention(self.program),  # type: ignore[arg-type]
                              graph, self.heads, self.width, self.out, self.exposed, plan.pmf)

    @staticmethod
    def runner(route: str):
        """The function that runs calls on a route."""
        return attention.run_cuda if route == "cuda" else attention.run_torch

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"self_loops": self.loops}


class CallInputs(NamedTuple):
    """The tensors of one call: source and destination features [N, F] (``x_dst`` None: there are
    none; the same object as ``x_src``: they are shared), ``edge_index`` [2, E] plain,
    ``edge_attr``, and ``extra``, the layer's own further arguments."""

    x_src: Tensor
    x_dst: Tensor | None
    edge_index: Tensor
    edge_attr: Tensor | None = None
    extra: tuple = ()

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    @property
    def structure(self) -> tuple[Tensor, ...]:
        """The tensors that the graph's structure is made of."""
        return (self.edge_index,)


@dataclass(frozen=True)
class JoinedSpec(CallSpec):
    """`CallSpec` of a call whose graph is a `JoinedView` by ``join``, which is hashable. Its
    tensors are a `RelationalInputs`.

    Layers ``around`` others are the ones whose graphs are put `together`.
    """

    join: Any = None

    @property
    def together(self) -> bool:  # type: ignore[override]  # of each object
        return self.around

    def request(self, device: str, grad: bool, fresh: int) -> Request:
        return super().request(device, grad,
                               fresh)._replace(part_bits=len(self.join.parts).bit_length())

    def resized(self, num_src: int, num_dst: int, num_edges: int, join: Any,
                loops: int = 0) -> JoinedSpec:
        """The statement of a call that differs in its graph alone."""
        return JoinedSpec(self.program, self.native, self.heads, self.width, self.row, self.out,
                          num_src, num_dst, num_edges, loops, self.exposed, self.folded,
                          self.around, self.flipped, join)

    def _sizes(self) -> tuple:
        return "joined", self.num_src, self.num_dst, self.loops, self.join

    def peek(self, given: Any) -> bool:
        return cache.peek_many(given.structure, self._sizes())

    def lookup(self, given: Any) -> tuple[GraphView, str]:
        return cache.lookup_many(given.structure, self._sizes(),
                                 lambda own: JoinedView(given.structure, self.num_src, self.num_dst,
                                                        self.join, own, self.loops))
