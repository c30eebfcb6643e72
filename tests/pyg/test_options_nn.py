"""NNConv with its options, held against the host."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import Linear, NNConv

import gnnaccel
from gnnaccel.dispatch.ops import outer_sums
from gnnaccel.dispatch.ops.plain import PlainRequest
from gnnaccel.dispatch.plan import planner
from tests.pyg.graphs import E, EDGE, F, N, edge_features, features, square
from tests.pyg.judge import close, compare, on_routes, took

OUT, HIDDEN = 6, 9
FLOOR = 3e-6  # of gradients: sums over all edges


def net(*more: nn.Module, last: nn.Module | None = None, width: int = F) -> nn.Sequential:
    return nn.Sequential(nn.Linear(EDGE, HIDDEN), *(more or (nn.ReLU(),)),
                         last or nn.Linear(HIDDEN, width * OUT))


def layer(nn_: nn.Module | None = None, width=F, **options) -> NNConv:
    return NNConv(width, OUT, nn_ or net(), **options)


@on_routes("options", [dict(), dict(aggr="mean"), dict(root_weight=False, bias=False)],
           [dict(aggr="mean", root_weight=False), dict(bias=False)])
def test_options(route, options):
    compare(route, layer(**options), features(), square(), edge_features(), floor=FLOOR)


@on_routes("made", [lambda: net(last=nn.Linear(HIDDEN, F * OUT, bias=False)),
                    lambda: nn.Sequential(nn.Linear(EDGE, F * OUT))],
           [lambda: net(nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN)),
            lambda: net(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Dropout(0.0)),
            lambda: net(last=Linear(HIDDEN, F * OUT))])
def test_networks(route, made):
    compare(route, layer(made()), features(), square(), edge_features(), floor=FLOOR)


@pytest.mark.parametrize("size", [None, (N, 5)])
def test_pairs(route, size):
    edge_index = torch.stack([torch.randint(0, N, (E,)), torch.randint(0, 5, (E,))])
    module = layer(net(width=F), (F, 3))
    given = (features(), torch.randn(5, 3)), edge_index, edge_features(), size
    module, (x, edges, attr, size) = module.to(route.device), given
    args = (tuple(t.to(route.device) for t in x), edges.to(route.device), attr.to(route.device),
            size)
    expected = module(*args)
    with route.on():
        assert close(module(*args), expected)
    took(route)


@on_routes("width", [1, 130], [64, 256])
def test_widths(route, width):
    compare(route, layer(net(width=width), width), features(width=width), square(),
            edge_features(), floor=FLOOR)


@pytest.mark.parametrize("made, code", [
    (lambda: layer(nn.Sequential(nn.Linear(EDGE, F * OUT), nn.ReLU())), "GA208"),
    (lambda: layer(nn.Sequential(nn.Linear(EDGE, HIDDEN), nn.Unflatten(1, (HIDDEN,)),
                                 nn.Linear(HIDDEN, F * OUT))), "GA208"),
    (lambda: layer(nn.Sequential(nn.Sequential(nn.Linear(EDGE, HIDDEN)),
                                 nn.Linear(HIDDEN, F * OUT))), "GA208"),
    (lambda: layer(net(width=257), 257), "GA207")])
def test_what_is_left_to_pyg(route, made, code):
    module = made().to(route.device)
    width = module.in_channels
    args = [t.to(route.device) for t in (features(width=width), square(), edge_features())]
    expected = module(*args)
    with route.on(on_fallback="native"):
        assert close(module(*args), expected)
    assert list(gnnaccel.stats()["NNConv"]["reasons"]) == [code]


def test_other_aggregations_pass_messages(emulated):
    compare(emulated, layer(aggr="max"), features(), square(), edge_features(), floor=FLOOR)


@pytest.mark.parametrize("where", ["nn", "last", "inner"])
def test_hooks_of_the_network(route, where):
    """They see what they see natively; a hook of an inner module keeps nothing native."""
    module, seen = layer().to(route.device), []
    watched = {"nn": module.nn, "last": module.nn[-1], "inner": module.nn[0]}[where]
    watched.register_forward_hook(lambda *given: seen.append(given[-1].shape))
    args = [t.to(route.device) for t in (features(), square(), edge_features())]
    with route.on(on_fallback="native"):
        module(*args)
        module(*args)
    assert len(seen) == 2 and {shape[0] for shape in seen} == {E}
    routes = gnnaccel.stats()["NNConv"]["routes"]
    assert routes == {route.backend if where == "inner" else "native": 2}


def test_a_network_that_changes_between_calls(route):
    module = layer().to(route.device)
    args = [t.to(route.device) for t in (features(), square(), edge_features())]
    changes = (lambda m: m.nn.__setitem__(1, nn.Tanh()),
               lambda m: m.nn.__setitem__(2, nn.Linear(HIDDEN, F * OUT, bias=False)),
               lambda m: m.nn.__setitem__(0, nn.Linear(EDGE, HIDDEN, bias=False)),
               lambda m: setattr(m, "root_weight", False),
               lambda m: setattr(m, "bias", None),
               lambda m: m.nn.append(nn.Identity()),
               lambda m: m.nn.__delitem__(3),
               lambda m: m.nn[2].weight.data.mul_(2))
    torch.manual_seed(3)
    with route.on(on_fallback="native"):
        for _ in range(3):
            module(*args)
        for change in changes:
            change(module)
            module.to(route.device)
            for _ in range(2):
                found = module(*args)
                with gnnaccel.disabled():
                    assert close(found, module(*args))


def test_gradients_of_gradients(route):
    module = layer(net(nn.Tanh())).to(route.device)
    args = [t.to(route.device) for t in (features(), square(), edge_features())]

    def second(on: bool) -> list:
        x, edge_index, attr = args
        x, attr = (t.clone().requires_grad_() for t in (x, attr))
        out = module(x, edge_index, attr)
        first = torch.autograd.grad(out.square().sum(), [x, attr], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first),
                                   [x, attr, *module.nn.parameters()])

    expected = second(False)
    with route.on():
        assert all(close(a, b, 1e-4) for a, b in zip(second(True), expected))


def test_nothing_of_the_size_of_the_edges_matrices(emulated):
    """The point of it: the host makes a matrix for each edge."""
    edges, nodes = 400, 10
    module = copy.deepcopy(layer()).to(emulated.device)
    x, edge_index = torch.randn(nodes, F).requires_grad_(), torch.randint(0, nodes, (2, edges))
    with emulated.on():
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t,
                                                      lambda t: t):
            module(x, edge_index, torch.randn(edges, EDGE)).sum().backward()
    assert saved and max(saved) < edges * F * OUT / 5


def test_explained():
    text = str(gnnaccel.explain_program(layer(), features(), square(), edge_features()))
    assert "h[e] x[j]^T" in text and f"{F} channels" in text


@pytest.mark.parametrize("nodes, edges, features, width, results, fresh, ours", [
    (2300, 39000, 128, 64, 64, True, True),  # a batch of dense molecules: 2.7x as fast
    (10000, 100000, 64, 64, 64, True, True),
    (100000, 400000, 16, 16, 32, False, True),
    (3000, 6400, 16, 16, 16, True, False),  # the host's time is all there is
    (20000, 24000, 128, 64, 64, False, False)])  # hardly fewer sums than matrices
@pytest.mark.parametrize("grad", [True, False])
def test_the_price(nodes, edges, features, width, results, fresh, ours, grad):
    reduce = outer_sums.Form(False, features, True, results).name
    request = PlainRequest("NNConv", reduce, False, width, torch.float32, "cuda",
                           nodes.bit_length(), nodes.bit_length(), edges.bit_length(), grad, fresh)
    by_us = planner.PLAIN[0].seconds(request)
    assert (by_us < planner.native_plain(request)) is ours


@pytest.mark.parametrize("called", [False, True])
def test_a_bias_for_all_numbers_of_a_matrix(route, called):
    """The host broadcasts it."""
    layer = NNConv(F, 4, nn.Linear(EDGE, F * 4)).to(route.device)
    args = [t.to(route.device) for t in (features(), square(), edge_features())]
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*args)
    layer.nn.bias = nn.Parameter(torch.ones(1, device=route.device))
    expected = layer(*args)
    with route.on(on_fallback="native"):
        assert close(layer(*args), expected)
