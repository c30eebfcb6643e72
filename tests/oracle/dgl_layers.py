"""The table for DGL: its layers and operations, over ugly graphs in its own forms."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import torch
from torch import Tensor, nn

from .backends import Backend
from .graphs import IN, KINDS, SCALE, Case, Draw, edges, features, mlp, nodes
from .modes import MODES
from .table import judged

OUT = 4
EDGE = 3
#: DGL's own second derivatives are wrong (gradgradcheck fails), so they are no truth
HOW = tuple(name for name in MODES if name not in ("second", "vmap", "compiled", "float16"))


def applicable(backend: Backend) -> bool:
    """DGL is there, on a GPU through gnnaccel's bridge where DGL is not built for it."""
    return importlib.util.find_spec("dgl") is not None


def graph(d: Draw, pairs: bool = False) -> tuple[Any, int, int, str]:
    """A graph, the numbers of its sources and destinations, and what it is like."""
    import dgl

    kind = d.choice(KINDS)
    form = d.choice(("plain", "plain", "pair", "block") if pairs else ("plain",))
    n = nodes(d)
    m = SCALE * d.choice((1, 3, 11, 20)) if form == "pair" else n
    ends = tuple(edges(d, n, m, kind))
    idtype = d.choice((torch.int64, torch.int64, torch.int32))
    if form == "pair":
        count = {"u": n, "v": m}
        g = dgl.heterograph({("u", "r", "v"): ends}, num_nodes_dict=count, idtype=idtype)
    else:
        g = dgl.graph(ends, num_nodes=n, idtype=idtype)
    if form == "block":
        seeds = torch.arange(0, n, 2).to(idtype)
        g = dgl.to_block(dgl.in_subgraph(g, seeds), seeds)
        n, m = g.num_src_nodes(), g.num_dst_nodes()
    elif d.chance(0.3):
        g = g.formats(d.choice(("csc", "csr", "coo")))
    return g, n, m, f"{kind} {form} {n}x{m} {str(idtype)[6:]}"


def case(d: Draw, module: nn.Module, pairs: bool = False, edge: int = 0, weight: str = "") -> Case:
    """A call ``module(graph, features, ...)``; ``edge``: channels of edge features that come
    next."""
    g, n, m, note = graph(d, pairs)
    x: Any = features(d, n, IN)
    if g.is_block or n != m or len(g.ntypes) > 1:
        x = (x, x[:m]) if g.is_block else (x, features(d, m, IN))
    args = (g, x, features(d, g.num_edges(), edge)) if edge else (g, x)
    kwargs = {weight: d.uniform_(g.num_edges()) + 0.1} if weight and d.chance(0.5) else {}
    return Case(module, args, kwargs, note)


class Operations(nn.Module):
    """Message passing by DGL's own functions, as home-made layers do it."""

    def __init__(self, message: str, reduce: str, softmax: bool):
        super().__init__()
        self.message, self.reduce, self.softmax = message, reduce, softmax

    def forward(self, g: Any, x: Tensor, e: Tensor) -> Tensor:
        import dgl
        import dgl.function as fn

        with g.local_scope():
            g.ndata["x"], g.edata["e"] = x, e
            if self.softmax:
                g.edata["e"] = dgl.ops.edge_softmax(g, e)
            fields = {"copy_u": ("x",), "copy_e": ("e",)}.get(self.message)
            fields = fields or (("x", "e") if self.message[-1] == "e" else ("x", "x"))
            g.update_all(getattr(fn, self.message)(*fields, "m"),
                         getattr(fn, self.reduce)("m", "out"))
            g.apply_edges(fn.u_sub_v("x", "x", "d"))
            return g.ndata["out"], g.edata["d"]


def operations(d: Draw) -> Case:
    message = d.choice(("copy_u", "copy_e", "u_mul_e", "u_add_e", "u_sub_e", "u_add_v", "u_mul_v",
                        "u_sub_v"))
    g, n, _, note = graph(d)
    # Of a graph without edges DGL's own largest message has a gradient, which is wrong.
    reduce = d.choice(("sum", "mean", "max", "min") if g.num_edges() else ("sum", "mean"))
    args = g, features(d, n, IN), features(d, g.num_edges(), IN)
    return Case(Operations(message, reduce, d.chance(0.4)), args, note=f"{message} {reduce} {note}")


def relational(d: Draw) -> Case:
    import dgl.nn as dgl_nn

    base, bases = d.choice(((None, None), ("basis", 2), ("bdd", 2)))
    module = dgl_nn.RelGraphConv(IN, OUT, 3, base, bases, self_loop=d.chance(0.6),
                                 layer_norm=d.chance(0.2))
    g, n, _, note = graph(d)
    kwargs = {"norm": d.uniform_(g.num_edges(), 1) + 0.1} if d.chance(0.4) else {}
    return Case(module, (g, features(d, n, IN), d.integers(3, g.num_edges())), kwargs, note)


def hgt(d: Draw) -> Case:
    import dgl.nn as dgl_nn

    g, n, _, note = graph(d)
    module = dgl_nn.HGTConv(IN, 4, d.choice((1, 2)), 2, 3, dropout=0.0, use_norm=d.chance(0.3))
    return Case(module, (g, features(d, n, IN), d.integers(2, n), d.integers(3, g.num_edges())),
                note=note)


