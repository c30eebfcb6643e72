"""Classes with a ``propagate`` of the user's own: one that hands on to PyG's asks as PyG's does."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, PNAConv, SimpleConv
from torch_geometric.typing import Adj

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, compare


class HandsOn(Message):
    """Names an argument that nobody passed."""

    def propagate(self, edge_index, size=None, **kwargs):
        kwargs["scale"] = kwargs.get("scale")
        return super().propagate(edge_index, size=size, **kwargs)

    def message(self, x_i, x_j, scale):
        return torch.tanh(x_i - x_j) if scale is None else x_j * scale


class BySize(HandsOn):
    """The size is no keyword, and another class stands between."""

    def propagate(self, edge_index, **kwargs):
        return MessagePassing.propagate(self, edge_index, kwargs.pop("size", None), **kwargs)

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j)


class Queue(Message):
    """Weights that wait on the layer, one for each time that it propagates."""

    def __init__(self):
        super().__init__()
        self.weights, self.now, self.lin = None, None, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        self.weights = [edge_attr[:, 0], None, edge_attr[:, 1]]
        x = self.lin(x)
        return sum(self.propagate(edge_index, x=x) for _ in range(3))

    def propagate(self, edge_index, **kwargs):
        self.now = self.weights.pop(0)
        return super().propagate(edge_index, **kwargs)

    def message(self, x_i, x_j):
        out = torch.relu(x_j - x_i)
        return out if self.now is None else out * self.now.view(-1, 1)


class Twice(Message):
    def propagate(self, edge_index, size=None, **kwargs):
        out = super().propagate(edge_index, size=size, **kwargs)
        return torch.cat([out, super().propagate(edge_index.flip(0), size=size, **kwargs)], 1)

    def message(self, x_i, x_j, edge_attr):
        return torch.cat([x_i * x_j, edge_attr], -1).sigmoid()


class ByHand(Message):
    """A ``propagate`` that does all by itself."""

    def propagate(self, edge_index, size=None, **kwargs):
        size = self._check_input(edge_index, size)
        given = self._collect(self._user_args, edge_index, size, kwargs)
        out = self.message(given["x_i"], given["x_j"])
        return self.aggregate(out, given["index"], dim_size=given["dim_size"]) * 2

    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j)


@pytest.mark.parametrize("cls", [HandsOn, BySize, Twice])
def test_values_and_gradients(kernels, cls):
    x, ei, edge = arguments(cls)
    given = [x, ei, edge] if cls is Twice else [x, ei]
    compare(kernels, cls(), *given, calls=2 if cls is Twice else 1)


@pytest.mark.long
def test_what_a_propagate_sets_is_seen_by_each_message(emulated):
    layer, given = Queue(), arguments(Queue)
    for _ in range(3):
        expected = layer(*given)
        gnnaccel.reset_stats()
        with emulated.on():
            assert close(layer(*given), expected)
        assert routes(layer) == {"cuda": 3}
        with torch.no_grad():
            given[2].mul_(-1.5)
            layer.lin.weight.add_(0.1)


@pytest.mark.long
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_dtypes_and_flows(emulated, dtype, flow):
    layer = HandsOn(flow=flow)
    x, ei = graphs.features().to(dtype), graphs.square()
    for index in (ei, ei.int(), ei[:, :0]):
        expected = layer(x, index)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                got = layer(x, index)
        assert got.dtype is dtype
        torch.testing.assert_close(got, expected)
    with emulated.on(on_fallback="native"):
        assert layer(x[:0], ei[:, :0]).shape == (0, WIDTH)


def test_pairs_and_sizes(emulated):
    layer, ei = HandsOn(), graphs.bipartite()
    x = graphs.features(), graphs.features(graphs.M)
    expected = layer(x, ei, size=(N, graphs.M))
    with emulated.on():
        got = layer(x, ei, size=(N, graphs.M))
    assert close(got, expected) and routes(layer) == {"cuda": 1}


def test_one_that_does_all_by_itself_is_left_alone(emulated):
    layer, (x, ei, _) = ByHand(), arguments(ByHand)
    expected = layer(x, ei)
    gnnaccel.reset_stats()
    with emulated.on():
        got = layer(x, ei)
    assert torch.equal(got, expected) and "ByHand" not in gnnaccel.stats()


def test_one_of_a_layer_object_is_called(emulated):
    layer, (x, ei, _) = HandsOn(), arguments(HandsOn)
    layer.propagate = lambda edge_index, x, **kwargs: x * 3
    with emulated.on():
        assert torch.equal(layer(x, ei), x * 3)


def test_a_layer_that_is_explained_stays_native(emulated):
    layer, (x, ei, _) = HandsOn(), arguments(HandsOn)
    expected = layer(x, ei)
    layer.explain, layer._edge_mask = True, torch.zeros(E)
    layer._apply_sigmoid, layer._loop_mask = True, torch.ones(E, dtype=torch.bool)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        got = layer(x, ei)
    assert close(got, expected / 2) and routes(layer) == {"native": 1}


class OfPNA(PNAConv):
    """PyG may have written no ``propagate`` for its base."""

    def propagate(self, edge_index, size=None, **kwargs):
        return super().propagate(edge_index, size=size, **kwargs)


def test_a_subclass_of_a_layer_of_the_host(emulated):
    layer = OfPNA(WIDTH, 6, ["mean", "max"], ["identity"], torch.ones(9, dtype=torch.long))
    x, ei, _ = arguments(Message)
    expected = layer(x, ei)
    with emulated.on(on_fallback="native"):
        assert close(layer(x, ei), expected)


def test_pygs_own_comes_back():
    before = MessagePassing.propagate
    with gnnaccel.enabled():
        assert MessagePassing.propagate is not before
        layer = SimpleConv()
        cls = type("MadeWhileOn", (HandsOn,), {})
        made = cls()
        assert type(made)._orig_propagate.__qualname__ == "HandsOn.propagate"
    assert MessagePassing.propagate is before
    x, ei, _ = arguments(Message)
    assert layer(x, ei).shape == made(x, ei).shape == (N, WIDTH)


class Written(MessagePassing):
    """A class that goes back to PyG's general ``propagate``, for which PyG then writes one."""

    def forward(self, x: Tensor, edge_index: Adj) -> Tensor:
        # propagate_type: (x: Tensor)
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_a_class_that_goes_back_to_pygs_general_propagate():
    """PyG compares it with MessagePassing's, which is ours then."""
    x, edges = torch.randn(N, 3), graphs.square()
    with gnnaccel.enabled():
        right = Written()(x, edges)
        Written.propagate = Written._orig_propagate
        try:
            scripted = torch.jit.script(Written())
        finally:
            del Written.propagate
    assert torch.equal(scripted(x, edges), right)


def test_a_class_that_is_new_and_for_which_pyg_cannot_write_one():
    """As `ptr` has no annotation. It inherits PyG's general one, which is ours by then."""

    class Unannotated(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j, ptr):
            return x_j

    x, edges = torch.randn(N, 3), graphs.square()
    with gnnaccel.enabled(backend="torch", when="supported"):
        layer = Unannotated()
        got = layer(x, edges)
        assert gnnaccel.stats()["Unannotated"]["routes"] == {"torch": 1}
    assert torch.allclose(got, layer(x, edges), atol=1e-5)
