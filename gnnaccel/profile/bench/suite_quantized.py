"""``--suite quantized``: sums and attention over rows in bf16 and int8 against the same kernels
over fp32 rows; whole models."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gnnaccel
from gnnaccel.adapters.pyg.bench import models
from gnnaccel.cuda.attention import additive, additive_backward
from gnnaccel.cuda.int8 import quantize
from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse import aggregate
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.profile.bench import accel, cells, plan, shapes, steps, timing
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

DEFAULT = ("reddit", "proteins", "products")
PARTS = ("kernels", "models")
OF_MODELS = ("reddit", "products")  # shapes


def from_options(options) -> Plan:
    """A plan from parsed options; its layers are names of `LAYERS` and of
    `models.MODELS`. Raises ValueError on names that do not exist and where there is
    no GPU."""
    device = plan.device(options)
    if device.type != "cuda" and not driver.placed():
        raise ValueError("--suite quantized measures kernels, which need a GPU; the device is "
                         f"{device.type}")
    parts = plan.parts(options, PARTS)
    known: dict[str, Iterable[str]] = {"kernels": LAYERS, "models": models.MODELS}
    every = {name: name for part in PARTS if part in parts for name in known[part]}
    wanted = [plan.named(name, every) for name in plan.flat(options.layers)] or list(every)
    names = plan.flat(options.shapes) or (["tiny"] if options.quick else [])
    over = {"kernels": names or DEFAULT, "models": names or OF_MODELS}
    jobs = [(shapes.resolve(name), tuple(layer for layer in wanted if any(
        layer in known[part] and name in over[part] for part in PARTS)))
        for name in names or DEFAULT]
    return Plan(tuple(job for job in jobs if job[1]), parts, **plan.measuring(options))


def quantized(plan: Plan, budget: Budget) -> Iterator[Record]:
    """The records: of kernels by shape, layer and format, then of models."""
    for shape, layers in plan.jobs:
        yield from cells.on_graph(plan, shape, shapes.make,
                                  lambda graph: _on_graph(plan, graph, layers, budget))


def _on_graph(plan: Plan, graph: Graph, layers: tuple[str, ...],
              budget: Budget) -> Iterator[Record]:
    for layer in layers:
        if layer in LAYERS:
            if budget.spent:
                return
            yield from layer_records(plan, graph, layer)
    yield from model_records(graph, tuple(layer for layer in layers if layer in models.MODELS),
                             plan.effort, budget)


def layer_records(plan: Plan, graph: Graph, layer: str) -> Iterator[Record]:
    """One record per format and mode. Those of bf16 and int8 hold the relative L2 difference of the
    result (forward) and of the rows' gradient (training) from fp32's."""
    make, heads, width = LAYERS[layer]
    found, error = guarded(lambda: case(graph, heads, width, plan.seed), plan.device)
    expected: dict[str, Tensor] = {}

    for name, dtype in FORMATS.items():
        def made(dtype=dtype) -> Pair:
            torch.manual_seed(plan.seed)  # random weights are the same for every format
            assert found is not None  # or there was an error
            return make(found, dtype)

        def difference(pair: Pair, mode: str, name=name) -> dict[str, float]:
            index = steps.MODES.index(mode)
            got = pair[index]()
            got = got[1] if index else got
            if name == "fp32":
                expected[mode] = got
                return {}
            return {"rel_l2": cells.rel_l2(got, expected[mode])} if mode in expected else {}

        place: dict[str, Any] = dict(shape=graph.shape.name, layer=layer, impl=name)
        yield from cells.pair_records("quantized", place, made, plan.device, plan.effort,
                                      more=difference, error=error)


# --- kernels with what makes their rows, nothing of a host ----------------------------------------

# Each maker prepares what is the same for every call and returns, per format, two functions of no
# arguments: (forward, forward and backward). What a call makes anew belongs to it: rows are
# quantized in forward, the result's gradient in backward. Forward returns the result, training the
# result and the gradient of the rows.

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph's index arrays, its rows [N, H, D] and a gradient of as many."""

    by_dst: Rows
    by_src: Rows
    x: Tensor
    grad: Tensor

    @property
    def size(self) -> tuple[int, int]:
        return self.x.shape[1], self.x.shape[2]


def case(graph: Graph, heads: int, width: int, seed: int = 0) -> Case:
    view = GraphView(graph.edge_index, graph.num_nodes, graph.num_nodes)
    by_dst, by_src = view.csc(), view.csr()
    random = torch.Generator(graph.device).manual_seed(seed)
    x, grad = (torch.randn(graph.num_nodes, heads, width, device=graph.device, generator=random)
               for _ in range(2))
    return Case(by_dst, by_src, x, grad)


def stored(x: Tensor, dtype: torch.dtype, stochastic: bool) -> Tensor | quantize.Int8Rows:
    """Rows in a format, made anew; fp32 as they are."""
    key = quantize.key(x.device) if stochastic else None
    if dtype is torch.int8:
        return quantize.int8_rows(x, key)
    return quantize.bf16_rows(x, key) if dtype is torch.bfloat16 else x


def gcn(found: Case, dtype: torch.dtype) -> Pair:
    """A sum with a number per edge; both orders of the numbers are made beforehand, as belongs to a
    graph."""
    by_position = torch.rand(found.by_dst.other.shape[0], device=found.x.device) + 0.5
    transposed = by_position[found.by_src.place.long()]
    return _sum(found, dtype, False, (by_position, transposed))


def sage(found: Case, dtype: torch.dtype) -> Pair:
    """A mean. Backward's weight, one over the count, belongs to the gathered row: int8 has it in
    the scale."""
    return _sum(found, dtype, True, (None, None))


