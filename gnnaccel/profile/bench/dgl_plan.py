"""What a run of the suite over DGL is to measure: the command line's options, resolved."""
from __future__ import annotations

import dataclasses

import torch

from gnnaccel.adapters.dgl import bench as dgl
from gnnaccel.profile.bench import plan, relation_shapes, shapes
from gnnaccel.profile.bench.relation_shapes import RelationShape

AnyShape = shapes.Shape | RelationShape
Job = tuple[AnyShape, tuple[dgl.DglLayer, ...]]

# In the order of importance, as time may run out: large graphs come again for the layers that
# matter less.
GPU = (
    ("proteins", ("GAT 8x8",)),
    ("reddit", ("GAT 8x8",)),
    ("arxiv", ("GAT 8x8",)),
    ("mag-inverse-size", ("HGT 4x16",)),
    ("fb15k-size", ("RelGraphConv 64",)),
    ("proteins", ("GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("cora", ("GAT 8x8", "GATv2 4x16", "GraphConv 64", "SAGE 64")),
    ("arxiv", ("GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("reddit", ("SAGE 64", "GATv2 4x16", "DotGat 1x64", "GraphConv 64")),
)
CPU = (
    ("cora", ("GAT 8x8", "GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("aifb-size", ("RelGraphConv 64",)),
    ("dblp-size", ("HGT 4x16",)),
    ("arxiv", ("GAT 8x8", "GATv2 4x16", "DotGat 1x64")),
    ("fb15k-size", ("RelGraphConv 64",)),
)
QUICK = (
    ("tiny", ("GAT 8x8", "GATv2 4x16", "DotGat 1x64", "GraphConv 64", "SAGE 64")),
    ("tiny-typed", ("RelGraphConv 64", "HGT 4x16")),
)


@dataclasses.dataclass(frozen=True)
class DglPlan(plan.Measuring):
    """``jobs`` are graphs with the layers measured on each."""

    jobs: tuple[Job, ...]


def from_options(options) -> DglPlan:
    """A plan from parsed options. Raises ValueError on names that do not exist, on devices that are
    not there, without DGL."""
    plan.parts(options, (), [])  # the suite has none: naming one is an error
    jobs = _jobs(options, plan.device(options))
    why = dgl.problem()
    if why is not None:
        raise ValueError(f"--suite dgl needs DGL: {why}")
    return DglPlan(jobs, **plan.measuring(options, patient=True))


def _jobs(options, device: torch.device) -> tuple[Job, ...]:
    """The shapes asked for with all layers of their kind, else the suite's own shapes with their
    own layers; of the layers only those asked for."""
    own = QUICK if options.quick else GPU if device.type == "cuda" else CPU
    named = [(name, tuple(dgl.LAYERS)) for name in plan.flat(options.shapes)] or own
    asked = ([plan.named(name, dgl.LAYERS) for name in plan.flat(options.layers)]
             or list(dgl.LAYERS.values()))
    jobs = []
    for name, layers in named:
        shape = _shape(name)
        typed = isinstance(shape, RelationShape)
        jobs.append((shape, tuple(layer for layer in asked if layer.name in layers
                                  and layer.typed == typed)))
    jobs = [job for job in jobs if job[1]]
    if not jobs:
        raise ValueError("none of the layers goes with any of the shapes")
    return tuple(jobs)


def _shape(name: str) -> AnyShape:
    if name in relation_shapes.SHAPES:
        return relation_shapes.SHAPES[name]
    if name in shapes.SHAPES or name.endswith(".npz"):
        return shapes.resolve(name)
    raise ValueError(f"no shape {name!r}; known: "
                     f"{', '.join([*shapes.SHAPES, *relation_shapes.SHAPES])}, or a path to an "
                     ".npz")
