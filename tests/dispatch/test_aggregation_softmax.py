"""Softmax over neighbours' rows and over rectified messages: by kernels and by torch operations,
against fp64."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.dispatch.ops import aggregation, aggregation_cost, aggregation_cuda
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_means import Softmax
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Gated, Rectified
from gnnaccel.dispatch.policy.reasons import Reason
from tests.dispatch.test_aggregation import M, N, edges
from tests.helpers import assert_accurate, relative
from tests.routes import clean, emulated, one_thread, opened, route  # noqa: F401


def leaves(graph: OpGraph, features: tuple[int, ...], numbers: int) -> list[torch.Tensor]:
    """x, features of edges, and t."""
    return [torch.randn(graph.num_src, *features), torch.randn(graph.num_edges, *features),
            torch.linspace(0.5, 2.0, numbers)]


def stated(rectified: bool, tensors: list[torch.Tensor]) -> Aggregation:
    x, edge, t = tensors
    return Aggregation(Softmax(t, True), x, None, tuple(x.shape[1:]),
                       Rectified(edge, 0.1) if rectified else None)


def way(route):
    return aggregation_cuda.run if route.backend == "cuda" else aggregation.plain


def results(run, graph, rectified, tensors):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = run(graph, stated(rectified, tensors))
    torch.manual_seed(1)
    wanted = tensors if rectified else [tensors[0], tensors[2]]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.randn(out.shape).to(out))]


@settings(max_examples=12, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 25), st.integers(0, 2**16)),
       st.booleans(), st.sampled_from([((1,), 1), ((6,), 6), ((2, 3), 3)]))
def test_small_graphs_of_all_kinds(route, sizes, rectified, shape):
    src, dst, count, seed = sizes
    torch.manual_seed(seed)
    ei = torch.stack([torch.randint(0, src, (count,)), torch.randint(0, dst, (count,))])
    graph = OpGraph(ei, src, dst)
    tensors = leaves(graph, *shape)
    moved = OpGraph(ei.to(route.device), src, dst)
    got = results(way(route), moved, rectified, [t.to(route.device) for t in tensors])
    plain, exact = (results(aggregation.plain, graph, rectified, [t.to(d) for t in tensors])
                    for d in (torch.float32, torch.float64))
    for place, (a, b, c) in enumerate(zip(got, plain, exact)):
        assert_accurate(f"{place}", a.cpu(), b, c, floor=2e-6 if c.norm() > 1e-3 else 1e-5)


@pytest.mark.parametrize("rectified", [False, True])
def test_gradients_in_double_precision(rectified):
    graph = OpGraph(edges(), N, M)
    tensors = [t.double().requires_grad_() for t in leaves(graph, (3,), 3)]

    def function(*tensors):
        return aggregation.plain(graph, stated(rectified, tensors))

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("numbers", [1, 6])
def test_second_derivatives(route, numbers):
    ei = edges()
    tensors = leaves(OpGraph(ei, N, M), (6,), numbers)

    def second(run, device, dtype):
        mine = [t.to(device, dtype).requires_grad_() for t in tensors]
        graph = OpGraph(ei.to(device), N, M)
        grads = torch.autograd.grad(run(graph, stated(True, mine)).pow(3).sum(), mine,
                                    create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), mine)

    exact = second(aggregation.plain, "cpu", torch.float64)
    got = second(way(route), route.device, torch.float32)
    assert all(relative(a.cpu(), b) <= 5e-5 for a, b in zip(got, exact))


def test_only_what_is_wanted_gets_a_gradient(route):
    graph = OpGraph(edges().to(route.device), N, M)
    tensors = [t.to(route.device) for t in leaves(graph, (6,), 6)]
    expected = results(way(route), graph, True, tensors)[1:]
    for wanted in range(3):
        mine = [t.detach().requires_grad_(place == wanted) for place, t in enumerate(tensors)]
        out = way(route)(graph, stated(True, mine))
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape).to(out))
        assert [t.grad is None for t in mine] == [place != wanted for place in range(3)]
        assert relative(mine[wanted].grad, expected[wanted]) <= 1e-6


def test_nothing_is_kept_where_nothing_is_differentiated(emulated):
    graph = OpGraph(edges(), N, M)
    tensors = [t.requires_grad_() for t in leaves(graph, (6,), 1)]
    expected = aggregation_cuda.run(graph, stated(True, tensors))
    with torch.no_grad():
        out = aggregation_cuda.run(graph, stated(True, tensors))
    assert torch.equal(out, expected) and expected.requires_grad and not out.requires_grad


def test_no_kernel_for_other_messages(emulated):
    graph = OpGraph(edges(), N, M)
    x = torch.randn(N, 6)
    gated = Aggregation(Softmax(1.0, True), x, None, (6,), Gated(x, torch.randn(M, 6)))
    found = aggregation_cuda.kernel(graph, gated)
    assert type(found) is Reason and found.code == "GA208"


def test_features_of_edges_cost_another_row():
    graph = OpGraph(torch.zeros(1, dtype=torch.int64).expand(2, 10**7), 100000, 100000)
    x = torch.empty(1).expand(100000, 64)
    plain, more = (aggregation_cost._on_cuda(graph,
                                             Aggregation(Softmax(1.0, True), x, None, (64,), made),
                                             "training")
                   for made in (None, Rectified(torch.empty(1).expand(10**7, 64))))
    assert more.ours == pytest.approx(2 * plain.ours) and more.gain > 0
    # to plain rows the host's launches are added, which many edges hide
    assert more.native == pytest.approx(plain.native, rel=0.05) and more.native < plain.native
