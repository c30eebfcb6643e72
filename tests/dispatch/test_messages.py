"""Aggregations of messages that are more than a neighbour's row: by kernels and by torch
operations, against fp64."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.dispatch.ops import (aggregation, aggregation_cost, aggregation_cpu, aggregation_cuda,
                                   messages)
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Gated, Rectified, Shifted
from gnnaccel.dispatch.policy.reasons import Reason
from tests.dispatch.test_aggregation import E, M, N, edges
from tests.helpers import assert_accurate, relative
from tests.routes import clean, emulated, one_thread, opened, route  # noqa: F401

#: rows besides x, and the messages made of them
FORMS = {"shifted": ("v", lambda rows: Shifted(rows, -1.0)),
         "weighted": ("vw", lambda rows, w: Shifted(rows, 1.0)),
         "rectified": ("e", lambda edge: Rectified(edge, 0.5)), "gated": ("uv", Gated),
         "gated, edge": ("uve", Gated), "gated, edges": ("uvee", Gated)}


def leaves(form: str, graph: OpGraph, features: tuple[int, ...],
           dtype=torch.float32) -> list[torch.Tensor]:
    rows = [graph.rows("e" if target == "w" else target) for target in "u" + FORMS[form][0]]
    tails = [(1,) * len(features) if target == "w" else features for target in "u" + FORMS[form][0]]
    return [torch.randn(count, *tail, dtype=dtype) for count, tail in zip(rows, tails)]


def stated(form: str, graph: OpGraph, reduce: str, x, *more) -> aggregation.Aggregation:
    found = aggregation.prepare(reduce, x, more[-1] if form == "weighted" else None,
                                graph.num_edges)
    made = FORMS[form][1](*more)
    assert messages.unfit(graph, found.x, found.weight, made) is None
    return found._replace(more=made)


def results(run, form, graph, reduce, tensors):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = run(graph, stated(form, graph, reduce, *tensors))
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out))]


def way(route, form: str):
    if route.backend == "cuda":
        return aggregation_cuda.run
    return aggregation_cpu.run if form in ("shifted", "weighted") else aggregation.plain


def judged(route, form, reduce, ei, src, dst, features, floor=None):
    graph = OpGraph(ei, src, dst)
    tensors = leaves(form, graph, features)
    got = results(way(route, form), form, OpGraph(ei.to(route.device), src, dst), reduce,
                  [t.to(route.device) for t in tensors])
    plain, exact = (results(aggregation.plain, form, graph, reduce, [t.to(d) for t in tensors])
                    for d in (torch.float32, torch.float64))
    for place, (a, b, c) in enumerate(zip(got, plain, exact)):
        if floor is None:
            assert_accurate(f"{place}", a.cpu(), b, c)
        else:
            assert a.shape == c.shape and (a.cpu() - c).abs().max() <= floor, place


@pytest.mark.parametrize("reduce, features", [("sum", (6,)), ("mean", (2, 3)), ("max", (6,))])
@pytest.mark.parametrize("form", FORMS)
def test_ways(route, form, reduce, features):
    if form in ("shifted", "weighted") and reduce == "max":
        graph = OpGraph(edges().to(route.device), N, M)
        given = stated(form, graph, reduce,
                       *(t.to(route.device) for t in leaves(form, graph, features)))
        refused = type(aggregation_cuda.kernel(graph, given)) is Reason
        assert refused if route.backend == "cuda" else aggregation_cpu.unfit(graph,
                                                                             given) is not None
        return
    judged(route, form, reduce, edges(), N, M, features)


@settings(max_examples=12, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 25), st.integers(0, 2**16)),
       st.sampled_from([*FORMS]), st.sampled_from(["sum", "mean"]))
def test_small_graphs_of_all_kinds(route, sizes, form, reduce):
    src, dst, count, seed = sizes
    torch.manual_seed(seed)
    ei = torch.stack([torch.randint(0, src, (count,)), torch.randint(0, dst, (count,))])
    judged(route, form, reduce, ei, src, dst, (6,), floor=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_double_precision(form):
    graph = OpGraph(edges(), N, M)
    ways = [(aggregation.plain, "mean"), (aggregation.plain, "max")]
    for run, reduce in ways + ([(aggregation_cpu.run, "sum")]
                               if form in ("shifted", "weighted") else []):
        tensors = [t.requires_grad_() for t in leaves(form, graph, (3,), torch.float64)]

        def function(*tensors):
            return run(graph, stated(form, graph, reduce, *tensors))

        assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(route, form):
    tensors = leaves(form, OpGraph(edges(), N, M), (6,))
    ei = edges()

    def second(run, device, dtype):
        mine = [t.to(device, dtype).requires_grad_() for t in tensors]
        graph = OpGraph(ei.to(device), N, M)
        grads = torch.autograd.grad(run(graph, stated(form, graph, "mean", *mine)).pow(3).sum(),
                                    mine, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), mine)

    exact = second(aggregation.plain, "cpu", torch.float64)
    got = second(way(route, form), route.device, torch.float32)
    assert all(relative(a.cpu(), b) <= 5e-5 for a, b in zip(got, exact))


@pytest.mark.parametrize("form", ["rectified", "gated, edges"])
def test_only_what_is_wanted_gets_a_gradient(route, form):
    ei = edges().to(route.device)
    graph = OpGraph(ei, N, M)
    tensors = [t.to(route.device) for t in leaves(form, graph, (6,))]
    expected = results(way(route, form), form, graph, "sum", tensors)[1:]
    for wanted in range(len(tensors)):
        mine = [t.detach().requires_grad_(place == wanted) for place, t in enumerate(tensors)]
        out = way(route, form)(graph, stated(form, graph, "sum", *mine))
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape).to(out))
        assert [t.grad is None for t in mine] == [place != wanted for place in range(len(mine))]
        assert relative(mine[wanted].grad, expected[wanted]) <= 1e-6


def test_tensors_that_do_not_fit():
    graph = OpGraph(edges(), N, M)
    x = torch.randn(N, 6)
    for more, code in ((Rectified(torch.randn(E, 5)), "GA206"),
                       (Shifted(torch.randn(N, 6), 1.0), "GA206"),
                       (Gated(x, torch.randn(M, 6).double()), "GA203"),
                       (Gated(x, torch.randn(M, 6), None), None), (Rectified(None), "GA206")):
        why = messages.unfit(graph, x, None, more)
        assert (None if why is None else why.code) == code
    assert messages.unfit(graph, x, torch.randn(E, 1), Rectified(torch.randn(E, 6))).code == "GA208"


def test_more_rows_cost_more():
    graph = OpGraph(torch.zeros(1, dtype=torch.int64).expand(2, 10**7), 100000, 100000)
    x = torch.empty(1).expand(100000, 64)
    plain = aggregation.prepare("sum", x, None, 10**7)
    by_form = {type(more): aggregation_cost._on_cuda(graph, plain._replace(more=more), "forward")
               for more in (None, Shifted(x, 1.0), Rectified(x), Gated(x, x))}
    first = by_form[type(None)]
    # to plain rows the host's launches are added, which many edges hide
    assert (by_form[Shifted].native < first.native
            and first.native == pytest.approx(by_form[Shifted].native, rel=0.05))
    assert by_form[Rectified].ours == pytest.approx(2 * first.ours)
    assert by_form[Rectified].native == by_form[Shifted].native
    assert by_form[Gated].native == pytest.approx(2 * by_form[Shifted].native)
    assert by_form[Shifted].ours == first.ours
