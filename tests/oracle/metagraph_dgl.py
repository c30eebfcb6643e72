"""DGL's layers over random metagraphs, and the same results computed relation by relation.

Graphs are on the CPU.
"""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import metagraph_draws as draws
from tests.oracle.metagraph_draws import WIDTH, Case, EdgeType, Metagraph


def _graph_conv(o: random.Random, i: int, j: int, **more: Any) -> nn.Module:
    from dgl.nn import GraphConv

    activation = torch.tanh if o.random() < 0.05 else None
    norm = o.choice(["right", "right", "right", "none", "none", "both"])
    return GraphConv(i, WIDTH, norm=norm, bias=o.random() < 0.7, activation=activation)


def _sage_conv(o: random.Random, i: int, j: int, **more: Any) -> nn.Module:
    from dgl.nn import SAGEConv

    return SAGEConv((i, j), WIDTH, "pool" if o.random() < 0.1 else "mean", bias=o.random() < 0.7)


def _gat_conv(o: random.Random, i: int, j: int, **more: Any) -> nn.Module:
    from dgl.nn import GATConv

    return GATConv((i, j), WIDTH, 2, bias=o.random() < 0.7, residual=o.random() < 0.1)


def _gin_conv(o: random.Random, i: int, j: int, **more: Any) -> nn.Module:
    from dgl.nn import GINConv

    return (GINConv(nn.Linear(i, WIDTH), "sum", learn_eps=o.random() < 0.5) if i == j
            else _sage_conv(o, i, j))


_KINDS = {"GraphConv": _graph_conv, "SAGEConv": _sage_conv, "GATConv": _gat_conv,
          "GINConv": _gin_conv}


def _aggregate(r: random.Random) -> tuple[Any, str | None]:
    """What HeteroGraphConv takes, and its name for `put_together`."""
    how = r.choice(["sum"] * 4 + ["mean"] * 4 + ["max", "min", "stack", "callable"])
    return (_added, "sum") if how == "callable" else (how, how)


def _added(parts: list[Tensor], target: str) -> Tensor:
    return sum(parts[1:], start=parts[0])


