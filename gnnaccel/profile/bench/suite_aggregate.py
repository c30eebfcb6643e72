"""``--suite aggregate``: PyG's plain layers natively, compiled and through gnnaccel; sums against
cuSPARSE; single operations."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.bench import plain as pyg
from gnnaccel.adapters.pyg.bench.plain import LAYERS
from gnnaccel.dispatch.ops import calls, neighbours
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.multi_reduce import multi_reduce
from gnnaccel.dispatch.ops.operands import Operands, prepare
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.profile.bench import (accel, cells, compiled, peers, plan, shapes, steps,
                                    timing)
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.plan import Job, Plan
from gnnaccel.profile.bench.result import Record

KIND, FRESH = "aggregate", "fresh-plain"
PARTS = ("floor", "layers", "spmm", "operations", "fresh", "cpu", "compiled")
BATCHES = (shapes.Shape("fresh-10k", 3_000, 10_000, 60), cells.BATCH)
_SPARE = 0.9  # of the free memory

# In the order of importance, as time may run out: large graphs come again for the layers that
# matter less.
GPU = (
    ("proteins", ("GCN 64", "SAGE 64")),
    ("reddit", ("SAGE 64", "GCN 64")),
    ("products", ("GCN 128",)),
    ("hub", ("GCN 64", "SAGE 64")),
    ("arxiv", ("GCN 64", "SAGE 64", "GIN 64", "SAGE max 64", "PNA 64", "GCN 128", "SAGE 128")),
    ("cora", ("GCN 64", "SAGE 64", "GIN 64", "SAGE max 64", "PNA 64")),
    ("uniform", ("GCN 64",)),
    ("proteins", ("GIN 64", "SAGE max 64", "PNA 64", "GCN 128", "SAGE 128")),
    ("reddit", ("SAGE max 64", "SAGE 128")),
    ("products", ("SAGE 64", "SAGE max 64")),
)
CPU = (("cora", tuple(LAYERS)), ("arxiv", ("GCN 64", "SAGE 64", "GIN 64", "SAGE max 64")))
QUICK = (("tiny", tuple(LAYERS)),)
WIDTHS = (64, 128)  # of weighted sums
OPERATIONS = "proteins"  # the shape on which single operations are timed


@dataclasses.dataclass(frozen=True)
class AggregatePlan(Plan):
    """``operations``: the graph of that part; ``cpu_jobs``: those of the part "cpu"."""

    operations: shapes.Shape = shapes.SHAPES[OPERATIONS]
    cpu_jobs: tuple[Job, ...] = ()


def from_options(options) -> AggregatePlan:
    device = plan.device(options)
    own, operations = ((QUICK, "tiny") if options.quick else (GPU, OPERATIONS)
                       if device.type == "cuda" else (CPU, "cora"))
    jobs = plan.jobs(options, own, LAYERS, shapes.resolve)
    # on a CPU "layers" is "cpu" already
    left_out = {"cpu"} if options.quick or device.type == "cpu" else set()
    if device.type == "cpu" and not options.quick:
        left_out |= {"spmm", "operations"}  # kernels are what they are about
    measured = [layer for _, layers in jobs for layer in layers]
    cpu_jobs = [(shapes.SHAPES[shape], tuple(LAYERS[name] for name in names
                                             if LAYERS[name] in measured)) for shape, names in CPU]
    cpu_jobs = [job for job in cpu_jobs if job[1]]
    return AggregatePlan(jobs, plan.possible(options, plan.parts(options, PARTS, left_out)),
                         shapes.resolve((plan.flat(options.shapes) or [operations])[0]),
                         tuple(cpu_jobs), **plan.measuring(options, patient=True))


def aggregate(plan: AggregatePlan, budget: Budget) -> Iterator[Record]:
    if {"floor", "layers", "spmm"} & set(plan.parts):
        done: set[str] = set()
        for job in plan.jobs:
            if budget.spent:
                return
            yield from job_records(plan, job, plan.device, plan.parts, budget, done)
    if "operations" in plan.parts and not budget.spent:
        yield from cells.on_graph(plan, plan.operations, shapes.make,
                                  lambda graph: operation_records(
                                      graph, plan.effort, cells.copy_bandwidth(plan)))
    if "fresh" in plan.parts and not budget.spent:
        for shape in BATCHES:
            yield from cells.fresh_records(FRESH, shape, {
                f"2-layer {name}": functools.partial(pyg.build_two_layers, f"{name}Conv",
                                                     channels=64)
                for name in ("GCN", "SAGE")}, plan)
    if "cpu" in plan.parts:
        for job in plan.cpu_jobs:
            yield from job_records(plan, job, torch.device("cpu"), ("layers",), budget, set())
    if "compiled" in plan.parts:
        yield from compiled.by_waves(plan, budget, KIND)


def job_records(plan: AggregatePlan, job: Job, device: torch.device, parts: tuple[str, ...],
                budget: Budget, done: set[str]) -> Iterator[Record]:
    """All that is measured on one graph. ``done``: names of graphs of which the part that is not
    about layers was measured."""
    shape, layers = job
    effort = plan.effort_on(device)

    def records(graph: shapes.Graph) -> Iterator[Record]:
        if "floor" in parts:
            yield from cells.floor_records(graph, {layer.width for layer in layers}, plan.effort)
        if "layers" in parts:
            yield from cells.in_modes(layers, budget, lambda layer, mode: cells.records_of(
                KIND, cells.place_of(layer, graph, mode), plan.impls,
                lambda: layer_step(layer, graph, mode), effort,
                lambda impl: (accel.CONTEXTS[impl], too_large(layer, graph, mode)
                              if impl == "native" else None), width=layer.width))
        accel.clear_cache()
        timing.release(device)
        if "spmm" in parts and shape.name not in done and not budget.spent:
            done.add(shape.name)
            yield from spmm_records(graph, plan.effort)

    return cells.on_graph(plan, shape, shapes.make, records, device)


def layer_step(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str) -> steps.Step:
    """The step of one layer; equal arguments give equal weights and inputs."""
    module = pyg.build_layer(layer, graph.edge_index, graph.num_nodes)
    return steps.Step(module, graph, mode, layer.width, in_channels=layer.width)


def too_large(layer: pyg.PlainLayer, graph: shapes.Graph, mode: str) -> str | None:
    """Why PyG's own layer is not tried: its messages would not fit."""
    if graph.device.type != "cuda":
        return None
    needed = layer.copies[mode == "training"] * graph.num_edges * layer.width * 4
    free = torch.cuda.mem_get_info(graph.device)[0]
    return f"skipped: {needed >> 30} GiB of messages" if needed > _SPARE * free else None


