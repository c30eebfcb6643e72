"""Ugly graphs, layouts of memory and features, drawn by chance."""

from __future__ import annotations

import os
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import PDNConv

#: how many times as many nodes, edges, and edges of super-nodes (``--scale``)
SCALE = int(os.environ.get("GNNACCEL_ORACLE_SCALE", "1"))
IN = 8  # channels of features
EDGE = 3  # channels of edge features
RELATIONS = 3
#: Channels of one head that lie over a warp's lanes in other ways than a few: alone in a lane, at
#: an odd place, several loads to a lane.
WIDE = (1, 17, 64, 130)
#: Edges of a super-node: a warp takes 256, so around that and twice that; and far more.
LONG = (255, 256, 257, 260, 511, 513, 520, 700, 1100)

#: kinds of graphs; what breaks kernels comes more often than what people have
KINDS = ("random", "random", "random", "repeated", "loops", "only_loops", "one_loop", "from_one",
         "hub", "hub", "hub", "source_hub", "isolated", "single", "chain", "sorted", "descending",
         "few", "none", "many", "one_each", "same_edge")
LAYOUTS = ("plain", "plain", "plain", "plain", "transposed", "strided", "offset", "int32", "part")
FEATURES = ("plain", "plain", "plain", "plain", "plain", "transposed", "strided", "offset", "zero",
            "large", "equal", "expanded", "alike")


class Draw(random.Random):
    """Choices of one case. ``look``: above 0, other numbers in the same features and weights."""

    def __init__(self, key: str, look: int = 0):
        super().__init__(key)
        self.places = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        self.numbers = torch.Generator().manual_seed(zlib.crc32(f"{key} {look}".encode()))
        torch.manual_seed(zlib.crc32(f"{look} {key}".encode()))  # for the parameters of modules

    def chance(self, share: float) -> bool:
        return self.random() < share

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, max(1, high), shape, generator=self.places)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.numbers)

    def uniform_(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.numbers)


@dataclass
class Case:
    """A module and its arguments; ``note`` says what was drawn."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def edges(d: Draw, sources: int, targets: int, kind: str, count: int = 0) -> Tensor:
    """Edges [2, E] of a graph of this kind."""
    count = SCALE * (count or d.choice((7, 33, 80, 150)))
    both = min(sources, targets)

    def random_edges(size: int) -> Tensor:
        return torch.stack([d.integers(sources, size), d.integers(targets, size)])

    if kind == "repeated":
        return random_edges(count // 4 + 1).repeat(1, 4)
    if kind == "loops":
        own = torch.arange(both)
        return torch.cat([random_edges(count), torch.stack([own, own])[:, ::2],
                          torch.zeros(2, 2, dtype=torch.long)], 1)
    if kind in ("only_loops", "one_loop"):
        own = d.integers(both, count) if kind == "only_loops" else torch.full((9,), both - 1)
        return torch.stack([own, own])
    if kind == "from_one":
        return torch.stack([torch.zeros(count, dtype=torch.long), d.integers(targets, count)])
    if kind in ("hub", "source_hub"):
        long = SCALE * d.choice(LONG)
        ends = [d.integers(sources, long), torch.full((long,), targets - 1)]
        if kind == "source_hub":
            ends = [torch.full((long,), sources - 1), d.integers(targets, long)]
        return torch.cat([random_edges(count), torch.stack(ends)], 1)
    if kind == "isolated":
        return torch.stack([d.integers(sources // 3, count), d.integers(targets // 3, count)])
    if kind in ("single", "few", "many", "none"):
        return random_edges({"single": 1, "few": 3, "many": 2000 * SCALE, "none": 0}[kind])
    if kind == "chain":
        return torch.stack([torch.arange(both - 1), torch.arange(1, both)])
    if kind == "one_each":
        return torch.stack([d.integers(sources, targets), torch.arange(targets)])
    if kind == "same_edge":
        return random_edges(1).repeat(1, 12)
    found = random_edges(count)
    if kind in ("sorted", "descending"):
        found = found[:, found[1].argsort(stable=True, descending=kind == "descending")]
    return found


def lying(d: Draw, edge_index: Tensor) -> Tensor:
    """The same edges in another layout of memory or another integer type."""
    layout, size = d.choice(LAYOUTS), edge_index.shape[1]
    if layout == "int32":
        return edge_index.int()
    if layout == "transposed":
        return edge_index.t().contiguous().t()
    if layout in ("plain", "part"):
        return (edge_index.contiguous() if layout == "plain"
                else torch.cat([edge_index, edge_index])[:2])
    wide = torch.zeros(2, 2 * size + 3, dtype=torch.long)
    place = wide[:, : 2 * size : 2] if layout == "strided" else wide[:, 3 : size + 3]
    return place.copy_(edge_index)


def features(d: Draw, rows: int, channels: int) -> Tensor:
    """Features [rows, channels] in some layout, at times all zero, large or equal."""
    kind = d.choice(FEATURES)
    if kind == "transposed":
        return d.normal(channels, rows).t()
    if kind == "strided":
        return d.normal(rows, 2 * channels)[:, ::2]
    if kind == "offset":
        return d.normal(rows * channels + 1)[1:].view(rows, channels)
    x = d.normal(rows, channels)
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "large":
        return x * 1e3
    if kind == "alike":
        return x[:1] + 1e-4 * x
    if kind in ("equal", "expanded") and rows:
        return x[:1].repeat(rows, 1) if kind == "equal" else x[:1].expand(rows, channels)
    return x


def channels(d: Draw, usual: int) -> int:
    """Channels of a head of a layer's result."""
    return d.choice(WIDE) if d.chance(0.2) else usual


