"""Messages that need something for each edge before they are reduced."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.nn.resolver import aggregation_resolver
from torch_geometric.utils import scatter, softmax

import gnnaccel
from gnnaccel.adapters.tracing import expressed, tracing
from tests.pyg import edge_layers, graphs
from tests.pyg.edge_layers import (FORMS, Attended, ByHeads, Deep, DeepBent, Distance, Dropped,
                                   Embedded, HeadGates, Keeps, MapOfDifference, Normed,
                                   NormOfProduct, OfEachChannel, OwnModules, SideBySide, Statistics,
                                   WithoutSoftmax)
from tests.pyg.generated_calls import arguments, both, compare_second, hub, repeats, routes, to
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(kernels, form):
    compare(kernels, form(), *arguments(form))


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema_of_networks(kernels, aggr):
    compare(kernels, Deep(aggr), *arguments(Deep))


@pytest.mark.parametrize("form, count", [(WithoutSoftmax, 1), (HeadGates, 2), (Normed, 2),
                                         (NormOfProduct, 2), (Distance, 1)])
def test_sums_over_channels_are_in_the_kernel(kernels, form, count):
    """Nothing is written for each edge of what a sum or a norm over channels is made of."""
    layer, args = form().to(kernels.device), to(kernels.device, *arguments(form))
    with kernels.on(records=5):
        layer(*args)
        record = gnnaccel.records()[-1]
    assert record["kernel"].count("channel_sum") <= count
    (message,) = messages_of(layer)
    assert len(message.expression.sums) == count


def messages_of(layer) -> list:
    found = tracing._traces.get(layer)
    return [trace.message for _, trace in found if isinstance(trace.message, expressed.Message)]


@pytest.mark.parametrize("aggr", ["max", "mean"])
@pytest.mark.parametrize("form", [WithoutSoftmax, HeadGates, NormOfProduct])
def test_other_reductions_of_sums_over_channels(kernels, form, aggr):
    layer = form()
    layer.aggr_module = aggregation_resolver(aggr)
    compare(kernels, layer, *arguments(form))


@pytest.mark.parametrize("width", [1, 3, 64, 130, 512])
def test_widths_of_sums_over_channels(kernels, width):
    class Norm(Message):
        def message(self, x_i, x_j):
            found = F.layer_norm(x_i * x_j, (width,))
            return found * torch.tanh((x_i - x_j).mean(-1, keepdim=True))

    compare(kernels, Norm(), torch.randn(N, width), graphs.square())


def test_edge_conv_of_two_maps(kernels):
    maps = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 5))
    compare(kernels, pyg.EdgeConv(maps, aggr="max"), graphs.features(), graphs.square())


def points() -> torch.Tensor:
    return graphs.features(N)[:, :3].contiguous()


def net(*widths: int) -> nn.Sequential:
    return edge_layers.network(*widths, act=nn.ReLU)


#: layers of PyG's, with what they get besides features: "edge", "pos" before the edges, or nothing
HOSTS = {
    "FAConv": (lambda: pyg.FAConv(WIDTH), "x"),
    "FeaStConv": (lambda: pyg.FeaStConv(WIDTH, 8, heads=3), ""),
    "GMMConv": (lambda: pyg.GMMConv(WIDTH, 8, dim=EDGE, kernel_size=3), "edge"),
    "GMMConv, separate": (lambda: pyg.GMMConv(WIDTH, 8, dim=EDGE, kernel_size=3,
                                              separate_gaussians=True), "edge"),
    "GeneralConv": (lambda: pyg.GeneralConv(WIDTH, 8, in_edge_channels=EDGE), "edge"),
    "GeneralConv, attention": (lambda: pyg.GeneralConv(WIDTH, 8, attention=True, heads=2), ""),
    "GeneralConv, products": (lambda: pyg.GeneralConv(WIDTH, 8, attention=True, heads=2,
                                                      attention_type="dot_product"), ""),
    "PointGNNConv": (lambda: pyg.PointGNNConv(net(WIDTH, 3), net(WIDTH + 3, 8, 8), net(8, WIDTH)),
                     "pos"),
    "PointNetConv": (lambda: pyg.PointNetConv(net(WIDTH + 3, 8, 8)), "pos"),
    "PointTransformerConv": (lambda: pyg.PointTransformerConv(WIDTH, 8), "pos"),
    "PointTransformerConv, networks": (lambda: pyg.PointTransformerConv(
        WIDTH, 8, net(3, 6, 8), net(8, 6, 8)), "pos")}


@pytest.mark.parametrize("name", HOSTS)
def test_layers_of_the_host(kernels, name):
    make, more = HOSTS[name]
    x, ei = graphs.features(), graphs.square()
    args = {"": (x, ei), "x": (x, x.sin(), ei), "edge": (x, ei, graphs.edge_features(E, EDGE)),
            "pos": (x, points(), ei)}[more]
    compare(kernels, make(), *args)


@pytest.mark.parametrize("name, sizes", [("FAConv", (5, 1, 1)), ("GeneralConv", (2, 0, 2)),
                                         ("GMMConv", (3, 1, 2))])
def test_inputs_that_are_computed_for_a_call_are_counted(kernels, monkeypatch, name, sizes):
    """Their price keeps layers native where the host is what takes the time."""
    seen, of = [], expressed.Message.stand_in

    def stand_in(*args):
        seen.append(of(*args))
        return seen[-1]

    monkeypatch.setattr(expressed.Message, "stand_in", stand_in)
    test_layers_of_the_host(kernels, name)
    assert max(one.sizes for one in seen) == sizes


@pytest.mark.parametrize("edges", [1, 2])
@pytest.mark.parametrize("form", [DeepBent, Attended, ByHeads, Keeps, OwnModules, SideBySide])
def test_few_edges(kernels, form, edges):
    x, ei, edge = arguments(form)
    compare(kernels, form(), x, ei[:, :edges], edge if edge is None else edge[:edges])


@pytest.mark.parametrize("form", [Attended, ByHeads, DeepBent, HeadGates, Normed])
def test_rows_that_are_split(kernels, form):
    ei = hub()
    edge = graphs.edge_features(ei.shape[1], EDGE)
    compare(kernels, form(), graphs.features(), ei, edge)


@pytest.mark.parametrize("form", [WithoutSoftmax, OfEachChannel, DeepBent, Embedded, HeadGates])
def test_second_derivatives(kernels, form):
    layer = form().to(kernels.device)
    x, ei, edge = arguments(form)
    edge = graphs.edge_features(E, EDGE) if edge is None else edge
    compare_second(kernels, layer, *to(kernels.device, x, ei, edge))


@pytest.mark.parametrize("form", [ByHeads, OwnModules])
def test_on_torch_operations(kernels, form):
    both(kernels, form(), *arguments(form), backend="torch", on_fallback="native")


def test_results_repeat(kernels):
    repeats(kernels, ByHeads(), EDGE)


# --- what is drawn and kept -----------------------------------------------------------------------

@pytest.mark.long
@pytest.mark.parametrize("form", [Dropped, lambda: Attended(0.4)])
def test_dropout_draws_as_the_host(kernels, form):
    """One mask for a call, though several kernels read what was dropped; the next draws anew."""
    layer = form().to(kernels.device)
    x, ei, edge = to(kernels.device, *arguments(Dropped))
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        torch.manual_seed(3)
        given, edges = x.clone().requires_grad_(), edge
        with block:
            outs = [layer(given, ei, edges) for _ in range(2)]
            sum(outs).sin().sum().backward()
        found.append([*outs, given.grad])
    assert all(close(*pair) for pair in zip(*found))
    assert not close(*found[1][:2])
    assert routes(layer) == {"cuda": 2}
    layer.eval()
    both(kernels, layer, *arguments(Dropped))


def test_statistics_are_kept_once(kernels):
    one, other = (Statistics().to(kernels.device) for _ in range(2))
    other.load_state_dict(one.state_dict())
    args = to(kernels.device, *arguments(Statistics))
    with kernels.on():
        for _ in range(3):
            one(*args)
    for _ in range(3):
        other(*args)
    for name, buffer in other.norm.named_buffers():
        assert torch.allclose(getattr(one.norm, name), buffer, 1e-5, 1e-6), name
    assert one.norm.num_batches_tracked == 3


def test_kept_attention_has_gradients(kernels):
    layer, args = Keeps().to(kernels.device), to(kernels.device, *arguments(Keeps))
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        layer.zero_grad()
        with block:
            _, alpha = layer(*args)
            (alpha * torch.linspace(0, 1, E, device=alpha.device).view(-1, 1)).sum().backward()
        found.append([alpha, layer.q.weight.grad.clone(), layer.k.weight.grad.clone()])
    assert routes(layer) == {"cuda": 1}
    assert all(close(*pair) for pair in zip(*found))


class KeepsOfHeads(Keeps):
    """One number for each edge, which is dropped and laid out after it was kept."""

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        self.alpha = alpha = softmax((q_i * k_j).sum(dim=-1) * 0.3, index, ptr, size_i)
        return F.dropout(alpha, 0.3, self.training).view(-1, 1) * v_j


@pytest.mark.parametrize("form", [Keeps, KeepsOfHeads])
def test_the_gradient_of_kept_attention_is_of_what_the_message_makes(kernels, form):
    """As those ask for it who explain a model: by `retain_grad`, a hook, or by its name."""
    layer, args = form().to(kernels.device).train(), to(kernels.device, *arguments(form))
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        layer.zero_grad()
        torch.manual_seed(4)
        with block:
            out, alpha = layer(*args)
            alpha.retain_grad()
            alpha.register_hook(lambda grad: grad * 2)
            (by_name,) = torch.autograd.grad(out.sin().sum(), alpha, retain_graph=True)
            out.sin().sum().backward()
        found.append([by_name, alpha.grad, layer.q.weight.grad.clone()])
    assert routes(layer) == {"cuda": 1}
    assert all(close(*pair) for pair in zip(*found))


class KeepsNumber(Message):
    """Sets what its ``aggregate`` reads."""

    def __init__(self):
        super().__init__()
        self.scale = 0.3

    def message(self, x_i, x_j):
        self.scale = 0.6
        return torch.tanh(x_i * x_j)

    def aggregate(self, inputs, index, x_j, dim_size):
        return scatter(self.scale * inputs + x_j, index, 0, dim_size)


def test_what_is_kept_is_read_afterwards(kernels):
    args, found = to(kernels.device, *arguments(KeepsNumber)), []
    for block in (gnnaccel.disabled(), kernels.on()):
        layer = KeepsNumber().to(kernels.device)
        with block:
            found.append([layer(*args), layer(*args)])
        assert layer.scale == 0.6
    assert routes(layer) == {"cuda": 2}
    assert all(close(*pair) for pair in zip(*found))


class KeepsOfHost(Message):
    """Would set what message passing has of its own."""

    def message(self, x_i, x_j):
        self.node_dim = -2
        return torch.relu(x_i - x_j) * x_j.sum(-1, keepdim=True)


class KeepsParameter(Message):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def message(self, x_i, x_j):
        self.weight = nn.Parameter(self.weight.detach() * 1.5)
        return torch.relu(x_i - x_j) * self.weight


@pytest.mark.parametrize("cls", [KeepsOfHost, KeepsParameter])
def test_what_may_not_be_kept(kernels, cls):
    layer, args = cls().to(kernels.device), to(kernels.device, *arguments(cls))
    expected = layer(*args)
    if cls is KeepsParameter:
        layer.weight = nn.Parameter(torch.ones_like(layer.weight))
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        got = layer(*args)
    assert close(got, expected) and routes(layer) == {"native": 1}


def test_nothing_is_kept_alive(kernels, monkeypatch):
    """What a call computed is gone with its results, without a search for cycles."""
    alive, made = [], expressed.CallArguments.__init__

    class Made(dict):
        pass

    def init(self, *args):
        made(self, *args)
        self.made = Made()
        alive.append(weakref.ref(self.made))

    monkeypatch.setattr(expressed.CallArguments, "__init__", init)
    layer, args = DeepBent().to(kernels.device), to(kernels.device, *arguments(DeepBent))
    gc.disable()
    try:
        with kernels.on():
            for _ in range(3):
                layer(*args).sum().backward()
        assert len(alive) >= 3 and not any(one() is not None for one in alive)
    finally:
        gc.enable()


# --- what changes ---------------------------------------------------------------------------------

class InPlace(Message):
    """An activation that changes what it gets: new rows in a network, ``x_j``, which the host has
    gathered, and ``z`` that is used again."""

    def __init__(self, again: str):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, WIDTH))
        self.act, self.again = nn.ReLU(inplace=True), again

    def message(self, x_i, x_j, edge_attr):
        out = self.net(torch.cat([x_i, x_j], -1))
        z = x_i - x_j
        if self.again == "view":
            return self.act(z.unsqueeze(0)).squeeze(0) + z
        if self.again == "argument":
            return self.act(x_j) + out
        found = self.act(z)
        return found * out + (z if self.again == "itself" else 0.0)


@pytest.mark.parametrize("again", ["", "itself", "view", "argument"])
def test_what_is_changed_in_place(kernels, again):
    layer = InPlace(again)
    both(kernels, layer, *arguments(Message), on_fallback="native")
    assert routes(layer) == {"native" if again == "view" else "cuda": 1}


def test_parameters_go_with_their_layer(kernels):
    """Once what its tracing left is gone, without a further collection of garbage."""
    layer = pyg.EdgeConv(net(2 * WIDTH, 8, 4)).to(kernels.device)
    args = to(kernels.device, graphs.features(), graphs.square())
    with kernels.on():
        for _ in range(3):
            layer(*args).sum().backward()
    gc.collect()
    gc.disable()
    try:
        alive = [*map(weakref.ref, layer.parameters())]
        del layer
        assert alive and not any(one() is not None for one in alive)
    finally:
        gc.enable()


def test_modules_that_change(kernels):
    layer = OwnModules()
    each_seen(kernels, layer, *arguments(OwnModules), changes=(
        lambda: setattr(layer.net, "last", 3.0),
        lambda: setattr(layer.net.act[0], "beta", nn.Parameter(layer.net.act[0].beta * 2)),
        lambda: layer.net.act.__setitem__(1, nn.Sigmoid()),
        lambda: layer.net.maps.append(nn.Linear(6, 6).to(kernels.device)),
        lambda: layer.net.maps[0].weight.data.mul_(0.5)))


def test_a_replaced_forward(kernels, monkeypatch):
    layer = OwnModules()
    each_seen(kernels, layer, *arguments(OwnModules), changes=(
        lambda: monkeypatch.setattr(edge_layers.Swish, "forward", lambda self, x: x * 2.0),))


@pytest.mark.parametrize("change", [
    lambda layer: layer.net.act[0].register_forward_hook(lambda module, args, out: out * 2),
    lambda layer: setattr(layer.net.act[0], "forward", lambda x: x * 3)])
def test_modules_that_are_watched(kernels, change):
    layer = OwnModules()
    each_seen(kernels, layer, *arguments(OwnModules), changes=(lambda: change(layer),),
              taken="native")


def test_a_replaced_softmax(kernels, monkeypatch):
    layer = Attended()
    each_seen(kernels, layer, *arguments(Attended), changes=(lambda: monkeypatch.setattr(
        edge_layers, "softmax", lambda src, index, ptr, size: torch.ones_like(src)),),
        taken="cuda")


def test_training_and_evaluation(kernels):
    layer = Normed()
    each_seen(kernels, layer, *arguments(Normed), changes=(
        layer.eval, lambda: setattr(layer.net[1], "eps", 0.3),
        lambda: setattr(layer.net[1], "normalized_shape", (8,)), layer.train))


class TellsItself(Message):
    """A method asks under another name for what message passing passes by itself, and counts."""

    def scaled(self, x, told):
        return x * (2.0 if told is None else 3.0)

    def message(self, x_i, x_j, size_i):
        return self.scaled(torch.relu(x_i - x_j), size_i)


def test_a_method_that_is_told(kernels):
    layer, args = TellsItself().to(kernels.device), to(kernels.device, *arguments(TellsItself))
    expected = layer(*args)
    gnnaccel.reset_stats()
    with kernels.on():
        assert close(layer(*args), expected)
    assert routes(layer) == {"cuda": 1}


def test_other_dtypes_and_autocast_stay_native(kernels):
    layer, args = Deep().double().to(kernels.device), to(kernels.device, *arguments(Deep))
    args = [a.double() if a is not None and a.is_floating_point() else a for a in args]
    both(kernels, layer, *args, on_fallback="native")
    assert routes(layer) == {"native": 1}


def test_small_graphs_stay_native(kernels):
    layer = Attended()
    both(kernels, layer, *arguments(Attended), when="profitable", on_fallback="native")
    assert routes(layer) == {"native": 1}


def test_a_shared_mask_in_a_comparison(kernels):
    """What is compared has no gradient; what it shares with the rest keeps its own."""

    class Compared(Message):
        def message(self, x_i, x_j, edge_attr):
            found = F.layer_norm(x_i * x_j, (WIDTH,))
            return torch.where(found > 0.1, found, 0.2 * found)

    compare(kernels, Compared(), *arguments(Compared))


def test_differences_are_mapped_as_such(kernels):
    """Neighbours that are nearly alike: the maps of both are far larger than that of their
    difference."""
    x = 1000.0 + graphs.features(N)
    compare(kernels, MapOfDifference(), x, graphs.square())
