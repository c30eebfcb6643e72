"""Layers that call functions of their own, keep tensors of edges, and use indices of the edges."""
from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing

import gnnaccel
from gnnaccel.adapters.standins.scatter import composite, reduce as of_torch_scatter
from gnnaccel.adapters.tracing.rows import pointwise, rearranged
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen
from tests.pyg import graphs, indexed_layers
from tests.pyg.edge_layers import Ends
from tests.pyg.generated_calls import both, compare_second, hub, routes, to
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.graphs import E, M, N
from tests.pyg.indexed_layers import (FORMS, BackToEdges, BySoftmaxFunction, Degrees, DegreesAtEnds,
                                      DropsAndGives, EdgesOnly, FromList, GivesBack, Held, Helped,
                                      Learned, OfModule, Principal, Receiver, Shares, Softened)
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen


def given(edges: int = E) -> list[torch.Tensor]:
    """Arguments of a call, over edges of which one enters, and one leaves, the last node."""
    ei = graphs.square(edges=edges)
    ei[1, -1] = ei[0, 0] = N - 1
    return [graphs.features(), ei, graphs.edge_features(edges, EDGE)]


@pytest.mark.long
@pytest.mark.parametrize("form", [*FORMS, EdgesOnly])
def test_values_and_gradients(kernels, form):
    for train in (True, False):
        compare(kernels, form(), *given(), train=train)


@pytest.mark.parametrize("form", [form for form in FORMS if form is not Learned])
@pytest.mark.parametrize("edges", [[(3, N - 1)], [(3, N - 1)] * 3 + [(N - 1, 3), (4, 4)]])
def test_degenerate_graphs(kernels, form, edges):
    """One edge, duplicates, a self loop; nodes without edges in each."""
    ei = torch.tensor(edges, dtype=torch.long).t().contiguous()
    compare(kernels, form(), graphs.features(), ei, graphs.edge_features(len(edges), EDGE))


