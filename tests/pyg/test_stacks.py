"""Features with nodes in another dimension than the first: batches, steps of time, heads."""
from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax
from torch_geometric.utils.num_nodes import maybe_num_nodes

import gnnaccel
from gnnaccel.adapters.standins.scatter import reduce as of_torch_scatter
from gnnaccel.adapters.standins.scatter.segment import segment_csr
from tests.pyg import graphs
from tests.pyg.edge_layers import network
from tests.pyg.generated_calls import both, routes, to
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen

BATCH, TIME, WIDTH, HEADS = 2, 3, 8, 2


class Stacked(MessagePassing):
    """Passes ``x`` [..., nodes, channels] on."""

    def __init__(self, aggr: str = "add", node_dim: int = -2):
        super().__init__(aggr=aggr, node_dim=node_dim)

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)


class Network(Stacked):
    """A network of both ends, gated by a map of its result (GatedGraphNetwork)."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr)
        self.net = network(2 * WIDTH, 4, WIDTH)
        self.gate = nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())

    def message(self, x_i, x_j):
        found = self.net(torch.cat([x_i, x_j], -1))
        return self.gate(found) * found


class Difference(Stacked):
    """With a parameter and a number for each edge."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(1, 1))

    def message(self, x_i, x_j, edge_attr):
        return torch.relu(x_j - x_i) * self.scale * edge_attr[..., :1] + self.bias


