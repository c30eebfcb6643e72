"""An ``aggregate`` of the user's own, against PyG's own message passing."""
from __future__ import annotations

import sys
import types

import pytest
import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

import gnnaccel
from gnnaccel.adapters.standins.scatter import reduce as of_torch_scatter
from tests.pyg import graphs
from tests.pyg.aggregating_layers import (FORMS, PLAIN, BySuper, Extremes, Pair, Quotient,
                                          Scattered, Statistics, Told)
from tests.pyg.generated_calls import arguments, both, compare_second, routes
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import E, M, N
from tests.pyg.judge import compare


def given(form, edges: int = E) -> list[torch.Tensor]:
    """Arguments of a call, over edges of which one enters the last node."""
    x, ei, edge = arguments(form, edges)
    ei[1, -1] = N - 1
    return [x, ei, edge]


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(kernels, form):
    for train in (True, False):
        compare(kernels, form(), *given(form), train=train)


@pytest.mark.parametrize("form", PLAIN)
def test_plain_sums_by_torch_operations(route, form):
    compare(route, form(), *given(form))


@pytest.mark.parametrize("reduce", ["add", "mean", "max", "min", "amax"])
def test_reductions(kernels, reduce):
    compare(kernels, Scattered(reduce), *given(Scattered))
    compare(kernels, BySuper({"amax": "max"}.get(reduce, reduce)), *given(BySuper))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("edges", [[], [(3, N - 1)], [(3, N - 1)] * 3 + [(N - 1, 3)]])
def test_degenerate_graphs(kernels, form, edges):
    """No edges, one, duplicates; nodes without edges in each."""
    ei = torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()
    x, edge = graphs.features(), graphs.edge_features(len(edges), form.edge)
    if edges:
        compare(kernels, form(), x, ei, edge)
    elif form is not Statistics:  # which has no rows then
        both(kernels, form(), x, ei, edge, on_fallback="native")


@pytest.mark.long
def test_two_kinds_of_nodes(kernels):
    left, right = graphs.features(), graphs.features(M)
    for layer in (Scattered("mean"), BySuper(), Extremes()):
        compare(kernels, layer, (left, right), graphs.bipartite(), None, (N, M),
                positions=("x", "edge_index", "edge_attr", "size"))


def test_nodes_that_an_argument_of_the_aggregate_tells(kernels):
    layer, args = Told(), ((graphs.features(), graphs.features(M)), graphs.bipartite())
    compare(kernels, layer, *args)


@pytest.mark.parametrize("form", [Quotient, Pair, Statistics])
def test_against_the_flow(kernels, form):
    layer = form()
    layer.flow = "target_to_source"
    x, ei, edge = given(form)
    compare(kernels, layer, x, ei.flip(0), edge)


def test_second_derivatives(kernels):
    compare_second(kernels, Quotient().to(kernels.device), *(t.to(kernels.device)
                                                             for t in given(Quotient)))


class Chosen(Message):
    """By a function of torch_scatter that the module holds."""

    def message(self, x_i, x_j):
        return x_j * torch.sigmoid(x_i)

    def aggregate(self, inputs, index, dim_size):
        above = torch_scatter.scatter(inputs, index, dim=0, dim_size=dim_size, reduce="mean")
        return above + total(inputs.abs(), index, 0, None, dim_size)


torch_scatter = types.ModuleType("torch_scatter")  # a package in which there is what stands in
vars(torch_scatter).update({name: getattr(of_torch_scatter, name) for name in dir(of_torch_scatter)
                            if name.startswith("scatter")})
total = of_torch_scatter.scatter_add


