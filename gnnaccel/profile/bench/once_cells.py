"""Relational layers over graphs that come once, as mini-batches do: each call natively and through
gnnaccel in turns, over edges that are new in each call.

Such calls are bound by the host, which events on a device would not show: they are timed one by
one, by the clock, with the wait for the device. On a CPU with one thread it is the clock of the
process, so that what else runs there does not count.
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator

import torch

from gnnaccel.adapters.pyg.bench import once as pyg
from gnnaccel.adapters.pyg.bench.once import OnceLayer
from gnnaccel.profile.bench import accel, cells, timing
from gnnaccel.profile.bench.guard import Budget, guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.steps import RelationStep

TURNS = 7  # at least, unless fewer are asked for
# calls that stay native are remembered after a few: a stream of batches is what is measured
_WARM = {"native": 2, "gnnaccel": 5}
_SHARE = 6  # of the seconds that other cells take: there are many more of these


def records(layers: tuple[OnceLayer, ...], sizes: tuple[OnceSize, ...], device: torch.device,
            effort: timing.Effort, seed: int, budget: Budget) -> Iterator[Record]:
    """One record per size, layer and mode, small graphs first."""
    for size in sizes:
        yield from cells.in_modes(layers, budget, lambda layer, mode: [
            once_record(layer, size, device, mode, effort, seed)])


def once_record(layer: OnceLayer, size: OnceSize, device: torch.device, mode: str,
                effort: timing.Effort, seed: int = 0) -> Record:
    """``*_us`` are microseconds per call, ``ratio_*`` native's time over gnnaccel's, ``turns`` the
    calls of each. ``routes`` and ``reasons`` are those of gnnaccel's timed calls and of the layers
    inside them."""
    accel.clear_cache()
    values, error = guarded(lambda: _turns(once_step(layer, size, device, mode, seed), effort),
                            device)
    accel.clear_cache()
    timing.release(device)
    return Record("once", size.name, layer.name, mode, device=device.type, values=values or {},
                  error=error)


def _turns(step: OnceStep, effort: timing.Effort) -> dict:
    samples: dict[str, list[float]] = {impl: [] for impl in accel.CONTEXTS}
    most, least = 2 * effort.batches, min(TURNS, 2 * effort.batches)
    # entered once: entering it may reset what calls had memoised
    with accel.CONTEXTS["gnnaccel"]():
        with accel.CONTEXTS["native"]():
            for _ in range(_WARM["native"]):
                _call(step)
        for _ in range(_WARM["gnnaccel"]):
            _call(step)
        accel.reset_routes()
        end = time.monotonic() + effort.seconds / _SHARE
        while (len(samples["native"]) < least
               or len(samples["native"]) < most and time.monotonic() < end):
            with accel.CONTEXTS["native"]():
                samples["native"].append(_call(step))
            samples["gnnaccel"].append(_call(step))
        return {**_statistics(samples["native"], samples["gnnaccel"]), **accel.routes()}


def _statistics(native: list[float], ours: list[float]) -> dict[str, float]:
    values: dict[str, float] = {"turns": len(native)}
    for name, of in (("least", min), ("median", statistics.median)):
        values |= {f"native_{name}_us": of(native), f"ours_{name}_us": of(ours),
                   f"ratio_{name}": of(native) / of(ours)}
    return values


def _call(step: OnceStep) -> float:
    """One call over a new graph, whose copying is not timed, in microseconds."""
    clock = (time.process_time if step.device.type == "cpu" and torch.get_num_threads() == 1
             else time.perf_counter)
    step.renew()
    timing.synchronize(step.device)
    start = clock()
    step()
    timing.synchronize(step.device)
    return (clock() - start) * 1e6


# --- steps ----------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class OnceSize:
    """``relations`` of equally many edges, ``edges`` in all, between three types of ``nodes`` nodes
    each."""

    relations: int
    edges: int
    nodes: int
    channels: int

    @property
    def name(self) -> str:
        return f"{self.relations} relations, {self.edges} edges, {self.channels} channels"

    @property
    def triples(self) -> list[pyg.Triple]:
        """Each node type is a destination of some relation, from five relations on; with many,
        types also point to themselves."""
        types, count = pyg.NODE_TYPES, len(pyg.NODE_TYPES)
        return [(types[number % count], f"r{number}", types[(number + 1 + number // count) % count])
                for number in range(self.relations)]


SIZES = {"cuda": tuple(OnceSize(*numbers) for numbers in (
    (5, 500, 150, 64), (5, 5_000, 1_500, 64), (5, 50_000, 15_000, 64), (5, 500_000, 100_000, 64),
    (40, 5_000, 1_500, 64), (40, 50_000, 15_000, 64), (5, 50_000, 15_000, 16),
    (5, 500_000, 100_000, 16))),
    "cpu": tuple(OnceSize(*numbers) for numbers in ((5, 100, 30, 16), (5, 500, 50, 16),
                                                    (5, 5_000, 500, 16)))}
QUICK = OnceSize(5, 100, 30, 16)
QUICK_LAYERS = ("RGCN", "HeteroConv SAGE")


class OnceStep(RelationStep):
    """A step over the same edges in tensors that are new after each ``renew``: no cache can know
    them."""

    def __init__(self, module: torch.nn.Module, inputs: dict[str, torch.Tensor], x, graph: tuple,
                 mode: str) -> None:
        super().__init__(module, inputs, (x, *graph), mode)
        self.x, self.graph = x, graph

    def renew(self) -> None:
        self.arguments = (self.x, *map(_copy, self.graph))


def once_step(layer: OnceLayer, size: OnceSize, device: torch.device, mode: str,
              seed: int = 0) -> OnceStep:
    """The step of one layer over one random graph; equal arguments give equal weights, features and
    edges."""
    generator = torch.Generator(device).manual_seed(seed)
    module = pyg.build_layer(layer, size.channels, size.triples, device, seed)
    if layer.takes == "dictionaries":
        inputs = {name: torch.randn(size.nodes, size.channels, device=device, generator=generator)
                  for name in pyg.NODE_TYPES}
        ends = (2, size.edges // size.relations)
        edges = {triple: torch.randint(size.nodes, ends, device=device, generator=generator)
                 for triple in size.triples}
        return OnceStep(module, inputs, inputs, (edges,), mode)
    x = torch.randn(len(pyg.NODE_TYPES) * size.nodes, size.channels, device=device,
                    generator=generator)
    return OnceStep(module, {"x": x}, x, _graph(layer, size, len(x), generator), mode)


def _graph(layer: OnceLayer, size: OnceSize, nodes: int,
           generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """What a layer takes behind the features of all nodes."""
    def drawn(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, device=generator.device, generator=generator)

    if layer.takes == "rows":
        return (drawn(size.relations, nodes),)
    edge_index, edge_type = drawn(nodes, 2, size.edges), drawn(size.relations, size.edges)
    if layer.takes == "edges":
        return edge_index, edge_type
    features = torch.randn(size.edges, pyg.EDGE_CHANNELS, device=generator.device,
                           generator=generator)
    return edge_index, drawn(len(pyg.NODE_TYPES), nodes), edge_type, features


def _copy(part):
    return ({name: tensor.clone() for name, tensor in part.items()} if isinstance(part, dict)
            else part.clone())