class Pieces(Stacked):
    def message(self, x_i, x_j):
        left, right = x_j.chunk(2, dim=-1)
        found = F.softmax(left * x_i[..., :WIDTH // 2], dim=-1) + right
        found = F.layer_norm(found, (WIDTH // 2,)) / x_i.abs().sum(3, keepdim=True)
        return found.view(BATCH, TIME, -1, 2, WIDTH // 4).mean(-2)


class Weighted(Stacked):
    """Weights for each batch and edge, in the second dimension (ChebConvAttention)."""

    def message(self, x_j, edge_attr):
        batch, edges = edge_attr.shape
        return edge_attr.view(batch, edges, 1) * x_j.tanh()


class Attention(Stacked):
    """Heads after the nodes; the softmax along the dimension of these, kept on the layer."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(node_dim=-3)
        self.alpha, self.dropout = None, dropout

    def forward(self, x, edge_index, edge_attr=None):
        x = x.unflatten(-1, (HEADS, -1))
        out = self.propagate(edge_index, q=x.sin(), k=x.cos(), v=x)
        alpha, self.alpha = self.alpha, None
        return out, alpha

    def message(self, q_i, k_j, v_j, index, size_i):
        alpha = softmax((q_i * k_j).sum(dim=-1), index, num_nodes=size_i, dim=-2)
        self.alpha = alpha
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)
        return v_j * alpha[..., None]


class Dots(Stacked):
    """Heads that the message makes of channels, and a gate."""

    def message(self, x_i, x_j, index, size_i):
        query, key = x_i.unflatten(-1, (HEADS, -1)), x_j.unflatten(-1, (HEADS, -1))
        scores = torch.linalg.vecdot(query, key, dim=-1)
        weights = softmax(src=scores, index=index, num_nodes=size_i, dim=-2)
        return (weights.unsqueeze(-1) * key).flatten(-2) * F.glu(torch.cat([x_i, x_j], -1))


class ByHead(Stacked):
    """A weight for each head; the dimension of nodes counted from the first (tsl's GATConv)."""

    def __init__(self):
        super().__init__(node_dim=2)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x.unflatten(-1, (HEADS, -1)), alpha=edge_attr)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * x_j


EPSILON = 1e-8  # read by a function


def own_softmax(src, index=None, ptr=None, num_nodes=None, dim=-2):
    """With a branch for sorted edges, which names what is not followed (tsl)."""
    if ptr is not None:
        return segment_csr(src, ptr)
    count = maybe_num_nodes(index, num_nodes)
    along = of_torch_scatter.broadcast(index, src, dim)
    top = of_torch_scatter.scatter(src, along, dim, dim_size=count, reduce="max")
    out = (src - top.index_select(dim, index)).exp()
    total = of_torch_scatter.scatter(out, along, dim, dim_size=count, reduce="sum")
    return out / (total.index_select(dim, index) + this.EPSILON)


def told(src, index, num_nodes, dim):
    """Asks for what message passing passes by itself."""
    return src.tanh() if num_nodes is None else src.sigmoid()


class OwnSoftmax(Attention):
    def message(self, q_i, k_j, v_j, index, size_i):
        alpha = own_softmax((q_i * k_j).sum(dim=-1), index, num_nodes=size_i, dim=-2)
        self.alpha = alpha
        return v_j * alpha[..., None]


this = sys.modules[__name__]


@pytest.fixture
def torch_scatter(monkeypatch):
    """The package, in which there is what stands in."""
    monkeypatch.setitem(sys.modules, "torch_scatter", of_torch_scatter)


@pytest.mark.long
def test_a_softmax_of_the_users_own(kernels, torch_scatter):
    for train in (True, False):
        compare(kernels, OwnSoftmax(), *given("attention"), train=train, went=lambda: routes(
            OwnSoftmax()) == {"cuda": 1})


def test_a_number_of_a_module_that_changes(kernels, torch_scatter, monkeypatch):
    class Alone(OwnSoftmax):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index)[0]

    each_seen(kernels, Alone(), *given("attention"), changes=(
        lambda: monkeypatch.setattr(this, "EPSILON", 3.0),
        lambda: monkeypatch.setattr(this, "own_softmax",
                                    lambda src, index, num_nodes, dim: src.sigmoid()),
        lambda: monkeypatch.setattr(this, "own_softmax", told)))


def features(*sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (BATCH, TIME)), N, WIDTH)


FORMS = {"network": (Network, (), None), "difference": (Difference, (), (E, 4)),
         "of edges in stacks": (Difference, (), (BATCH, TIME, E, 4)),
         "batch": (Network, (5,), None), "pieces": (Pieces, (), None),
         "weights": (Weighted, (BATCH,), (BATCH, E)), "attention": (Attention, (), None),
         "dots": (Dots, (), None), "by head": (ByHead, (), (BATCH, TIME, E, HEADS))}


def given(name: str) -> tuple:
    _, sizes, edge = FORMS[name]
    return (features(*sizes), graphs.square(), *([] if edge is None else [torch.randn(*edge)]))


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(kernels, name):
    for train in (True, False):
        compare(kernels, FORMS[name][0](), *given(name), train=train)


@pytest.mark.parametrize("aggr", ["mean", "max", "min"])
def test_reductions(kernels, aggr):
    compare(kernels, Network(aggr), *given("network"))


@pytest.mark.parametrize("name", FORMS)
def test_few_edges(kernels, name):
    x, ei, *edge = given(name)
    for edges in (1, 3):
        of_edges = [one[:, :edges] if one.dim() == 2 and len(one) == BATCH else
                    one[:edges] if one.dim() == 2 else one[..., :edges, :] for one in edge]
        compare(kernels, FORMS[name][0](), x, ei[:, :edges], *of_edges)


@pytest.mark.parametrize("node_dim", [-2, 1])
def test_as_many_edges_as_batches(kernels, node_dim):
    """Which dimension edges are in cannot be told by its size alone."""
    x, ei = torch.randn(4, N, WIDTH), graphs.square()[:, :4]
    for edge in (torch.randn(4, 4), torch.randn(4, 4, 4)):
        layer = (Weighted if edge.dim() == 2 else Difference)(node_dim=node_dim)
        both(kernels, layer, x, ei, edge, on_fallback="native")


def test_channels_before_nodes(kernels):
    """Features [channels, nodes], weights for each edge."""

    class Turned(Stacked):
        def message(self, x_j, edge_attr):
            return edge_attr * x_j

    both(kernels, Turned(node_dim=-1), torch.randn(5, N), graphs.square(), torch.randn(1, E))
    assert routes(Turned()) == {"cuda": 1}


def test_dropout_draws_as_the_host(kernels):
    layer, (x, ei) = Attention(0.4).to(kernels.device), to(kernels.device, *given("attention"))
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with block:
            out, alpha = layer(leaf, ei)
            (out.sin().sum() + alpha.cos().sum()).backward()
        found.append([out, alpha, leaf.grad])
    assert routes(layer) == {"cuda": 1}
    assert all(close(*pair) for pair in zip(*found))


@pytest.mark.long
def test_other_sizes_and_dimensions(kernels):
    """Another batch, another number of nodes, another dimension of the nodes."""
    layer = Network().to(kernels.device)
    with kernels.on():
        for sizes, nodes, node_dim in (((2, 3), N, -2), ((4, 3), N, -2), ((3,), N, -2),
                                       ((3,), N + 4, -2), ((), N, -2), ((N,), N, 0),
                                       ((N,), N, -2), ((2, 3), N, 2)):
            layer.node_dim = node_dim
            x, ei = to(kernels.device, torch.randn(*sizes, nodes, WIDTH), graphs.square())
            for _ in range(2):
                with gnnaccel.disabled():
                    expected = layer(x, ei)
                assert close(layer(x, ei), expected)
    assert routes(layer) == {"cuda": 16}


class InPlace(Stacked):
    """What is changed in place is used again, or is not."""

    def __init__(self, again: bool):
        super().__init__()
        self.act, self.again = nn.ReLU(inplace=True), again

    def message(self, x_i, x_j):
        z = x_i - x_j
        found = self.act(z)
        return found * (z.exp() if self.again else x_j)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_changed_in_place(kernels, again):
    layer = InPlace(again)
    both(kernels, layer, *given("network"), on_fallback="native")
    assert routes(layer) == {"native": 1}


class Normed(Stacked):
    """Statistics of all edges, which torch takes over another dimension."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(E)

    def message(self, x_i, x_j):
        return self.norm(x_i * x_j)


class OverNodes(Stacked):
    def message(self, x_i, x_j):
        return torch.softmax(x_i * x_j, dim=1)


class OverStacks(Stacked):
    def message(self, x_i, x_j):
        return (x_i * x_j).sum(0, keepdim=True)


class Mixing(Stacked):
    """A view that mixes stacks with edges."""

    def message(self, x_i, x_j):
        return torch.relu(x_i - x_j).reshape(-1, x_j.shape[-1] * BATCH).view(x_j.shape)


class AnotherSoftmax(Stacked):
    def message(self, x_i, x_j, index):
        return x_j * softmax(x_i * x_j, index, dim=-1, num_nodes=N)[..., :1] if False else (
            softmax(x_j, index % 2, dim=-2))


@pytest.mark.parametrize("cls", [Normed, OverNodes, OverStacks, Mixing, AnotherSoftmax])
def test_native(kernels, cls):
    layer, args = cls().to(kernels.device), to(kernels.device, features(BATCH), graphs.square())
    expected = layer(*args)
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        got = layer(*args)
    assert torch.allclose(got, expected, 1e-4, 1e-4)
    assert gnnaccel.stats()[cls.__name__]["reasons"] == {"GA211": 1}
