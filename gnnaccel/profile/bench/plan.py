"""What a run is to measure: the command line's options, resolved."""
from __future__ import annotations

import dataclasses

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench import shapes, timing

PARTS = ("floor", "layers", "structure", "overhead", "fresh", "cpu", "compiled")


@dataclasses.dataclass(frozen=True)
class Plan:
    """``parts`` are from PARTS; ``impls`` are the implementations timed within the layer cells.

    ``compile_limit`` is in seconds per mode of a layer (or of a group that compiles side by side).
    """

    shapes: tuple[shapes.Shape, ...]
    layers: tuple[pyg.LayerSpec, ...]
    device: torch.device
    effort: timing.Effort
    quick: bool
    parts: tuple[str, ...]
    impls: tuple[str, ...]
    compile_limit: float
    seed: int
    order: str


def from_options(options) -> Plan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    where = device(options)
    names = flat(options.shapes) or (["tiny"] if options.quick else list(shapes.DEFAULT))
    layers = flat(options.layers) or list(pyg.LAYERS)
    return Plan(tuple(shapes.resolve(name) for name in names),
                tuple(pyg.resolve(name) for name in layers), where, effort(options), options.quick,
                _parts(options, where), impls(options), options.compile_limit, options.seed,
                options.order)


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


def impls(options) -> tuple[str, ...]:
    """The implementations timed within the layer cells."""
    return ("native", "gnnaccel") if options.native else ("gnnaccel",)


def parts(options, known: tuple[str, ...], default: list[str]) -> list[str]:
    """The parts asked for. Raises ValueError on those that are not ``known``."""
    wanted = flat(options.parts) or default
    if unknown := set(wanted) - set(known):
        raise ValueError(f"no part {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return wanted


def named(name: str, known: dict):
    """The one of ``known`` by this name; case, spaces, "_" and "-" do not matter. Raises
    ValueError."""
    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    for key, found in known.items():
        if plain(key) == plain(name):
            return found
    raise ValueError(f"no layer {name!r}; known: {', '.join(known)}")


def flat(groups: list[list[str]] | None) -> list[str]:
    """Names may come as one list with commas, as several arguments, or both."""
    return [name for group in groups or [] for name in group]


def _parts(options, where: torch.device) -> tuple[str, ...]:
    wanted = parts(options, PARTS, [part for part in PARTS if part != "cpu" or not options.quick])
    if options.compile is False or options.compile is None and (options.quick
                                                                or where.type != "cuda"):
        wanted = [part for part in wanted if part != "compiled"]
    if where.type != "cuda":
        wanted = [part for part in wanted if part != "floor"]
    return tuple(wanted)
