"""Edits of edges, of their weights and of features."""

from __future__ import annotations

import torch

from .edits import edit
from .trees import tree_map


@edit(5)
def edges_in_place(h) -> str:
    edge_index, n, m = h.some_edges()
    size, one = edge_index.shape[1], h.choose.randrange(edge_index.shape[1])

    def drawn():
        return torch.stack([torch.randint(0, n, (size,)),
                            torch.randint(0, m, (size,))]).to(h.device)

    ways = {
        "one edge": lambda: edge_index[:, one].copy_(drawn()[:, 0]),
        "sources": lambda: edge_index[0].copy_(drawn()[0]),
        "all": lambda: edge_index.copy_(drawn()),
        "one target": lambda: edge_index[1].fill_(h.choose.randrange(m)),
        "index_put": lambda: edge_index.index_put_((torch.tensor([1], device=h.device),
                                                    torch.tensor([one], device=h.device)),
                                                   drawn()[1, :1]),
        "out=": lambda: torch.remainder(edge_index + 1, min(n, m), out=edge_index),
        "of a detached view": lambda: edge_index.detach()[0].fill_(h.choose.randrange(n)),
        "flat view": lambda: edge_index.view(-1)[:size].random_(0, n),
        "unbind": lambda: edge_index.unbind(0)[1].mul_(0),
        "foreach": lambda: torch._foreach_mul_([edge_index], 0),
        "flipped order": lambda: edge_index.copy_(edge_index.flip(1).clone()),
    }
    way = h.choose.choice(sorted(ways))
    ways[way]()
    return way


@edit(2)
def edges_of_data(h) -> str:
    """``edge_index.data`` set to another tensor: the same Python object holds other memory."""
    edge_index, n, m = h.some_edges()
    edge_index.data = torch.stack(
        [torch.randint(0, n, (edge_index.shape[1],)), torch.randint(0, m, (edge_index.shape[1],))]
    ).to(h.device)
    return ""


@edit(2)
def edges_in_inference_mode(h) -> str:
    with torch.inference_mode():
        edge_index, _, m = h.some_edges()
        edge_index[1].random_(0, m)
    return ""


@edit(1)
def ends_swapped(h) -> str:
    if h.edge == "types":
        return "of types: no"
    first = h.edge_index[0].clone()
    h.edge_index[0] = h.edge_index[1]
    h.edge_index[1] = first
    return ""


@edit(4)
def memory_freed_and_reused(h) -> str:
    """Other edges in new tensors, likely where the old ones were."""
    if h.edge == "types":
        key = h.choose.choice(sorted(h.edge_index))
        h.edge_index[key] = None
        h.edge_index[key] = h.random_edges(key)
        return str(key)
    h.edge_index = None
    h.edge_index = h.random_edges()
    return ""


@edit(3)
def another_graph(h) -> str:
    h.nodes, h.edges = h.choose.choice((5, 20, 31)), h.choose.choice((80, 80, 40, 200))
    h.new_graph()
    return f"{h.nodes} nodes {h.edges} edges"


@edit(1)
def fewer_edges(h) -> str:
    if h.edge == "types" or h.edges < 20:
        return "no"
    h.edges -= 10
    h.edge_index = h.edge_index[:, : h.edges]
    h.values = None if h.values is None else h.values[: h.edges].detach()
    return "a view"


# ---- weights of edges, features ----


@edit(6)
def values_in_place(h) -> str:
    if h.values is None:
        return "none"
    values = h.values = h.values.detach()
    if h.edge == "relation":
        values.add_(1).remainder_(3)
        return "other relations"
    ways = {
        "mul_": lambda: values.mul_(2),
        "one": lambda: values[0].fill_(3.0),
        "foreach": lambda: torch._foreach_add_([values], 0.5),
        "out=": lambda: torch.mul(values, 0.5, out=values),
        "flat view": lambda: values.view(-1)[1:3].fill_(0.7),
        "data": lambda: values.data.mul_(1.7),
        "data set": lambda: setattr(values, "data", values * 1.3 + 0.1),
    }
    if h.device.type == "cpu":
        ways["numpy"] = lambda: values.numpy().__imul__(1.5)
    way = h.choose.choice(sorted(ways))
    ways[way]()
    return way


@edit(2)
def values_reallocated(h) -> str:
    h.values = None
    if h.edge != "types":
        h.new_values()
    return ""


@edit(2)
def values_with_gradient(h) -> str:
    if h.values is None or not h.values.is_floating_point():
        return "none"
    h.values = h.values.detach().clone().requires_grad_(h.choose.random() < 0.6)
    return str(h.values.requires_grad)


@edit(1)
def values_in_inference_mode(h) -> str:
    if h.values is None or not h.values.is_floating_point():
        return "none"
    with torch.inference_mode():
        h.values.add_(0.3)
    return ""


@edit(2)
def features_edited(h) -> str:
    if h.choose.random() < 0.4:
        h.x = tree_map(lambda t: h.normal(*t.shape), h.x)
        return "new"
    h.x = tree_map(lambda t: t.detach(), h.x)
    tree_map(lambda t: t.add_(1), h.x)
    return "in place"


@edit(2)
def features_learned(h) -> str:
    """A Parameter, as embeddings are, or a tensor again."""
    h.learned = not h.learned
    return str(h.learned)