def hetero_graph_conv(r: random.Random, device: torch.device) -> Case:
    import dgl
    from dgl.nn import HeteroGraphConv

    kind = r.choice(["GraphConv", "GraphConv", "SAGEConv", "SAGEConv", "GATConv", "mixed"])
    meta = draws.metagraph(r, one_width=r.random() < 0.5)
    aggregate, how = _aggregate(r)
    if kind == "mixed":
        how = None if how == "stack" else how
    canonical = len({name[1] for name in meta.relations}) < len(meta.relations) or r.random() < 0.2
    layers = _layers(r, meta, kind)
    mods = {name if canonical else name[1]: layer for name, layer in layers.items()}
    module = HeteroGraphConv(mods, aggregate=aggregate)
    ids = r.choice([torch.int64, torch.int64, torch.int32])
    g = dgl.heterograph({name: tuple(t) for name, t in meta.edges.items()}, meta.nodes, idtype=ids)
    form = r.choice(["one", "one", "one", "pair", "block", "fewer"])
    feed, shapes, g = _inputs(r, g, meta, form)
    given = {name: _alone(g, name) for name in g.canonical_etypes}

    def truth(module: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        sources, targets = _ends(feed(x), g)
        parts = ((name, module._get_module(name)(given[name], (sources[name[0]], targets[name[2]])))
                 for name in g.canonical_etypes if name[0] in sources and name[2] in targets)
        found = draws.by_target(parts)
        return {t: draws.put_together(found[t], how) for t in g.dsttypes if t in found}

    return Case(f"HeteroGraphConv of {kind}, "
                f"aggregate={aggregate if isinstance(aggregate, str) else 'a function'}, {form}, "
                f"{ids}: {meta}", module, shapes, lambda module, x: module(g, feed(x)), truth,
                draws.longest_sum(meta))


def _layers(r: random.Random, meta: Metagraph, kind: str) -> dict[EdgeType, nn.Module]:
    options, alike, found = r.randrange(1 << 30), r.random() < 0.75, {}
    for name in meta.relations:
        own = random.Random(options if alike or r.random() < 0.5 else r.randrange(1 << 30))
        made = r.choice(["GraphConv", "SAGEConv", "GINConv"]) if kind == "mixed" else kind
        found[name] = _KINDS[made](own, meta.widths[name[0]], meta.widths[name[2]])
        if hasattr(found[name], "set_allow_zero_in_degree"):
            found[name].set_allow_zero_in_degree(True)
    return found


def _inputs(r: random.Random, g: Any, meta: Metagraph,
            form: str) -> tuple[Callable, dict[str, tuple[int, int]], Any]:
    """How features become the layer's argument, their shapes, and the graph."""
    import dgl

    types = r.sample(list(meta.nodes), len(meta.nodes))
    shapes = {t: (meta.nodes[t], meta.widths[t]) for t in types}
    if form == "pair":
        shapes = {f"{end} {t}": shape for end in ("src", "dst") for t, shape in shapes.items()}
        return lambda x: tuple({t: x[f"{end} {t}"] for t in types}
                               for end in ("src", "dst")), shapes, g
    if form == "fewer":
        # a type that is no destination has no features, and its relations are left out
        targets = {name[2] for name in meta.relations}
        kept = [t for t in types if t in targets or r.random() < 0.3]
        return lambda x: {t: x[t] for t in kept}, {t: shapes[t] for t in kept}, g
    if form == "block" and all(meta.nodes.values()):
        seeds = {t: torch.randperm(n, generator=draws.generator(r))[:r.randint(1, n)].to(g.idtype)
                 for t, n in meta.nodes.items()}
        g = dgl.to_block(dgl.in_subgraph(g, seeds), seeds)
        shapes = {t: (g.num_src_nodes(t), meta.widths[t]) for t in types}
    return lambda x: {t: x[t] for t in types}, shapes, g


def _ends(given: Any, g: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if isinstance(given, tuple):
        return given
    return given, {t: x[:g.num_dst_nodes(t)] for t, x in given.items() if t in g.dsttypes}


def _alone(g: Any, name: EdgeType) -> Any:
    """A graph of this relation's edges alone, with two types of nodes."""
    import dgl

    sizes = {"u": g.num_src_nodes(name[0]), "v": g.num_dst_nodes(name[2])}
    return dgl.heterograph({("u", "e", "v"): g.edges(etype=name)}, sizes, idtype=g.idtype)


def hgt(r: random.Random, device: torch.device) -> Case:
    import dgl
    from dgl.nn import HGTConv

    meta, heads = draws.metagraph(r, one_width=True), r.choice([1, 2, 4])
    types, count = list(meta.nodes), len(meta.relations)
    sizes = torch.tensor([meta.nodes[t] for t in types])
    start = dict(zip(types, (sizes.cumsum(0) - sizes).tolist()))
    ntype = torch.arange(len(types)).repeat_interleave(sizes)
    edges = [meta.edges[name] for name in meta.relations]
    etype = torch.arange(count).repeat_interleave(torch.tensor([t.shape[1] for t in edges]))
    src, dst = (torch.cat([t[end] + start[name[2 * end]] for t, name in zip(edges, meta.relations)])
                for end in (0, 1))
    presorted = r.random() < 0.3
    if not presorted and r.random() < 0.7:  # types in any order
        nodes, order = (torch.randperm(len(t), generator=draws.generator(r))
                        for t in (ntype, etype))
        place = nodes.argsort()
        src, dst, ntype, etype = place[src][order], place[dst][order], ntype[nodes], etype[order]
    joined = dgl.graph((src, dst), num_nodes=len(ntype))
    module = HGTConv(WIDTH, WIDTH // heads, heads, len(types), count, dropout=0.0,
                     use_norm=r.random() < 0.3)

    def truth(module: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"nodes": _hgt(module, x["nodes"], joined.edges(), ntype, etype, count)}

    return Case(f"dgl.HGTConv of {heads} heads: {meta}", module,
                {"nodes": (joined.num_nodes(), WIDTH)},
                lambda module, x: {"nodes": module(joined, x["nodes"], ntype, etype,
                                                   presorted=presorted)}, truth,
                draws.longest_sum(meta))


def _typed(lin: nn.Module, x: Tensor, types: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), lin.get_weight()[types]).squeeze(1)


def _hgt(layer: nn.Module, x: Tensor, edges: tuple[Tensor, Tensor], ntype: Tensor, etype: Tensor,
         count: int) -> Tensor:
    heads, width = layer.num_heads, layer.head_size
    key, query, value = (_typed(lin, x, ntype).view(-1, heads, width)
                         for lin in (layer.linear_k, layer.linear_q, layer.linear_v))
    logits, messages, ends = [], [], []
    for relation in range(count):
        src, dst = (t[etype == relation].long() for t in edges)
        att, msg, prior = (torch.stack(found) for found in zip(*(
            (layer.relation_att[h].get_weight()[relation],
             layer.relation_msg[h].get_weight()[relation],
             layer.relation_pri[h][relation]) for h in range(heads))))
        mapped = torch.einsum("nhd,hde->nhe", key, att)
        logits.append((mapped[src] * query[dst]).sum(-1) * prior / layer.sqrt_d)
        messages.append(torch.einsum("nhd,hde->nhe", value, msg)[src])
        ends.append(dst)
    h = _typed(layer.linear_a, draws.softmax_sum(logits, messages, ends, x.shape[0]).flatten(1),
               ntype)
    share = torch.sigmoid(layer.skip[ntype]).unsqueeze(-1)
    h = h * share + x * (1 - share)
    return layer.norm(h) if layer.use_norm else h


CASES = {"HeteroGraphConv": hetero_graph_conv, "dgl.HGTConv": hgt}
