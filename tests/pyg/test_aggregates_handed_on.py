"""An ``aggregate`` that gets or gives dictionaries, features of nodes that the message hands on, or
vectors of heads; one that numbers say the rows of; and what messages ask of what they have."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, compare

HEADS = 2


class Named(Message):
    """EGNN with a dictionary of messages, and of results."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, x_i, x_j, edge_attr):
        gate = torch.sigmoid(self.lin(x_i) + x_j)
        return {"rows": gate * x_j, "ends": (x_i - x_j)[:, :3] * edge_attr[:, :1]}

    def aggregate(self, inputs, index, dim_size):
        return {"rows": scatter(inputs["rows"], index, 0, dim_size, reduce=self.aggr),
                "ends": scatter(inputs["ends"], index, 0, dim_size, reduce="mean")}

    def update(self, found, x):
        return torch.cat([x + found["rows"], found["ends"]], -1)


class HandsOn(Message):
    """GatedGCN with a list: features of the nodes that receive go by way of the message."""

    def forward(self, x, edge_index, edge_attr):
        return torch.cat([one.sum(0, keepdim=True) for one in self.propagate(
            edge_index, x=x, own=x.tanh(), edge_attr=edge_attr)], -1)

    def message(self, x_i, x_j, own, edge_attr):
        return [x_j, x_i + edge_attr[:, :1], own]

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        gate = torch.sigmoid(inputs[1])
        rows = scatter(gate * inputs[0], index, dim=self.node_dim, dim_size=dim_size, reduce="add")
        return [inputs[2] + rows / (scatter(gate, index, self.node_dim, dim_size) + 1e-6),
                inputs[1]]