def nodes(d: Draw) -> int:
    return SCALE * d.choice((1, 2, 5, 20, 20, 33))


def graph(d: Draw, sources: int, targets: int, loops: bool = True) -> tuple[Tensor, str]:
    """Edges in some layout, and the kind of graph."""
    kind = d.choice(KINDS)
    found = edges(d, sources, targets, kind)
    if not loops:
        found = found[:, found[0] != found[1]]
    return lying(d, found), kind


def edge_values(d: Draw, what: str | None, count: int, channels: int = EDGE) -> dict[str, Tensor]:
    """Keyword arguments for the edges: ``what`` is weight, attr, type or both (attr and type)."""
    found = {}
    if what == "weight" and d.chance(0.6):
        found["edge_weight"] = d.uniform_(count) + 0.1
    if what in ("type", "both"):
        found["edge_type"] = d.integers(RELATIONS, count)
    if what in ("attr", "both"):
        found["edge_attr"] = features(d, count, channels)
    return found


def one_type(
    d: Draw,
    module: nn.Module,
    edge: str | None = None,
    pairs: bool = False,
    lone: bool = False,
    loops: bool = True,
    edge_channels: int = EDGE,
) -> Case:
    """A call ``module(x, edge_index, ...)``.

    ``pairs``: x may be a pair; ``lone``: the second of it may be None.
    """
    apart = pairs and d.chance(0.4)
    n = nodes(d)
    m = SCALE * d.choice((1, 3, 11, 20)) if apart else n
    edge_index, kind = graph(d, n, m, loops)
    kwargs: dict[str, Any] = edge_values(d, edge, edge_index.shape[1], edge_channels)
    x: Any = features(d, n, IN)
    if apart:
        x = (x, None if lone and d.chance(0.3) else features(d, m, IN))
        if x[1] is None:
            kwargs["size"] = (n, m)
    return Case(module, (x, edge_index), kwargs, f"{kind} {n}x{m}")


def with_one_weight_a_loop(case: Case) -> Case:
    """The case, with the same weight for all self loops of a node.

    ``gcn_norm`` writes these weights to one place. On a GPU any of them may come last, from call to
    call another one, in the host's own code as well.
    """
    edge_index = case.args[1] if len(case.args) > 1 else None
    names = ("edge_weight", "edge_attr") if isinstance(case.module, PDNConv) else ("edge_weight",)
    found = [t for name in names if isinstance(t := case.kwargs.get(name), Tensor)]
    if (isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
        and edge_index.dim() == 2 and edge_index.shape[0] == 2):
        # DGL's layers have features or an index there
        found = [values for values in found if not edge_index.is_floating_point()
                 and values.shape[0] == edge_index.shape[1]]
        for values in found:
            one_weight_a_loop(edge_index, values)
    return case


def one_weight_a_loop(edge_index: Tensor, values: Tensor) -> None:
    """Write the weight of each node's first self loop to the others, where it is another."""
    loops = (edge_index[0] == edge_index[1]).nonzero()[:, 0]
    nodes, place = edge_index[0, loops].long().unique(return_inverse=True)
    first = place.new_full(nodes.shape, edge_index.shape[1]).scatter_reduce(0, place, loops, "amin")
    with torch.no_grad():
        wanted = values[first[place]]
        if not torch.equal(values[loops], wanted):
            values[loops] = wanted


def mlp(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after))