def typed_linear(d: Draw) -> Case:
    import dgl.nn as dgl_nn

    base, bases = d.choice(((None, None), ("basis", 2), ("bdd", 2)))
    types = d.integers(4, 30)
    ordered = d.chance(0.4)
    types = types.sort().values if ordered else types
    return Case(dgl_nn.TypedLinear(IN, OUT, 4, base, bases), (features(d, 30, IN), types),
                {"sorted_by_type": ordered})


def gated_gcn(d: Draw) -> Case:
    import dgl.nn as dgl_nn

    same = d.chance(0.4)
    module = dgl_nn.GatedGCNConv(IN, IN if same else EDGE, IN if same else OUT, batch_norm=False,
                                 residual=d.chance(0.5))
    return case(d, module, edge=IN if same else EDGE)


def pna(d: Draw) -> Case:
    import dgl.nn as dgl_nn

    aggregators = d.choice((["mean", "max"], ["sum", "min", "std", "var"]))
    module = dgl_nn.PNAConv(IN, IN, aggregators, ["identity", "amplification", "attenuation"], 2.5)
    found = case(d, module)
    g, *rest = found.args  # without the CSC DGL's mailboxes hold other nodes' messages (docs/dgl.md)
    return Case(module, (g.formats(["coo", "csr", "csc"]), *rest), found.kwargs, found.note)


def table() -> dict:
    """The layers by name; DGL is imported here."""
    import dgl.nn as n

    from .dgl_more import more

    zero = {"allow_zero_in_degree": True}
    return more() | {
        "dgl GATConv": lambda d: case(d, n.GATConv(IN, OUT, d.choice((1, 2, 3)),
                                                   negative_slope=d.choice((0.2, 0.5)),
                                                   residual=d.chance(0.4), bias=d.chance(0.7),
                                                   **zero), pairs=True),
        "dgl GATv2Conv": lambda d: case(d, n.GATv2Conv(IN, OUT, d.choice((1, 2)),
                                                       residual=d.chance(0.4),
                                                       share_weights=d.chance(0.4), **zero),
                                        pairs=True),
        "dgl EdgeGATConv": lambda d: case(d, n.EdgeGATConv(IN, EDGE, OUT, d.choice((1, 2)),
                                                           residual=d.chance(0.4), **zero),
                                          pairs=True, edge=EDGE),
        "dgl EGATConv": lambda d: case(d, n.EGATConv(IN, EDGE, OUT, 5, d.choice((1, 2))),
                                       edge=EDGE),
        "dgl DotGatConv": lambda d: case(d, n.DotGatConv(IN, OUT, d.choice((1, 2)), **zero),
                                         pairs=True),
        "dgl AGNNConv": lambda d: case(d, n.AGNNConv(learn_beta=d.chance(0.7), **zero), pairs=True),
        "dgl GraphConv": lambda d: case(
            d,
            n.GraphConv(IN, OUT, norm=d.choice(("both", "left", "right", "none")),
                        bias=d.chance(0.7), **zero),
            pairs=True,
            weight="edge_weight",
        ),
        "dgl SAGEConv": lambda d: case(d, n.SAGEConv(IN, OUT, d.choice(("mean", "gcn", "pool")),
                                                     bias=d.chance(0.7)), pairs=True,
                                       weight="edge_weight"),
        "dgl GINConv": lambda d: case(d, n.GINConv(mlp(IN, OUT), d.choice(("sum", "max", "mean")),
                                                   learn_eps=d.chance(0.5)), pairs=True,
                                      weight="edge_weight"),
        "dgl GINEConv": lambda d: case(d, n.GINEConv(mlp(IN, OUT), learn_eps=d.chance(0.5)),
                                       edge=IN),
        "dgl SGConv": lambda d: case(d, n.SGConv(IN, OUT, k=d.choice((1, 2)), **zero),
                                     weight="edge_weight"),
        "dgl TAGConv": lambda d: case(d, n.TAGConv(IN, OUT, k=d.choice((1, 2))),
                                      weight="edge_weight"),
        "dgl APPNPConv": lambda d: case(d, n.APPNPConv(2, 0.2), weight="edge_weight"),
        "dgl CFConv": lambda d: case(d, n.CFConv(IN, EDGE, 6, OUT), edge=EDGE),
        "dgl GMMConv": lambda d: case(
            d, n.GMMConv(IN, OUT, EDGE, 2, d.choice(("sum", "mean", "max")), **zero), edge=EDGE
        ),
        "dgl NNConv": lambda d: case(d, n.NNConv(IN, OUT, mlp(EDGE, IN * OUT),
                                                 d.choice(("sum", "mean", "max"))), edge=EDGE),
        "dgl EdgeConv": lambda d: case(d, n.EdgeConv(IN, OUT, **zero)),
        "dgl GatedGCNConv": gated_gcn,
        "dgl PNAConv": pna,
        "dgl RelGraphConv": relational,
        "dgl HGTConv": hgt,
        "dgl TypedLinear": typed_linear,
        "dgl operations": operations,
        "dgl GatedGraphConv": lambda d: case(d, n.GatedGraphConv(IN, IN, 2, 1)),
    }


def check_with(backend: Backend):
    """The part's ``check(seed, only, mode)``."""
    made = table()

    def check(seed: int, only: str, mode: str) -> tuple[str, str | None, int]:
        r = random.Random(f"dgl {seed}")
        name = only if only in made else r.choice([name for name in made if only in name])
        mode = mode or r.choices(HOW, [MODES[m].often for m in HOW])[0]
        wrong = judged(lambda look: made[name](Draw(f"{name} {seed}", look)), seed, mode, backend)
        return f"{name} --mode {mode}", wrong, 1

    return check
