"""What a run is to measure: the command line's options, resolved."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench.layers import named
from gnnaccel.profile.bench import timing

Job = tuple[Any, tuple[Any, ...]]  # a graph's recipe, and layers


@dataclasses.dataclass(frozen=True)
class Plan:
    """``jobs``: graphs with the layers measured on each, what matters most first; ``parts``: of
    those that the suite has. ``impls`` are the implementations timed within the layer cells;
    ``compile_limit`` is in seconds per mode of a layer (or of a group that compiles side by
    side)."""

    jobs: tuple[Job, ...]
    parts: tuple[str, ...] = ()
    _: dataclasses.KW_ONLY
    device: torch.device
    effort: timing.Effort
    quick: bool = False
    impls: tuple[str, ...] = ("native", "gnnaccel")
    compile_limit: float = 0.0
    seed: int = 0
    order: str = "random"

    def effort_on(self, device: torch.device) -> timing.Effort:
        return calm(self.effort) if device.type == "cpu" else self.effort


def jobs(options, own: tuple, known: Mapping[str, Any], resolve: Callable[[str], Any],
         fits: Callable[[Any, Any], bool] = lambda shape, layer: True) -> tuple[Job, ...]:
    """The shapes asked for with all layers ``known``, else the suite's ``own``, pairs of names; of
    the layers only those asked for that are fit for the shape. Raises ValueError on names that do
    not exist."""
    asked = [named(name, known) for name in flat(options.layers)] or list(known.values())
    wanted = [(name, tuple(known)) for name in flat(options.shapes)] or own
    found = [(resolve(name), tuple(known[layer] for layer in layers if known[layer] in asked))
             for name, layers in wanted]
    found = [(shape, tuple(layer for layer in layers if fits(shape, layer)))
             for shape, layers in found]
    return tuple(job for job in found if job[1])


def measuring(options, patient: bool = False) -> dict[str, Any]:
    """How to measure. ``patient``: cells may take as long as ``--patience`` says."""
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
    found = timing.QUICK if options.quick else timing.Effort()
    return dataclasses.replace(found, batches=options.repeat) if options.repeat else found


def calm(effort: timing.Effort) -> timing.Effort:
    """For CPUs, which are noisy: more and longer samples than a GPU needs."""
    return dataclasses.replace(effort, batches=2 * effort.batches, batch_ms=2 * effort.batch_ms,
                               seconds=2 * effort.seconds)


def parts(options, known: tuple[str, ...], left_out: Collection[str] = ()) -> tuple[str, ...]:
    """The parts asked for, else those ``known`` that are not ``left_out``. Raises ValueError on
    those that are not known."""
    wanted = flat(options.parts) or [part for part in known if part not in left_out]
    if unknown := set(wanted) - set(known):
        raise ValueError(f"no part {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return tuple(wanted)


def flat(groups: list[list[str]] | None) -> list[str]:
    """Names may come as one list with commas, as several arguments, or both."""
    return [name for group in groups or [] for name in group]


def possible(options, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the parts that are for this device: floors are a GPU's, and so is what is compiled
    unless it was asked for."""
    gpu = device(options).type == "cuda"
    compiles = gpu and not options.quick if options.compile is None else options.compile
    return tuple(part for part in wanted if (part != "floor" or gpu)
                 and (part != "compiled" or compiles))
