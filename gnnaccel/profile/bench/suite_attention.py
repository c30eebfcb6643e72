"""``--suite attention``: PyG's attention layers natively, compiled and through gnnaccel, and what
else has a target. ``--suite attention-kernel``: raw attention by graph and head layout, Python and
allocation included."""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.cuda.attention import additive as additive_kernel
from gnnaccel.cuda.traverse import head_dot
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.run import attention as attention_run
from gnnaccel.profile.bench import accel, cells, compiled, plan, shapes, steps, timing
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

PARTS = ("floor", "layers", "structure", "overhead", "fresh", "cpu", "compiled")
SIZES = ((1, 64), (8, 8), (1, 128))  # heads and width of raw attention
CPU_SHAPES = (shapes.Shape("batch-10k", 3_000, 10_000, 60), shapes.SHAPES["cora"])


def from_options(options) -> Plan:
    default = ("tiny",) if options.quick else shapes.DEFAULT
    parts = plan.parts(options, PARTS, ("cpu",) if options.quick else ())
    return Plan(plan.jobs(options, tuple((name, tuple(pyg.LAYERS)) for name in default),
                          pyg.LAYERS, shapes.resolve), plan.possible(options, parts),
                **plan.measuring(options))


def attention(plan: Plan, budget: Budget) -> Iterator[Record]:
    if {"floor", "layers", "structure"} & set(plan.parts):
        for shape, layers in plan.jobs:
            yield from cells.on_graph(plan, shape, shapes.make,
                                      lambda graph: _on_graph(plan, graph, layers, budget))
    yield from small_records(plan)
    if "cpu" in plan.parts:
        for shape in CPU_SHAPES:
            yield from cells.in_modes(plan.jobs[0][1], budget,
                                      lambda layer, mode: cpu_records(shape, layer, mode,
                                                                      plan.effort))
    if "compiled" in plan.parts:
        # Last, as it takes longest, and in processes of their own: nothing here needs the memory
        # any more. Shapes with targets against them come first: the small ones.
        yield from compiled.by_waves(plan, budget)


def _on_graph(plan: Plan, graph: Graph, layers: tuple, budget: Budget) -> Iterator[Record]:
    """All layers on one graph, its floors and its structure building."""
    if "floor" in plan.parts:
        yield from cells.floor_records(graph, {spec.out_channels for spec in layers}, plan.effort)
    if "layers" in plan.parts:
        yield from cells.in_modes(layers, budget, lambda spec, mode: cells.records_of(
            "layer", cells.place_of(spec, graph, mode), plan.impls,
            lambda: steps.layer_step(spec, graph, mode), plan.effort, turns=False,
            width=spec.out_channels))
    accel.clear_cache()
    if "structure" in plan.parts:
        yield from structure_records(graph, plan.effort)


def small_records(plan: Plan) -> Iterator[Record]:
    """Overhead of a memoised call, and fresh batches."""
    if "overhead" in plan.parts:
        values, error = guarded(lambda: measure_overhead(plan.device, plan.quick), plan.device)
        yield Record("overhead", "cora", "GAT 8x8", "forward", "gnnaccel", plan.device.type,
                     values=values or {}, error=error)
    if "fresh" in plan.parts:
        yield from cells.fresh_records("fresh", cells.BATCH, {
            "2-layer GAT": pyg.build_two_layer_gat}, plan)


def cpu_records(shape: shapes.Shape, spec: pyg.LayerSpec, mode: str,
                effort: timing.Effort) -> list[Record]:
    """A layer on the CPU, on a batch too small to be worth a GPU: native and gnnaccel in turns."""
    graph = shapes.make(shape, "cpu")
    # the ratio wanted is near one
    effort = dataclasses.replace(plan.calm(effort), seconds=0.8)
    return cells.alternating_records("layer", cells.place_of(spec, graph, mode),
                                     lambda: steps.layer_step(spec, graph, mode), effort)


def structure_records(graph: Graph, effort: timing.Effort) -> list[Record]:
    """Time to build the structures kernels walk, and ``peak_mib``, in MiB: layers "csc", that alone
    (forward), and "csc+csr" (backward)."""
    records = []
    for name, csr in (("csc", False), ("csc+csr", True)):
        def build(csr=csr):
            pyg.build_structure(graph.edge_index, graph.num_nodes, csr)

        place = Record("structure", graph.shape.name, name, impl="gnnaccel",
                       device=graph.device.type)
        records.append(cells.call_record(place, build, None, graph.device, effort,
                                         lambda: cells.peak_mib(build, graph.device)))
        timing.release(graph.device)
    return records


