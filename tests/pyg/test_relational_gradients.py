"""Gradients of relational layers belong to one parameter each: who accumulates or clips them in
place changes no other."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import (FiLMConv, GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, HANConv,
                                HEATConv, HeteroConv, HGTConv, NNConv, RGATConv, RGCNConv, SAGEConv)

from tests.pyg import graphs, hgt_graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.hetero_graphs import (CITES, KNOWS, METADATA, OUT, RELATIONS, WIDTH, edges, features,
                                     hetero, on)
from tests.pyg.test_to_hetero_bases import model_of

R = 3
LOOPS = [CITES, KNOWS, ("paper", "follows", "paper")]  # GCNConv wants one type at both ends
WIDTHS = {"paper": 12, "author": 12, "field": 5}  # nothing leaves a field

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def typed(layer: torch.nn.Module):
    return layer, (graphs.features(), graphs.square(), torch.randint(0, R, (E,)))


def by_dict(layer: torch.nn.Module, widths: dict | int = WIDTH, relations=RELATIONS):
    return layer, (features(widths), edges(relations))


def of_widths(cls, **options) -> HeteroConv:
    return HeteroConv({name: cls((WIDTHS[name[0]], WIDTHS[name[2]]), OUT, **options)
                       for name in RELATIONS})


def gin() -> HeteroConv:
    return HeteroConv({name: GINConv(torch.nn.Linear(WIDTH, OUT), train_eps=True)
                       for name in RELATIONS})


MADE = {
    "rgcn": lambda: typed(RGCNConv(F, 8, R)),
    "rgcn bases": lambda: typed(RGCNConv(F, 8, R, num_bases=2)),
    "rgat": lambda: typed(RGATConv(F, 8, R, heads=2)), "film": lambda: typed(FiLMConv(F, 8, R)),
    "heat": lambda: (HEATConv(F, 8, 2, R, 4, 3, 4),
                     (graphs.features(), graphs.square(), torch.arange(N) % 2, torch.arange(E) % R,
                      torch.randn(E, 3))),
    "hgt": lambda: (hgt_graphs.layer(), (hgt_graphs.features(), hgt_graphs.edges())),
    "han": lambda: by_dict(HANConv(WIDTH, OUT, METADATA, 2)),
    "sage": lambda: by_dict(hetero()),
    "sage by target": lambda: by_dict(of_widths(SAGEConv), WIDTHS),
    "graph mean": lambda: by_dict(hetero(GraphConv, "mean")),
    "graph max": lambda: by_dict(hetero(GraphConv, "max")),
    "gat": lambda: by_dict(hetero(GATConv, add_self_loops=False)),
    "gat heads averaged": lambda: by_dict(hetero(GATConv, "mean", heads=2, concat=False,
                                                 add_self_loops=False)),
    "gatv2": lambda: by_dict(hetero(GATv2Conv, add_self_loops=False)),
    "gin": lambda: by_dict(gin()),
    "gcn": lambda: by_dict(hetero(GCNConv, relations=LOOPS), relations=LOOPS),
    "bases": lambda: by_dict(model_of()), "one basis": lambda: by_dict(model_of(bases=1)),
}


@pytest.mark.parametrize("name", MADE)
def test_each_gradient_has_memory_of_its_own(route, name):
    layer, args = MADE[name]()
    layer = layer.to(route.device)
    args = [on(route.device, a)[0] if isinstance(a, dict) else a.to(route.device) for a in args]
    with route.on(on_fallback="native"):
        for time in range(2):
            out = layer(*args)
            parts = out.values() if isinstance(out, dict) else [out]
            sum(t.sin().sum() for t in parts if t is not None).backward()
            if time == 0:
                once = {k: p.grad.clone() for k, p in layer.named_parameters()
                        if p.grad is not None}
    for k, p in layer.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, 2 * once[k], rtol=1e-4, atol=1e-5,
                                       msg=lambda text: f"{k}: {text}")


@pytest.mark.parametrize("hooks", [False, True], ids=["asked for", "in hooks"])
@pytest.mark.parametrize("name", MADE)
def test_gradients_that_are_scaled_in_place(route, name, hooks):
    """What autograd hands out before it is anybody's ``grad``, which would be a copy."""
    layer, args = MADE[name]()
    layer = layer.to(route.device)
    args = [on(route.device, a)[0] if isinstance(a, dict) else a.to(route.device) for a in args]
    with route.on(on_fallback="native"):
        out = layer(*args)
    parts = out.values() if isinstance(out, dict) else [out]
    loss = sum(t.sin().sum() for t in parts if t is not None)
    names, parameters = zip(*layer.named_parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=hooks, allow_unused=True)
    expected = [None if grad is None else 2 * grad for grad in found]
    if hooks:
        for parameter in parameters:
            parameter.register_hook(lambda grad: grad.mul_(2))
        loss.backward()
        found = [parameter.grad for parameter in parameters]
    else:
        for grad in found:
            if grad is not None:
                grad.mul_(2)
    for k, ours, doubled in zip(names, found, expected):
        torch.testing.assert_close(ours, doubled, rtol=1e-4, atol=1e-5,
                                   msg=lambda text, k=k: f"{k}: {text}")


MORE = {
    "hgt wide": lambda: by_dict(HGTConv(WIDTH, 72, METADATA)),
    "nn": lambda: (NNConv(F, 8, torch.nn.Linear(3, F * 8)),
                   (graphs.features(), graphs.square(), torch.randn(E, 3))),
}


@pytest.mark.parametrize("name", [*MADE, *MORE])
def test_gradients_lie_in_order(kernels, name):
    """As the host's, of which users take ``grad.view(-1)``."""
    layer, args = {**MADE, **MORE}[name]()
    layer = layer.to(kernels.device)
    args = [on(kernels.device, a)[0] if isinstance(a, dict) else a.to(kernels.device) for a in args]

    def found():
        out = layer(*args)
        parts = out.values() if isinstance(out, dict) else [out]
        return torch.autograd.grad(sum(t.sin().sum() for t in parts if t is not None),
                                   [*layer.parameters()], allow_unused=True)

    with kernels.on(on_fallback="native"):
        ours = found()
    for grad, expected in zip(ours, found()):
        assert grad is None or grad.is_contiguous() or not expected.is_contiguous()