def _sum(found: Case, dtype: torch.dtype, mean: bool, weights: tuple) -> Pair:
    kind = "none" if mean else "edge"
    ahead = aggregate.variant(*found.size, dtype, torch.float32, kind, "position", False, mean,
                              found.by_dst.wide)
    back = aggregate.variant(*found.size, dtype, torch.float32, kind, "position", False, False,
                             found.by_src.wide)
    per_row = found.by_dst.indptr.diff().clamp(min=1).float().reciprocal() if mean else None

    def forward() -> Tensor:
        return aggregate.forward(ahead, found.by_dst, stored(found.x, dtype, False), weights[0])

    def training() -> tuple[Tensor, Tensor]:
        out, grad = forward(), found.grad
        if per_row is not None and dtype is not torch.int8:
            grad = grad * per_row.view(-1, 1, 1)
        rows = stored(grad, dtype, True)
        if per_row is not None and isinstance(rows, quantize.Int8Rows):
            rows = rows.times(per_row)
        return out, aggregate.forward(back, found.by_src, rows, weights[1])

    return forward, training


def gat(found: Case, dtype: torch.dtype) -> Pair:
    """Additive attention over terms that are there already."""
    heads, width = found.size
    a_src, a_dst = (torch.randn(found.x.shape[0], heads, device=found.x.device) for _ in range(2))
    none = torch.zeros(heads, width, device=found.x.device)
    wide, grad = found.by_dst.wide, None if dtype is torch.float32 else dtype
    ahead, train = (additive.variant(heads, width, dtype, torch.float32, False, False, training,
                                     wide, grad)
                    for training in (False, True))

    def forward() -> Tensor:
        return additive.forward(ahead, found.by_dst, a_src, a_dst, stored(found.x, dtype, False),
                                0.2)[0]

    def training() -> tuple[Tensor, Tensor]:
        values = stored(found.x, dtype, False)
        out, saved = additive.forward(train, found.by_dst, a_src, a_dst, values, 0.2)
        assert saved is not None  # the variant trains
        given = stored(found.grad, dtype, True)
        g = additive_backward.backward(train, found.by_dst, found.by_src, saved, given,
                                       a_src, a_dst, values, none, None, 0.2)
        return out, g.values

    return forward, training


LAYERS = {"GCN 64": (gcn, 1, 64), "GCN 128": (gcn, 1, 128), "GCN 256": (gcn, 1, 256),
          "SAGE 128": (sage, 1, 128), "GAT 8x8": (gat, 8, 8), "GAT 1x128": (gat, 1, 128)}


# --- models: all in fp32, and with rows and linear maps in fewer bytes ----------------------------

MODEL_KIND = "quantized-model"
#: implementation -> what `gnnaccel.quantize` is told; "all": the layer before the softmax too
MODEL_FORMATS: dict[str, dict | None] = {"fp32": None, "bf16": {"format": "bf16"},
                                   "int8": {"format": "int8"},
                                   "int8 all": {"format": "int8", "overrides": {"second": "int8"}}}
_SECONDS = 0.7  # of a cell


class Training:
    """One step: forward, loss over all nodes, backward, Adam. The features need no gradient."""

    def __init__(self, spec: models.ModelSpec, graph: Graph, options: dict | None):
        random = torch.Generator(graph.device).manual_seed(0)
        self.x = torch.randn(graph.num_nodes, models.IN_CHANNELS, device=graph.device,
                             generator=random)
        self.labels = torch.randint(models.CLASSES, (graph.num_nodes,), device=graph.device,
                                    generator=random)
        self.edge_index, self.model = graph.edge_index, models.build(spec, graph.device)
        if options is not None:
            gnnaccel.quantize(self.model, **options)
        self.optimizer = torch.optim.Adam(self.model.parameters(),
                                          fused=graph.device.type == "cuda")

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x, self.edge_index), self.labels).backward()
        self.optimizer.step()

    @torch.no_grad()
    def output(self) -> Tensor:
        return self.model(self.x, self.edge_index)


def model_records(graph: Graph, names: tuple[str, ...], effort: timing.Effort,
            budget: Budget) -> Iterator[Record]:
    """One record per model and format. Their values: the relative L2 difference of the result of
    the untrained model from fp32's; how many calls of layers and of linear maps ran in the format,
    and in fp32 (``calls``)."""
    effort = dataclasses.replace(effort, seconds=min(effort.seconds, _SECONDS))
    for name in names:
        expected = None
        for impl, options in MODEL_FORMATS.items():
            if budget.spent:
                return

            def cell(options=options, expected=expected):
                with accel.accelerated():
                    step = Training(models.MODELS[name], graph, options)
                    out = step.output()
                    timed = dataclasses.asdict(timing.measure(step, graph.device, effort))
                    return out, timed, {
                        **({} if expected is None else {"rel_l2": cells.rel_l2(out, expected)}),
                        **_calls(step.model)}

            value, error = guarded(cell, graph.device)
            out, timed, values = value or (None, None, {})
            expected = out if impl == "fp32" else expected
            yield Record(MODEL_KIND, graph.shape.name, name, "training", impl, graph.device.type,
                         timed, values, error)
            del value, out
            accel.clear_cache()
            timing.release(graph.device)


def _calls(model: torch.nn.Module) -> dict[str, dict[str, list[int]]]:
    report = gnnaccel.quant_report(model)
    found = {row.name: [row.quantized, row.in_fp32] for row in (*report.rows, *report.maps)}
    return {"calls": found} if found else {}
