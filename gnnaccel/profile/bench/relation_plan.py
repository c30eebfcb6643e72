"""What a run of the relational suite is to measure: the command line's options, resolved."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gnnaccel.adapters.pyg.bench import once
from gnnaccel.adapters.pyg.bench import relational as pyg
from gnnaccel.profile.bench import once_steps, plan, relation_files, relation_shapes
from gnnaccel.profile.bench.relation_shapes import RelationShape

ONCE = "once"
PARTS = ("layers", "memory", "compaction", "cpu", ONCE)
Job = tuple[RelationShape, tuple[pyg.RelationLayer, ...]]


@dataclasses.dataclass(frozen=True)
class RelationPlan(plan.Measuring):
    """``jobs`` are graphs with the layers measured on each; ``cpu_jobs`` those of the part "cpu".
    The part "once" measures all ``once_layers`` in all ``once_sizes``."""

    jobs: tuple[Job, ...]
    cpu_jobs: tuple[Job, ...]
    once_layers: tuple[once.OnceLayer, ...]
    once_sizes: tuple[once_steps.OnceSize, ...]
    parts: tuple[str, ...]


def from_options(options) -> RelationPlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    device = plan.device(options)
    parts = _parts(options, device)
    return RelationPlan(*_all_jobs(options, device, parts), *_once(options, device, parts), parts,
                        **plan.measuring(options, patient=True))


def _all_jobs(options, device: torch.device,
              parts: tuple[str, ...]) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
    """``jobs`` and ``cpu_jobs``; neither where only graphs that come once are measured."""
    if set(parts) == {ONCE}:
        return (), ()
    names = plan.flat(options.shapes) or _default(options,
                                                  relation_shapes.CPU if device.type == "cpu" else
                                                  relation_shapes.DEFAULT, every=True)
    return _jobs(options, names), _jobs(options, _default(options, relation_shapes.CPU,
                                                          every=False))


def _once(options, device: torch.device,
          parts: tuple[str, ...]) -> tuple[tuple[once.OnceLayer, ...],
                                           tuple[once_steps.OnceSize, ...]]:
    """``once_layers`` and ``once_sizes``. Raises ValueError where names are given that mean nothing
    to this part."""
    if ONCE not in parts:
        return (), ()
    if options.shapes or options.layers and set(parts) != {ONCE}:
        raise ValueError("part once has sizes and layers of its own: without --shapes, and "
                         "--layers only with --parts once")
    names = plan.flat(options.layers) or (once_steps.QUICK_LAYERS if options.quick
                                          else once.LAYERS)
    layers = tuple(plan.named(name, once.LAYERS) for name in names)
    return layers, (once_steps.QUICK,) if options.quick else once_steps.SIZES[device.type]


def _default(options, synthetic: tuple[str, ...], every: bool) -> list[str]:
    """Shapes to measure when none are named: real ones where ``--data`` has them, ``every`` one or
    the imitated only."""
    if options.quick:
        return ["tiny-typed"]
    there = [name for name in relation_shapes.FILES if options.data
             and Path(options.data, f"{name}.npz").is_file()]
    real = {name: shape for shape in synthetic if (name := relation_shapes.NEEDLESS.get(shape))
            in there}
    files = [name for name in there if every or name in real]
    return files + [shape for shape in synthetic if shape not in real.values()]


def _jobs(options, names: list[str]) -> tuple[Job, ...]:
    asked = plan.flat(options.layers)
    shapes = [_shape(name, options.data) for name in names]
    return tuple((shape, tuple(pyg.resolve(layer) for layer in asked or shape.layers))
                 for shape in shapes)


def _shape(name: str, data: str | None) -> RelationShape:
    if name in relation_shapes.SHAPES:
        return relation_shapes.SHAPES[name]
    if data:
        return relation_files.resolve(data, name)
    raise ValueError(f"no shape {name!r}; known: {', '.join(relation_shapes.SHAPES)}, and with "
                     "--data the files there")


def _parts(options, device: torch.device) -> tuple[str, ...]:
    # on a CPU "layers" is "cpu" already
    left_out = {"cpu", ONCE} if options.quick or device.type == "cpu" else {ONCE}
    wanted = plan.parts(options, PARTS, [part for part in PARTS if part not in left_out])
    return tuple(part for part in wanted if part != "memory" or device.type == "cuda")
