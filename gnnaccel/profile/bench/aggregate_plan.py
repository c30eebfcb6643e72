"""What a run of the suite over plain aggregation is to measure: the command line's options,
resolved."""
from __future__ import annotations

import dataclasses

import torch

from gnnaccel.adapters.pyg.bench.plain import LAYERS, PlainLayer
from gnnaccel.profile.bench import plan, shapes

PARTS = ("floor", "layers", "spmm", "operations", "fresh", "cpu", "compiled")
Job = tuple[shapes.Shape, tuple[PlainLayer, ...]]

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
OPERATIONS = "proteins"  # the shape on which single operations are timed


@dataclasses.dataclass(frozen=True)
class AggregatePlan(plan.Measuring):
    """``jobs``: graphs with the layers measured on each; ``operations``: the graph of that part."""

    jobs: tuple[Job, ...]
    operations: shapes.Shape
    parts: tuple[str, ...]


def from_options(options) -> AggregatePlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    device = plan.device(options)
    named = plan.flat(options.shapes)
    own = QUICK if options.quick else GPU if device.type == "cuda" else CPU
    asked = [plan.named(name, LAYERS).name for name in plan.flat(options.layers)]
    jobs = resolved(tuple((name, tuple(LAYERS)) for name in named) or own, asked)
    default = "tiny" if options.quick else OPERATIONS if device.type == "cuda" else "cora"
    operations = named[0] if named else default
    return AggregatePlan(jobs, shapes.resolve(operations), _parts(options, device),
                         **plan.measuring(options, patient=True))


def resolved(named: tuple, asked: list[str]) -> tuple[Job, ...]:
    jobs = [(shapes.resolve(shape), tuple(LAYERS[name] for name in layers if not asked
                                          or name in asked))
            for shape, layers in named]
    return tuple(job for job in jobs if job[1])


def _parts(options, device: torch.device) -> tuple[str, ...]:
    # on a CPU "layers" is that already
    left_out = {"cpu"} if options.quick or device.type == "cpu" else set()
    if device.type == "cpu" and not options.quick:
        left_out |= {"spmm", "operations"}  # kernels are what they are about
    return plan.possible(options, device, plan.parts(options, PARTS, [part for part in PARTS
                                                                      if part not in left_out]))
