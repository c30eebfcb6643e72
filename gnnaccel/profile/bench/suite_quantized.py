"""``--suite quantized``: sums and attention over rows in bf16 and int8 against the same kernels
over fp32 rows; whole models."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import (quantized_cells, quantized_models, shapes, suite_attention,
                                    timing)
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Shape
from gnnaccel.profile.bench.steps import MODES

DEFAULT = ("reddit", "proteins", "products")
PARTS = ("kernels", "models")
OF_MODELS = ("reddit", "products")  # shapes


@dataclasses.dataclass(frozen=True)
class QuantizedPlan(plans.Measuring):
    """``layers`` are names of `quantized_cells.LAYERS`, ``models`` of
    `quantized_models.pyg.MODELS`, which are run on ``of_models``."""

    shapes: tuple[Shape, ...]
    of_models: tuple[Shape, ...]
    layers: tuple[str, ...]
    models: tuple[str, ...]


def from_options(options) -> QuantizedPlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and where there is
    no GPU."""
    from gnnaccel.cuda import driver

    device = plans.device(options)
    if device.type != "cuda" and not driver.placed():
        raise ValueError("--suite quantized measures kernels, which need a GPU; the device is "
                         f"{device.type}")
    names = plans.flat(options.shapes) or (["tiny"] if options.quick else [])
    parts = plans.parts(options, PARTS, list(PARTS))
    layers, models = _named(options, parts)
    return QuantizedPlan(tuple(map(shapes.resolve, (names or DEFAULT) if layers else ())),
                         tuple(map(shapes.resolve, (names or OF_MODELS) if models else ())),
                         layers, models, **plans.measuring(options))


def _named(options, parts: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layers and models asked for by ``--layers``, else all, of the ``parts``."""
    known: dict[str, Iterable[str]] = {"kernels": quantized_cells.LAYERS,
                                       "models": quantized_models.pyg.MODELS}
    every = {name: part for part in parts for name in known[part]}
    wanted = [plans.named(name, {one: one for one in every})
              for name in plans.flat(options.layers)] or list(every)
    kernels, models = (tuple(name for name in wanted if every[name] == part) for part in PARTS)
    return kernels, models


def quantized(plan: QuantizedPlan, budget: Budget) -> Iterator[Record]:
    """The records: of kernels by shape, layer and format, then of models."""
    for shape in dict.fromkeys((*plan.shapes, *plan.of_models)):
        graph, error = guarded(lambda: shapes.make(shape, plan.device, plan.seed), plan.device)
        if graph is None:
            yield Record("note", shape.name, "graph", error=error)
            continue
        yield suite_attention.shape_record(graph)
        for layer in plan.layers if shape in plan.shapes else ():
            if budget.spent:
                return
            yield from layer_records(plan, graph, layer)
        if shape in plan.of_models:
            yield from quantized_models.records(graph, plan.models, plan.effort, budget)
        del graph
        timing.release(plan.device)


def layer_records(plan: QuantizedPlan, graph: shapes.Graph, layer: str) -> Iterator[Record]:
    """One record per format and mode. Those of bf16 and int8 hold the relative L2 difference of the
    result (forward) and of the rows' gradient (training) from fp32's."""
    make, heads, width = quantized_cells.LAYERS[layer]
    found, error = guarded(lambda: quantized_cells.case(graph, heads, width, plan.seed),
                           plan.device)
    expected: dict = {}
    for name, dtype in quantized_cells.FORMATS.items():
        pair, failed = (None, error) if error else guarded(
            lambda: _made(make, found, dtype, plan.seed),
            plan.device)
        for index, mode in enumerate(MODES):
            def cell(index=index, mode=mode):
                got = pair[index]()
                got = got[1] if index else got
                values = {"rel_l2": _difference(got, expected[mode])} if mode in expected else {}
                if name == "fp32":
                    expected[mode] = got
                del got
                return (dataclasses.asdict(timing.measure(pair[index], plan.device, plan.effort)),
                        values)

            value, problem = (None, failed) if failed else guarded(cell, plan.device)
            timed, values = value or (None, {})
            yield Record("quantized", graph.shape.name, layer, mode, name, plan.device.type, timed,
                         values, problem)
        pair = None
        timing.release(plan.device)


def _made(make, found, dtype: torch.dtype, seed: int):
    """Random weights are the same for every format."""
    torch.manual_seed(seed)
    return make(found, dtype)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    gap = torch.linalg.vector_norm(got.float() - expected, dtype=torch.float64)
    return float(gap / torch.linalg.vector_norm(expected, dtype=torch.float64))
