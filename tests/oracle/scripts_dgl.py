"""The world of training scripts with DGL: graphs that are changed, cut and drawn anew."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IN, CLASSES = 8, 3


class Attends(nn.Module):
    """Attention by users' functions."""

    def __init__(self):
        super().__init__()
        self.fc, self.att = nn.Linear(IN, IN, bias=False), nn.Linear(2 * IN, 1, bias=False)

    def scores(self, edges) -> dict:
        both = torch.cat([edges.src["z"], edges.dst["z"]], dim=1)
        return {"e": F.leaky_relu(self.att(both))}

    def send(self, edges) -> dict:
        return {"z": edges.src["z"], "e": edges.data["e"]}

    def reduce(self, nodes) -> dict:
        alpha = F.softmax(nodes.mailbox["e"], dim=1)
        return {"h": torch.sum(alpha * nodes.mailbox["z"], dim=1)}

    def forward(self, g, h: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["z"] = self.fc(h)
            g.ndata["h"] = torch.zeros_like(h)
            g.apply_edges(self.scores)
            g.update_all(self.send, self.reduce)
            return g.ndata["h"]


class Weighted(nn.Module):
    """A linear map, and neighbours times a learned part of edges' weights."""

    def __init__(self, reduce: str = "sum"):
        super().__init__()
        self.lin, self.scale, self.reduce = nn.Linear(IN, IN), nn.Parameter(torch.ones(1)), reduce

    def forward(self, g, h: Tensor) -> Tensor:
        import dgl.function as fn

        with g.local_scope():
            g.ndata["h"], g.edata["s"] = self.lin(h), g.edata["w"].view(-1, 1) * self.scale
            g.update_all(fn.u_mul_e("h", "s", "m"), getattr(fn, self.reduce)("m", "o"))
            return g.ndata["o"]


class Degrees(nn.Module):
    """A step of GCN with degrees that users take themselves, and operations on all edges."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(IN, IN)

    def forward(self, g, h: Tensor) -> Tensor:
        import dgl

        norm = g.in_degrees().clamp(min=1).to(h).rsqrt().view(-1, 1)
        score = dgl.nn.functional.edge_softmax(g, dgl.ops.u_dot_v(g, h, h.tanh()))
        return dgl.ops.copy_u_sum(g, self.lin(h) * norm) * norm + dgl.ops.u_mul_e_sum(g, h, score)


def layers() -> dict[str, tuple[Callable, str]]:
    import dgl.nn as D

    weak = {"allow_zero_in_degree": True}
    mlp = lambda: nn.Sequential(nn.Linear(IN, IN), nn.ReLU(), nn.Linear(IN, IN))  # noqa: E731
    return {
        "GraphConv": (lambda: D.GraphConv(IN, IN, **weak), ""),
        "GraphConv weight": (lambda: D.GraphConv(IN, IN, norm="none", **weak), "w"),
        "SAGEConv": (lambda: D.SAGEConv(IN, IN, "mean"), ""),
        "SAGEConv pool": (lambda: D.SAGEConv(IN, IN, "pool"), ""),
        "SAGEConv gcn": (lambda: D.SAGEConv(IN, IN, "gcn"), ""),
        "GATConv": (lambda: D.GATConv(IN, IN, 2, **weak), ""),
        "GATv2Conv": (lambda: D.GATv2Conv(IN, IN, 2, **weak), ""),
        "EdgeGATConv": (lambda: D.EdgeGATConv(IN, 3, IN, 2, allow_zero_in_degree=True), "a"),
        "DotGatConv": (lambda: D.DotGatConv(IN, IN, 2, **weak), ""),
        "GINConv": (lambda: D.GINConv(mlp(), "max", learn_eps=True), ""),
        "GINEConv": (lambda: D.GINEConv(nn.Linear(IN, IN)), "f"),
        "EdgeConv": (lambda: D.EdgeConv(IN, IN, **weak), ""),
        "TAGConv": (lambda: D.TAGConv(IN, IN), ""),
        "ChebConv": (lambda: D.ChebConv(IN, IN, 2), ""),
        "SGConv": (lambda: D.SGConv(IN, IN, 2, cached=True, **weak), ""),
        "AGNNConv": (lambda: D.AGNNConv(**weak), ""),
        "APPNPConv": (lambda: D.APPNPConv(2, 0.1), ""),
        "GatedGraphConv": (lambda: D.GatedGraphConv(IN, IN, 2, 1), ""),
        "GatedGCNConv": (lambda: D.GatedGCNConv(IN, IN, IN), "f"),
        "RelGraphConv": (lambda: D.RelGraphConv(IN, IN, 3, "basis", 2), "r"),
        "EGATConv": (lambda: D.EGATConv(IN, IN, IN, IN, 1), "f"),
        "PNAConv": (lambda: D.PNAConv(IN, IN, ["mean", "max"], ["identity"], 2.0), ""),
        "NNConv": (lambda: D.NNConv(IN, IN, nn.Linear(3, IN * IN), "mean"), "a"),
        "Attends": (Attends, ""), "Degrees": (Degrees, ""),
        "Weighted": (Weighted, ""), "Weighted mean": (lambda: Weighted("mean"), ""),
    }


class Net(nn.Module):
    def __init__(self, r: random.Random):
        super().__init__()
        known = layers()
        found = [known[r.choice(sorted(known))] for _ in range(r.choice((1, 2, 3)))]
        self.layers = nn.ModuleList([make() for make, _ in found])
        self.edges, self.over = [edge for _, edge in found], [r.randrange(2) for _ in found]
        if r.random() < 0.3:
            self.layers.append(self.layers[0])
            self.edges.append(self.edges[0])
            self.over.append(r.randrange(2))
        self.norm, self.head = nn.BatchNorm1d(IN), nn.Linear(IN, CLASSES)

    def forward(self, x: Tensor, graphs: list) -> Tensor:
        for one, edge, k in zip(self.layers, self.edges, self.over):
            g = graphs[k]
            out = one(g, x, *([g.edata[edge]] if edge else []))
            out = out[0] if isinstance(out, tuple) else out
            x = self.norm(out.reshape(x.shape[0], -1, IN).sum(1)).tanh()
        return self.head(x)


class Graph:
    """Two graphs over the same nodes."""

    second = False  # whether the host's second derivatives are right
    threads = False  # whether two may call a net at once: they would share the frames of a graph

    def __init__(self, r: random.Random, device: torch.device):
        self.device, self.n, self.m = device, 24, 90
        self.new(r)
        self.edits = [new_graphs, same_size, other_size, edges_added, edges_removed, transformed,
                      of_the_other, part_of_it, batched, values_written, features_written, formats,
                      message_passed]

    def net(self, r: random.Random) -> nn.Module:
        return Net(r)

    def draws(self, net: nn.Module) -> bool:
        return False

    def new(self, r: random.Random) -> None:
        self.x = torch.randn(self.n, IN).to(self.device)
        self.y = torch.randint(0, CLASSES, (self.n,)).to(self.device)
        self.graphs = [self.drawn(), self.drawn()]

    def drawn(self):
        import dgl

        g = dgl.graph(tuple(torch.randint(0, self.n, (2, self.m))), num_nodes=self.n)
        return self.filled(g.to(self.device))

    def filled(self, g):
        """A graph, with values for its edges."""
        e = g.num_edges()
        g.edata["w"] = torch.rand(e).to(self.device) + 0.1
        g.edata["a"] = torch.randn(e, 3).to(self.device)
        g.edata["f"] = torch.randn(e, IN).to(self.device)
        g.edata["r"] = torch.randint(0, 3, (e,)).to(self.device)
        return g

    def again(self, r: random.Random) -> None:
        r.choice((self.graphs.reverse, lambda: self.graphs.__setitem__(0, self.drawn())))()

    def out(self, net: Callable) -> Tensor:
        return net(self.x, self.graphs)

    def loss(self, net: Callable) -> Tensor:
        return F.cross_entropy(self.out(net), self.y)

    def inputs(self) -> list[Tensor]:
        return [self.x, *(g.edata[k] for g in self.graphs for k in ("w", "a", "f"))]

    def tensors(self) -> dict[str, Tensor]:
        ends = {f"edges {k}": torch.stack(g.edges(order="eid")).long()
                for k, g in enumerate(self.graphs)}
        return {"x": self.x, **ends}

    def failing(self, net: nn.Module, r: random.Random) -> None:
        x = self.x
        self.x = x[:, :5] if r.random() < 0.5 else x[:5]
        try:
            self.out(net)
        finally:
            self.x = x


# ---- edits ----


def new_graphs(s, r) -> None:
    s.world.new(r)


def same_size(s, r) -> None:
    s.world.graphs[0] = None
    s.world.graphs[0] = s.world.drawn()


def other_size(s, r) -> str:
    w = s.world
    w.n, w.m = r.choice((3, 12, 24, 40)), r.choice((0, 1, 30, 90, 300))
    w.new(r)
    return f"{w.n} nodes {w.m} edges"


def edges_added(s, r) -> None:
    """In place: the same graph object."""
    g = s.world.graphs[r.randrange(2)]
    g.add_edges(*torch.randint(0, s.world.n, (2, r.choice((1, 7)))).to(s.world.device))
    s.world.filled(g)


def edges_removed(s, r) -> None:
    g = s.world.graphs[r.randrange(2)]
    g.remove_edges(torch.arange(g.num_edges() // 3, device=s.world.device))


def transformed(s, r) -> str:
    import dgl

    w, k = s.world, r.randrange(2)
    way = r.choice(("add_self_loop", "remove_self_loop", "reverse", "to_bidirected", "to_simple",
                    "DropEdge", "DropNode", "AddReverse"))
    g = w.graphs[k]
    if way == "DropEdge":
        w.graphs[k] = dgl.transforms.DropEdge(0.3)(g)
    elif way == "DropNode":
        nodes = torch.arange(1, w.n, 4, device=w.device)
        g.remove_edges(g.in_edges(nodes, form="eid").unique())
    elif way == "AddReverse":
        w.graphs[k] = w.filled(dgl.add_reverse_edges(g))
    elif way == "reverse":
        w.graphs[k] = dgl.reverse(g, copy_edata=True)
    else:
        w.graphs[k] = w.filled(getattr(dgl, way)(g))
    return way


def of_the_other(s, r) -> str:
    """One graph made of the other: of its tensors, of its memory, or the same object."""
    import dgl

    w, way = s.world, r.choice(("same", "clone", "local_var", "tensors", "flipped", "int"))
    g = w.graphs[0]
    u, v = g.edges(order="eid")
    w.graphs[1] = {"same": lambda: g, "clone": g.clone, "local_var": g.local_var,
                   "tensors": lambda: w.filled(dgl.graph((u, v), num_nodes=w.n)),
                   "flipped": lambda: w.filled(dgl.graph((v, u), num_nodes=w.n)),
                   "int": g.int}[way]()
    return way


def part_of_it(s, r) -> str:
    import dgl

    w, way = s.world, r.choice(("edge_subgraph", "in_subgraph", "sample_neighbors"))
    g = w.graphs[0]
    nodes = torch.arange(0, w.n, 2, device=w.device).to(g.idtype)
    if way == "edge_subgraph":
        edges = torch.arange(0, g.num_edges(), 2, device=w.device).to(g.idtype)
        w.graphs[1] = dgl.edge_subgraph(g, edges, relabel_nodes=False)
    else:
        more = (3,) if way == "sample_neighbors" else ()
        w.graphs[1] = w.filled(getattr(dgl, way)(g, nodes, *more))
    return way


def batched(s, r) -> str:
    """The nodes in parts, each with edges of its own, as batches of graphs are."""
    import dgl

    w = s.world
    sizes = r.choice(([w.n], [1, w.n - 1], [w.n // 3, w.n - w.n // 3]))
    parts = [dgl.graph(tuple(torch.randint(0, n, (2, r.choice((0, 5, 30))))), num_nodes=n)
             for n in sizes]
    w.graphs[0] = w.filled(dgl.batch(parts).to(w.device))
    return str(sizes)


def values_written(s, r) -> None:
    for g in s.world.graphs:
        g.edata["w"].mul_(1.3)
        g.edata["r"].add_(1).remainder_(3)
        if r.random() < 0.5:
            g.edata["f"] = g.edata["f"] * 0.8


def features_written(s, r) -> None:
    r.choice((lambda: s.world.x.add_(0.1), lambda: setattr(s.world, "x", s.world.x * 0.9)))()


def formats(s, r) -> str:
    """All forms of a graph are made, or it is one with the forms that there are, in new memory."""
    w, k = s.world, r.randrange(2)
    way = r.choice(("create", "copy"))
    if way == "create":
        w.graphs[k].create_formats_()
    else:
        w.graphs[k] = w.graphs[k].formats(["coo", "csr", "csc"])
    return way


def message_passed(s, r) -> None:
    """By functions of DGL on the graph itself, whose frames keep the results."""
    import dgl.function as fn

    w = s.world
    g = w.graphs[0]
    g.ndata["h"] = w.x
    g.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
    s.say("mean", g.ndata["h"])
    g.apply_edges(lambda edges: {"d": (edges.src["h"] - edges.dst["h"]).pow(2).sum(-1)})
    s.say("distance", g.edata.pop("d"))


WORLDS = {"dgl": Graph} if importlib.util.find_spec("dgl") else {}
