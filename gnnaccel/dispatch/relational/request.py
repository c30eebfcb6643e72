"""A relational call: its statement by an adapter (`RelationalSpec`), the request to the planner
(`RelationalRequest`), and how it runs (`RelationalCall`)."""
from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.cuda.runtime.launch import TYPES
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import PARAM, Program
from gnnaccel.dispatch.plan.request import Stated
from gnnaccel.dispatch.policy.config import PASSES, current, passes_on
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import (added as adding, cuda_maps, cuda_program, cuda_steps,
                                          execute, gather, optimise, prepare, torch_maps)
from gnnaccel.dispatch.run import attention, attention_families

if TYPE_CHECKING:
    from gnnaccel.dispatch.relational.counting import Shape
    from gnnaccel.dispatch.relational.gather import RelationStatistics
    from gnnaccel.dispatch.relational.optimise import Optimised
    from gnnaccel.dispatch.relational.view import RelationView

#: layers of which the host's own code waits for nothing
_CAPTURED_NATIVELY = ("FastRGCNConv", "RGATConv", "HeteroConv")

Shapes = tuple[tuple[str, "Shape"], ...]


class RelationalRequest(NamedTuple):
    """Everything a relational plan depends on; the memo key. Sizes are classes of magnitude (bits).

    ``shapes``: of one row of each input of the Program, of the whole for parameters;
    ``relation_bits``: of the relations; ``rows_grad``, ``beside``: as of `RelationalSpec`.
    """

    program: Program
    native: str
    shapes: Shapes
    row: torch.dtype
    out: torch.dtype
    device: str
    src_bits: int
    dst_bits: int
    edge_bits: int
    relation_bits: int
    grad: bool
    fresh: bool
    heads: int = 1
    width: int = 1  # channels per head of the attention, if there is one
    rows_grad: bool = True
    beside: Any = None

    def statistics(self) -> RelationStatistics:
        """Statistics of a graph of these sizes in which half of the possible pairs are distinct."""
        src, dst, edges, relations = (1 << b
                                      for b in (self.src_bits, self.dst_bits, self.edge_bits,
                                                self.relation_bits))
        return gather.RelationStatistics(src, dst, edges, relations,
                                         min(edges, src * relations) // 2,
                                         min(edges, dst * relations) // 2)


@dataclass(frozen=True)
class RelationalSpec(Stated):
    """A relational host call that the adapter understood, without its tensors.

    ``make(own, compact)``: the `RelationView` of the call's graph; ``ignore`` as there; ``heads``,
    ``width``: of its attention; ``layout``: a key of all else that the view depends on; ``around``:
    as of `JoinedSpec`; ``rows_grad``: whether gradients of the rows that the Program reads may be
    asked for; ``beside``: of `relational.beside`, the kernels launched beside the Program.
    """

    program: Program
    native: str
    shapes: Shapes
    row: torch.dtype
    out: torch.dtype
    num_src: int
    num_dst: int
    num_edges: int
    num_relations: int
    make: Callable[[bool, bool], RelationView]
    ignore: bool = False
    heads: int = 1
    width: int = 1
    layout: Hashable = None
    around: bool = False
    rows_grad: bool = True
    beside: Any = None

    def request(self, device: str, grad: bool, fresh: int) -> RelationalRequest:
        return RelationalRequest(self.program, self.native, self.shapes, self.row, self.out, device,
                                 self.num_src.bit_length(), self.num_dst.bit_length(),
                                 self.num_edges.bit_length(), self.num_relations.bit_length(), grad,
                                 fresh > 0, self.heads, self.width, self.rows_grad and grad,
                                 self.beside)

    @functools.cached_property
    def _sizes(self) -> tuple:
        """The structure's key besides the edges, by the configuration in which the call was
        stated."""
        return ("relational", self.num_src, self.num_dst, self.num_relations, self.ignore,
                self.layout, "compaction" in passes_on())

    def peek(self, inputs: RelationalInputs) -> bool:
        """Whether the structure of the call's graph is there."""
        return cache.peek_many(inputs.structure, self._sizes)

    def lookup(self, inputs: RelationalInputs) -> tuple[RelationView, str]:
        """The structure of the call's graph, and "hit", "miss" or "none".

        During a capture it is the structure from before the capture; each replay makes sure that
        the edges are still the same, unless the caller does (`capture.still`).
        """
        if not capture.capturing() or capture.here.held is not None:
            return cache.lookup_many(inputs.structure, self._sizes,
                                     lambda own: self.make(own, self._sizes[-1]))
        return cache.lookup_many(inputs.structure, ("standing", *self._sizes),
                                 lambda own: self._standing(inputs))

    def _standing(self, inputs: RelationalInputs) -> RelationView:
        view = cache.before_capture(inputs.structure, self._sizes)
        view.stands(*inputs.structure)
        return view

    def captured_reason(self, inputs: RelationalInputs) -> Reason | None:
        """Why a call within a capture runs natively; None where it does not.

        The host's own code, where it can be captured, may find other edges at each replay. Layers
        around others are captured layer by layer.
        """
        natively = self.around or self.native.startswith(_CAPTURED_NATIVELY)
        if natively and capture.here.held is None:
            return reason("GA407", "relations are put together for one graph, "
                                   "and its replays may find another")
        return (reason("GA407") if cache.before_capture(inputs.structure, self._sizes) is None
                else None)

    def resized(self, num_src: int, num_dst: int, num_edges: int, make: Callable[..., RelationView],
                rows_grad: bool, layout: Hashable = None, beside: Any = None) -> RelationalSpec:
        """The statement of a call that differs in its graph alone. ``beside`` None: as it was."""
        return RelationalSpec(self.program, self.native, self.shapes, self.row, self.out, num_src,
                              num_dst, num_edges, self.num_relations, make, self.ignore, self.heads,
                              self.width, layout, self.around, rows_grad, beside or self.beside)

    def call(self, graph: RelationView, plan: Any) -> RelationalCall:
        """The call over ``graph``. ``plan`` None: to look at its Program, not to run it."""
        device, alone = graph.device, graph.alone
        if alone is None or device.type == "cuda" and (
                torch._C._cuda_getCurrentRawStream(device.index) != alone):
            graph.enter()
        kernels = plan is not None and plan.route == "cuda"
        if kernels:
            graph.kernels = True
        return RelationalCall(self.program, graph, self.shapes, self.out, kernels,
                              (self.heads, self.width, self.row.itemsize), self)

    def kept(self) -> RelationalSpec:
        """This statement without the edges, which ``make`` holds, for the layer's memory."""
        return replace(self, make=_made_already)

    by_graph: ClassVar[bool] = True

    @staticmethod
    def runner(route: str) -> Callable[[RelationalCall, dict[str, Any]], Tensor]:
        return run_cuda if route == "cuda" else run_torch

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"num_relations": self.num_relations}


