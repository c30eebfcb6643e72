"""Training steps of whole PyG models through gnnaccel: all in fp32, and with rows and linear maps
in fewer bytes."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import gnnaccel
from gnnaccel.adapters.pyg.bench import models as pyg
from gnnaccel.profile.bench import accel, cells, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

KIND = "quantized-model"
#: implementation -> what `gnnaccel.quantize` is told; "all": the layer before the softmax too
FORMATS: dict[str, dict | None] = {"fp32": None, "bf16": {"format": "bf16"},
                                   "int8": {"format": "int8"},
                                   "int8 all": {"format": "int8", "overrides": {"second": "int8"}}}
_SECONDS = 0.7  # of a cell


class Training:
    """One step: forward, loss over all nodes, backward, Adam. The features need no gradient."""

    def __init__(self, spec: pyg.ModelSpec, graph: Graph, options: dict | None):
        random = torch.Generator(graph.device).manual_seed(0)
        self.x = torch.randn(graph.num_nodes, pyg.IN_CHANNELS, device=graph.device,
                             generator=random)
        self.labels = torch.randint(pyg.CLASSES, (graph.num_nodes,), device=graph.device,
                                    generator=random)
        self.edge_index, self.model = graph.edge_index, pyg.build(spec, graph.device)
        if options is not None:
            gnnaccel.quantize(self.model, **options)
        self.optimizer = torch.optim.Adam(self.model.parameters(),
                                          fused=graph.device.type == "cuda")

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x, self.edge_index), self.labels).backward()
        self.optimizer.step()

    @torch.no_grad()
    def output(self) -> torch.Tensor:
        return self.model(self.x, self.edge_index)


def records(graph: Graph, models: tuple[str, ...], effort: timing.Effort,
            budget: Budget) -> Iterator[Record]:
    """One record per model and format. Their values: the relative L2 difference of the result of
    the untrained model from fp32's; how many calls of layers and of linear maps ran in the format,
    and in fp32 (``calls``)."""
    effort = dataclasses.replace(effort, seconds=min(effort.seconds, _SECONDS))
    for name in models:
        expected = None
        for impl, options in FORMATS.items():
            if budget.spent:
                return

            def cell(options=options, expected=expected):
                with accel.accelerated():
                    step = Training(pyg.MODELS[name], graph, options)
                    out = step.output()
                    timed = dataclasses.asdict(timing.measure(step, graph.device, effort))
                    return out, timed, {
                        **({} if expected is None else {"rel_l2": cells.rel_l2(out, expected)}),
                        **_calls(step.model)}

            value, error = guarded(cell, graph.device)
            out, timed, values = value or (None, None, {})
            expected = out if impl == "fp32" else expected
            yield Record(KIND, graph.shape.name, name, "training", impl, graph.device.type, timed,
                         values, error)
            del value, out
            accel.clear_cache()
            timing.release(graph.device)


def _calls(model: torch.nn.Module) -> dict[str, dict[str, list[int]]]:
    report = gnnaccel.quant_report(model)
    found = {row.name: [row.quantized, row.in_fp32] for row in (*report.rows, *report.maps)}
    return {"calls": found} if found else {}