@pytest.mark.parametrize("form", [Held, EdgesOnly, Shares, GivesBack, Degrees])
def test_no_edges(kernels, form):
    ei, edge = torch.zeros(2, 0, dtype=torch.long), graphs.edge_features(0, EDGE)
    layer, args = form().to(kernels.device), to(kernels.device, graphs.features(), ei, edge)
    expected = layer(*args)
    with kernels.on(on_fallback="native"):
        got = layer(*args)
    for one, other in zip(*((out if type(out) is tuple else (out,)) for out in (got, expected))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", [Shares, BySoftmaxFunction, Softened, BackToEdges, GivesBack])
def test_rows_that_are_split(kernels, form):
    ei = hub()
    compare(kernels, form(), graphs.features(), ei, graphs.edge_features(ei.shape[1], EDGE))


@pytest.mark.parametrize("form", [Shares, Softened, Receiver])
def test_two_kinds_of_nodes(kernels, form):
    args = (graphs.features(), graphs.features(M)), graphs.bipartite(), graphs.edge_features()
    compare(kernels, form(), *args, (N, M), positions=("x", "edge_index", "edge_attr", "size"))


@pytest.mark.parametrize("form", [Degrees, Shares, BySoftmaxFunction, DegreesAtEnds, EdgesOnly])
def test_against_the_flow(kernels, form):
    layer, (x, ei, edge) = form(), given()
    layer.flow = "target_to_source"
    compare(kernels, layer, x, ei.flip(0), edge)


@pytest.mark.parametrize("form", [Shares, BackToEdges])
def test_second_derivatives(kernels, form):
    compare_second(kernels, form().to(kernels.device), *to(kernels.device, *given()))


@pytest.mark.parametrize("form", [Shares, Helped, Held, OfModule, Degrees])
def test_on_torch_operations(kernels, form):
    both(kernels, form(), *given(), backend="torch", on_fallback="native")


@pytest.mark.parametrize("aggr", ["mean", "max", "min"])
def test_reductions_of_features_of_edges(kernels, aggr):
    compare(kernels, EdgesOnly(aggr), *given())


def test_as_many_nodes_as_edges_enter(kernels):
    """Results of features of edges end with the last node that an edge enters."""
    layer, (x, ei, edge) = EdgesOnly(), given()
    for last in (N - 1, N - 9):
        ei[1].clamp_(max=last)
        both(kernels, layer, x, ei, edge)
        assert routes(layer) == {"cuda": 1}
    with kernels.on():
        args = to(kernels.device, x, ei, edge)
        assert layer(*args).shape[0] == N - 8 and layer(*args, (N, N + 5)).shape[0] == N + 5


def test_the_same_mask(kernels):
    layer, args, found = DropsAndGives().to(kernels.device), to(kernels.device, *given()), []
    for block in (gnnaccel.disabled(), kernels.on()):
        torch.manual_seed(3)
        x = args[0].clone().requires_grad_()
        with block:
            out, edges = layer(x, *args[1:])
            (out.sin().sum() + edges.cos().sum()).backward()
        found.append([out, edges, x.grad])
    assert routes(layer) == {"cuda": 1}
    assert all(close(*pair) for pair in zip(*found))


# --- packages -------------------------------------------------------------------------------------

def rearrange(tensor, pattern, **sizes):
    """What einops does for the patterns below."""
    assert pattern == "n (h d) -> n h d"
    return tensor.reshape(len(tensor), sizes["h"], -1)


def of_package(function, package):
    """The same function, as one of a package."""
    found = types.FunctionType(function.__code__, {**globals(), "__name__": package},
                               function.__name__, function.__defaults__)
    found.__module__ = package
    return found


class Rearranged(Ends):
    def message(self, q_i, k_j, v_j, edge_attr, index, ptr, size_i):
        q, k = in_heads(q_i), in_heads(k_j)
        v = in_heads(v_j)
        alpha = softmax_of((q * k).sum(-1) * 0.3 + edge_attr[:, :1], index, ptr, size_i)
        return (v * alpha.unsqueeze(-1)).view(-1, WIDTH)


def in_heads(x):
    return einops_rearrange(x, "n (h d) -> n h d", h=3)


einops_rearrange = of_package(rearrange, "einops.einops")
softmax_of = indexed_layers.softmax


def test_einops(kernels):
    compare(kernels, Rearranged(), *given())


@pytest.mark.parametrize("pattern, sizes, shape", [
    ("n (h d) -> n h d", {"h": 3}, (3, 4)), ("n (h d) -> n h d", {"d": 2}, (6, 2)),
    ("n c -> n 1 c", {}, (1, 12)), ("n (a b c) -> n (a b) c", {"a": 2, "c": 3}, (4, 3)),
    ("n (a b c) -> n c (a b)", {"a": 2, "c": 3}, None), ("n c -> c n", {}, None),
    ("n (h d) -> n h d", {"h": 5}, None), ("n (h d) -> n h d", {}, None),
    ("n c -> (n c)", {}, None), ("... c -> ... c", {}, None), ("n c d -> n c d", {}, None)])
def test_patterns(pattern, sizes, shape):
    meta = torch.empty(ROWS, 12, device="meta")
    rows = pointwise.rows("j", lambda given: given["x"], meta, "x")
    if shape is None:
        with pytest.raises(Unseen):
            rearranged.rearrange(rows, pattern, **sizes)
    else:
        assert tuple(rearranged.rearrange(rows, pattern, **sizes).meta.shape[1:]) == shape


class SoftenedByPackage(Softened):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        weights = torch_scatter.scatter_softmax(inputs * self.t, index, dim=0)
        return torch_scatter.scatter_sum(inputs * weights, index, dim=0, dim_size=dim_size)


class LargestByPackage(Message):
    """PNA's form: means, and extrema whose gradient goes to one of equal numbers."""

    def message(self, x_j):
        return F.dropout(F.relu(x_j), 0.3, self.training)

    def aggregate(self, inputs, index, dim_size=None):
        top = torch_scatter.scatter(inputs, index, 0, None, dim_size, reduce="max")
        low, _ = torch_scatter.scatter_min(inputs * inputs, index, dim=0, dim_size=dim_size)
        above = inputs - top[index]
        return top * torch_scatter.scatter_mean(inputs, index, 0) + low + torch_scatter.scatter_sum(
            above * above, index, 0)


torch_scatter = types.ModuleType("torch_scatter")  # a package in which there is what stands in
torch_scatter.scatter_softmax = composite.scatter_softmax
for _name in ("scatter", "scatter_sum", "scatter_mean", "scatter_min"):
    setattr(torch_scatter, _name, getattr(of_torch_scatter, _name))


@pytest.mark.long
def test_softmax_of_torch_scatter(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_scatter", torch_scatter)
    compare(kernels, SoftenedByPackage(True), *given())


@pytest.mark.long
def test_extrema_of_torch_scatter(kernels, monkeypatch):
    """Of many equal numbers; with the same mask in all that is made of the messages."""
    monkeypatch.setitem(sys.modules, "torch_scatter", torch_scatter)
    for train in (False, True):
        compare(kernels, LargestByPackage(), *given(), train=train, went=lambda: gnnaccel.stats()[
            "LargestByPackage"]["routes"] == {"cuda": 1})


# --- what changes ---------------------------------------------------------------------------------

def test_functions_that_change(kernels, monkeypatch):
    layer = Helped()
    each_seen(kernels, layer, *given(), changes=(
        lambda: setattr(layer, "kind", "tanh"), lambda: setattr(layer, "kind", "squared"),
        lambda: monkeypatch.setattr(indexed_layers, "SLOPE", 0.9),
        lambda: monkeypatch.setitem(indexed_layers.ACTIVATIONS, "squared", torch.sin),
        lambda: monkeypatch.setattr(indexed_layers, "bent", lambda x, by: x * by * 3.0)))


def test_lists_that_change(kernels):
    layer = FromList()
    each_seen(kernels, layer, *given(), changes=(
        lambda: layer.steps.append(torch.sigmoid), lambda: layer.steps.reverse(),
        lambda: layer.scales.update(first=0.1), lambda: layer.scales.update(last=0.7),
        lambda: layer.steps.__setitem__(1, nn.Sigmoid()), lambda: layer.steps.clear()))


def test_lists_of_an_aggregate_that_change(kernels):
    layer = Principal()
    each_seen(kernels, layer, *given(), changes=(
        lambda: layer.average.update(log=0.2), lambda: layer.aggregators.pop(),
        lambda: layer.scalers.reverse()))


def test_tensors_of_edges_that_change(kernels):
    """New ones, written ones, and such of another number of edges with another graph."""
    layer = Learned().to(kernels.device)
    x, ei, _ = to(kernels.device, *given())

    def write():
        with torch.no_grad():
            layer.strength.mul_(-2.0)

    def shorter():
        layer.strength = nn.Parameter(torch.randn(50, 1, device=x.device))

    def as_buffer():
        del layer.strength
        layer.strength = torch.rand(150, 1, device=x.device)

    with kernels.on():
        for change, edges in ((lambda: None, ei), (write, ei), (shorter, ei[:, :50]),
                              (write, ei[:, :50]), (as_buffer, ei)):
            change()
            with gnnaccel.disabled():
                expected = layer(x, edges)
            gnnaccel.reset_stats()
            assert close(layer(x, edges), expected)
            assert routes(layer) == {"cuda": 1}


def test_a_tensor_of_another_size_is_the_hosts_error(kernels):
    layer = Learned(E - 1).to(kernels.device)
    with kernels.on(on_fallback="native"), pytest.raises(RuntimeError):
        layer(*to(kernels.device, *given()))


class Sides(MessagePassing):
    """Degrees of the sources at the destinations, of features with as many rows or not."""

    def __init__(self):
        super().__init__("add")

    def forward(self, x, edge_index, y):
        return self.propagate(edge_index, x=x, y=y)

    def message(self, x_j, y_i, edge_index_j, edge_index_i, size_j):
        deg = indexed_layers.degree(edge_index_j, size_j) + 1.0
        return torch.relu(x_j - y_i) / deg[edge_index_i].view(-1, 1)


@pytest.mark.parametrize("rows, taken", [(N, "cuda"), (N - 4, "native"), (N + 3, "native")])
def test_as_many_nodes_at_both_ends(kernels, rows, taken):
    layer, (x, ei, _) = Sides(), given()
    ei[1].clamp_(max=N - 5)
    for other, went in ((N, "cuda"), (rows, taken), (N, "cuda")):
        both(kernels, layer, x, ei, torch.randn(other, WIDTH), on_fallback="native")
        assert routes(layer) == {went: 1}


class Both(Message):
    """A tensor that has as many rows as there are edges by chance."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(WIDTH, 5)

    def message(self, x_i, x_j):
        return torch.relu(x_i - x_j) @ self.table


def test_as_many_rows_by_chance(kernels):
    layer, (x, ei, edge) = Both(), given()
    ei, edge = ei[:, -WIDTH:], edge[:WIDTH]
    layer.table = layer.table.to(kernels.device)
    both(kernels, layer, x, ei, edge)
    assert routes(layer) == {"cuda": 1}


def test_functions_of_pyg_that_are_replaced(kernels, monkeypatch):
    for cls, name, value, taken in (
        (Degrees, "degree", lambda index, count, dtype: torch.ones(
            count, dtype=dtype, device=index.device), "native"),
        (Shares, "scatter", lambda src, index, dim, dim_size: src.new_ones(dim_size, WIDTH),
         "native"),
        (Softened, "softmax", lambda src, index, num_nodes: torch.ones_like(src), "cuda")):
        with monkeypatch.context() as change:
            each_seen(kernels, cls(), *given(), changes=(
                lambda: change.setattr(indexed_layers, name, value),), taken=taken)


@pytest.mark.long
def test_other_graphs_and_edges_in_place(kernels):
    for cls in (Held, Degrees, Shares, GivesBack, EdgesOnly, Principal):
        layer, (x, ei, edge) = cls().to(kernels.device), to(kernels.device, *given())
        with kernels.on():
            for change in (lambda: None, lambda: ei[1].fill_(4), lambda: ei.copy_(other)):
                other = graphs.square().to(kernels.device)
                change()
                for edges in (ei, other, ei[:, :50]):
                    with gnnaccel.disabled():
                        expected = layer(x, edges, edge[:edges.shape[1]])
                    got = layer(x, edges, edge[:edges.shape[1]])
                    assert all(map(close, *((out if type(out) is tuple else (out,))
                                            for out in (got, expected))))


@pytest.mark.long
def test_nothing_holds_a_layer_or_its_tensors(kernels):
    for cls in (Held, Degrees, Shares, GivesBack, Principal):
        layer, args = cls().to(kernels.device), to(kernels.device, *given())
        with kernels.on():
            layer(*args)
            if cls is Held:
                before = weakref.ref(layer.weight_vector)
                layer(*args)
                gc.collect()
                assert before() is None
        gone = weakref.ref(layer)
        del layer
        gc.collect()
        assert gone() is None


# --- what stays native ----------------------------------------------------------------------------

class AnOwn(MessagePassing):
    """With a message that is put in its place."""

    def __init__(self):
        super().__init__("add")
        self.fns, self.seen = [torch.tanh], None

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, size=(len(x), None))


def changes(x):
    x.mark = 1
    return x


def itself(x):
    return itself(x)


NATIVE = r"""
row, col = edge_index\nreturn torch.tanh(x_j - x_i) * (2.0 if row == col else 1.0)
row, col = edge_index\nreturn torch.tanh(x_j - x_i) * col.view(-1, 1)
self.fns.append(torch.relu)\nreturn torch.tanh(x_j - x_i)
return changes(torch.tanh(x_j - x_i))
deg = degree(index, size[1])\nreturn torch.tanh(x_j - x_i) / deg[index].view(-1, 1)
deg = degree(edge_index[0])\nreturn torch.tanh(x_j - x_i) * deg.sum()
total = scatter(x_j.tanh() - x_i, index, 0)\nreturn total[edge_index[0]] * x_j
total = scatter(x_j.tanh() - x_i, index, 0)\nflat = total.view(-1)\ntotal += 1\nreturn total[index] * x_j
total = scatter(x_j.tanh() - x_i, index, 1, x_j.shape[0])\nreturn x_j.tanh() - x_i
""".strip().split("\n")


@pytest.mark.parametrize("text", NATIVE)
def test_native(kernels, text):
    """As the host does it, whether that is a result or an error."""
    body = "\n".join("    " + line for line in text.replace("\\n", "\n").split("\n"))
    names = dict(globals(), scatter=indexed_layers.scatter, degree=indexed_layers.degree)
    exec(f"def message(self, x_i, x_j, edge_index, index, size_i, size):\n{body}", names)
    cls = type(f"OwnMessage{NATIVE.index(text)}", (AnOwn,), dict(message=names["message"]))
    args = to(kernels.device, *given())

    def call():
        layer = cls().to(kernels.device)
        try:
            return layer(*args)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return type(error)

    expected = call()
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        got = call()
    assert got is expected or torch.allclose(got, expected, 1e-5, 1e-5, equal_nan=True)
    found = gnnaccel.stats()[cls.__name__]
    assert (found["routes"], found["reasons"]) == ({"native": 1}, {"GA211": 1})
