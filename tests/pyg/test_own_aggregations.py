"""Aggregations of users' own, subclasses of PyG's ``Aggregation``, and those of PyG's that have
modules of the user's, or are a softmax of messages that kernels are written for."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import GINConv, MLP, GraphConv, MessagePassing
from torch_geometric.nn.aggr import (Aggregation, AttentionalAggregation, DeepSetsAggregation,
                                     MeanAggregation, SoftmaxAggregation)
from torch_geometric.utils import degree, scatter, softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, compare_second, routes, to
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import close, compare


class Preserving(Aggregation):
    """A sum divided by the root of how many there are, counted by a sum of ones."""

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        total = self.reduce(x, index, ptr, dim_size, dim, reduce="sum")
        shape = [1 for _ in x.shape]
        shape[dim] = x.shape[dim]
        ones = torch.ones(size=shape, dtype=x.dtype, device=x.device)
        counts = self.reduce(ones, index, ptr, dim_size, dim, reduce="sum")
        return torch.nan_to_num(total / torch.sqrt(counts))


class Learned(Aggregation):
    """A softmax with a parameter, and a number that may be set."""

    def __init__(self):
        super().__init__()
        self.t, self.shift, self.lin = nn.Parameter(torch.tensor(0.7)), 0.5, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        alpha = softmax(x * self.t, index, ptr, dim_size, dim)
        return self.lin(self.reduce(x * alpha, index, ptr, dim_size, dim)) + self.shift


class ByDegree(Aggregation):
    def forward(self, x, index, ptr=None, dim_size=None, dim=-2):
        out = scatter(x, index, dim, dim_size, "sum")
        return out / degree(index, dim_size, dtype=x.dtype).clamp(min=1).sqrt().view(-1, 1)


class Inherited(Preserving):
    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        mean = self.reduce(x, index, ptr, dim_size, dim, reduce="mean")
        return super().forward(x, index, ptr, dim_size, dim) + mean


def attention():
    return AttentionalAggregation(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 1)),
                                  nn.Linear(WIDTH, WIDTH))


def attention_of_each_channel():
    return AttentionalAggregation(MLP([WIDTH, 4, WIDTH]))


def deep_sets():
    return DeepSetsAggregation(nn.Linear(WIDTH, 4), nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh()))


AGGREGATIONS = [Preserving, Learned, ByDegree, Inherited, attention, attention_of_each_channel,
                deep_sets]


class Gated(Message):
    def message(self, x_i, x_j, edge_attr):
        return torch.relu(x_j - x_i) * edge_attr[:, :1]


class Copied(Message):
    """PyG's own message."""


class Handing(MessagePassing):
    """Hands messages to a module that it holds as its aggregation by an ``aggregate``."""

    edge = EDGE

    def __init__(self, aggr):
        super().__init__(aggr="add")
        self.aggr_module = aggr

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return torch.tanh(x_j + x_i) * edge_attr[:, 1:2]

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return self.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size, dim=self.node_dim)


class OfGraphConv(GraphConv):
    """Of a class of PyG's."""

    edge = 1

    def forward(self, x, edge_index, edge_attr):
        return super().forward(x, edge_index, edge_attr.view(-1))


LAYERS = [Copied, Gated, Handing]


@pytest.mark.long
@pytest.mark.parametrize("aggr", AGGREGATIONS)
@pytest.mark.parametrize("cls", LAYERS)
def test_values_and_gradients(kernels, cls, aggr):
    for train in (True, False):
        compare(kernels, cls(aggr()), *arguments(cls), train=train)


@pytest.mark.parametrize("aggr", [Preserving, attention])
def test_a_subclass_of_pygs(kernels, aggr):
    compare(kernels, OfGraphConv(WIDTH, WIDTH, aggr=aggr()), *arguments(OfGraphConv))


def test_attention_in_pygs_own_layer(kernels):
    compare(kernels, GINConv(nn.Linear(WIDTH, WIDTH), aggr=attention()), *arguments(Copied)[:2])


@pytest.mark.long
def test_second_derivatives(kernels):
    compare_second(kernels, Gated(Learned()).to(kernels.device),
                   *to(kernels.device, *arguments(Gated)))


SOFTMAX = [{}, {"t": 0.1, "semi_grad": True}, {"t": 2.0, "learn": True},
           {"t": 1.5, "learn": True, "channels": WIDTH}]


@pytest.mark.long
@pytest.mark.parametrize("options", SOFTMAX, ids=["plain", "cold", "learnt", "by channel"])
@pytest.mark.parametrize("cls", [Gated, Handing])
def test_pygs_softmax_of_messages(kernels, cls, options):
    for train in (True, False):
        compare(kernels, cls(SoftmaxAggregation(**options)), *arguments(cls), train=train)
    layer = cls(SoftmaxAggregation(**options)).to(kernels.device)
    compare_second(kernels, layer, *to(kernels.device, *arguments(cls)))


