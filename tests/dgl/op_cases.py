"""DGL's operations as layers, so that the judge of layers judges them; and graphs for them."""
from __future__ import annotations

from collections.abc import Callable

import dgl
import torch
from torch import Tensor

from tests.dgl import graphs
from tests.dgl.graphs import E, N

#: shapes of two operands' features that broadcast: equal, fewer dimensions, ones here and there,
#: odd and single widths
PAIRS = [((), ()), ((1,), (1,)), ((5,), ()), ((), (5,)), ((5,), (1,)), ((8,), (8,)),
         ((2, 4), (2, 1)), ((2, 1), (2, 4)), ((3, 5), (3, 5)), ((3, 1), (1, 5)), ((2, 3), (3,)),
         ((2, 3, 4), (2, 3, 1)), ((4,), (3, 1)), ((33,), (1,))]
SHAPES = [(), (1,), (7,), (2, 4), (3, 1), (2, 3, 2), (64,), (130,)]
TARGETS = {"u": N, "v": N, "e": E}


class Op(torch.nn.Module):
    """An operation, called with a graph and features. Infinite results, of nodes that no edge
    enters, become 0."""

    def __init__(self, function: Callable, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *args):
        out = self.function(*args, **self.options)
        return (finite(out) if isinstance(out, Tensor) else tuple(map(finite, out))
                if isinstance(out, (tuple, list)) else out)


def finite(out: Tensor) -> Tensor:
    return out.masked_fill(out.isinf(), 0.0)


def named(name: str) -> Op:
    """The function of ``dgl.ops`` called so."""
    return Op(getattr(dgl.ops, name))


def features(target: str, shape: tuple) -> Tensor:
    """Of the nodes or edges of `graphs.square`; away from 0, so that they can be divided by."""
    x = torch.randn(TARGETS[target], *shape)
    return x + 0.5 * x.sign()


def bare() -> dgl.DGLGraph:
    """A graph of which some nodes have no edges."""
    u, v = graphs.square().edges()
    return dgl.graph((u % 20, v % 10), num_nodes=N)


def typed(empty: bool = False) -> dgl.DGLGraph:
    """Three types of nodes, each a source and a destination (DGL's own backward fails on others);
    two relations end in one of them. ``empty``: a relation has no edges, where DGL's own code
    fails."""
    def ends(src: int, dst: int, edges: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, src, (edges,)), torch.randint(0, dst, (edges,))

    edges = {("a", "r", "b"): ends(7, 9, 30), ("c", "s", "b"): ends(5, 9, 12),
             ("a", "t", "c"): ends(7, 5, 11), ("b", "q", "a"): ends(9, 7, 20)}
    return dgl.heterograph({**edges, ("c", "z", "b"): ([], [])} if empty else edges,
                           num_nodes_dict=dict(a=7, b=9, c=5))


def per_type(g: dgl.DGLGraph, shape: tuple) -> list[Tensor]:
    return [torch.randn(g.num_nodes(t), *shape) for t in g.ntypes]


def per_relation(g: dgl.DGLGraph, shape: tuple) -> list[Tensor]:
    return [torch.randn(g.num_edges(t), *shape) for t in g.canonical_etypes]
