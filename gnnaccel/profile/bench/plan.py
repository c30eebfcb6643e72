"""What a run is to measure: the command line's options, resolved."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.adapters.pyg.bench.layers import named
from gnnaccel.profile.bench import shapes, timing

PARTS = ("floor", "layers", "structure", "overhead", "fresh", "cpu", "compiled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring:
    """What plans of all suites have. ``impls`` are the implementations timed within the layer
    cells; ``compile_limit`` is in seconds per mode of a layer (or of a group that compiles side by
    side)."""

    device: torch.device
    effort: timing.Effort
    quick: bool = False
    impls: tuple[str, ...] = ("native", "gnnaccel")
    compile_limit: float = 0.0
    seed: int = 0
    order: str = "random"


@dataclasses.dataclass(frozen=True)
class Plan(Measuring):
    """``parts`` are from PARTS."""

    shapes: tuple[shapes.Shape, ...]
    layers: tuple[pyg.LayerSpec, ...]
    parts: tuple[str, ...]


def from_options(options) -> Plan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    where = device(options)
    names = flat(options.shapes) or (["tiny"] if options.quick else list(shapes.DEFAULT))
    layers = flat(options.layers) or list(pyg.LAYERS)
    return Plan(tuple(shapes.resolve(name) for name in names),
                tuple(named(name, pyg.LAYERS) for name in layers), _parts(options, where),
                **measuring(options))


def measuring(options, patient: bool = False) -> dict[str, Any]:
    """The fields of `Measuring`. ``patient``: cells may take as long as ``--patience`` says."""
    more = {"patience_s": options.patience} if patient else {}
    return {"device": device(options), "quick": options.quick,
            "effort": dataclasses.replace(effort(options), **more),
            "impls": ("native", "gnnaccel") if options.native else ("gnnaccel",),
            "compile_limit": options.compile_limit, "seed": options.seed, "order": options.order}


def settings(options) -> dict:
    """The options as they go into the result file."""
    return {name: value for name, value in vars(options).items()
            if isinstance(value, (str, int, float, bool, list, type(None)))
            and name not in ("out", "plot", "read", "data", "scripts", "before", "preload")}


def device(options) -> torch.device:
    """The device asked for, else a GPU if there is one. Raises ValueError when it is not there."""
    found = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU")
    return found


def effort(options) -> timing.Effort:
    """How long each cell may take."""
    found = timing.QUICK if options.quick else timing.Effort()
    return dataclasses.replace(found, batches=options.repeat) if options.repeat else found


def calm(effort: timing.Effort) -> timing.Effort:
    """For CPUs, which are noisy: more and longer samples than a GPU needs."""
    return dataclasses.replace(effort, batches=2 * effort.batches, batch_ms=2 * effort.batch_ms,
                               seconds=2 * effort.seconds)


def parts(options, known: tuple[str, ...], default: list[str]) -> list[str]:
    """The parts asked for. Raises ValueError on those that are not ``known``."""
    wanted = flat(options.parts) or default
    if unknown := set(wanted) - set(known):
        raise ValueError(f"no part {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return wanted


def flat(groups: list[list[str]] | None) -> list[str]:
    """Names may come as one list with commas, as several arguments, or both."""
    return [name for group in groups or [] for name in group]


def _parts(options, where: torch.device) -> tuple[str, ...]:
    return possible(options, where, parts(options, PARTS, [part for part in PARTS
                                                           if part != "cpu" or not options.quick]))


def possible(options, where: torch.device, wanted: list[str]) -> tuple[str, ...]:
    """Those of the parts that are for this device: floors are a GPU's, and so is what is compiled
    unless it was asked for."""
    gpu = where.type == "cuda"
    compiles = gpu and not options.quick if options.compile is None else options.compile
    return tuple(part for part in wanted if (part != "floor" or gpu)
                 and (part != "compiled" or compiles))
