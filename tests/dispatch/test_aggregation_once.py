"""Weighted neighbours straight from the list of edges: against the same in fp64, with all
derivatives, and when it is chosen."""
from __future__ import annotations

import pytest
import torch

import gnnaccel
from gnnaccel.cuda.traverse import edge_list
from gnnaccel.dispatch.graph import cache, ledger
from gnnaccel.dispatch.ops import (aggregation, aggregation_cost, aggregation_cuda,
                                   aggregation_once, aggregation_route)
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from gnnaccel.dispatch.ops.aggregation_means import PowerMean, Softmax
from gnnaccel.dispatch.ops.aggregation_route import Asked
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Shifted
from gnnaccel.dispatch.policy.config import current
from gnnaccel.errors import GraphError
from tests.dispatch.test_aggregation import E, M, N, edges, inputs, prepared
from tests.helpers import assert_accurate, relative
from tests.routes import clean, emulated, one_thread, opened  # noqa: F401

CHEAP = Estimate(gain=9.0, structure=10.0, ours=1.0, native=10.0, once=2.0)


def results(run, graph, reduce, x, w):
    """The result, its gradient, and what that gives as a function of the first one's direction."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    out = run(graph, prepared(reduce, x, w, graph.num_edges))
    towards = torch.randn(out.shape).to(out).requires_grad_()
    d_x, = torch.autograd.grad(out, x, towards, create_graph=True)
    again, = torch.autograd.grad(d_x, towards, torch.ones_like(d_x))
    plain, = torch.autograd.grad(run(graph, prepared(reduce, x, w, graph.num_edges)), x,
                                 towards.detach())
    return out.detach(), d_x.detach(), again, plain


def judged(device, kind, reduce, flipped=False, index=torch.int64):
    ei = edges(E + 9, *((M, N) if flipped else (N, M)))
    ei = (ei.flip(0) if flipped else ei)[:, 5:-4].to(index)
    x, w = (None if t is None else t.detach() for t in inputs(kind, ei, M if flipped else N))
    sizes = (M, N, True) if flipped else (N, M, False)
    got = results(aggregation_once.run, OpGraph(ei.to(device), *sizes), reduce, x.to(device),
                  None if w is None else w.to(device))
    plain, exact = (results(aggregation.plain, OpGraph(ei, *sizes), reduce, x.to(t),
                            None if w is None else w.to(t))
                    for t in (torch.float32, torch.float64))
    for name, a, b, c in zip(("out", "d_x", "its derivative", "d_x unrecorded"), got, plain, exact):
        assert_accurate(name, a.cpu(), b, c)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["none", "edge", "odd", "one_for_all_heads"])
def test_results_and_derivatives(device, kind, reduce):
    judged(device, kind, reduce)


def test_against_the_edges(device):
    judged(device, "edge", "mean", True, torch.int32)


def test_tensors_that_are_no_blocks_of_memory(device):
    ei = edges().T.contiguous().T.to(device)
    x, w = torch.randn(6, N, device=device).T, torch.rand(1, 1, device=device).expand(E, 1)
    got = aggregation_once.run(OpGraph(ei, N, M), prepared("sum", x, w, E))
    exact = aggregation.plain(OpGraph(ei, N, M), prepared("sum", x.double(), w.double(), E))
    assert ei.stride(1) == 2 and relative(got, exact) < 1e-6
    leaf = x.clone().requires_grad_()
    # its gradient is expanded
    aggregation_once.run(OpGraph(ei, N, M), prepared("mean", leaf, w, E)).sum().backward()
    assert leaf.grad.isfinite().all()


def test_what_is_left_to_a_structure(device):
    ei = edges().to(device)
    graph = OpGraph(ei, N, M)

    def there(reduce="sum", kind="edge", dtype=torch.float32, grad=False):
        x, w = inputs(kind, ei, dtype=dtype, device=device)
        w = None if w is None else w.detach().requires_grad_(grad)
        return aggregation_once.kernel(graph, prepared(reduce, x, w, E)) is not None

    assert there() and there("mean", "none")
    assert not (there("max") or there(kind="head") or there(dtype=torch.bfloat16)
                or there(grad=True))
    x = inputs("none", ei, device=device)[0]
    plain = prepared("sum", x, None, E)
    means = (plain.by(Softmax(1.0, True)), plain.by(PowerMean(2.0, 0.0, 9.0)))
    for other in (plain._replace(more=Shifted(x, 1.0)), plain.by("var"), *means):
        assert aggregation_once.kernel(graph, other) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert not there()
    finally:
        torch.use_deterministic_algorithms(False)


def test_edges_that_change_before_backward(device):
    ei, x = edges().to(device), torch.randn(N, 3, device=device, requires_grad=True)
    out = aggregation_once.run(OpGraph(ei, N, M), prepared("sum", x, None, E))
    ei[0, 0] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_ids_out_of_range_are_told_of_at_the_next_call(device):
    ei, x = edges().to(device), torch.randn(N, 3, device=device)
    ei[0, 4] = N
    graph, given = OpGraph(ei, N, M), prepared("sum", x, None, E)
    aggregation_once.run(graph, given)
    if x.is_cuda:
        torch.cuda.synchronize()
    with pytest.raises(GraphError, match="ids outside its graph"):
        aggregation_once.run(graph, given)
    assert not edge_list.alarmed(x.device)


def test_until_a_structure_pays(device, monkeypatch):
    monkeypatch.setattr(aggregation_cost, "estimate", lambda *args: CHEAP)
    ei, x = edges().to(device), torch.randn(N, 3, device=device)
    given = prepared("sum", x, None, E)
    with gnnaccel.enabled(backend="cuda"):
        found = [aggregation_route.decide(OpGraph(ei, N, M), given, current()) for _ in range(22)]
        # what was missed is twice the price
        assert [f.run is aggregation_cuda.run for f in found].index(True) == 20
        first = found[0]
        assert first.run is aggregation_once.run and first.plan.route == "cuda" and first.plan.rejected[0][
            1].code == "GA302" and first.again
        assert cache.info()["entries"] == 0
        OpGraph(ei, N, M).view()
        ledger.forget()
        assert aggregation_route.decide(OpGraph(ei, N, M), given,
                                        current()).run is aggregation_cuda.run
        for fresh, run in ((True, aggregation_once.run), (False, aggregation_cuda.run)):
            assert aggregation_route.decide(OpGraph(ei, N, M), given, current(),
                                            Asked(True, fresh)).run is run
        monkeypatch.setattr(aggregation_cost, "estimate", lambda *args: CHEAP._replace(once=None))
        assert aggregation_route.decide(OpGraph(ei.clone(), N, M), given, current()).run is None


def test_rows_that_are_copied_first_gain_less():
    """Those of layers whose nodes do not come first."""
    ei, x = torch.empty(2, 10**4, dtype=torch.int64, device="meta"), torch.empty(
        3, 2000, 16, device="meta")
    graph = OpGraph(ei, 2000, 2000)
    for grad in (False, True):
        moved, there = (aggregation_cost.estimate(
            graph, aggregation.Aggregation("sum", rows, None, (3, 16)), grad)
            for rows in (x.movedim(1, 0), x.movedim(1, 0).contiguous()))
        assert moved.gain < there.gain and moved.native == there.native


def test_rows_that_are_copied_first_gain_less_over_the_list_of_edges():
    """`ARMAConv` of two stacks over 200,000 edges, in evaluation on an H100: 2.4 ms by the list of
    edges, 1.5 natively."""
    ei, x = torch.empty(2, 200_000, dtype=torch.int64, device="meta"), torch.empty(
        2, 10**4, 64, device="meta")
    graph = OpGraph(ei, 10**4, 10**4)
    moved, there = (aggregation_cost.estimate(
        graph, aggregation.Aggregation("sum", rows, None, (2, 64)), False)
        for rows in (x.movedim(1, 0), x.movedim(1, 0).contiguous()))
    assert there.once_pays and not moved.once_pays


def test_estimates_know_the_list_of_edges():
    """"meta" stands for a GPU."""
    found = []
    for count in (10**3, 10**5, 10**7):
        ei = torch.empty(2, count, dtype=torch.int64, device="meta")
        given = aggregation.Aggregation("sum", torch.empty(count // 5, 64, device="meta"), None,
                                        (64,))
        found.append(aggregation_cost.estimate(OpGraph(ei, count // 5, count // 5), given, True))
    assert [f.once_pays for f in found] == [False, True, True]
    assert all(f.over_once().gain < f.gain for f in found[1:]) and found[1].once < found[2].once
    assert found[1].over_once().gain < found[1].structure
    assert found[2].structure < found[2].native
    for other in (given.by(Softmax(1.0, True)), given._replace(more=Shifted(given.x, 1.0))):
        assert aggregation_cost.estimate(OpGraph(ei, count // 5, count // 5), other,
                                         True).once is None


def test_sums_that_run_together_train_where_one_of_them_does(emulated, monkeypatch):
    """The price is that of a training step, whichever of them wants a gradient."""
    seen = []
    monkeypatch.setattr(aggregation_cost, "estimate", lambda graph, given, grad: (
        seen.append(grad), Estimate(1.0, 0.0, 1.0, 2.0))[1])
    graph = OpGraph(edges(E, N, N), N, N)
    still, trained = (prepared("sum", torch.randn(N, 4), None, E)._replace(x=x) for x in (
        torch.randn(N, 4), torch.randn(N, 4, requires_grad=True)))
    with gnnaccel.enabled(backend="cuda", when="profitable"):
        for of, grad in (((still, still), False), ((still, trained), True),
                         ((trained, still), True)):
            seen.clear()
            aggregation_route._cost_reason(graph, of, None)
            assert seen == [grad, grad]
