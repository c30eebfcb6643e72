"""PyG's layers over random metagraphs, each with the same made relation by relation."""
from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import metagraph_draws as draws
from tests.oracle.metagraph_draws import WIDTH, Case, EdgeType, Metagraph

Edges = dict[EdgeType, Tensor]


def _shapes(meta: Metagraph, r: random.Random) -> dict[str, tuple[int, int]]:
    types = r.sample(list(meta.nodes), len(meta.nodes)) if r.random() < 0.5 else list(meta.nodes)
    return {t: (meta.nodes[t], meta.widths[t]) for t in types}


# ---- layers of one relation ----

def _mlp(i: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, WIDTH), nn.ReLU(), nn.Linear(WIDTH, out))


def _heads(o: random.Random, out: int) -> dict[str, Any]:
    heads, concat = o.choice([1, 2, 4]), o.random() < 0.7
    return dict(out_channels=out // heads if concat else out, heads=heads, concat=concat,
                bias=o.random() < 0.7)


def _sage(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import SAGEConv

    ends = (-1, -1) if o.random() < 0.1 else (i, j)
    return SAGEConv(ends, out, aggr=o.choice(["mean", "mean", "add", "max"]),
                    root_weight=o.random() < 0.8, bias=o.random() < 0.7,
                    normalize=o.random() < 0.07,
                    project=ends[0] > 0 and o.random() < 0.07)


def _graph(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import GraphConv

    return GraphConv((i, j), out, aggr=o.choice(["add", "add", "mean", "max"]),
                     bias=o.random() < 0.7)


def _gcn(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import GCNConv

    if not own:
        return _sage(o, i, j, out, own)
    normalize = o.random() < 0.8
    return GCNConv(i, out, normalize=normalize, add_self_loops=normalize and o.random() < 0.7,
                   bias=o.random() < 0.7, improved=o.random() < 0.1)


def _gin(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import GINConv

    if i != j:
        return _sage(o, i, j, out, own)
    return GINConv(_mlp(i, out), eps=o.choice([0.0, 0.3]), train_eps=o.random() < 0.4,
                   aggr=o.choice(["add", "add", "mean"]))


def _gat(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import GATConv

    ends = i if own and o.random() < 0.5 else (i, j)
    return GATConv(ends, add_self_loops=own and o.random() < 0.6, residual=o.random() < 0.07,
                   negative_slope=o.choice([0.2, 0.2, 0.0]), **_heads(o, out))


def _gatv2(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import GATv2Conv

    return GATv2Conv((i, j), add_self_loops=own and o.random() < 0.6,
                     share_weights=i == j and o.random() < 0.2,
                     negative_slope=o.choice([0.2, 0.2, 0.0]), **_heads(o, out))


def _transformer(o: random.Random, i: int, j: int, out: int, own: bool) -> nn.Module:
    from torch_geometric.nn import TransformerConv

    return TransformerConv((i, j), root_weight=o.random() < 0.7, **_heads(o, out))


KINDS = {"sage": _sage, "graph": _graph, "gcn": _gcn, "gin": _gin, "gat": _gat, "gatv2": _gatv2}
_ALL = {**KINDS, "transformer": _transformer}


def _layers(r: random.Random, meta: Metagraph, kind: str,
            out: dict[EdgeType, int]) -> dict[EdgeType, nn.Module]:
    """A layer for each relation; sometimes two relations share one.

    Layers are of one kind or mixed, with the same options or with options of their own.
    """
    options, alike, found = r.randrange(1 << 30), r.random() < 0.65, {}
    for name in meta.relations:
        own = random.Random(options if alike or r.random() < 0.5 else r.randrange(1 << 30))
        make = _ALL[r.choice(list(_ALL)) if kind == "mixed" else kind]
        i, j = meta.widths[name[0]], meta.widths[name[2]]
        found[name] = make(own, i, j, out[name], name[0] == name[2])
    one_width = len(set(meta.widths.values())) == 1 and len(set(out.values())) == 1
    if one_width and kind not in ("gcn", "gat") and r.random() < 0.1:
        a, b = r.choice(meta.relations), r.choice(meta.relations)
        if not getattr(found[a], "add_self_loops", False):
            found[b] = found[a]
    return found


# ---- HeteroConv ----

def hetero_conv(r: random.Random, device: torch.device) -> Case:
    from torch_geometric.nn import HeteroConv

    kind = r.choice([*KINDS, "mixed", "mixed"])
    meta = draws.metagraph(r, odd=True, own=kind == "gcn" and r.random() < 0.8,
                           one_width=kind == "gin")
    aggr = r.choice(["sum", "sum", "mean", "mean", "max", "min", "cat", None])
    out = {name: r.choice([4, 8]) if aggr == "cat" else WIDTH for name in meta.relations}
    module = HeteroConv(_layers(r, meta, kind, out), aggr=aggr)
    edges = {name: t.to(device) for name, t in meta.edges.items()
             if len(meta.edges) == 1 or r.random() < 0.9}

    def truth(module: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = ((name, conv(*_given(name, x, edges))) for name, conv in module.convs.items()
                 if name in edges)
        return {t: draws.put_together(found, aggr) for t, found in draws.by_target(parts).items()}

    shapes = _shapes(meta, r)
    return Case(f"HeteroConv of {kind}, aggr={aggr}: {meta}", module, shapes,
                lambda module, x: module(x, edges), truth, draws.longest_sum(meta))


def _given(name: EdgeType, x: dict[str, Tensor], edges: Edges) -> tuple[Any, Tensor]:
    src, _, dst = name
    return x[src] if src == dst else (x[src], x[dst]), edges[name]


# ---- to_hetero ----

class Net(nn.Module):
    """One layer or two."""

    def __init__(self, first: nn.Module, second: nn.Module | None):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return x if self.second is None else self.second(x.relu(), edge_index)


def to_hetero(r: random.Random, device: torch.device) -> Case:
    from torch_geometric import nn as pyg

    two = r.random() < 0.6
    kind = r.choice(["sage", "graph", "gat", "gatv2", "gin"])
    meta = draws.metagraph(r, entered=two, one_width=kind in ("graph", "gin"))
    types = [t for t in meta.nodes if any(t in (name[0], name[2]) for name in meta.relations)]
    meta = meta._replace(nodes={t: meta.nodes[t] for t in types})
    aggr = r.choice(["sum", "sum", "mean", "max", "min", "mul"])
    first, second = (_copied(r, kind) for _ in range(2))
    module = pyg.to_hetero(Net(first, second if two else None), (types, meta.relations), aggr=aggr)
    edges = {name: t.to(device) for name, t in meta.edges.items()}

    def layer(modules: nn.ModuleDict, x: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = ((name, modules["__".join(name)](*_given(name, x, edges)))
                 for name in meta.relations)
        return {t: _folded(found, aggr) for t, found in draws.by_target(parts).items()}

    def truth(module: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        out = layer(module.first, x)
        return layer(module.second, {t: v.relu() for t, v in out.items()}) if two else out

    return Case(f"to_hetero of {1 + two} {kind}, aggr={aggr}: {meta}", module, _shapes(meta, r),
                lambda module, x: {t: v for t, v in module(x, edges).items() if v is not None},
                truth)


def _copied(r: random.Random, kind: str) -> nn.Module:
    """A layer that is copied for each relation."""
    from torch_geometric.nn import GATConv, GATv2Conv, GINConv, GraphConv, SAGEConv

    bias = r.random() < 0.7
    if kind == "sage":
        return SAGEConv((-1, -1), WIDTH, aggr=r.choice(["mean", "add", "max"]),
                        root_weight=r.random() < 0.8, bias=bias)
    if kind == "graph":
        return GraphConv((WIDTH, WIDTH), WIDTH, aggr=r.choice(["add", "mean"]), bias=bias)
    if kind == "gin":
        return GINConv(_mlp(WIDTH, WIDTH), train_eps=r.random() < 0.5)
    return {"gat": GATConv, "gatv2": GATv2Conv}[kind]((-1, -1), add_self_loops=False,
                                                      **_heads(r, WIDTH))


def _folded(parts: list[Tensor], aggr: str) -> Tensor:
    """Parts put together two at a time, as the host does it.

    The order matters for maxima and minima: equal numbers share the gradient of their pair.
    """
    fold = {"mul": torch.mul, "max": torch.max, "min": torch.min}.get(aggr)
    if fold is None:
        return draws.put_together(parts, aggr)
    queue = deque(parts)
    while len(queue) > 1:
        queue.append(fold(queue.popleft(), queue.popleft()))
    return queue[0]


# ---- to_hetero_with_bases ----

def with_bases(r: random.Random, device: torch.device) -> Case:
    from torch_geometric import nn as pyg

    kind, two, aligned = (r.choice(["sage", "graph", "gcn", "gin"]), r.random() < 0.5,
                          r.random() < 0.4)
    meta = draws.metagraph(r, entered=True, one_width=not aligned)
    if len(meta.relations) == 1 and len(meta.nodes) > 1:
        # the host does not shift the ids of a single relation
        return with_bases(r, device)
    types = list(meta.nodes)
    bias, aggr = r.random() < 0.7, r.choice(["mean", "add", "add", "max"])
    made = {"sage": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr=aggr, bias=bias,
                                         root_weight=r.random() < 0.7),
            "graph": lambda: pyg.GraphConv(WIDTH, WIDTH, aggr=aggr, bias=bias),
            "gcn": lambda: pyg.GCNConv(WIDTH, WIDTH, add_self_loops=False,
                                       normalize=r.random() < 0.7, bias=bias),
            "gin": lambda: pyg.GINConv(_mlp(WIDTH, WIDTH))}[kind]
    net = Net(made(), made() if two else None)
    module = pyg.to_hetero_with_bases(net, (types, meta.relations), r.choice([1, 2, 3]),
                                      in_channels={"x": WIDTH} if aligned else None)
    edges = {name: t.contiguous().to(device) for name, t in meta.edges.items()}

    def truth(module: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        if aligned:
            x = {t: module.align_lin__x.lins[t](v) for t, v in x.items()}
        joined = torch.cat([x[t] for t in types])
        ends = _joined(meta, types, edges)
        joined = _of_bases(module.first, joined, ends)
        joined = _of_bases(module.second, joined.relu(), ends) if two else joined
        return dict(zip(types, joined.split([meta.nodes[t] for t in types])))

    return Case(f"to_hetero_with_bases of {1 + two} {kind}, aggr={aggr}: {meta}", module,
                _shapes(meta, r), lambda module, x: module(x, edges), truth,
                draws.longest_sum(meta))


def _joined(meta: Metagraph, types: list[str], edges: Edges) -> list[tuple[Tensor, Tensor]]:
    """(src, dst) of each relation, over the nodes of all types."""
    start = {t: sum(meta.nodes[other] for other in types[:at]) for at, t in enumerate(types)}
    return [(edges[name][0] + start[name[0]], edges[name][1] + start[name[2]])
            for name in meta.relations]


def _of_bases(layer: nn.Module, x: Tensor, ends: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum(_of_basis(conv, x, ends) for conv in layer.convs)


def _of_basis(conv: nn.Module, x: Tensor, ends: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One basis: each relation's messages, times its number, reduced together."""
    kind, numbers = type(conv).__name__, conv.edge_type_weight.view(-1)
    rows = conv.lin(x) if kind == "GCNConv" else x
    dst = torch.cat([d for _, d in ends])
    messages = torch.cat([rows[s] * number for (s, _), number in zip(ends, numbers)])
    count = x.new_zeros(x.shape[0]).index_add(0, dst, torch.ones_like(dst, dtype=x.dtype))
    if kind == "GCNConv" and conv.normalize:
        root = count.pow(-0.5).masked_fill(count == 0, 0.0)
        messages = messages * (root[torch.cat([s for s, _ in ends])] * root[dst]).unsqueeze(1)
    reduced = _reduced(conv, messages, dst, count)
    if kind == "GCNConv":
        return reduced if conv.bias is None else reduced + conv.bias
    if kind == "GINConv":
        return conv.nn(reduced + (1 + conv.eps) * x)
    if kind == "GraphConv":
        return conv.lin_rel(reduced) + conv.lin_root(x)
    return conv.lin_l(reduced) + conv.lin_r(x) if conv.root_weight else conv.lin_l(reduced)


def _reduced(conv: nn.Module, messages: Tensor, dst: Tensor, count: Tensor) -> Tensor:
    out = messages.new_zeros(count.shape[0], messages.shape[1])
    name = type(conv.aggr_module).__name__
    if name == "MaxAggregation":
        rows = dst.view(-1, 1).expand_as(messages)
        return out.scatter_reduce(0, rows, messages, "amax", include_self=False)
    out = out.index_add(0, dst, messages)
    return out / count.clamp(min=1).unsqueeze(1) if name == "MeanAggregation" else out


# ---- HGT and HAN ----

def hgt(r: random.Random, device: torch.device) -> Case:
    from torch_geometric.nn import HGTConv

    meta = draws.metagraph(r)
    types, heads = r.sample(list(meta.nodes), len(meta.nodes)), r.choice([1, 2, 4])
    module = HGTConv({t: meta.widths[t] for t in types}, WIDTH, (types, meta.relations),
                     heads=heads)
    names = ([name for name in meta.relations if len(meta.relations) == 1 or r.random() < 0.9]
             or list(meta.relations))
    # the host assumes that relations are sorted; in another order it mixes up their weights
    ordered = r.random() < 0.8
    if not ordered:
        r.shuffle(names)
    edges = {name: meta.edges[name].to(device) for name in names}
    host = names == sorted(names, key=meta.relations.index)
    return Case(f"HGTConv of {heads} heads, "
                f"relations {'as' if host else 'not as'} in the metadata: {meta}", module,
                _shapes(meta, r), lambda module, x: module(x, edges),
                lambda module, x: _hgt(module, x, edges), draws.longest_sum(meta), host)


def _hgt(layer: nn.Module, x: dict[str, Tensor], edges: Edges) -> dict[str, Tensor]:
    heads, relations, out = layer.heads, len(layer.edge_types), {}
    width = layer.out_channels // heads
    keys, queries, values = ({t: layer.kqv_lin.lins[t](v).view(-1, 3, heads, width)[:, at]
                              for t, v in x.items()} for at in range(3))
    for target in dict.fromkeys(name[2] for name in layer.edge_types):
        if target not in x:
            continue
        logits, messages, ends = [], [], []
        for name in edges:
            if name[2] == target:
                at = torch.arange(heads) * relations + layer.edge_types.index(name)
                src, dst = edges[name]
                key = torch.einsum("nhd,hde->nhe", keys[name[0]], layer.k_rel.weight[at])
                value = torch.einsum("nhd,hde->nhe", values[name[0]], layer.v_rel.weight[at])
                logit = ((queries[target][dst] * key[src]).sum(-1) * layer.p_rel["__".join(name)]
                         / math.sqrt(width))
                logits.append(logit), messages.append(value[src]), ends.append(dst)
        nodes = x[target].shape[0]
        sums = (draws.softmax_sum(logits, messages, ends, nodes) if logits
                else keys[target].new_zeros(nodes, heads, width))
        found = layer.out_lin.lins[target](F.gelu(sums.flatten(1)))
        if found.shape[1] == x[target].shape[1]:
            share = layer.skip[target].sigmoid()
            found = share * found + (1 - share) * x[target]
        out[target] = found
    return {t: out[t] for t in layer.kqv_lin.lins if t in out}


def han(r: random.Random, device: torch.device) -> Case:
    from torch_geometric.nn import HANConv

    meta = draws.metagraph(r)
    types, heads = r.sample(list(meta.nodes), len(meta.nodes)), r.choice([1, 2, 4])
    module = HANConv({t: meta.widths[t] for t in types}, WIDTH, (types, meta.relations),
                     heads=heads, negative_slope=r.choice([0.2, 0.0]))
    edges = {name: t.to(device) for name, t in meta.edges.items()
             if len(meta.edges) == 1 or r.random() < 0.9}
    weights = r.random() < 0.3

    def flat(found: Any) -> dict[Any, Tensor]:
        outs, shares = found if weights else (found, {})
        outs = {**outs, **{f"share of {t}": v for t, v in shares.items()}}
        return {t: v for t, v in outs.items() if v is not None}

    return Case(f"HANConv of {heads} heads: {meta}", module, _shapes(meta, r),
                lambda module, x: flat(module(x, edges, return_semantic_attention_weights=weights)),
                lambda module, x: flat(_han(module, x, edges, weights)), draws.longest_sum(meta))


def _han(layer: nn.Module, x: dict[str, Tensor], edges: Edges, weights: bool) -> Any:
    width = layer.out_channels // layer.heads
    rows = {t: layer.proj[t](v).view(-1, layer.heads, width) for t, v in x.items()}
    outs, shares = dict.fromkeys(x), dict.fromkeys(x)
    parts = {t: [] for t in x}
    for name, (src, dst) in edges.items():
        key = "__".join(name)
        a_src, a_dst = ((rows[name[0]] * layer.lin_src[key]).sum(-1),
                        (rows[name[2]] * layer.lin_dst[key]).sum(-1))
        logit = F.leaky_relu(a_src[src] + a_dst[dst], layer.negative_slope)
        sums = draws.softmax_sum([logit], [rows[name[0]][src]], [dst], x[name[2]].shape[0])
        parts[name[2]].append(sums.flatten(1).relu())
    for t, found in parts.items():
        if found:
            stacked = torch.stack(found)
            if not stacked.numel():
                outs[t] = stacked.view(0, stacked.shape[-1])
                continue
            score = (layer.q * torch.tanh(layer.k_lin(stacked)).mean(1)).sum(-1)
            shares[t] = score.softmax(0)
            outs[t] = (shares[t].view(-1, 1, 1) * stacked).sum(0)
    return (outs, shares) if weights else outs


CASES = {"HeteroConv": hetero_conv, "to_hetero": to_hetero, "to_hetero_with_bases": with_bases,
         "HGTConv": hgt, "HANConv": han}
