"""Scores that are dots of rows with parameters: kernels compute them, not torch over all nodes."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, F as WIDTH, N
from tests.pyg.judge import close, compare
from tests.pyg.own_attention import Apart, Inner, Tutorial

H, C = 2, 8


class Attends(MessagePassing):
    """Attention over rows ``x``, or a pair of such."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.src, self.dst = (nn.Parameter(torch.randn(1, H, C)) for _ in range(2))
        self.h, self.c = H, C

    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = F.leaky_relu((x_j * self.src).sum(-1) + (x_i * self.dst).sum(dim=-1), 0.2)
        return x_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class WithEdges(Attends):
    """With a term of the edges."""

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr, index, ptr, size_i):
        alpha = (x_j * self.src).sum(-1) + (x_i * self.dst).sum(-1) + edge_attr
        alpha = F.leaky_relu(alpha, 0.2)
        return x_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class Kept(Attends):
    """``keepdim`` and a view in between."""

    def message(self, x_i, x_j, index, ptr, size_i):
        a, b = (x_j * self.src).sum(-1, keepdim=True), (x_i * self.dst).sum(2, keepdim=True)
        alpha = softmax(F.leaky_relu(b + a, 0.1).view(-1, self.h), index, ptr, size_i)
        return x_j * alpha.view(-1, self.h, 1)


class Swapped(Attends):
    """One parameter for both ends, which comes first in one product."""

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (self.src * x_i).sum(-1) + (x_j * self.src).sum(-1)
        return x_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class Doubled(Attends):
    """Rows that are no views: a dot of twice the rows."""

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = F.leaky_relu((2 * x_j * self.src).sum(-1) + (x_i * self.dst).sum(-1), 0.2)
        return x_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class OfOthers(Attends):
    """The destination's rows are another argument."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, y=x.flip(0))

    def message(self, y_i, x_j, index, ptr, size_i):
        alpha = F.leaky_relu((x_j * self.src).sum(-1) + (y_i * self.dst).sum(-1), 0.2)
        return x_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class Broadcast(Attends):
    """Rows of one channel, which the parameters make several of."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x[:, :, :1].contiguous())


class OneEach(Attends):
    """One number for all channels of a head, which is no dot of a full parameter."""

    def __init__(self):
        super().__init__()
        self.src, self.dst = (nn.Parameter(torch.randn(1, H, 1)) for _ in range(2))


class Beside(Attends):
    """Both ends' rows side by side, and one parameter for them."""

    def __init__(self):
        super().__init__()
        self.att = nn.Parameter(torch.randn(1, H, 2 * C))

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (torch.cat([x_i, x_j], -1) * self.att).sum(-1)
        return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)


class OfSources(WithEdges):
    """Scores of the source and of the edge alone."""

    def message(self, x_j, edge_attr, index, ptr, size_i):
        alpha = F.leaky_relu((x_j * self.src).sum(-1) + edge_attr, 0.2)
        return x_j * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class OneHead(MessagePassing):
    """GAT of one head by a linear map without a bias."""

    def __init__(self):
        super().__init__(aggr="add")
        self.score = nn.Linear(2 * C, 1, bias=False)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index, size_i):
        alpha = F.leaky_relu(self.score(torch.cat([x_i, x_j], -1)))
        return x_j * softmax(alpha, index, num_nodes=size_i)


LAYERS = {"Attends": Attends, "WithEdges": WithEdges, "Kept": Kept, "Swapped": Swapped,
          "Doubled": Doubled, "OfOthers": OfOthers, "Broadcast": Broadcast, "OneEach": OneEach,
          "Beside": Beside, "OfSources": OfSources}


def edges_of(name: str) -> list[torch.Tensor]:
    return [torch.randn(E, H)] if issubclass(LAYERS[name], WithEdges) else []


def connected() -> torch.Tensor:
    """The test graph, in which all nodes have edges, though not at both ends."""
    ei = graphs.square()
    ei[0, :N - 1], ei[1, :N - 1] = torch.arange(N - 1), N - 1
    ei[1][ei[1] == 0] = 1  # nothing enters it
    return ei


def passes(layer, route, *args) -> list[str]:
    """Operations of torch over all nodes in forward and backward of a repeated call."""
    with route.on():
        for _ in range(3):
            layer(*args).sum().backward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            layer(*args).sum().backward()
    return [one.name for one in seen.events() if one.name in ("aten::mul", "aten::where", "aten::masked_fill")
            and N in [shape[0] for shape in one.input_shapes if shape]]


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(route, name):
    compare(route, LAYERS[name](), torch.randn(N, H, C), graphs.square(), *edges_of(name),
            positions=("x", "edge_index", "edge_attr"))


def test_one_head(route):
    compare(route, OneHead(), torch.randn(N, C), graphs.square())


