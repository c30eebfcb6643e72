"""PyG layers with their options, each on a small graph, for the compatibility table."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Case = tuple[str, str, Any, tuple, dict]

_N, _M, _E, _F, _R = 12, 8, 40, 16, 3
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv")
WITH_EDGES = ("GATConv", "GATv2Conv", "TransformerConv")


def cases() -> Iterator[Case]:
    """(class, option, layer, args, kwargs) of calls."""
    import torch

    torch.manual_seed(0)
    yield from _attention()
    yield from _relational()
    yield from _heterogeneous()
    yield from _plain()


def _attention() -> Iterator[Case]:
    import torch
    from torch_geometric import nn

    x, edges = torch.randn(_N, _F), torch.randint(0, 8, (2, _E))
    for name in ATTENTION:
        cls = getattr(nn, name)
        yield name, "as constructed", cls(_F, 8, heads=4), (x, edges), {}
        yield name, "`dropout`", cls(_F, 8, heads=4, dropout=0.5), (x, edges), {}
        yield name, "`concat=False`", cls(_F, 8, heads=4, concat=False), (x, edges), {}
        yield name, "`aggr='mean'`", cls(_F, 8, aggr="mean"), (x, edges), {}
        yield name, "`flow='target_to_source'`", cls(_F, 8, flow="target_to_source"), (x, edges), {}
        yield name, "more than 512 channels per head", cls(_F, 520), (x, edges), {}
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            yield name, str(dtype).removeprefix("torch."), cls(_F, 8).to(dtype), (x.to(dtype),
                                                                                  edges), {}
        yield name, "adjacency as a sparse tensor", cls(_F, 8), (x, _sparse(edges)), {}
        yield name, "a message hook", _hooked(cls(_F, 8)), (x, edges), {}
        if name != "SuperGATConv":
            yield (name, "`return_attention_weights=True`", cls(_F, 8), (x, edges),
                   dict(return_attention_weights=True))
            yield name, "pairs of features (bipartite)", cls((_F, _F), 8,
                                                             **_no_loops(name)), ((x, x[:_M]),
                                                                                  edges), {}
    for name in WITH_EDGES:
        yield name, "`edge_attr`", getattr(nn, name)(_F, 8,
                                                     edge_dim=4), (x, edges, torch.randn(_E, 4)), {}
    yield "GATConv", "`residual=True`", nn.GATConv(_F, 8, residual=True), (x, edges), {}
    yield "GATv2Conv", "`share_weights=True`", nn.GATv2Conv(_F, 8,
                                                            share_weights=True), (x, edges), {}
    yield "TransformerConv", "`beta=True`", nn.TransformerConv(_F, 8, beta=True), (x, edges), {}
    for kind in ("MX", "SD"):
        yield "SuperGATConv", f"`attention_type='{kind}'`", nn.SuperGATConv(_F, 8,
                                                                            attention_type=kind), (
                                                                                x, edges), {}
    yield "AGNNConv", "as constructed", nn.AGNNConv(), (x, edges), {}
    yield "AGNNConv", "float64", nn.AGNNConv().double(), (x.double(), edges), {}


def _no_loops(name: str) -> dict:
    return {} if name == "TransformerConv" else dict(add_self_loops=False)


def _sparse(edges: Any) -> Any:
    import torch

    return torch.sparse_coo_tensor(edges, torch.ones(_E), (_N, _N),
                                   check_invariants=True).coalesce()


def _hooked(layer: Any) -> Any:
    layer.register_message_forward_hook(lambda module, inputs, out: None)
    return layer


def _relational() -> Iterator[Case]:
    import torch
    from torch_geometric import nn

    x, edges, types = torch.randn(_N, _F), torch.randint(0, 8, (2, _E)), torch.randint(0, _R, (_E,))
    for name in ("RGCNConv", "FastRGCNConv"):
        cls = getattr(nn, name)
        for aggregation in ("mean", "sum", "max"):
            yield name, f"`aggr='{aggregation}'`", cls(_F, 8, _R,
                                                       aggr=aggregation), (x, edges, types), {}
        yield name, "`num_bases`", cls(_F, 8, _R, num_bases=2), (x, edges, types), {}
        yield name, "`num_blocks`", cls(_F, 8, _R, num_blocks=2), (x, edges, types), {}
        yield name, "no features (`x=None`)", cls(_N, 8, _R), (None, edges, types), {}
        yield name, "float64", cls(_F, 8, _R).double(), (x.double(), edges, types), {}
    for option, options in (("as constructed", {}), ("`mod='additive'`", dict(mod="additive")),
                            ("`attention_mechanism='within-relation'`",
                             dict(attention_mechanism="within-relation")),
                            ("`attention_mode='multiplicative-self-attention'`",
                             dict(attention_mode="multiplicative-self-attention", heads=2, dim=2)),
                            ("`dropout`", dict(dropout=0.5)), ("`num_bases`", dict(num_bases=2))):
        yield "RGATConv", option, nn.RGATConv(_F, 8, _R, **options), (x, edges, types), {}
    yield "RGATConv", "`edge_attr`", nn.RGATConv(_F, 8, _R,
                                                 edge_dim=4), (x, edges, types,
                                                               torch.randn(_E, 4)), {}
    yield "FiLMConv", "one relation", nn.FiLMConv(_F, 8), (x, edges), {}
    yield "FiLMConv", "several relations", nn.FiLMConv(_F, 8, _R), (x, edges, types), {}
    heat = nn.HEATConv(_F, 8, 2, _R, 3, 4, 4, heads=2)
    yield "HEATConv", "as constructed", heat, (x, edges, torch.randint(0, 2, (_N,)), types,
                                               torch.randn(_E, 4)), {}
    yield "HeteroLinear", "types unsorted", nn.HeteroLinear(_F, 8,
                                                            _R), (x,
                                                                  torch.randint(0, _R, (_N,))), {}
    kinds = {f"t{i}": torch.randn(_N, _F) for i in range(12)}
    yield "HeteroDictLinear", "many types", nn.HeteroDictLinear(_F, 8, types=list(kinds)), (kinds,
                                                                                            ), {}
    yield "HeteroDictLinear", "types of several widths", nn.HeteroDictLinear({"a": _F, "b": 3},
                                                                             8), (
        {"a": x, "b": torch.randn(_N, 3)},), {}


def _heterogeneous() -> Iterator[Case]:
    import torch
    from torch_geometric import nn

    x = {"a": torch.randn(_N, _F), "b": torch.randn(_M, _F)}
    edges = {("a", "to", "b"): torch.randint(0, 8, (2, _E)),
             ("b", "back", "a"): torch.randint(0, 8, (2, _E))}
    metadata = (list(x), list(edges))
    yield "HGTConv", "as constructed", nn.HGTConv(_F, 8, metadata, heads=2), (x, edges), {}
    yield "HANConv", "as constructed", nn.HANConv(_F, 8, metadata, heads=2), (x, edges), {}
    yield "HANConv", "`dropout`", nn.HANConv(_F, 8, metadata, heads=2, dropout=0.5), (x, edges), {}
    for option, make in (("of `SAGEConv`", lambda: nn.SAGEConv((_F, _F), 8)),
                         ("of `GraphConv`", lambda: nn.GraphConv((_F, _F), 8)),
                         ("of `GATConv`", lambda: nn.GATConv((_F, _F), 8, add_self_loops=False)),
                         ("of `GATv2Conv`",
                          lambda: nn.GATv2Conv((_F, _F), 8, add_self_loops=False)),
                         ("of `GINConv`", lambda: nn.GINConv(torch.nn.Linear(_F, 8)))):
        yield "HeteroConv", option, nn.HeteroConv({key: make() for key in edges}), (x, edges), {}
    mixed = nn.HeteroConv(dict(zip(edges, (nn.SAGEConv((_F, _F), 8), nn.GraphConv((_F, _F), 8)))))
    yield "HeteroConv", "of different layers, one of each", mixed, (x, edges), {}
    square = {("a", name, "a"): torch.randint(0, 8, (2, _E)) for name in ("to", "near", "from")}
    yield "HeteroConv", "of `GCNConv`", nn.HeteroConv({key: nn.GCNConv(_F, 8)
                                                       for key in square}), (x, square), {}
    kinds = nn.SAGEConv((_F, _F), 8), nn.SAGEConv((_F, _F), 8), nn.GraphConv((_F, _F), 8)
    yield "HeteroConv", "of different layers, some alike", nn.HeteroConv(
        dict(zip(square, kinds))), (x, square), {}
    largest = nn.HeteroConv({key: nn.SAGEConv((_F, _F), 8) for key in edges}, aggr="max")
    yield "HeteroConv", "`aggr='max'`", largest, (x, edges), {}


def _plain() -> Iterator[Case]:
    """Layers whose message passing alone is taken over, and PNAConv."""
    import torch
    from torch_geometric import nn

    x, edges, weight = torch.randn(_N, _F), torch.randint(0, 8, (2, _E)), torch.rand(_E)
    yield "GCNConv", "as constructed", nn.GCNConv(_F, 8), (x, edges), {}
    yield "GCNConv", "`edge_weight`", nn.GCNConv(_F, 8), (x, edges, weight), {}
    yield ("GCNConv", "`flow='target_to_source'`", nn.GCNConv(_F, 8, flow="target_to_source"),
           (x, edges), {})
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield "GCNConv", str(dtype).removeprefix("torch."), nn.GCNConv(_F,
                                                                       8).to(dtype), (x.to(dtype),
                                                                                      edges), {}
    yield "GCNConv", "adjacency as a sparse tensor", nn.GCNConv(_F, 8), (x, _sparse(edges)), {}
    yield ("GCNConv", "adjacency as a `torch.sparse_csr` matrix", nn.GCNConv(_F, 8),
           (x, _sparse(edges).to_sparse_csr()), {})
    yield "GCNConv", "a message hook", _hooked(nn.GCNConv(_F, 8)), (x, edges), {}
    for aggr in ("mean", "max", "softmax", "powermean", "std", "median", ["mean", "max"],
                 ["mean", "max", "std"]):
        yield "SAGEConv", f"`aggr={aggr!r}`", nn.SAGEConv(_F, 8, aggr), (x, edges), {}
    yield "SAGEConv", "pairs of features (bipartite)", nn.SAGEConv((_F, _F), 8), ((x, x[:_M]),
                                                                                  edges), {}
    yield "GENConv", "as constructed", nn.GENConv(_F, 8), (x, edges), {}
    yield "GENConv", "`edge_attr`", nn.GENConv(_F, 8,
                                               edge_dim=4), (x, edges, torch.randn(_E, 4)), {}
    for name, layer in (("GINConv", nn.GINConv(torch.nn.Linear(_F, 8))),
                        ("GraphConv", nn.GraphConv(_F, 8)), ("SGConv", nn.SGConv(_F, 8, K=2)),
                        ("TAGConv", nn.TAGConv(_F, 8)), ("LEConv", nn.LEConv(_F, 8))):
        yield name, "as constructed", layer, (x, edges), {}
    yield from _more_than_neighbours(x, edges)
    for option, options in (("as constructed", {}), ("`towers=2`", dict(towers=2)),
                            ("`pre_layers=2`", dict(pre_layers=2))):
        yield "PNAConv", option, _pna(**options), (x, edges), {}
    yield "PNAConv", "`edge_attr`", _pna(edge_dim=4), (x, edges, torch.randn(_E, 4)), {}
    yield "PNAConv", "float64", _pna().double(), (x.double(), edges), {}
    attr, net = torch.randn(_E, 4), torch.nn.Sequential(torch.nn.Linear(4, _F * 8))
    for option, network, aggr in (("as constructed", net, "add"), ("`aggr='max'`", net, "max"),
                                  ("`nn` that is no `Sequential`", net[0], "add")):
        yield "NNConv", option, nn.NNConv(_F, 8, network, aggr), (x, edges, attr), {}


def _more_than_neighbours(x: Any, edges: Any) -> Iterator[Case]:
    """Layers whose messages are more than neighbours' features, and EGConv."""
    import torch
    from torch_geometric import nn

    attr, mlp = torch.randn(_E, 4), torch.nn.Linear(_F, 8)
    yield "LEConv", "`edge_weight`", nn.LEConv(_F, 8), (x, edges, torch.rand(_E)), {}
    yield "LEConv", "`aggr='max'`", nn.LEConv(_F, 8, aggr="max"), (x, edges), {}
    yield "GINEConv", "as constructed", nn.GINEConv(mlp), (x, edges, torch.randn(_E, _F)), {}
    yield "GINEConv", "`edge_dim`", nn.GINEConv(mlp, edge_dim=4), (x, edges, attr), {}
    yield "GINEConv", "`aggr='max'`", nn.GINEConv(mlp, edge_dim=4, aggr="max"), (x, edges, attr), {}
    for aggr in ("powermean", "add", "max"):
        yield "GENConv", f"`aggr={aggr!r}`", nn.GENConv(_F, 8, aggr=aggr), (x, edges), {}
    for aggr in ("powermean", "add"):
        yield "GENConv", f"`aggr={aggr!r}`, `edge_dim`", nn.GENConv(_F, 8, aggr=aggr,
                                                                    edge_dim=4), (x, edges,
                                                                                  attr), {}
    yield "ResGatedGraphConv", "as constructed", nn.ResGatedGraphConv(_F, 8), (x, edges), {}
    yield "ResGatedGraphConv", "`edge_dim`", nn.ResGatedGraphConv(_F, 8, edge_dim=4), (x, edges,
                                                                                       attr), {}
    yield ("ResGatedGraphConv", "`act=Tanh()`", nn.ResGatedGraphConv(_F, 8, act=torch.nn.Tanh()),
           (x, edges), {})
    yield "EGConv", "as constructed", nn.EGConv(_F, 8), (x, edges), {}
    yield "EGConv", "all `aggregators`", nn.EGConv(_F, 8,
                                                   ["sum", "mean", "symnorm", "min", "max", "var",
                                                    "std"]), (x, edges), {}


def _pna(**options: Any) -> Any:
    import torch
    from torch_geometric import nn

    return nn.PNAConv(_F, 8, ["mean", "min", "max", "std"], ["identity", "amplification"],
                      torch.tensor([1, 3, 5]), **options)
