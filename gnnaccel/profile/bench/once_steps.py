"""Graphs that come once, as mini-batches do: their sizes, and steps of relational layers over one
that is new in each call."""
from __future__ import annotations

import dataclasses

import torch

from gnnaccel.adapters.pyg.bench import once as pyg
from gnnaccel.profile.bench.relation_steps import RelationStep


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


def once_step(layer: pyg.OnceLayer, size: OnceSize, device: torch.device, mode: str,
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


def _graph(layer: pyg.OnceLayer, size: OnceSize, nodes: int,
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
