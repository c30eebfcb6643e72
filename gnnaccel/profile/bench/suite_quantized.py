"""``--suite quantized``: sums and attention over rows in bf16 and int8 against the same kernels
over fp32 rows; whole models."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gnnaccel.profile.bench import cells, plan, quantized_cells, quantized_models, shapes, steps
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.result import Record

DEFAULT = ("reddit", "proteins", "products")
PARTS = ("kernels", "models")
OF_MODELS = ("reddit", "products")  # shapes


def from_options(options) -> Plan:
    """A plan from parsed options; its layers are names of `quantized_cells.LAYERS` and of
    `quantized_models.pyg.MODELS`. Raises ValueError on names that do not exist and where there is
    no GPU."""
    from gnnaccel.cuda import driver

    device = plan.device(options)
    if device.type != "cuda" and not driver.placed():
        raise ValueError("--suite quantized measures kernels, which need a GPU; the device is "
                         f"{device.type}")
    parts = plan.parts(options, PARTS)
    known: dict[str, Iterable[str]] = {"kernels": quantized_cells.LAYERS,
                                       "models": quantized_models.pyg.MODELS}
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


def _on_graph(plan: Plan, graph: shapes.Graph, layers: tuple[str, ...],
              budget: Budget) -> Iterator[Record]:
    for layer in layers:
        if layer in quantized_cells.LAYERS:
            if budget.spent:
                return
            yield from layer_records(plan, graph, layer)
    models = tuple(layer for layer in layers if layer in quantized_models.pyg.MODELS)
    yield from quantized_models.records(graph, models, plan.effort, budget)


def layer_records(plan: Plan, graph: shapes.Graph, layer: str) -> Iterator[Record]:
    """One record per format and mode. Those of bf16 and int8 hold the relative L2 difference of the
    result (forward) and of the rows' gradient (training) from fp32's."""
    make, heads, width = quantized_cells.LAYERS[layer]
    found, error = guarded(lambda: quantized_cells.case(graph, heads, width, plan.seed),
                           plan.device)
    expected: dict[str, torch.Tensor] = {}

    for name, dtype in quantized_cells.FORMATS.items():
        def made(dtype=dtype) -> cells.Pair:
            torch.manual_seed(plan.seed)  # random weights are the same for every format
            assert found is not None  # or there was an error
            return make(found, dtype)

        def difference(pair: cells.Pair, mode: str, name=name) -> dict[str, float]:
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