# --- weighted sums --------------------------------------------------------------------------------

# Below the layers: Python, allocation of results and autograd are in the times, as in a layer.

def ours(graph: shapes.Graph, x: Tensor, grad: Tensor, weight: Tensor) -> Pair:
    """gnnaccel's kernels; on a CPU torch operations. Training: with the gradient of x, the other
    sum, as of `cusparse`."""
    edges = OpGraph(graph.edge_index, graph.num_nodes, graph.num_nodes)
    way = neighbours.by_kernels if x.is_cuda else neighbours.by_operations
    leaf = x.clone().requires_grad_()

    def forward() -> Tensor:
        return way(edges, "sum", x, weight)

    def training() -> tuple[Tensor, Tensor]:
        return way(edges, "sum", x, weight), neighbours.gradient(edges, grad, weight)

    if x.is_cuda:
        return forward, training
    return forward, lambda: torch.autograd.grad(way(edges, "sum", leaf, weight), leaf, grad)


def cusparse(graph: shapes.Graph, x: Tensor, grad: Tensor, weight: Tensor) -> Pair:
    """``torch.sparse``'s product with a CSR matrix, cuSPARSE on a GPU. The matrix and its transpose
    are made beforehand, so the gradient is the product that a user could have at best."""
    src, dst = graph.edge_index
    across, back = peers.both_ways(src, dst, weight, graph.num_nodes)
    return lambda: across @ x, lambda: (across @ x, back @ grad)


