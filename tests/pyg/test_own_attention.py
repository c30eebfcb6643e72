"""Attention that users write themselves, against PyG's own message passing."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import softmax

import gnnaccel
from tests.pyg import graphs, own_attention
from tests.pyg.graphs import E, F as WIDTH, M, N
from tests.pyg.judge import close, compare
from tests.pyg.own_attention import (Apart, Inner, InnerOfEdges, Linear, Scored, Summed,
                                     Tutorial)

LAYERS = {"Tutorial": (Tutorial, ()), "Scored": (Scored, ()), "Summed": (Summed, ()),
          "Inner": (Inner, ()), "Linear": (Linear, ()), "Apart": (Apart, (3,)),
          "InnerOfEdges": (InnerOfEdges, (3,))}
POSITIONS = ("x", "edge_index", "edge_attr")


def made(name: str) -> tuple:
    cls, width = LAYERS[name]
    return cls(WIDTH, 8), [graphs.edge_features(E, w) for w in width]


def routes(route, layer, *args, **options) -> set[str]:
    gnnaccel.reset_stats()
    with route.on(**options):
        layer(*args)
    return set(gnnaccel.stats()[type(layer).__name__]["routes"])


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(route, name):
    layer, more = made(name)
    compare(route, layer, graphs.features(), graphs.square(), *more, positions=POSITIONS)


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_run(emulated, name):
    layer, more = made(name)
    assert routes(emulated, layer, graphs.features(), graphs.square(), *more) == {"cuda"}


@pytest.mark.parametrize("name", ["Tutorial", "Summed", "Inner"])
def test_a_result_that_is_changed_in_place(route, name):
    """What kernels keep for backward is not the result."""
    cls, _ = LAYERS[name]

    class InPlace(cls):
        def update(self, inputs):
            return inputs.mul_(0.5).relu_()

    compare(route, InPlace(WIDTH, 8), graphs.features(), graphs.square())


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_what_changes_between_calls(emulated, name):
    """Weights written to and replaced, modes, another graph, another width of x."""
    layer, more = made(name)
    x, ei = graphs.features(), graphs.square()

    def both(x, ei, *more):
        expected = layer(x, ei, *more)
        with emulated.on():
            got = layer(x, ei, *more)
        assert close(got, expected)
        if expected.requires_grad:
            weights = list(layer.parameters())
            for a, b in zip(*(torch.autograd.grad(t.sum(), weights) for t in (got, expected))):
                assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)

    with torch.no_grad():
        both(x, ei, *more)  # what is kept of this has no gradients
    both(x, ei, *more)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.7)
    both(x, ei, *more)
    for module in list(layer.modules()):
        for key, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[key] = nn.Parameter(torch.randn_like(p))
    both(x, ei, *more)
    both(graphs.features(), graphs.square(), *more)
    both(x.double().float() * 2, ei.clone(), *more)


@pytest.mark.long
def test_options_and_modules_that_change(emulated):
    layer, x, ei = Tutorial(WIDTH, 8), graphs.features(), graphs.square()
    scored = Scored(WIDTH, 8)
    for change in (lambda: setattr(layer, "slope", 0.5), lambda: setattr(scored.act,
                   "negative_slope", 0.7), lambda: setattr(scored, "act", nn.ReLU()),
                   lambda: setattr(scored, "score", nn.Linear(16, 1, bias=False)),
                   lambda: layer.double()):
        for one in (layer, scored):
            with emulated.on():
                one(x.to(one.lin.weight.dtype), ei)
        change()
        for one in (layer, scored):
            given = x.to(one.lin.weight.dtype)
            expected = one(given, ei)
            with emulated.on(on_fallback="native"):
                assert close(one(given, ei), expected)


def test_both_ends_apart(emulated):
    layer = Summed(WIDTH, 8)
    left, right = torch.randn(N, 2, 8), torch.randn(M, 2, 8)
    ei = graphs.bipartite()
    expected = layer.propagate(ei, x=(left, right), size=(N, M))
    with emulated.on():
        assert close(layer.propagate(ei, x=(left, right), size=(N, M)), expected)
    assert gnnaccel.stats()["Summed"]["routes"] == {"cuda": 1}


class Optional(Inner):
    """With features of edges for some: without them the layer has no map of them."""

    embeds = False

    def message(self, q_i, k_j, v_j, index, ptr):
        if self.embeds:
            k_j = k_j + self.embedding(self.table).view(-1, self.heads, self.out)
        alpha = softmax((q_i * k_j).sum(dim=-1) * 0.5, index, ptr)
        return v_j * alpha.unsqueeze(-1)


def test_what_the_layer_does_not_have(emulated):
    """A branch that is not taken may name it; one that is taken fails as ever."""
    layer, x, ei = Optional(WIDTH, 8), graphs.features(), graphs.square()
    compare(emulated, layer, x, ei)
    assert routes(emulated, layer, x, ei) == {"cuda"}
    layer.embeds = True
    with emulated.on(on_fallback="native"), pytest.raises(AttributeError, match="embedding"):
        layer(x, ei)


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
def test_dropout(emulated, training):
    layer = Tutorial(WIDTH, 8, heads=1, dropout=0.5).train(training)
    x, ei = graphs.features(), graphs.square(N, 4000)
    with torch.no_grad():
        layer.att.zero_()  # each neighbour weighs the same
        expected = layer.eval()(x, ei)
        layer.train(training)
        torch.manual_seed(1)
        with emulated.on():
            one, two = layer(x, ei), layer(x, ei)
            average = torch.stack([layer(x, ei) for _ in range(200)]).mean(0)
    assert torch.equal(one, two) is not training
    if training:
        assert float((average - expected).norm() / expected.norm()) < 0.1
    else:
        assert close(one, expected)


def native_because(route, layer, *args, code: str, **options) -> None:
    gnnaccel.reset_stats()
    expected = layer(*args)
    with route.on(**{"on_fallback": "native", **options}):
        got = layer(*args)
    assert close(got, expected)
    found = gnnaccel.stats()[type(layer).__name__]
    assert found["routes"] == {"native": 1} and set(found["reasons"]) == {code}


def test_hooks_and_other_aggregations(emulated):
    x, ei = graphs.features(), graphs.square()
    layer = Tutorial(WIDTH, 8)
    handle = layer.register_message_forward_hook(lambda module, args, out: out * 2)
    native_because(emulated, layer, x, ei, code="GA501")
    handle.remove()
    assert routes(emulated, layer, x, ei) == {"cuda"}
    layer.score_hook = layer.lin.register_forward_hook(lambda *args: None)  # outside the message
    assert routes(emulated, layer, x, ei) == {"cuda"}
    scored = Scored(WIDTH, 8)
    scored.score.register_forward_hook(lambda module, args, out: out + 1)
    native_because(emulated, scored, x, ei, code="GA211")


@pytest.mark.long
def test_a_softmax_of_the_users_own(emulated, monkeypatch):
    layer, x, ei = Tutorial(WIDTH, 8), graphs.features(), graphs.square()
    assert routes(emulated, layer, x, ei) == {"cuda"}
    monkeypatch.setattr(own_attention, "softmax", lambda src, *args: src * 0 + 1)
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


def test_rows_of_edges_that_are_not_one_each(emulated):
    """What broadcasts over edges is no feature of theirs."""
    layer, _ = made("Apart")
    native_because(emulated, layer, graphs.features(), graphs.square(), torch.randn(1, 3),
                   code="GA206")


def test_features_without_data(route):
    """Shapes alone, as a model is asked for them before it is loaded."""
    layer, more = made("InnerOfEdges")
    given = [one.to("meta") for one in (graphs.features(), graphs.square(), *more)]
    with route.on(on_fallback="native"):
        out = layer.to("meta")(*given)
    assert out.is_meta and out.shape == (N, 16)


class Bare(Tutorial):
    """With the features as they are given."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index):
        return x_j * softmax((x_i + x_j).sum(-1, keepdim=True), index)