@pytest.mark.long
@pytest.mark.parametrize("name", ["Attends", "WithEdges", "Kept", "Swapped", "Beside"])
def test_kernels_compute_the_dots(emulated, name):
    x = torch.randn(N, H, C, requires_grad=True)
    assert not passes(LAYERS[name](), emulated, x, connected(), *edges_of(name))
    assert passes(Doubled(), emulated, x, connected())


@pytest.mark.long
def test_dots_within_whole_layers(emulated):
    """The linear map before, one head, and inner products, whose rows are views alone."""
    x = torch.randn(N, WIDTH, requires_grad=True)
    assert not passes(Tutorial(WIDTH, 8), emulated, x, connected())
    assert not passes(Inner(WIDTH, 8), emulated, x, connected())
    assert not passes(OneHead(), emulated, x[:, :C], connected())


def test_terms_of_the_layers_own(route):
    """Terms made before ``propagate``, in place of dots in the message."""
    compare(route, Apart(WIDTH, 8), graphs.features(), graphs.square(),
            graphs.edge_features(E, 3), positions=("x", "edge_index", "edge_attr"))


@pytest.mark.long
def test_other_rows_at_the_destination(emulated):
    """One tensor for both ends, then two, over the same edges: what is kept of the first is not
    what the second needs."""
    layer, ei = Attends(), graphs.square()
    x, y = torch.randn(N, H, C), torch.randn(N, H, C)
    for given in (x, x, (x, y), (x, x), (x, x), (x, y), (y, x), x):
        expected = layer(given, ei)
        with emulated.on():
            assert close(layer(given, ei), expected)
    assert gnnaccel.stats()["Attends"]["routes"] == {"cuda": 8}


def _edges_without(nodes: list[int]) -> torch.Tensor:
    ei = graphs.square()
    return ei[:, ~torch.isin(ei, torch.tensor(nodes)).any(0)]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", ["Attends", "Doubled", "Beside"])
def test_rows_of_nodes_without_edges(route, name, times):
    """What is infinite in them reaches no gradient, as it does not with the host."""
    layer = LAYERS[name]().to(route.device)
    ei = _edges_without([0, 3]).to(route.device)
    x = torch.randn(N, H, C, device=route.device)
    x[0], x[3, 0, 2] = float("inf"), float("nan")
    x.requires_grad_()
    weights = [layer.att] if name == "Beside" else [layer.src, layer.dst]
    expected = torch.autograd.grad(layer(x, ei).sum(), [x, *weights])
    with route.on():
        for _ in range(times):  # also once it is known which nodes have edges
            got = torch.autograd.grad(layer(x, ei).sum(), [x, *weights])
    assert all(torch.isfinite(one).all() for one in got[1:])
    for a, b in zip(got, expected):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("times", [1, 3])
def test_rows_that_no_edge_reads_where_destinations_are_others(route, times):
    """Scores of sources alone: how many destinations there are, and which have edges, is nothing
    to the sources' rows."""
    layer = OfSources().to(route.device)
    ei = torch.stack([torch.randint(1, 9, (E,)), torch.randint(2, 5, (E,))])
    x, y, edge = torch.randn(12, H, C), torch.randn(7, H, C), torch.randn(E, H)
    x[0], x[10, 1, 2] = float("inf"), float("nan")
    ei, x, y, edge = route.put(ei, x, y, edge)
    wrt = [x.requires_grad_(), edge.requires_grad_(), layer.src]
    expected = torch.autograd.grad(layer((x, y), ei, edge).sum(), wrt)
    with route.on():
        for _ in range(times):
            got = torch.autograd.grad(layer((x, y), ei, edge).sum(), wrt)
    for a, b in zip(got, expected):
        assert torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["Beside", "Attends"])
def test_results_written_over(route, name):
    """A result that is changed in place, and second derivatives of what came before."""
    layer = LAYERS[name]().to(route.device)
    x, ei = route.put(torch.randn(N, H, C), _edges_without([2]))
    x.requires_grad_()

    def run():
        out = layer(x, ei).mul_(2.0).relu_()
        first, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *layer.parameters()],
                                   allow_unused=True)

    expected = run()
    with route.on():
        for _ in range(3):
            got = run()
    for a, b in zip(got, expected):
        assert (a is None) == (b is None)
        assert a is None or close(a, b)


def test_another_graph_in_the_place_of_one(emulated):
    """Which nodes have edges is asked of each graph, also of one in the same memory."""
    layer, x = Attends(), torch.randn(N, H, C)
    x[0] = float("inf")
    full, ei = graphs.square(), _edges_without([0])
    full[:, 0] = 0
    with emulated.on():
        finite = x.clone()
        finite[0] = 1.0
        for _ in range(3):
            layer(finite, full).sum().backward()
        full[:, full.eq(0).any(0)] = 1
        layer.zero_grad()
        layer(x, full).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
        layer(x, ei).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