def attention_kernel(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The raw kernels on every shape, with backward in the thread in which gnnaccel lets it run."""
    for shape, _ in plan.jobs:
        with accel.accelerated():
            yield from cells.on_graph(plan, shape, shapes.make,
                                      lambda graph: kernel_records(graph, plan.effort))


def kernel_records(graph: Graph, effort: timing.Effort) -> Iterator[Record]:
    """All kernel cells of one graph, and the floor for their widths."""
    device = graph.device
    if device.type == "cuda":
        yield from cells.floor_records(graph, {heads * width for heads, width in SIZES}, effort)

    def peak(pair: Pair, mode: str) -> dict[str, float]:
        return cells.peak_mib(pair[steps.MODES.index(mode)], device)

    for scores, make in SCORES.items():
        for heads, width in SIZES:
            place: dict[str, Any] = dict(shape=graph.shape.name, layer=f"{scores} {heads}x{width}",
                                         impl="gnnaccel")
            yield from cells.pair_records("kernel", place, lambda: make(graph, heads, width),
                                          device, effort, lambda mode: {"width": heads * width},
                                          peak)


# --- raw attention: everything below the layer, nothing of the host -------------------------------

# Both functions prepare what is the same for every call (structure, random inputs) and return two
# functions of no arguments, (forward, forward and backward), which do what one call costs: Python,
# allocation of the output, the launches. Forward runs under ``torch.no_grad()``; backward starts
# from a fixed random gradient and leaves the gradients of all inputs in ``.grad``, set to None
# before.

def additive(graph: Graph, heads: int, width: int) -> Pair:
    """GAT's scores. The scalars per node come out of the values, so their product with the two
    attention vectors (one pass over the nodes) is part of the call."""
    vectors = {name: torch.randn(heads, width, device=graph.device)
               for name in ("att_src", "att_dst")}
    tensors = {"x": _rows(graph, heads, width), **vectors}
    return _pair(graph, attention_programs.gat(0.2, 0.0, True, True, False), tensors, heads, width)


def dot(graph: Graph, heads: int, width: int) -> Pair:
    """The Transformer's scores, <query[destination], key[source]> / sqrt(width)."""
    tensors = {name: _rows(graph, heads, width) for name in ("queries", "keys", "values")}
    return _pair(graph, attention_programs.dot_product(width ** -0.5, 0.0, False), tensors, heads,
                 width)


SCORES = {"additive": additive, "dot": dot}


def _rows(graph: Graph, heads: int, width: int) -> torch.Tensor:
    return torch.randn(graph.num_nodes, heads, width, device=graph.device)


def _pair(graph: Graph, program: Program, tensors: dict[str, Any], heads: int, width: int) -> Pair:
    view = GraphView(graph.edge_index, graph.num_nodes, graph.num_nodes)
    fused = attention_programs.attention(program)
    assert fused is not None
    call = attention_run.Call(program, fused, view, heads, width, torch.float32)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    grad = _rows(graph, heads, width)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention_run.run_cuda(call, tensors)

    def training() -> torch.Tensor:
        for leaf in leaves.values():
            leaf.grad = None
        out = attention_run.run_cuda(call, leaves)
        out.backward(grad)
        return out.detach()

    return forward, training


# --- Python's cost of a memoised call: an enabled layer against the same work done by hand --------

def cpu_us(call: Callable[[], object], device: torch.device, calls: int = 200,
           loops: int = 15) -> float:
    """CPU time of one call in microseconds: median over loops that do not wait for the device
    inside.

    Valid while the device keeps up (small graphs): otherwise a full launch queue would be counted
    as CPU time.
    """
    samples = []
    for _ in range(loops):
        timing.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(samples[1:])


def measure_overhead(device: torch.device, quick: bool = False) -> dict:
    """Microseconds per GAT 8x8 forward on the cora shape: ``enabled_us``, ``bare_us`` and their gap
    ``overhead_us``. ``quick``: from few calls, to see that it runs.

    The gap is what patching, rules, planning, the memo and the structure cache cost together with
    the call of the layer as a module. Nothing of the host's own forward is in either.
    """
    graph = shapes.make(shapes.SHAPES["cora"], device)
    spec = pyg.resolve("GAT 8x8")
    effort = (20, 3) if quick else ()
    step = steps.Step(pyg.build_layer(spec, device), graph, "forward", spec.out_channels)
    with accel.accelerated():
        enabled = cpu_us(step, device, *effort)
    bare = cpu_us(bare_gat(step, graph), device, *effort)
    return {"enabled_us": enabled, "bare_us": bare, "overhead_us": enabled - bare}


def bare_gat(step: steps.Step, graph: shapes.Graph) -> Callable[[], torch.Tensor]:
    """The GAT layer's forward by hand: its projection and the two launches, all else done before.
    """
    layer: Any = step.module
    nodes = graph.num_nodes
    heads, width = layer.heads, layer.out_channels
    att_src, att_dst = (att.detach().reshape(heads, width).contiguous()
                        for att in (layer.att_src, layer.att_dst))
    rows = GraphView(graph.edge_index, nodes, nodes, loops=nodes).csc(places=False)
    variant = additive_kernel.variant(heads, width, step.x.dtype, step.x.dtype)
    bias, slope = layer.bias.detach(), layer.negative_slope

    def call() -> torch.Tensor:
        # The step enters no_grad in every call, so this must pay for that as well.
        with torch.no_grad():
            x = layer.lin(step.x).view(nodes, heads, width)
            a_src, a_dst = head_dot.dot(x, att_src, att_dst)
            out, _ = additive_kernel.forward(variant, rows, a_src, a_dst, x, slope, bias=bias)
            return out.view(nodes, heads * width)

    return call