@pytest.mark.long
def test_torch_scatter(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_scatter", torch_scatter)
    compare(kernels, Chosen(), *given(Chosen))


class Overwritten(Message):
    def message(self, x_i, x_j):
        return x_j * torch.sigmoid(x_i)

    def aggregate(self, inputs, index, dim_size):
        inputs *= 2
        return scatter(inputs, index, 0, dim_size)


class OfTheCaller(Message):
    """Which edge features are the messages themselves."""

    edge = 12

    def message(self, edge_attr):
        return edge_attr

    aggregate = Overwritten.aggregate


@pytest.mark.long
def test_messages_that_are_overwritten(kernels):
    compare(kernels, Overwritten(), *given(Overwritten))


def test_features_of_edges_that_are_overwritten(emulated):
    layer, (x, ei, edge) = OfTheCaller(), given(OfTheCaller)
    mine = edge.clone()
    expected = layer(x, ei, edge)
    with emulated.on(on_fallback="native"):
        assert torch.equal(layer(x, ei, mine), expected)
    assert torch.equal(mine, edge)


# --- what stays native ----------------------------------------------------------------------------

class AnOwn(MessagePassing):
    """With an aggregate that is put in its place."""

    def __init__(self):
        super().__init__("add")
        self.kept, self.last = None, 0.5

    def forward(self, x, edge_index, rows=None):
        return self.propagate(edge_index, x=x, kind=torch.arange(len(x)), rows=rows)

    def message(self, x_i, x_j):
        return torch.relu(x_j - x_i)


NATIVE = r"""
n = index.numel()\nreturn scatter(inputs, index, 0, dim_size) / n
n = inputs.shape[0]\nreturn scatter(inputs, index, 0, dim_size) * n
return scatter(inputs, index, 0, dim_size) * len(inputs)
return scatter(inputs, index, 0, dim_size) * dim_size
inputs.mul_(2)\nreturn scatter(inputs, index, 0, dim_size)
out = scatter(inputs, index, 0, dim_size)\nflat = out.view(-1)\nout += 1\nreturn flat.view(-1, 12)
out = scatter(inputs, index, 0, dim_size)\nout[0] = 1\nreturn out
return scatter(inputs, index, 1)[:, :0] if False else inputs
return scatter(inputs, edge_index_j, 0, dim_size)
return scatter(inputs, index, 0, 2 * dim_size)
return scatter(inputs, index, 0, 40)
return scatter(inputs, index, 0)
return scatter(inputs, index, 0, dim_size, reduce='mul')
return scatter(inputs, torch.sort(index)[0], 0, dim_size)
return scatter(inputs, index * 0, 0, dim_size)
self.kept = inputs\nreturn scatter(inputs, index, 0, dim_size)
out = scatter(inputs, index, 0, dim_size)\nreturn out.sum(0, keepdim=True)
out = scatter(inputs, index, 0, dim_size)\nreturn tuple(row for row in out)[0]
out = scatter(inputs, index, 0, dim_size)\nreturn out if out.sum() > 0 else -out
out = scatter(inputs, index, 0, dim_size)\nreturn out / kind.view(-1, 1).to(out)
out = scatter(inputs, index, 0, dim_size)\nreturn out + torch.rand(out.shape).to(out)
out = scatter(inputs, index, 0, dim_size)\nreturn F.dropout(out, 0.5, True)
try:\n    return scatter(inputs, index, 0, dim_size)\nexcept ValueError:\n    return inputs
return scatter(inputs.cumsum(0), index, 0, dim_size)
return scatter(inputs.flip(0), index, 0, dim_size)
out = scatter(inputs, index, 0, dim_size)\nreturn torch.add(out, 1.0, out=out)
""".strip().split("\n")


@pytest.mark.parametrize("text", NATIVE)
def test_native(kernels, text):
    """As the host does it, with the reason that there always was."""
    body = "\n".join("    " + line for line in text.replace("\\n", "\n").split("\n"))
    arguments = "inputs, index, ptr, dim_size" + ", edge_index_j" * ("edge_index_j" in body) + (
        ", kind" * ("kind" in body))
    names = dict(globals(), scatter=scatter, F=torch.nn.functional)
    exec(f"def aggregate(self, {arguments}):\n{body}", names)
    # PyG keeps what it writes for a class by the class's name
    cls = type(f"Own{NATIVE.index(text)}", (AnOwn,), dict(aggregate=names["aggregate"]))
    layer, x, ei = cls().to(kernels.device), graphs.features(), graphs.square()
    x, ei = x.to(kernels.device), ei.to(kernels.device)

    def call():
        torch.manual_seed(0)
        return layer(x, ei)

    expected = call()
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        got = call()
    for one, other in zip(*((out if type(out) is tuple else (out,)) for out in (got, expected))):
        assert torch.allclose(one, other, 1e-5, 1e-5, equal_nan=True)
    found = gnnaccel.stats()[cls.__name__]
    assert (found["routes"], found["reasons"]) == ({"native": 1}, {"GA211": 1})


def test_as_many_rows_as_an_argument_has(kernels):
    """Results of fewer rows than there are nodes are the host's."""
    layer, (x, ei, edge) = Quotient(), given(Quotient)
    ei = ei.clamp(max=N - 3)
    both(kernels, layer, x, ei, edge)
    assert routes(layer) == {"cuda": 1}
    both(kernels, layer, x, ei, edge, N - 2, on_fallback="native")
    assert routes(layer) == {"native": 1}


def test_as_many_rows_as_there_are_edges_for(kernels):
    layer, (x, ei, edge) = Statistics(), given(Statistics)
    both(kernels, layer, x, ei, edge)
    assert routes(layer) == {"cuda": 1}
    both(kernels, layer, x, ei.clamp(max=N - 2), edge, on_fallback="native")
    assert routes(layer) == {"native": 1}