def test_features_without_channels(emulated):
    native_because(emulated, Bare(WIDTH, 8), torch.ones(N, 0), graphs.square(), code="GA206")


def test_copies_of_a_layer(emulated):
    layer, x, ei = Tutorial(WIDTH, 8), graphs.features(), graphs.square()
    with emulated.on():
        layer(x, ei)
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.att.neg_()
        got = other(x, ei)
    assert close(got, other(x, ei)) and not close(got, layer(x, ei))


class Told(Tutorial):
    """Keeps its weights for the user, as some layers do."""

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = softmax(F.leaky_relu((x_i + x_j).sum(-1)), index, ptr, size_i)
        self.alpha = alpha
        return x_j * alpha.unsqueeze(-1)


class Squared(Tutorial):
    """Of no known form."""

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = softmax((x_i * x_j).abs().sum(-1), index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class Mixing(Tutorial):
    """A sum over all edges, which no row can make alone."""

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = softmax((x_i + x_j).sum(-1) - x_j.sum(0).sum(-1), index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class InOrder(Tutorial):
    """Scores that edges before them add to."""

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = softmax((x_i + x_j).sum(-1).cumsum(0), index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class EdgesInKeys(InnerOfEdges):
    def message(self, q_i, k_j, v_j, edge_attr, index):
        edges = self.e(edge_attr).view(-1, self.heads, self.out)
        return v_j * softmax((q_i * (k_j + edges)).sum(-1), index).unsqueeze(-1)


class EdgesInValues(InnerOfEdges):
    def message(self, q_i, k_j, v_j, edge_attr, index):
        edges = self.e(edge_attr).view(-1, self.heads, self.out)
        return (v_j + edges) * softmax((q_i * k_j).sum(-1), index).unsqueeze(-1)


class OtherEdges(InnerOfEdges):
    """Not the same rows in keys and values."""

    def message(self, q_i, k_j, v_j, edge_attr, index):
        edges = self.e(edge_attr).view(-1, self.heads, self.out)
        alpha = softmax((q_i * (k_j + edges)).sum(-1), index)
        return (v_j + 2.0 * edges) * alpha.unsqueeze(-1)


class EdgesInQueries(InnerOfEdges):
    def message(self, q_i, k_j, v_j, edge_attr, index):
        edges = self.e(edge_attr).view(-1, self.heads, self.out)
        alpha = softmax(((q_i + edges) * (k_j + edges)).sum(-1), index)
        return (v_j + edges) * alpha.unsqueeze(-1)


@pytest.mark.parametrize("cls", [EdgesInKeys, EdgesInValues, OtherEdges, EdgesInQueries])
def test_other_places_of_edges(kernels, cls):
    """No published layer's attention: by kernels that are written for it."""
    compare(kernels, cls(WIDTH, 8), graphs.features(), graphs.square(), graphs.edge_features(E, 3))


@pytest.mark.parametrize("cls", [Told, Squared, Mixing])
def test_other_forms(kernels, cls):
    layer = cls(WIDTH, 8)
    compare(kernels, layer, graphs.features(), graphs.square())
    if cls is Told:
        layer, found = layer.to(kernels.device), []
        x, ei = graphs.features().to(kernels.device), graphs.square().to(kernels.device)
        for block in (gnnaccel.disabled(), kernels.on()):
            with block:
                layer(x, ei)
            found.append(layer.alpha)
        assert found[0] is not found[1] and close(*found)


@pytest.mark.parametrize("called", [False, True])
def test_a_vector_of_a_wider_dtype(route, called):
    """Scores have it, and so has the result."""
    layer, x = Tutorial(WIDTH, 4).to(route.device), graphs.features().to(route.device)
    ei = graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(x, ei)
    layer.att.data = layer.att.data.double()
    expected = layer(x, ei)
    with route.on(on_fallback="native"):
        got = layer(x, ei)
    assert got.dtype == expected.dtype == torch.float64 and close(got, expected)


def test_messages_that_stay_native(emulated):
    native_because(emulated, InOrder(WIDTH, 8), graphs.features(), graphs.square(), code="GA211")


CHANGES = {
    "hook": lambda layer, patch: layer.score.register_forward_hook(lambda m, args, out: out + args[
        0][:, :1]),
    "forward of the module": lambda layer, patch: setattr(
        layer.score, "forward", lambda x: x[:, :1] * 2),
    "forward of the class": lambda layer, patch: patch.setattr(
        nn.Linear, "forward", lambda self, x: F.linear(x, self.weight * 2, self.bias)),
    "function of torch's": lambda layer, patch: patch.setattr(
        F, "dropout", lambda x, p=0.5, training=True, inplace=False: x * 0.5),
    "activation": lambda layer, patch: patch.setattr(
        nn.LeakyReLU, "forward", lambda self, x: x.sin()),
}


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_are_changed(emulated, monkeypatch, change, when):
    """Hooks and replaced functions of modules that the message calls, seen at each call."""
    layer, x, ei = Scored(WIDTH, 8), graphs.features(), graphs.square()
    if when == "after it":
        with emulated.on():
            layer(x, ei)
    CHANGES[change](layer, monkeypatch)
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


# --- 16 bits --------------------------------------------------------------------------------------

class SideBySide(Linear):
    """The host rounds the score once, which says on which side of 0 it lies."""

    def __init__(self, slope):
        super().__init__(WIDTH, 8)
        self.score, self.slope = nn.Linear(2 * WIDTH, 1), slope

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index):
        alpha = self.score(torch.cat([x_i, x_j], dim=-1))
        if self.slope is not None:
            alpha = F.leaky_relu(alpha, self.slope)
        return x_j * softmax(alpha, index)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bent_products_of_both_ends_in_16_bits(route, dtype):
    def taken(layer, dtype):
        x, ei = graphs.features().to(route.device, dtype), graphs.square().to(route.device)
        return routes(route, layer.to(route.device, dtype), x, ei, on_fallback="native")

    assert taken(SideBySide(0.2), dtype) == {"native"}
    assert taken(SideBySide(0.2), torch.float32) == {route.backend}
    assert taken(SideBySide(None), dtype) == {route.backend}