class Turned(MessagePassing):
    """TorchMD-NET: scalars and vectors of several heads."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.edge = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(3, 2 * WIDTH)

    def forward(self, x, edge_index, vec, turn):
        x, vec = self.propagate(edge_index, x=self.lin(x).view(-1, HEADS, WIDTH),
                                vec=vec.view(-1, 3, HEADS, WIDTH // 2), turn=turn,
                                by=self.edge(turn).view(-1, HEADS, WIDTH))
        return torch.cat([x.flatten(1), vec.flatten(1)], -1)

    def message(self, x_i, x_j, vec_j, turn, by):
        x_j = x_j * by
        gate = F.silu((x_i * x_j).sum(-1))
        one, other = torch.split(x_j, WIDTH // 2, dim=2)
        vec = vec_j * one.unsqueeze(1) + other.unsqueeze(1) * turn.unsqueeze(2).unsqueeze(3)
        return x_j * gate.unsqueeze(2), vec

    def aggregate(self, features, index, ptr, dim_size):
        return tuple(scatter(one, index, dim=self.node_dim, dim_size=dim_size) for one in features)

    def update(self, inputs):
        return inputs


class Counted(Message):
    """AllSet: numbers say how many nodes receive."""

    def __init__(self, nodes: int = N):
        super().__init__()
        self.num_nodes = nodes

    def message(self, x_i, x_j, index, ptr):
        return softmax((x_i * x_j).sum(-1, keepdim=True), index, ptr, self.num_nodes) * x_j

    def aggregate(self, inputs, index):
        return scatter(inputs, index, dim=self.node_dim, dim_size=self.num_nodes, reduce="mean")


class Mixin:
    def combined(self, inputs, index, dim_size):
        return torch.cat([scatter(inputs, index, 0, dim_size, reduce=one)
                          for one in self.kinds], -1)


class ByMixin(Message, Mixin):
    """PNA's form: by a method of another class, named by it; and by the host's."""

    kinds = ("mean", "max")

    def message(self, x_i, x_j):
        return torch.relu(x_i) * x_j

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        out = MessagePassing.aggregate(self, inputs, index, ptr, dim_size)
        return Mixin.combined(self, inputs, index, dim_size) + torch.cat([out, out], -1)


class Asks(Message):
    """Asks what it has and of which class it is."""

    def __init__(self):
        super().__init__()
        self.act, self.scale = nn.LeakyReLU(0.3), 2.0

    def bent(self, x):
        if isinstance(self.act, torch.Tensor):
            return x * self.act
        elif isinstance(self.act, nn.Module):
            return self.act(x)
        return x

    def message(self, x_i, x_j, edge_attr):
        out = self.bent(x_j * x_i)
        if isinstance(edge_attr, torch.Tensor) and not isinstance(self.scale, torch.Tensor):
            out = out * edge_attr[:, :1] * self.scale
        return out + self.extra if hasattr(self, "extra") else out


class NotOfRows(Message):
    """Asks for the number of dimensions by the other name."""

    def message(self, x_j):
        return torch.relu(x_j)

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, int(inputs.ndim == 3), dim_size, reduce="sum")


FORMS = (Named, HandsOn, Counted, ByMixin, Asks, NotOfRows)


def given(edges: int = E) -> list[torch.Tensor]:
    """Arguments of a call, over edges of which one enters the last node."""
    x, ei, edge = arguments(Message, edges)
    ei[1, -1] = N - 1
    return [x, ei, edge]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("train", [True, False])
def test_values_and_gradients(kernels, form, train):
    compare(kernels, form(), *given(), train=train)


@pytest.mark.long
def test_vectors_of_heads(kernels):
    vec, turn = torch.randn(N, 3 * WIDTH), graphs.edge_features(E, 3)
    compare(kernels, Turned(), graphs.features(), graphs.square(), vec, turn)


@pytest.mark.parametrize("nodes", [N - 1, N + 3])
def test_other_numbers_of_nodes_stay_native(emulated, nodes):
    x, ei, edge = given()
    ei = ei % (N - 1)
    layer = Counted(nodes)
    both(emulated, layer, x, ei, edge, on_fallback="native")
    assert routes(layer) == {"native": 1}


def test_a_number_of_nodes_that_changes(emulated):
    """Of the layer, and of the call, whose graph has other nodes then."""
    layer, (x, ei, edge) = Counted(), given()
    ei = ei % (N - 1)
    with emulated.on(on_fallback="native"):
        for nodes in (N, N, N + 2, N, N - 1):
            layer.num_nodes = nodes
            assert layer(x, ei, edge).shape[0] == nodes
        for rows in (N - 1, N, N - 1):
            assert layer(x[:rows], ei, edge).shape[0] == N - 1


@pytest.mark.long
def test_dictionaries_may_be_changed(emulated):
    layer, args = Named(), given()
    with emulated.on():
        first, second = (layer.propagate(args[1], x=args[0], edge_attr=args[2]) for _ in range(2))
        assert close(first, second)
    report = gnnaccel.compare(layer, *args)
    assert report is not None


@pytest.mark.long
def test_what_is_asked_for_changes(emulated):
    layer, args = Asks(), given()
    changes = (lambda: None, lambda: setattr(layer, "extra", 1.5), lambda: delattr(layer, "extra"),
               lambda: setattr(layer, "act", None),
               lambda: layer.register_parameter("act", nn.Parameter(torch.randn(WIDTH))),
               lambda: setattr(layer, "scale", torch.tensor(3.0)),
               lambda: args.__setitem__(2, None))
    for at, change in enumerate(changes):
        if at == 3:
            del layer.act
        elif at == 4:
            del layer.act
        change()
        expected = layer(*args)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert close(layer(*args), expected), at
    assert routes(layer)["cuda"] >= 8


@pytest.mark.long
def test_features_of_other_rows_that_are_handed_on(emulated):
    """One row for all nodes, and none that fits: as the host has it."""
    x, ei, edge = given()
    layer = HandsOn()

    def call(own):
        return layer.propagate(ei, x=x, own=own, edge_attr=edge)

    for own in (x.tanh(), x[:1], x.tanh()):
        expected = call(own)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert all(map(close, call(own), expected))
    with emulated.on(on_fallback="native"), pytest.raises(RuntimeError):
        call(x[:3])
    assert EDGE == edge.shape[1]
