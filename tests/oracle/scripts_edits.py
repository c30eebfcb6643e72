"""What happens to graphs between steps of training with PyG: each is a function of a
`scripts.Script` and of random choices of its own; it may return words."""

from __future__ import annotations

import torch
import torch_geometric.utils as utils
from torch import nn
from torch.nn import functional as F


def new_graph(s, r) -> None:
    s.world.new(r)


def same_size(s, r) -> str:
    """Other edges, most likely where the old ones were."""
    w, k = s.world, r.randrange(3)
    w.lists[k] = None
    w.lists[k] = w.drawn()
    if r.random() < 0.3:
        w.weight = None
        w.weight = torch.rand(4096).to(w.device) + 0.1
    return str(k)


def other_size(s, r) -> str:
    w = s.world
    w.n, w.m = r.choice((3, 12, 24, 40)), r.choice((0, 1, 30, 90, 300))
    w.new(r)
    return f"{w.n} nodes {w.m} edges"


def in_place(s, r) -> str:
    w, k = s.world, r.randrange(3)
    edges = w.lists[k]
    way = r.choice(("all", "targets", "first", "sorted", "swap"))
    if way == "all":
        edges.copy_(w.drawn(edges.shape[1]))
    elif way == "targets":
        edges[1].random_(0, w.n)
    elif way == "first":
        edges[:, :1] = 0
    elif way == "sorted":
        edges.copy_(edges[:, edges[1].argsort()])
    else:
        edges.copy_(edges.flip(0))
    return f"{way} {k}"


def views(s, r) -> str:
    w, (a, b) = s.world, r.sample(range(3), 2)
    edges, half = w.lists[a], w.lists[a].shape[1] // 2
    way = r.choice(("slice", "second half", "same", "clone", "flip", "detach", "strided", "alias",
                    "one memory"))
    if way == "one memory":
        whole = torch.cat([edges, w.lists[b]], 1)
        w.lists[a], w.lists[b] = whole[:, : edges.shape[1]], whole[:, edges.shape[1]:]
        return f"{way} {a} {b}"
    w.lists[b] = {"slice": lambda: edges[:, :half], "second half": lambda: edges[:, half:],
                  "same": lambda: edges, "clone": edges.clone, "flip": lambda: edges.flip(0),
                  "detach": edges.detach, "strided": lambda: edges[:, ::2],
                  "alias": lambda: edges.view_as(edges)}[way]()
    return f"{b} is {way} of {a}"


def grown(s, r) -> None:
    w, k = s.world, r.randrange(3)
    w.lists[k] = torch.cat([w.lists[k], w.drawn(r.choice((1, 10)))], 1)


def shrunk(s, r) -> None:
    w, k = s.world, r.randrange(3)
    w.lists[k] = w.lists[k][:, r.choice((1, 10)):]


def dropped(s, r) -> str:
    w, k = s.world, r.randrange(3)
    way = r.choice(("dropout_edge", "dropout_node", "dropout_path", "mask"))
    if way == "mask":
        w.lists[k] = w.lists[k][:, torch.rand(w.lists[k].shape[1], device=w.device) < 0.8]
    else:
        w.lists[k] = getattr(utils, way)(w.lists[k])[0]
    return way


def transformed(s, r) -> str:
    w, k = s.world, r.randrange(3)
    way = r.choice((
        "to_undirected", "add_self_loops", "remove_self_loops", "coalesce",
        "add_remaining_self_loops", "sort_edge_index"))
    found = getattr(utils, way)(w.lists[k])
    found = found[0] if isinstance(found, tuple) else found
    w.lists[k] = found[:, :4000]
    return way


def sampled_negatives(s, r) -> None:
    """A loss over links between embeddings; the negatives go on as edges."""
    w = s.world
    wrong = utils.negative_sampling(w.lists[0], w.n, 20)
    z = w.out(s.net)
    score = (z[wrong[0]] * z[wrong[1]]).sum(-1)
    s.net.zero_grad()
    F.binary_cross_entropy_with_logits(score, torch.zeros_like(score)).backward()
    s.optimizers[0].step()
    w.lists[1] = wrong


def part_of_it(s, r) -> str:
    w = s.world
    way = r.choice(("subgraph", "k_hop_subgraph", "bipartite"))
    nodes = torch.randperm(w.n)[: w.n // 2].to(w.device)
    if way == "subgraph":
        w.lists[2] = utils.subgraph(nodes, w.lists[0], num_nodes=w.n)[0]
    elif way == "k_hop_subgraph":
        w.lists[2] = utils.k_hop_subgraph(nodes[:2], 2, w.lists[0], num_nodes=w.n)[1]
    else:
        w.lists[2] = w.lists[0][:, w.lists[0][0] < w.n // 2]
    return way


def weights_written(s, r) -> None:
    s.world.weight.mul_(1.3)
    s.world.attr.add_(0.2)
    s.world.relation.add_(1).remainder_(3)


def features_written(s, r) -> None:
    r.choice((lambda: s.world.x.add_(0.1), lambda: setattr(s.world, "x", s.world.x * 0.9)))()


def explained(s, r) -> None:
    """Masks of edges for a few calls, as an explainer sets them."""
    from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

    w = s.world
    if len({t.shape[1] for t in w.lists}) > 1:
        return
    mask = nn.Parameter(torch.randn(w.lists[0].shape[1], device=w.device))
    set_masks(s.net, mask, w.lists[0], apply_sigmoid=True)
    try:
        out = w.out(s.net)
        s.say("masked", out)
        (g,) = torch.autograd.grad(out.tanh().sum(), mask, allow_unused=True)
        if g is not None:
            s.say("mask", g)
    finally:
        clear_masks(s.net)


def next_batch(s, r) -> str:
    s.world.next(r)
    return str(s.world.data)


def batch_written(s, r) -> None:
    """Edges are turned around, in the memory of the batch."""
    edges = s.world.data.edge_index
    edges.copy_(edges.flip(0))


OF_NODES = [new_graph, same_size, other_size, in_place, views, grown, shrunk, dropped,
            transformed, sampled_negatives, part_of_it, weights_written, features_written,
            explained]
OF_TYPES = [new_graph, same_size, in_place, views, grown, shrunk, dropped, transformed,
            features_written, part_of_it]
OF_BATCHES = [next_batch, next_batch, batch_written, features_written]
