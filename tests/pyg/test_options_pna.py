"""PNAConv with its options, held against the host."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import PNAConv

import gnnaccel
from tests.pyg.graphs import E, EDGE, F, N, edge_features, features, square
from tests.pyg.judge import close, compare, on_routes
from tests.routes import opened

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
#: a standard deviation's slope has no bound where it comes to zero, and the host's variance is a
#: difference of large numbers
FLOOR = 3e-6


def layer(aggregators=AGGREGATORS, scalers=SCALERS, width: int = F, out: int = 8,
          **options) -> PNAConv:
    degrees = torch.bincount(torch.bincount(square()[1], minlength=N))
    return PNAConv(width, out, list(aggregators), list(scalers), degrees, **options)


@pytest.fixture
def by_torch():
    with opened("torch") as found:
        yield found


@on_routes("aggregators", [AGGREGATORS, ["max"], ["sum", "var"], ["mean", "sum", "min"]],
           [["std"], ["min", "max", "sum", "mean"]])
def test_aggregators(route, aggregators):
    compare(route, layer(aggregators), features(), square(), floor=FLOOR)


def test_deviations_of_sources_that_lie_far_from_zero(by_torch):
    """Whose messages do not, since they are differences of both ends: what is of the source alone is
    twenty, and neighbours are nearly alike."""
    module, x = layer(["std"], ["identity"]), 20 + features() * 0.05
    with torch.no_grad():
        lin = module.pre_nns[0][0]
        lin.weight[:, :F] = -torch.eye(F)
        lin.weight[:, F:] = torch.eye(F)
        lin.bias.zero_()
    compare(by_torch, module, x, square(), floor=3e-5)


@on_routes("options",
           [dict(towers=2), dict(towers=4, divide_input=True), dict(post_layers=2),
            dict(train_norm=True)])
def test_options(route, options):
    compare(route, layer(["mean", "max"], **options), features(), square(), floor=FLOOR)


@on_routes("scalers", [["linear"], ["inverse_linear", "identity"]], [SCALERS[1:]])
def test_scalers(route, scalers):
    compare(route, layer(["mean", "max"], scalers), features(), square(), floor=FLOOR)


@on_routes("width", [1, 7], [64, 130])
def test_widths(route, width):
    compare(route, layer(["mean", "min"], width=width), features(width=width), square(),
            floor=FLOOR)


def test_in_eval_mode_without_gradients(route):
    compare(route, layer().requires_grad_(False), features(), square(), train=False, require=False,
            floor=FLOOR)


@pytest.mark.parametrize("made, args, code", [
    (lambda: layer(edge_dim=EDGE), lambda: (features(), square(), edge_features()), "GA208"),
    (lambda: layer(pre_layers=2), lambda: (features(), square()), "GA208"),
    (lambda: layer(["mean", "mul"]), lambda: (features(), square()), "GA201"),
    (lambda: layer(["mean", "mean"]), lambda: (features(), square()), "GA201")])
def test_what_is_left_to_pyg(route, made, args, code):
    module, given = made().to(route.device), [t.to(route.device) for t in args()]
    expected = module(*given)
    with route.on(on_fallback="native"):
        assert torch.equal(module(*given), expected) or close(module(*given), expected)
    assert list(gnnaccel.stats()["PNAConv"]["reasons"]) == [code]


def test_explained():
    text = str(gnnaccel.explain_program(layer(), features(), square()))
    assert "several:mean,min,max,std" in text and f"{F} channels" in text


def test_hooks_of_a_map_keep_the_layer_native(route):
    module, seen = layer().to(route.device), []
    module.pre_nns[0][0].register_forward_hook(lambda *_: seen.append(1))
    with route.on(on_fallback="native"):
        module(features().to(route.device), square().to(route.device))
    assert seen and list(gnnaccel.stats()["PNAConv"]["reasons"]) == ["GA208"]


def test_no_tensor_has_the_size_of_the_edges(emulated, monkeypatch):
    """The point of it: what is E x F in the host is N x F here."""
    nodes, edges = 10, 400
    module = layer(["mean", "max"]).to(emulated.device)
    x, edge_index = torch.randn(nodes, F).requires_grad_(), torch.randint(0, nodes, (2, edges))
    with emulated.on():
        module(x, edge_index)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t,
                                                      lambda t: t):
            module(x, edge_index).sum().backward()
    assert saved and max(saved) < edges * F
    assert E < edges