@pytest.mark.long
def test_changes_of_a_softmax_are_seen(emulated):
    """Its temperature, its half of a gradient, and a hook."""
    layer, (x, *given) = Gated(SoftmaxAggregation()), arguments(Gated)
    module = layer.aggr_module
    x.requires_grad_()

    def gradient():
        return torch.autograd.grad(layer(x, *given).sin().sum(), x)[0]

    for change in (lambda: None, lambda: setattr(module, "t", 0.3),
                   lambda: setattr(module, "semi_grad", True),
                   lambda: setattr(module, "t", nn.Parameter(torch.tensor([2.0]))),
                   lambda: module.t.data.mul_(2.0)):
        change()
        expected = gradient()
        gnnaccel.reset_stats()
        with emulated.on():
            for _ in range(2):
                assert close(gradient(), expected)
        assert routes(layer) == {"cuda": 2}
    module.register_forward_hook(lambda module, args, out: 4.0 * out)
    expected = gradient()
    with emulated.on(on_fallback="native"):
        assert close(gradient(), expected)


def test_two_kinds_of_nodes(kernels):
    left, right = graphs.features(), graphs.features(graphs.M)
    ei = torch.stack([torch.randint(0, graphs.N, (90,)), torch.randint(0, graphs.M, (90,))])
    compare(kernels, Gated(Learned()), (left, right), ei, graphs.edge_features(90, EDGE))


@pytest.mark.long
def test_changes_are_seen(emulated):
    """Of the module, of its class, and another module."""
    layer, given = Gated(Learned()), arguments(Gated)

    def replaced(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        return self.reduce(x, index, ptr, dim_size, dim, "max") * 2.0

    before = Learned.forward
    try:
        for change in (lambda: None, lambda: setattr(layer.aggr_module, "shift", -2.0),
                       lambda: layer.aggr_module.t.data.mul_(3.0),
                       lambda: setattr(layer.aggr_module, "lin", nn.Linear(WIDTH, WIDTH)),
                       lambda: setattr(Learned, "forward", replaced),
                       lambda: setattr(layer, "aggr_module", Preserving())):
            change()
            expected = layer(*given)
            gnnaccel.reset_stats()
            with emulated.on():
                for _ in range(2):
                    assert close(layer(*given), expected)
            assert routes(layer) == {"cuda": 2}
    finally:
        Learned.forward = before


@pytest.mark.long
def test_changes_of_attention_are_seen(emulated):
    """Of its modules, and of PyG's class, which is native then."""
    layer, given = Gated(attention()), arguments(Gated)
    module, native = layer.aggr_module, AttentionalAggregation.forward

    def replaced(self, x, *args, **kwargs):
        return 2.0 * native(self, x, *args, **kwargs)

    def agrees(route):
        expected = layer(*given)
        gnnaccel.reset_stats()
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert close(layer(*given), expected)
        assert routes(layer) == {route: 2}

    agrees("cuda")
    for name in ("gate_nn", "nn"):
        setattr(module, name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        agrees("cuda")
    module.nn = None
    agrees("cuda")
    try:
        AttentionalAggregation.forward = replaced
        agrees("native")
    finally:
        AttentionalAggregation.forward = native
    agrees("cuda")


class Reducing(Preserving):
    """With another ``reduce``."""

    def reduce(self, *args, **kwargs):
        return 2.0 * super().reduce(*args, **kwargs)


class Calling(Preserving):
    """With another call."""

    def __call__(self, *args, **kwargs):
        return 3.0 * super().__call__(*args, **kwargs)


class Sorting(Aggregation):
    def forward(self, x, index, ptr=None, dim_size=None, dim=-2):
        index, order = torch.sort(index)
        return self.reduce(x[order], index, ptr, dim_size, dim)


def hooked():
    module = Preserving()
    module.register_forward_hook(lambda module, args, out: 4.0 * out)
    return module


def set_on_the_object():
    module = Preserving()
    module.reduce = lambda x, *args, **kwargs: 5.0 * MeanAggregation()(x, *args[:1], dim_size=args[2])
    return module


@pytest.mark.parametrize("make", [Reducing, Calling, Sorting, hooked, set_on_the_object])
@pytest.mark.parametrize("cls", LAYERS)
def test_others_stay_native(emulated, cls, make):
    layer, given = cls(make()), arguments(cls)
    expected = layer(*given)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        for _ in range(2):
            assert close(layer(*given), expected)
    assert routes(layer) == {"native": 2}


def test_a_hook_that_comes_later(emulated):
    layer, given = Gated(Preserving()), arguments(Gated)
    with emulated.on(on_fallback="native"):
        layer(*given)
        handle = layer.aggr_module.register_forward_hook(lambda module, args, out: 4.0 * out)
        got = layer(*given)
    assert close(got, layer(*given))
    handle.remove()