def spmm_records(graph: shapes.Graph, effort: timing.Effort) -> Iterator[Record]:
    """One record per width, mode and way."""
    weight = torch.rand(graph.num_edges, device=graph.device)
    for width in WIDTHS:
        x, grad = (torch.randn(graph.num_nodes, width, device=graph.device) for _ in range(2))
        for impl, way in (("cusparse", cusparse), ("gnnaccel", ours)):
            yield from cells.pair_records(
                "spmm", dict(shape=graph.shape.name, layer=f"weighted {width}", impl=impl),
                lambda: way(graph, x, grad, weight), graph.device, effort,
                lambda mode: {"width": width})


# --- single operations ----------------------------------------------------------------------------

class Operation(NamedTuple):
    """``tensors`` makes what it is given, ``call`` states it; ``moved``: bytes per edge that it
    must read and write, forward and in training."""

    tensors: Callable[[], list[Tensor]]
    call: Callable[..., OpCall]
    moved: tuple[int, int]


def _operands(operation: str, left: Tensor, right: Tensor | None) -> Operands:
    found = prepare(operation, left, right)
    assert not isinstance(found, Reason)  # nothing speaks against these
    return found


def operations(edges: OpGraph) -> dict[str, Operation]:
    """By name. Ids take 4 bytes; a row that is gathered counts once per edge, what lies at nodes
    alone does not count."""
    nodes, count, device = edges.num_src, edges.num_edges, edges.edge_index.device
    scalars, row, ids = 8 * 4, 64 * 4, 4

    def random(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.randn(shape, device=device) for shape in shapes]

    def several(*reduces: str) -> Callable[[Tensor], OpCall]:
        return lambda u: multi_reduce(edges, u, reduces)

    both = row + scalars + 2 * ids
    return {
        "edge_softmax 8": Operation(random((count, 8)), lambda x: calls.edge_softmax(edges, x, "v"),
                                    (2 * scalars + ids, 5 * scalars + 2 * ids)),
        "u_add_v 8": Operation(random((nodes, 8), (nodes, 8)),
                               lambda u, v: calls.gsddmm(edges, _operands("add", u, v), ("u", "v")),
                               (3 * scalars + 2 * ids, 5 * scalars + 4 * ids)),
        "u_dot_v 8x8": Operation(random((nodes, 8, 8), (nodes, 8, 8)),
                                 lambda u, v: calls.gsddmm(edges, _operands("dot", u, v),
                                                           ("u", "v")), (both, 3 * both)),
        "u_mul_e_sum 8x8": Operation(random((nodes, 8, 8), (count, 8, 1)),
                                     lambda u, e: calls.gspmm(edges, _operands("mul", u, e),
                                                              "sum"), (both, 3 * both)),
        "u_max 64": Operation(random((nodes, 64)),
                              lambda u: calls.gspmm(edges, _operands("copy_lhs", u, None), "max"),
                              (row + 2 * ids, 2 * row + 4 * ids)),
        "max 64, ties shared": Operation(random((nodes, 64)), several("max"),
                                         (row + ids, 2 * row + 2 * ids)),
        "mean min max std 64": Operation(random((nodes, 64)), several("mean", "min", "max", "std"),
                                         (row + ids, 5 * row + 2 * ids)),
    }


def operation_records(graph: shapes.Graph, effort: timing.Effort,
                      bandwidth: float) -> Iterator[Record]:
    """Each operation by kernels (on a CPU by torch operations); ``floor_ms``: its bytes at
    ``bandwidth``, that of copying."""
    edges = OpGraph(graph.edge_index, graph.num_nodes, graph.num_nodes)
    for name, operation in operations(edges).items():
        yield from cells.pair_records(
            "operation", dict(shape=graph.shape.name, layer=name, impl="gnnaccel"),
            lambda: _pair(operation), graph.device, effort,
            lambda mode: {"floor_ms": graph.num_edges * operation.moved[steps.MODES.index(mode)]
                          / bandwidth * 1e3})


def _pair(operation: Operation) -> Pair:
    tensors = operation.tensors()
    leaves = [t.clone().requires_grad_() for t in tensors]

    def run(given: list[Tensor]) -> Tensor:
        call = operation.call(*given)
        return (call.kernel.run() if given[0].is_cuda and type(call.kernel) is Kernel
                else call.plain())

    def forward() -> Tensor:
        with torch.no_grad():
            return run(tensors)

    grad = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(run(leaves), leaves, grad)
