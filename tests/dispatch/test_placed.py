"""Weights in the order of a traversal: kept for the same weights only, and never another answer
than by edge id."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.graph.ordered_weights import of_the_graph
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ops import aggregation
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_cuda import run
from gnnaccel.dispatch.ops.graph import OpGraph
from tests.routes import opened

N, E = 30, 400


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    with opened(request.param) as route:
        yield route.device


@pytest.fixture
def edge_index(device):
    return torch.randint(0, N, (2, E), device=device)


def found(view: GraphView, weight, by_src: bool = False) -> str:
    """Where weights stand; and they are the right ones."""
    rows, given, at = view.weighted(weight, by_src)
    ids = (view.csr_by_id() if by_src else view.csc()).place[:E].long()
    if at == "position":
        assert torch.equal(given[:E], weight.detach().float()[ids]) and given.dtype is torch.float32
    else:
        assert torch.equal(given, weight.detach().float())
    assert torch.equal(rows.other[:E], (view.csr_by_id() if by_src else view.csc()).other[:E])
    return at


@pytest.mark.parametrize("shape", [(E,), (E, 3)])
@pytest.mark.parametrize("by_src", [False, True])
def test_the_second_time_they_are_placed(device, edge_index, shape, by_src):
    view, weight = GraphView(edge_index, N, N), of_the_graph(torch.randn(shape, device=device))
    assert [found(view, weight, by_src) for _ in range(3)] == ["place", "position", "position"]
    assert found(view, weight, not by_src) == "place", "each direction counts for itself"
    assert view.nbytes() > weight.nbytes


def test_aliases_are_the_same_weights(device, edge_index):
    view, weight = GraphView(edge_index, N, N), of_the_graph(torch.randn(E, 1, device=device))
    found(view, weight.view(-1))
    assert found(view, weight.detach().reshape(-1)) == "position"


def test_a_change_in_place_is_seen(device, edge_index):
    view, weight = GraphView(edge_index, N, N), of_the_graph(torch.randn(E, device=device))
    assert [found(view, weight) for _ in range(2)] == ["place", "position"]
    weight.mul_(2)
    assert [found(view, weight) for _ in range(2)] == ["place", "position"]
    assert len(view._weights._entries) == 1, "the older version is not kept"


def test_memory_that_is_used_again_is_other_weights(device, edge_index):
    view = GraphView(edge_index, N, N)
    for _ in range(6):
        weight = of_the_graph(torch.randn(E, device=device))  # in the same memory each time
        assert found(view, weight) == "place"
        del weight


def test_weights_of_the_callers_are_looked_up_each_time(device, edge_index):
    """They may be written to where no version tells of it."""
    view, weight = GraphView(edge_index, N, N), torch.randn(E, device=device)
    for by_src in (False, False, False, True, True):
        assert found(view, weight, by_src) == "place"
        weight.data.mul_(2)


def test_several_weights_of_one_graph(device, edge_index):
    view, weights = GraphView(edge_index, N,
                              N), [of_the_graph(torch.randn(E, device=device)) for _ in range(4)]
    for _ in range(2):
        seen = [found(view, weight) for weight in weights]
    assert seen == ["position"] * 4
    more = [of_the_graph(torch.randn(E, device=device)) for _ in range(4)]
    for weight in more:
        found(view, weight)
    assert found(view, weights[0]) == "place", "no more than four are kept"


@pytest.mark.parametrize("kind", ["grad", "inference", "half"])
def test_what_is_not_placed(device, edge_index, kind):
    view = GraphView(edge_index, N, N)
    if kind == "inference":
        with torch.inference_mode():
            weight = of_the_graph(torch.randn(E, device=device))
    else:
        weight = torch.randn(E, device=device, requires_grad=kind == "grad")
    weight = of_the_graph(weight.half()) if kind == "half" else weight
    assert [found(view, weight) for _ in range(3)][-1] == ("position"
                                                           if kind == "half" else "place")


def test_arrays_built_anew_do_not_mix_with_placed_weights(device, edge_index):
    view, weight = GraphView(edge_index, N, N), of_the_graph(torch.randn(E, device=device))
    view.csr(places=False)
    assert [found(view, weight, True) for _ in range(2)] == ["place", "position"]
    view._csr = None  # as if it had been built again, maybe in another order
    view.csr()
    rows, given, at = view.weighted(weight, True)
    assert at == "position" and rows.other is view.csr_by_id().other


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["edge", "head"])
def test_values_and_gradients(device, edge_index, reduce, kind):
    graph = OpGraph(edge_index, N, N)
    weight = of_the_graph(torch.rand((E, 1) if kind == "edge" else (E, 3, 1), device=device))
    shape = (6,) if kind == "edge" else (3, 2)
    x, up = torch.randn(N, *shape, device=device,
                        requires_grad=True), torch.randn(N, *shape, device=device)
    for _ in range(3):
        given = Aggregation(reduce, x, weight, shape)
        [got] = torch.autograd.grad(run(graph, given), x, up)
        expected = aggregation.plain(OpGraph(edge_index, N, N),
                                     Aggregation(reduce, x.double(), weight.double(), shape))
        [want] = torch.autograd.grad(expected, x, up.double())
        torch.testing.assert_close(run(graph, given), expected.float())
        torch.testing.assert_close(got, want)
    assert graph.view().weighted(weight.reshape(E, -1)
                                 if kind == "head" else weight.reshape(-1))[2] == "position"


@pytest.mark.gpu
def test_another_stream_looks_them_up():
    with opened("cuda") as route:
        edge_index = torch.randint(0, N, (2, E), device=route.device)
        view, weight = GraphView(edge_index, N,
                                 N), of_the_graph(torch.randn(E, device=route.device))
        assert [view.weighted(weight)[2] for _ in range(2)] == ["place", "position"]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert view.weighted(weight)[2] == "place"
        assert view.weighted(weight)[2] == "position"
