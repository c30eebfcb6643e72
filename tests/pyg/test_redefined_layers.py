"""Users' subclasses of layers that have an adapter, with a message of their own: their messages are
read as those of any layer."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GATv2Conv, RGCNConv, TransformerConv
from torch_geometric.utils import softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import EDGE, F as WIDTH
from tests.pyg.judge import close, compare


class TanhGAT(GATConv):
    def __init__(self):
        super().__init__(WIDTH, 4, heads=2)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * torch.tanh(x_j)


class WeightedGAT(GATConv):
    """Scores changed by weights of edges, and a forward of its own."""

    def __init__(self):
        super().__init__(WIDTH, 4, heads=2, add_self_loops=False)

    def forward(self, x, edge_index, edge_attr):
        return super().forward(x, edge_index, edge_attr=edge_attr[:, 0].abs() + 0.1)

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, size_i):
        alpha = F.leaky_relu(alpha_j + alpha_i, self.negative_slope)
        return softmax(alpha + torch.log2(edge_attr.view(-1, 1)), index, ptr, size_i)


class TanhGATv2(GATv2Conv):
    def __init__(self):
        super().__init__(WIDTH, 4, heads=2)

    def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
        return softmax((torch.tanh(x_i + x_j) * self.att).sum(-1), index, ptr, dim_size)


class EdgeTransformer(TransformerConv):
    """PyG cannot write its `propagate`, as the arguments are not annotated: it inherits one."""

    def __init__(self):
        TransformerConv(WIDTH, 4)  # for which PyG has written one then
        super().__init__(WIDTH, 4, heads=2, edge_dim=EDGE)

    def forward(self, x, edge_index, edge_attr):
        return super().forward(x, edge_index, edge_attr)

    def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
        edge = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        alpha = (query_i * (key_j + edge)).sum(-1) / math.sqrt(self.out_channels)
        alpha = softmax(alpha, index, ptr, size_i)
        return torch.relu(value_j + edge) * alpha.view(-1, self.heads, 1)


CLASSES = [TanhGAT, WeightedGAT, TanhGATv2, EdgeTransformer]


def given(cls):
    args = [graphs.features(), graphs.square(), graphs.edge_features(graphs.E, EDGE)]
    return args[:3 if cls in (WeightedGAT, EdgeTransformer) else 2]


def by_kernels(cls) -> bool:
    return gnnaccel.stats()[cls.__name__]["routes"].get("cuda") == 1


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES)
def test_values_and_gradients(emulated, cls):
    """The layer's call is none that its adapter knows; within it runs a kernel."""
    layer = cls()

    def route():
        return emulated.on(on_fallback="native")

    compare(type("Route", (), dict(device=emulated.device, on=staticmethod(route))), layer,
            *given(cls), went=lambda: by_kernels(cls))


@pytest.mark.parametrize("cls", CLASSES)
def test_again_and_after_changes(emulated, cls):
    layer, args = cls(), given(cls)
    with emulated.on(on_fallback="native"):
        for step in range(6):
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.mul_(0.9)
            if step == 4:
                args[0] = args[0] * 2
            with gnnaccel.disabled():
                expected = layer(*args)
            gnnaccel.reset_stats()
            assert close(layer(*args), expected)
            assert by_kernels(cls)


class Untouched(GATConv):
    """A subclass that only says how it is made."""

    def __init__(self):
        super().__init__(WIDTH, 4, heads=2)


def test_subclasses_that_change_nothing_run_by_their_adapter(emulated):
    layer, args = Untouched(), given(Untouched)
    expected = layer(*args)
    gnnaccel.reset_stats()
    with emulated.on():
        assert close(layer(*args), expected)
    assert routes(layer) == {"cuda": 1}


def test_a_method_that_is_replaced_later(emulated, monkeypatch):
    """What was a plain subclass when its first layer was made is the host's afterwards."""

    class LaterGAT(GATConv):
        pass

    layer, args = LaterGAT(WIDTH, 4, heads=2), given(LaterGAT)
    with emulated.on(on_fallback="native"):
        layer(*args)
        monkeypatch.setattr(LaterGAT, "message", TanhGAT.message)
        with gnnaccel.disabled():
            expected = layer(*args)
        assert close(layer(*args), expected)


class PlainRGCN(RGCNConv):
    def __init__(self):
        super().__init__(WIDTH, 6, 3)

    def message(self, x_j, edge_type_ptr, index):
        return torch.tanh(x_j)


def test_relations(emulated):
    layer, (x, edges) = PlainRGCN(), given(PlainRGCN)
    kinds = torch.arange(edges.shape[1]) % 3
    expected = layer(x, edges, kinds)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        assert close(layer(x, edges, kinds), expected)
    assert gnnaccel.stats()["PlainRGCN"]["routes"]["cuda"] == 3