def _made_already(own: bool, compact: bool) -> RelationView:
    raise AssertionError("the structure of a repeated call is there")


class RelationalInputs(NamedTuple):
    """The tensors of one call. ``structure``: those that define the graph; ``operands``: the
    adapter's own."""

    structure: tuple[Tensor, ...]
    device: torch.device
    operands: Any

    @property
    def edge_index(self) -> Tensor:
        return self.structure[0]


@dataclass
class RelationalCall:
    """A relational call. ``kernels``: by the CUDA kernels; ``row``: of its attention, heads,
    width and bytes of an element; ``stated``: its statement; ``run`` as of `attention.Call`."""

    program: Program
    graph: RelationView
    shapes: Shapes
    out_dtype: torch.dtype
    kernels: bool = False
    row: tuple[int, int, int] = (1, 1, 4)
    stated: RelationalSpec | None = None
    run: Any = None

    def __call__(self, tensors: dict[str, Any]) -> Tensor:
        return self.run(self, tensors)

    def of(self, program: Program, shapes: Shapes) -> RelationalCall:
        """This call with another Program."""
        return replace(self, program=program, shapes=shapes)

    def optimised(self, train: bool | None = None, asked: bool = False) -> Optimised:
        """The ordering taken, and those that were not; worked out once per graph. train: whether
        backward is to follow; None: by autograd's mode. ``asked``: whether the caller asks for the
        `problem` next."""
        config, train = current(), torch.is_grad_enabled() if train is None else train
        passes: Any = PASSES if config is None else config.passes  # `passes_on`
        key = self.program, self.shapes, passes, train
        optimised = self.graph.plans.get(key)
        if optimised is None:
            device = "cuda" if self.graph.device.type == "cuda" else "cpu"
            optimised = optimise.optimise(self.program, dict(self.shapes),
                                          self.graph.statistics(), device, passes, train)
            self.graph.plans[key] = optimised
            if not asked:
                self._problem(optimised, train)  # compiles what it needs, side by side
        return optimised

    def problem(self, train: bool) -> Reason | None:
        """Why the kernels of the ordering taken cannot run over this graph, or not yet."""
        return self._problem(self.optimised(train, True), train)

    def _problem(self, found: Optimised, train: bool) -> Reason | None:
        if not self.kernels or self.stated is None:
            return None
        request = self.stated.request(self.graph.device.type, train, 0)
        return prepare.problem(found, request._replace(program=self.program, shapes=self.shapes))

    def build(self, train: bool) -> None:
        """Build the index arrays that the attention will read, backward's too if it will ``train``,
        now rather than when it runs: later, rows would hold the memory that sorting needs."""
        key = "built", self.program, train
        if key in self.graph.plans:
            return
        for step in self.optimised().program.ops:
            if step.kind == "attend":
                pattern = programs.attention(step.attr("attention"))
                assert pattern is not None
                graph = self.graph.graph(step.attr("source"), step.attr("target"))
                graph.csc(pattern.places)
                if train:
                    graph.csr(pattern.places,
                              attention_families.keeps_scores(pattern, graph, *self.row))
        self.graph.plans[key] = None


