"""GatedGCNConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import GatedGCNConv

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import E, F, M, N
from tests.dgl.judge import close, compare, on_routes
from tests.dgl.test_options_graphconv import bare

#: sums over all edges of what batch norm makes: those of its own input cancel
FLOOR = 3e-6
OPTIONS = [dict(batch_norm=False), dict(residual=False), dict(activation=None),
           dict(activation=torch.tanh, batch_norm=False)]


@on_routes("width", [1, 5, F], [2, 16, 64, 130])
def test_widths(route, width):
    compare(route, GatedGCNConv(F, 4, width, batch_norm=False), graphs.square(), graphs.features(),
            torch.randn(E, 4), floor=FLOOR)


@on_routes("options", OPTIONS)
def test_layer_options(route, options):
    compare(route, GatedGCNConv(F, F, F, **options), graphs.square(), graphs.features(),
            torch.randn(E, F), floor=FLOOR, nothing=1e-5)


def test_nodes_without_edges(route):
    compare(route, GatedGCNConv(F, 4, 6, batch_norm=False), bare(), graphs.features(),
            torch.randn(E, 4), floor=FLOOR)


def test_in_eval_mode_without_gradients(route):
    compare(route, GatedGCNConv(F, 4, 6).requires_grad_(False), graphs.square(), graphs.features(),
            torch.randn(E, 4), train=False, require=False)


def test_a_loss_of_one_result_alone(route):
    """The other's gradient is then none at all, nor have maps one that only that was made of."""
    g, layer = route.put(graphs.square(), GatedGCNConv(F, 4, 6, batch_norm=False))
    x, e = (graphs.features().to(route.device).requires_grad_(),
            torch.randn(E, 4, device=route.device).requires_grad_())
    for index in (0, 1):
        found = []
        for on in (False, True):
            with route.on() if on else gnnaccel.disabled():
                found.append(torch.autograd.grad(layer(g, x, e)[index].square().sum(),
                                                 (x, e, *layer.parameters()), allow_unused=True))
        assert [a is None for a in found[0]] == [b is None for b in found[1]], index
        assert all(close(a, b, 2e-5) for a, b in zip(*found) if a is not None)


class Halved(torch.nn.Module):
    """Changes what a layer gives."""

    def __init__(self, layer: GatedGCNConv):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return tuple(t.mul_(0.5) for t in self.layer(*args))


@on_routes("by", ["activation", "caller"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_results_that_are_changed_in_place(route, by, batch_norm):
    layer = GatedGCNConv(F, 4, 6, batch_norm=batch_norm,
                         activation=torch.nn.ReLU(inplace=True) if by == "activation" else None)
    if batch_norm:
        layer.bn_node, layer.bn_edge = torch.nn.Identity(), torch.nn.Identity()
    compare(route, Halved(layer) if by == "caller" else layer, graphs.square(), graphs.features(),
            torch.randn(E, 4), floor=FLOOR,
            went=lambda: set(gnnaccel.stats()["GatedGCNConv"]["routes"]) == {route.backend})


def test_gradients_with_columns_side_by_side(route):
    """As a residual connection gives them where features are so."""
    g = graphs.square().to(route.device)
    layer = GatedGCNConv(F, 4, 6, batch_norm=False, activation=None).to(route.device).eval()
    x, e, *grads = (t.to(route.device) for t in (graphs.features(), torch.randn(E, 4),
                                                 torch.randn(6, N).t(), torch.randn(6, E).t()))
    inputs, found = (x.requires_grad_(), e.requires_grad_(), layer.B.weight, layer.E.weight), []
    for on in (False, True):
        with route.on() if on else gnnaccel.disabled():
            found.append(torch.autograd.grad(layer(g, x, e), inputs, grads))
    assert all(close(a, b, 2e-5) for a, b in zip(*found))


def test_dropout_is_drawn_as_the_host_draws_it(route):
    layer = GatedGCNConv(F, 4, 6, dropout=0.5).to(route.device)
    g, x, e = (graphs.square().to(route.device), graphs.features().to(route.device),
               torch.randn(E, 4, device=route.device))
    torch.manual_seed(3)
    expected = layer(g, x, e)
    torch.manual_seed(3)
    with route.on():
        got = layer(g, x, e)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, expected))


def test_second_derivatives(route):
    g = graphs.square().to(route.device)
    layer, grads = GatedGCNConv(F, 4, 6, batch_norm=False,
                                activation=torch.tanh).to(route.device), []
    x, e = (torch.randn(shape, device=route.device).requires_grad_() for shape in ((N, F), (E, 4)))
    for on in (False, True):
        with route.on() if on else gnnaccel.disabled():
            out = sum(t.square().sum() for t in layer(g, x, e))
        (d_x,) = torch.autograd.grad(out, x, create_graph=True)
        grads.append(torch.autograd.grad(d_x.square().sum(), (x, e)))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*grads))


def test_explained():
    text = str(gnnaccel.explain_program(GatedGCNConv(F, 4, 6), graphs.square(), graphs.features(),
                                        torch.randn(E, 4)))
    assert "sigmoid(score[e])" in text and "6 channels" in text


def test_records_of_both_directions(route):
    layer, g = GatedGCNConv(F, 4, 6).to(route.device), graphs.square().to(route.device)
    x = graphs.features().to(route.device).requires_grad_()
    with route.on(records=8):
        layer(g, x, torch.randn(E, 4, device=route.device))[0].sum().backward()
        found = gnnaccel.records()
    assert [r["direction"] for r in found
            if r["layer"] == "GatedGCNConv"] == ["forward", "backward"]


@pytest.mark.parametrize("what", ["pair", "edges"])
def test_what_is_left_to_dgl(route, what):
    layer = GatedGCNConv(F, 4, 6).to(route.device)
    g = graphs.bipartite().to(route.device)
    x = (graphs.features().to(route.device), graphs.features(M).to(route.device))
    g, x = (g, x) if what == "pair" else (graphs.square().to(route.device), x[0])
    e = (torch.randn(E, 4, device=route.device).double()
         if what == "edges" else torch.randn(E, 4, device=route.device))
    with route.on(on_fallback="native"), pytest.raises(Exception):  # noqa: B017  whatever DGL raises
        layer(g, x, e)
    assert gnnaccel.stats()["GatedGCNConv"]["routes"] == {"native": 1}
