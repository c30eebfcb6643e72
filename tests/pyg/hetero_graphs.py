"""`hgt_graphs` whose features are all of one width, a graph with many edge types, HeteroConv, and
judging its results."""
from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import HeteroConv, SAGEConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.helpers import relative
from tests.pyg import hgt_graphs
from tests.pyg.hgt_graphs import RELATIONS, edges, on

__all__ = ["ABOUT", "BETWEEN_TWO", "CITES", "KNOWS", "METADATA", "NODES", "OUT", "RELATIONS", "WIDTH",
           "WRITES", "WRITTEN", "edges", "edited_in_place", "features", "hetero", "in_any_order",
           "in_groups", "many", "near", "of_other_sizes", "on", "results_of_types", "same",
           "trained_on_types"]

NODES = {name: hgt_graphs.NODES[name] for name in ("paper", "author", "field")}
WIDTH, OUT = 12, 16
WRITES, WRITTEN, CITES, ABOUT, KNOWS = RELATIONS
BETWEEN_TWO = [WRITES, WRITTEN, CITES, KNOWS]  # relations without fields
METADATA = (list(NODES), RELATIONS)


def features(widths: dict[str, int] | int = WIDTH, **counts: int) -> dict[str, Tensor]:
    """``counts``: nodes of a type, where they are not the usual ones."""
    return {name: torch.randn(counts.get(name, n),
                              widths if isinstance(widths, int) else widths[name])
            for name, n in NODES.items()}


def many(types: int = 4, relations: int = 64, nodes: int = 15, count: int = 12, width: int = WIDTH):
    """(features, edges) of a graph with many edge types between few node types."""
    names = [f"t{i}" for i in range(types)]
    triples = [(names[r % types], f"r{r}", names[r // types % types]) for r in range(relations)]
    return {name: torch.randn(nodes, width)
            for name in names}, edges(triples, count=count, **dict.fromkeys(names, nodes))


def hetero(cls=SAGEConv, group="sum", relations=RELATIONS, out=OUT, channels=WIDTH, **options):
    """HeteroConv with a layer of class ``cls`` for each relation."""
    return HeteroConv({name: cls(channels, out, **options) for name in relations}, aggr=group)


def in_groups(route, made: torch.nn.Module, x: dict, ei: dict, groups: int = 1,
              **inside: dict) -> None:
    """So many groups of layers run as one each; ``inside``: the routes of the others, by class. The
    result is the host's."""
    made, (x, ei) = made.to(route.device), on(route.device, x, ei)
    expected = made(x, ei)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        same(made(x, ei), expected)
    stats = gnnaccel.stats()
    assert stats["HeteroConv"]["routes"] == {"native": 1, route.backend: groups}, stats
    assert stats["HeteroConv"]["reasons"] == {"GA210": 1} and stats.keys() == {"HeteroConv",
                                                                               *inside}, stats
    assert all(stats[name]["routes"] == routes for name, routes in inside.items()), stats


def same(got: dict, expected: dict, tolerance: float = 1e-5) -> None:
    """Results by node type are equal up to rounding, in one order."""
    assert list(got) == list(expected)
    for name, t in expected.items():
        assert (got[name] is None) == (t is None)
        assert t is None or (got[name].dtype == t.dtype
                             and relative(got[name], t) <= tolerance), name


def near(got: dict, native: dict, exact: dict, dtype: torch.dtype) -> None:
    """Results are as near to the exact ones as the host's own in this precision."""
    assert list(got) == list(native)
    for name in exact:
        assert got[name].dtype == native[name].dtype
        allowed = 2 * relative(native[name], exact[name]) + 2 * torch.finfo(dtype).eps
        assert relative(got[name], exact[name]) <= allowed, name


def in_any_order(route, made: torch.nn.Module) -> None:
    """The order of the dictionaries changes neither the results nor the structure."""
    made, (x, ei) = made.to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    for _ in range(3):
        x, ei = ({k: d[k] for k in (list(d)[i] for i in torch.randperm(len(d)))} for d in (x, ei))
        with route.on():
            same(made(x, ei), expected)
    assert cache.info()["entries"] == 1


def edited_in_place(route, made: torch.nn.Module) -> None:
    """Edges that are edited in place make another structure."""
    made, (x, ei) = made.to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
        ei[CITES][0] = 3
        got = made(x, ei)
    assert cache.info()["misses"] == 2
    same(got, made(x, ei))


def of_other_sizes(route, made: torch.nn.Module) -> None:
    """The same edges between types of other sizes make another structure. The sum of the sizes is
    the same, so only where the types begin tells the graphs apart."""
    made, ei = made.to(route.device), on(route.device, edges(BETWEEN_TWO, paper=10, author=10))[0]
    for counts in (dict(paper=10, author=15), dict(paper=15, author=10)):
        x = on(route.device, features(**counts))[0]
        with route.on():
            got = made(x, ei)
        same(got, made(x, ei))
    assert cache.info()["misses"] == 2


def results_of_types(model: torch.nn.Module, x: dict, ei: dict,
                     leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The outputs of ``model(x, ei)`` by type, and the gradients of ``leaves``."""
    for t in leaves.values():
        t.grad = None
    out = model(x, ei)
    sum((t * torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape)).sum()
        for t in out.values()).backward()
    return {**{f"out {k}": t.detach() for k, t in out.items()},
            **{k: t.grad for k, t in leaves.items()}}


def trained_on_types(model: torch.nn.Module, x: dict, ei: dict, target: dict[str, Tensor],
                     steps: int) -> dict[str, Tensor]:
    """The model's weights after so many steps towards ``target``."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((t - target[k]).pow(2).mean() for k, t in model(x, ei).items()).backward()
        optimizer.step()
    return model.state_dict()