def shapes_of(program: Program, tensors: dict[str, Tensor]) -> Shapes:
    """The shapes that the passes count with, of operands by input name."""
    return tuple((name, tuple(tensors[name].shape if domain == PARAM else tensors[name].shape[1:]))
                 for name, domain in program.inputs)


def run_torch(call: RelationalCall, tensors: dict[str, Any]) -> Tensor:
    """The Program's output plus the operand `ADDED`, on torch operations."""
    return _run(call, call.optimised().program, tensors, torch_maps, attention.run_torch)


def run_cuda(call: RelationalCall, tensors: dict[str, Any]) -> Tensor:
    """The Program's output plus the operand `ADDED`, by the CUDA kernels."""
    program = call.optimised().orderings[0].program
    if cuda_steps.steps_of(program) is not None and tensors[program.inputs[0][0]].dtype in TYPES:
        out = cuda_program.run(program, call.graph, tensors, call.out_dtype)
        return out if out.dtype is call.out_dtype else out.to(call.out_dtype)
    return _run(call, program, tensors, cuda_maps, attention.run_cuda)


def _run(call: RelationalCall, program: Program, tensors: dict[str, Any], maps: Any,
         attend: Callable) -> Tensor:
    added = tensors.get(adding.ADDED)
    operands = (tensors
                if added is None
                else {name: t for name, t in tensors.items() if name != adding.ADDED})
    out = execute.run(program, call.graph, operands, maps, attend, call.out_dtype)
    out = out.to(call.out_dtype)
    return out if added is None else adding.add(out, added, call.graph, maps.take)
