"""Weighted neighbours: each way against the same in fp64, over graphs that are ugly, with all
derivatives."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.ops import aggregation, aggregation_cost, aggregation_cpu, aggregation_cuda
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason
from tests.helpers import assert_accurate, relative
from tests.routes import clean, emulated, one_thread, opened, route  # noqa: F401

N, M, E = 12, 9, 40
#: features of a node, of an edge's weight (None: no weights)
SHAPES = {"none": ((6,), None), "edge": ((6,), (1,)), "odd": ((7,), (1,)), "single": ((1,), (1,)),
          "head": ((3, 5), (3, 1)), "channel": ((4,), (4,)), "one_for_all_heads": ((3, 5), (1, 1)),
          "wider_weights": ((1,), (6,)), "wide": ((130,), (1,))}




def edges(count: int = E, src: int = N, dst: int = M) -> torch.Tensor:
    """With a hub, duplicates, and a node at each end without edges."""
    ei = torch.stack([torch.randint(0, src - 1, (count,)), torch.randint(0, dst - 1, (count,))])
    ei[1, :count // 3] = 2
    ei[:, :2] = 1
    return ei


def inputs(kind: str, ei: torch.Tensor, src: int = N, dtype=torch.float32, device="cpu"):
    features, weights = SHAPES[kind]
    x = torch.randn(src, *features).to(device, dtype).requires_grad_()
    w = (None
         if weights is None
         else torch.randn(ei.shape[1], *weights).to(device, dtype).requires_grad_())
    return x, w


def way(route):
    return aggregation_cuda.run if route.backend == "cuda" else aggregation_cpu.run


def prepared(reduce, x, w, count):
    found = aggregation.prepare(reduce, x, w, count)
    assert type(found) is not Reason, found
    return found


def results(run, graph, reduce, x, w):
    leaves = [t.detach().clone().requires_grad_() for t in (x, w) if t is not None]
    x, w = leaves[0], leaves[1] if w is not None else None
    out = run(graph, prepared(reduce, x, w, graph.num_edges))
    torch.manual_seed(1)
    (out * torch.randn(out.shape).to(out)).sum().backward()
    return [out.detach(), *(t.grad for t in leaves)]


def judged(route, reduce, ei, x, w, src, dst, flipped=False, floor=None):
    """``floor``: an absolute error that is allowed, for numbers that may cancel; else as
    `assert_accurate`."""
    graph = OpGraph(ei.to(route.device), src, dst, flipped)
    got = results(way(route), graph, reduce, x.to(route.device),
                  None if w is None else w.to(route.device))
    plain, exact = (results(aggregation.plain, OpGraph(ei, src, dst, flipped), reduce, x.to(t),
                            None if w is None else w.to(t))
                    for t in (torch.float32, torch.float64))
    for name, a, b, c in zip(("out", "d_x", "d_weight"), got, plain, exact):
        if floor is None:
            assert_accurate(name, a.cpu(), b, c)
        else:
            assert a.shape == c.shape and (a.cpu() - c).abs().max() <= floor, name


@pytest.mark.parametrize("kind, reduce",
                         [(kind, reduce) for reduce in aggregation.REDUCES for kind in SHAPES
                          if reduce != "var" or kind in ("none", "edge")])
def test_ways(route, kind, reduce):
    ei = edges()
    x, w = inputs(kind, ei)
    if (route.backend == "torch"
        and (kind in ("channel", "wider_weights") or reduce not in ("sum", "mean"))):
        assert aggregation_cpu.unfit(OpGraph(ei, N, M),
                                     prepared(reduce, x, w, E)).code in ("GA208", "GA301")
        return
    judged(route, reduce, ei, x.detach(), None if w is None else w.detach(), N, M)


def test_against_the_edges(route):
    """``flipped``: sources in the second row."""
    ei = edges(src=M, dst=N)
    x, w = inputs("edge", ei)
    judged(route, "mean", ei.flip(0).contiguous(), *(t.detach() for t in inputs("edge", ei, M)), M,
           N, flipped=True)
    upright, turned = OpGraph(ei, M, N), OpGraph(ei.flip(0), M, N, True)
    x = torch.randn(M, 4)
    for run in (aggregation.plain, aggregation_cpu.run):
        assert torch.equal(run(upright, prepared("sum", x, None, E)),
                           run(turned, prepared("sum", x, None, E)))


graphs = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 25), st.integers(0, 2**16))


@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs, st.sampled_from(["none", "edge", "odd", "head"]), st.sampled_from(["sum", "mean"]))
def test_small_graphs_of_all_kinds(route, sizes, kind, reduce):
    src, dst, count, seed = sizes
    torch.manual_seed(seed)
    ei = torch.stack([torch.randint(0, src, (count,)), torch.randint(0, dst, (count,))])
    x, w = inputs(kind, ei, src)
    judged(route, reduce, ei, x.detach(), None if w is None else w.detach(), src, dst, floor=1e-4)


# ---- what is computed ----

@pytest.mark.parametrize("reduce", aggregation.REDUCES)
def test_nodes_without_edges_get_zero(reduce):
    ei = torch.tensor([[0, 1], [1, 1]])
    out = aggregation.plain(OpGraph(ei, 2, 3), prepared(reduce, -torch.ones(2, 4), None, 2))
    assert not out[[0, 2]].any() and (out[1] == dict(sum=-2, var=0, std=0).get(reduce, -1)).all()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_equal_extrema_share_the_gradient(reduce):
    ei = torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]])
    x = torch.tensor([[3.0], [3.0], [5.0 if reduce == "min" else 1.0]], requires_grad=True)
    aggregation.plain(OpGraph(ei, 3, 2), prepared(reduce, x, None, 4)).sum().backward()
    assert x.grad.tolist() == [[1.5], [0.5], [0.0]]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["none", "edge"])
def test_double_precision_is_kept(kind, reduce):
    ei = edges()
    leaves = inputs(kind, ei, dtype=torch.float64)
    got, expected = (results(run, OpGraph(ei, N, M), reduce, *leaves)
                     for run in (aggregation_cpu.run, aggregation.plain))
    assert all(relative(a, b) < 1e-13 for a, b in zip(got, expected))


@pytest.mark.parametrize("reduce", aggregation.REDUCES)
@pytest.mark.parametrize("kind", ["none", "edge", "head", "wider_weights"])
def test_gradients_in_double_precision(kind, reduce):
    ei = edges()
    x, w = inputs(kind, ei, dtype=torch.float64)
    ways = [aggregation.plain] + ([aggregation_cpu.run] if reduce in ("sum", "mean")
                                  and kind != "wider_weights" else [])
    graph = OpGraph(ei, N, M)
    for run in ways:
        leaves = (x,) if w is None else (x, w)
        assert torch.autograd.gradcheck(lambda x, w=None: run(graph, prepared(reduce, x, w, E)),
                                        leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x, w=None: run(graph, prepared(reduce, x, w, E)),
                                            leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["none", "edge", "head"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_second_derivatives(route, kind, reduce):
    ei = edges()
    x, w = inputs(kind, ei)

    def second(run, device, dtype, frozen):
        leaves = [t.detach().to(device, dtype).requires_grad_() for t in (x, w) if t is not None]
        given_w = None if w is None else leaves[1].detach() if frozen else leaves[1]
        wanted = leaves[:1] if frozen or w is None else leaves
        out = run(OpGraph(ei.to(device), N, M), prepared(reduce, leaves[0], given_w, E))
        grads = torch.autograd.grad(out.pow(3).sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), wanted)

    for frozen in {False, w is not None}:
        got = second(way(route), route.device, torch.float32, frozen)
        exact = second(aggregation.plain, "cpu", torch.float64, frozen)
        assert all(relative(a.cpu(), b) < 5e-5 for a, b in zip(got, exact))


def test_gradients_of_some(route):
    ei = edges()
    graph = OpGraph(ei.to(route.device), N, M)
    for which in (0, 1):
        leaves = [t.detach().to(route.device).requires_grad_(i == which)
                  for i, t in enumerate(inputs("edge", ei))]
        way(route)(graph, prepared("mean", *leaves, E)).sum().backward()
        assert leaves[which].grad is not None and leaves[1 - which].grad is None


def test_rows_that_are_not_contiguous(route):
    ei = edges()
    x, w = torch.randn(6, N).t(), torch.randn(1, E, 2)[0, :, :1]
    judged(route, "sum", ei, x, w, N, M)


@pytest.mark.long
def test_half_precision(emulated):
    ei = edges()
    graph = OpGraph(ei, N, M)
    for dtype, unit in ((torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        x, w = inputs("edge", ei, dtype=dtype)
        for reduce in ("sum", "mean"):
            got = results(aggregation_cuda.run, graph, reduce, x, w)
            exact = results(aggregation.plain, graph, reduce, x.double(), w.double())
            assert all(a.dtype == dtype and relative(a, b) < unit for a, b in zip(got, exact))


def test_dtypes_that_differ():
    x, w = torch.randn(N, 4).bfloat16(), torch.randn(E, 1)
    found = prepared("sum", x, w, E)
    assert found.x.dtype == found.weight.dtype == torch.float32
    assert aggregation.prepare("sum", torch.randn(N, 4), torch.randn(E, 1).to(torch.complex64),
                               E).code == "GA203"


@pytest.mark.parametrize("x,w",
                         [((N,), None), ((N, 4), (E,)), ((N, 4), (E - 1, 1)), ((N, 4), (1, 1)),
                          ((N, 4), (E, 3)), ((N, 2, 4), (E, 1))])
def test_what_does_not_fit(x, w):
    found = aggregation.prepare("sum", torch.randn(x), None if w is None else torch.randn(w), E)
    assert type(found) is Reason and found.code == "GA206"


# ---- worth it? ----

def test_a_graph_that_comes_once_is_not_built_for():
    ei, found = edges(), Estimate(gain=1.0, structure=10.0)
    assert [aggregation_cost.pays(ei, found) for _ in range(22)].index(True) == 20
    fresh = edges()
    assert not aggregation_cost.pays(fresh, found)
    fresh[0, 0] = 3
    assert ledger.of(fresh).seconds == 0.0


def test_a_gain_beyond_the_price_is_taken_at_once():
    assert aggregation_cost.pays(edges(), Estimate(gain=11.0, structure=10.0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_estimates_grow_with_the_graph(device):
    """Small graphs lose, large ones gain; "meta" stands for a GPU."""
    gains = []
    for count in (10, 10**4, 10**6):
        ei = torch.empty(2, count, dtype=torch.int64, device=device)
        x, w = torch.empty(count // 2, 64, device=device), torch.empty(count, 1, device=device)
        given_ = aggregation.Aggregation("sum", x, w, (64,))
        gains.append(aggregation_cost.estimate(OpGraph(ei, count // 2, count // 2), given_,
                                               True).gain)
    assert gains[0] <= gains[1] < gains[2] and gains[2] > 0 and (device == "meta"
                                                                 or gains[0] < gains[1]
                                                                 and gains[0] < 0)


@pytest.mark.parametrize("kind", ["none", "edge"])
@pytest.mark.parametrize("features", [2, 130])
def test_a_means_gradient_by_shares_kept_from_the_second_time_on(route, kind, features):
    """Where rows are wide for the graph, the gradient of a mean without weights is one weighted
    sum."""
    ei = edges()
    x, w = (torch.randn(N, features, requires_grad=True),
            None if kind == "none" else torch.randn(E, 1, requires_grad=True))
    graph, found = OpGraph(ei.to(route.device), N, M), []
    for _ in range(3):
        placed = [None if t is None else t.detach().to(route.device) for t in (x, w)]
        found.append(results(way(route), graph, "mean", *placed))
    expected = results(aggregation.plain, OpGraph(ei, N, M), "mean", x.double(),
                       None if w is None else w.double())
    for got in found:
        for a, b in zip(got, expected):
            assert relative(a.cpu(), b) < 1e-6
    kept = graph.view()._shares is not None
    assert kept == (route.backend == "cuda" and kind == "none" and features == 130)
