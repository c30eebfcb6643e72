"""Graphs to measure on: synthetic, with the sizes and degree law of well-known sets, or read from
an ``.npz``.

A synthetic graph is a configuration model. Its in-degrees follow ``max_degree * rank**-s`` with
``s`` solved so that they sum to the number of edges; its out-degrees are the same sequence dealt to
other nodes, so hot source rows exist too. Sources and destinations are matched at random.
Everything is made on the device that will be measured, because moving 115 million edges there takes
longer than making them. Duplicate edges and self loops occur; no layer minds.
"""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Shape:
    """The recipe of a graph. ``max_degree == 0`` means uniform degrees; ``hub`` is the degree of
    one extra node."""

    name: str
    num_nodes: int
    num_edges: int
    max_degree: int
    hub: int = 0
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph on a device; ``edge_index`` is [2, E] int64, row 0 the sources and row 1 the
    destinations."""

    shape: Any  # its recipe
    edge_index: torch.Tensor

    @property
    def num_nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    def facts(self) -> dict[str, float]:
        """What a reader must know of a graph to judge a time."""
        degrees = torch.bincount(self.edge_index[1], minlength=self.num_nodes)
        return {"num_nodes": self.num_nodes, "num_edges": self.num_edges,
                "max_in_degree": int(degrees.max())}


SHAPES = {shape.name: shape for shape in (
    Shape("tiny", 200, 1_000, 40),
    Shape("cora", 2_708, 10_556, 168),
    Shape("arxiv", 169_343, 1_166_243, 7_600),
    Shape("proteins", 132_534, 79_122_504, 7_700),
    Shape("reddit", 232_965, 114_615_892, 21_000, hub=330_000),
    Shape("products", 2_449_029, 123_718_280, 17_500),
    Shape("hub", 200_000, 20_000_000, 2_000, hub=2_000_000),
    Shape("uniform", 200_000, 20_000_000, 0),
)}
DEFAULT = ("cora", "arxiv", "proteins", "reddit")


def resolve(name: str) -> Shape:
    """The shape called ``name``, or the one in the ``.npz`` that ``name`` points to. Raises
    ValueError."""
    if name in SHAPES:
        return SHAPES[name]
    if not name.endswith(".npz"):
        raise ValueError(f"no shape {name!r}; known: {', '.join(SHAPES)}, or a path to an .npz")
    import numpy as np

    path = Path(name)
    with np.load(path) as data:
        degrees = np.bincount(data["edge_index"][1])
        return Shape(path.stem, int(data["num_nodes"]), int(data["edge_index"].shape[1]),
                     int(degrees.max(initial=0)), path=str(path))


def scaled(shape: Shape, factor: float) -> Shape:
    """``shape`` with nodes, edges and degrees times ``factor`` (for tests and for machines without
    a GPU).

    The mean degree stays, so the largest one shrinks to no less than four times the mean: a skewed
    graph stays skewed.
    """
    nodes, edges = (max(1, round(value * factor)) for value in (shape.num_nodes, shape.num_edges))
    if not shape.max_degree:
        return dataclasses.replace(shape, num_nodes=nodes, num_edges=edges)
    largest = max(round(shape.max_degree * factor), 4 * edges // nodes, 1)
    hub = round(shape.hub * largest / shape.max_degree)
    return dataclasses.replace(shape, num_nodes=nodes, num_edges=edges, max_degree=largest, hub=hub)


def uniform(shape: Shape) -> Shape:
    """A shape of this size with all degrees equal (to within one): no kernel can beat this balance.
    """
    return dataclasses.replace(shape, name=f"{shape.name}-uniform", max_degree=0, hub=0, path="")


def make(shape: Shape, device: torch.device | str, seed: int = 0, order: str = "random") -> Graph:
    """Build or load the graph. The same shape, seed, order and kind of device give the same graph.

    ``order``: ``"random"`` leaves the edges in no order; ``"dst"`` groups them by destination.
    """
    device = torch.device(device)
    edge_index = _load(shape, device) if shape.path else _generate(shape, device, seed)
    if order == "dst":
        edge_index = edge_index[:, torch.argsort(edge_index[1], stable=True)]
    return Graph(shape, edge_index)


def degree_law(shape: Shape) -> torch.Tensor:
    """Degrees by rank, [N] int64 on the CPU, descending but for rounding, summing to exactly
    ``num_edges``.

    On the CPU because a GPU's running sum of floats differs in its last bits from run to run.
    """
    rank = torch.arange(1, shape.num_nodes + 1, dtype=torch.float64, device="cpu")
    if not shape.max_degree:
        return whole(torch.full_like(rank, shape.num_edges / shape.num_nodes), shape.num_edges)
    hub = min(shape.hub, shape.num_edges)
    rest = rank[:-1] if hub else rank
    edges = shape.num_edges - hub
    expected = shape.max_degree * rest.pow(-_exponent(rest, edges / shape.max_degree))
    law = whole(expected * (edges / expected.sum()), edges)
    return torch.cat([law.new_tensor([hub]), law]) if hub else law


def _exponent(rank: torch.Tensor, mass: float) -> float:
    """The s with sum(rank**-s) == mass. Bisection: the sum falls from N (s = 0) to about 1."""
    low, high, logarithm = 0.0, 8.0, rank.log()
    for _ in range(40):
        middle = (low + high) / 2
        if float((logarithm * -middle).exp_().sum()) > mass:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def whole(expected: torch.Tensor, total: int) -> torch.Tensor:
    """Integers near ``expected`` with the exact sum: differences of the rounded running sum."""
    running = expected.cumsum(0).round().long()
    running[-1] = total
    return torch.diff(running, prepend=running.new_zeros(1))


def _generate(shape: Shape, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    degrees = degree_law(shape).to(device)
    rows = [endpoints(degrees, generator) for _ in range(2)]
    return torch.stack(rows)


def endpoints(degrees: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One end of every edge: the degrees dealt to random nodes, in random order."""
    nodes = torch.randperm(len(degrees), generator=generator, device=degrees.device)
    ends = torch.repeat_interleave(nodes, degrees)
    return ends[torch.randperm(len(ends), generator=generator, device=degrees.device)]


def _load(shape: Shape, device: torch.device) -> torch.Tensor:
    import numpy as np

    with np.load(shape.path) as data:
        return torch.from_numpy(data["edge_index"].astype(np.int64)).to(device)
