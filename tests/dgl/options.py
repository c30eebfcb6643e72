"""DGL layers with their options, each on a small graph, for the compatibility table."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Case = tuple[str, str, Any, tuple, dict]

_N, _E, _F, _R = 12, 40, 16, 3


def cases() -> Iterator[Case]:
    """(class, option, layer, args, kwargs) of calls."""
    import dgl
    import torch

    torch.manual_seed(0)
    graph = dgl.add_self_loop(dgl.graph((torch.randint(0, _N, (_E,)), torch.randint(0, _N, (_E,))),
                                        num_nodes=_N))
    yield from _attention(graph, torch.randn(_N, _F))
    yield from _relational(graph, torch.randn(_N, _F))
    yield from _heterogeneous()
    yield from _plain(graph, torch.randn(_N, _F))


def _attention(graph: Any, x: Any) -> Iterator[Case]:
    import torch
    from dgl.nn import pytorch as nn

    for name in ("GATConv", "GATv2Conv"):
        cls = getattr(nn, name)
        yield name, "as constructed", cls(_F, 8, 4), (graph, x), {}
        yield name, "`feat_drop`, `attn_drop`", cls(_F, 8, 4, 0.5, 0.5), (graph, x), {}
        yield name, "`residual=True`", cls(_F, 8, 4, residual=True), (graph, x), {}
        yield name, "`get_attention=True`", cls(_F, 8, 4), (graph, x), dict(get_attention=True)
        yield name, "more than 512 channels per head", cls(_F, 520, 1), (graph, x), {}
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            yield name, str(dtype).removeprefix("torch."), cls(_F, 8, 4).to(dtype), (graph,
                                                                                     x.to(
                                                                                         dtype)), {}
        yield name, "block of a sampler", cls(_F, 8, 4), (_block(graph), x), {}
    weight = torch.rand(graph.num_edges(), 1)
    yield "GATConv", "`edge_weight`", nn.GATConv(_F, 8, 4), (graph, x), dict(edge_weight=weight)
    yield "DotGatConv", "as constructed", nn.DotGatConv(_F, 8, 4), (graph, x), {}
    yield "DotGatConv", "`get_attention=True`", nn.DotGatConv(_F, 8, 4), (graph,
                                                                          x), dict(
                                                                              get_attention=True)
    yield "AGNNConv", "as constructed", nn.AGNNConv(), (graph, x), {}
    edges = torch.randn(graph.num_edges(), 4)
    yield "EdgeGATConv", "as constructed", nn.EdgeGATConv(_F, 4, 8, 4), (graph, x, edges), {}
    yield "EGATConv", "as constructed", nn.EGATConv(_F, 4, 8, 4, 2), (graph, x, edges), {}


def _block(graph: Any) -> Any:
    import dgl

    return dgl.to_block(graph)


def _relational(graph: Any, x: Any) -> Iterator[Case]:
    import torch
    from dgl.nn import pytorch as nn

    types = torch.randint(0, _R, (graph.num_edges(),))
    for regularizer in (None, "basis", "bdd"):
        layer = nn.RelGraphConv(_F, 8, _R, regularizer, 2 if regularizer else None)
        yield "RelGraphConv", f"`regularizer={regularizer!r}`", layer, (graph, x, types), {}
    layer = nn.RelGraphConv(_F, 8, _R, dropout=0.5, layer_norm=True)
    yield "RelGraphConv", "`dropout`, `layer_norm=True`", layer, (graph, x, types), {}
    yield "RelGraphConv", "`norm`", nn.RelGraphConv(_F, 8,
                                                    _R), (graph, x, types,
                                                          torch.rand(graph.num_edges(), 1)), {}
    yield "HGTConv", "as constructed", nn.HGTConv(_F, 8, 2, 2,
                                                  _R), (graph, x, torch.randint(0, 2, (_N,)),
                                                        types), {}
    yield "TypedLinear", "as constructed", nn.TypedLinear(_F, 8,
                                                          2), (x, torch.randint(0, 2, (_N,))), {}


def _heterogeneous() -> Iterator[Case]:
    import dgl
    import torch
    from dgl.nn import pytorch as nn

    ends = {key: (torch.randint(0, _N, (_E,)), torch.randint(0, _N, (_E,)))
            for key in (("a", "goes", "b"), ("b", "back", "a"))}
    graph = dgl.heterograph(ends, {"a": _N, "b": _N})
    x = {"a": torch.randn(_N, _F), "b": torch.randn(_N, _F)}
    for option, make in (("of `GraphConv`, `norm='right'`",
                          lambda: nn.GraphConv(_F, 8, norm="right", allow_zero_in_degree=True)),
                         ("of `GraphConv`, `norm='both'`",
                          lambda: nn.GraphConv(_F, 8, allow_zero_in_degree=True)),
                         ("of `SAGEConv`, mean", lambda: nn.SAGEConv(_F, 8, "mean")),
                         ("of `SAGEConv`, pool", lambda: nn.SAGEConv(_F, 8, "pool")),
                         ("of `GATConv`", lambda: nn.GATConv(_F, 8, 2, allow_zero_in_degree=True))):
        yield "HeteroGraphConv", option, nn.HeteroGraphConv({"goes": make(),
                                                             "back": make()}), (graph, x), {}


def _plain(graph: Any, x: Any) -> Iterator[Case]:
    import torch
    from dgl.nn import pytorch as nn

    weight = torch.rand(graph.num_edges())
    for norm in ("both", "right", "left", "none"):
        yield "GraphConv", f"`norm={norm!r}`", nn.GraphConv(_F, 8, norm=norm), (graph, x), {}
    yield "GraphConv", "`edge_weight`", nn.GraphConv(_F, 8,
                                                     norm="none"), (graph,
                                                                    x), dict(edge_weight=weight)
    yield "GraphConv", "block of a sampler", nn.GraphConv(_F, 8), (_block(graph), x), {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield ("GraphConv", str(dtype).removeprefix("torch."), nn.GraphConv(_F, 8).to(dtype),
               (graph, x.to(dtype)), {})
    for kind in ("mean", "gcn", "pool", "lstm"):
        yield "SAGEConv", f"`aggregator_type={kind!r}`", nn.SAGEConv(_F, 8, kind), (graph, x), {}
    for kind in ("sum", "mean", "max"):
        yield "GINConv", f"`aggregator_type={kind!r}`", nn.GINConv(torch.nn.Linear(_F, 8),
                                                                   kind), (graph, x), {}
    edges = torch.randn(graph.num_edges(), _F)
    yield "GatedGCNConv", "as constructed", nn.GatedGCNConv(_F, _F, 8), (graph, x, edges), {}
    for kind in ("sum", "mean", "max"):
        network = torch.nn.Sequential(torch.nn.Linear(_F, 8), torch.nn.ReLU(),
                                      torch.nn.Linear(8, 8 * _F))
        yield "NNConv", f"`aggregator_type={kind!r}`", nn.NNConv(_F, 8, network, kind), (
            graph, x, edges), {}
    yield "NNConv", "a network that is one map", nn.NNConv(
        _F, 8, torch.nn.Linear(_F, 8 * _F), "sum"), (graph, x, edges), {}
