"""Sums of rounded rows: each way against what the formulas say in fp64, forward and backward."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.dispatch.ops import aggregation
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.quantized import aggregation as quantized
from gnnaccel.dispatch.quantized import rows
from gnnaccel.dispatch.quantized.guard import Guard, Watch
from gnnaccel.dispatch.quantized.rows import Storage
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.quantized.use import Use
from tests.dispatch.test_aggregation import E, M, N, edges, inputs, prepared
from tests.helpers import relative
from tests.routes import clean, emulated, one_thread, opened, route  # noqa: F401

STORAGES = [Storage(form, backward) for form in ("int8", "bf16") for backward in rows.FORMATS]
KINDS = ("none", "edge", "odd", "single", "head", "one_for_all_heads", "wide")
CASES = [(kind, s) for kind in KINDS for s in STORAGES if kind in ("edge", "head")
         or s.backward == s.format]


def use(route, storage: Storage) -> Use:
    return Use(storage, Entry("layer", "Layer", None, Watch(Guard(), "layer")),
               route.backend == "cuda")


def results(used: Use, graph: OpGraph, reduce: str, x, w, grad) -> dict:
    x, w = (x.detach().clone().requires_grad_(),
            None if w is None else w.detach().clone().requires_grad_())
    out = quantized.run(used, graph, prepared(reduce, x, w, graph.num_edges))
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad, "weight": None if w is None else w.grad}


def formulas(storage: Storage, graph: OpGraph, reduce: str, x, w, grad) -> dict:
    """In fp64, one edge after the other: of values and gradients as they are stored, to nearest."""
    ei = graph.edge_index.cpu()
    x, grad, w = x.detach().cpu(), grad.cpu(), None if w is None else w.detach().cpu()
    near_x = rows.read(rows.store(x, storage.format, False, False), x.shape).double()
    degree = torch.bincount(ei[1], minlength=graph.num_dst).clamp(min=1).float()
    shape = (-1, *(1,) * (grad.dim() - 1))
    plain = grad / degree.view(shape) if reduce == "mean" else grad
    if storage.backward == "int8":
        near = rows.read(rows.store(grad, "int8", False, False), grad.shape).double()
        near = near / degree.double().view(shape) if reduce == "mean" else near
    else:
        near = rows.read(rows.store(plain, storage.backward, False, False), plain.shape).double()
    left = near if storage == Storage("int8", "int8") else plain.double()
    wide = (torch.ones(ei.shape[1], *(1,) * (x.dim() - 1), dtype=torch.float64)
            if w is None else w.double())
    message = wide * near_x[ei[0]]
    out = torch.zeros(graph.num_dst, *message.shape[1:],
                      dtype=torch.float64).index_add(0, ei[1], message)
    d_x = torch.zeros_like(near_x).index_add(0, ei[0], wide * near[ei[1]])
    d_w = None if w is None else (left[ei[1]] * near_x[ei[0]]).sum_to_size(w.shape)
    return {"out": out / degree.double().view(shape) if reduce == "mean" else out, "x": d_x,
            "weight": d_w}


def judge(got: dict, exact: dict, allowed: float) -> None:
    for name, value in got.items():
        if value is not None:
            error = relative(value.cpu(), exact[name])
            assert torch.isfinite(value).all() and error <= allowed, (name, error)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("kind, storage", CASES, ids=[f"{kind}-{'/'.join(s)}" for kind, s in CASES])
def test_formulas(route, nearest, kind, reduce, storage):
    ei = edges()
    x, w = inputs(kind, ei, device=route.device)
    graph, grad = OpGraph(ei.to(route.device), N, M), torch.randn(M, *x.shape[1:]).to(route.device)
    # where a quotient lies within rounding of a tie, either neighbour is right: a step of one
    # number
    judge(results(use(route, storage), graph, reduce, x, w, grad),
          formulas(storage, graph, reduce, x, w, grad), 2e-4)


graphs = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 25), st.integers(0, 2**16))


@settings(max_examples=30, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs, st.sampled_from(["none", "edge", "odd", "head"]), st.sampled_from(["sum", "mean"]),
       st.sampled_from(STORAGES))
def test_small_graphs_of_all_kinds(route, nearest, sizes, kind, reduce, storage):
    src, dst, count, seed = sizes
    torch.manual_seed(seed)
    ei = torch.stack([torch.randint(0, src, (count,)), torch.randint(0, dst, (count,))])
    x, w = inputs(kind, ei, src)
    graph, grad = OpGraph(ei.to(route.device), src, dst), torch.randn(dst, *x.shape[1:])
    x, w, grad = (None if t is None else t.to(route.device) for t in (x, w, grad))
    got = results(use(route, storage), graph, reduce, x, w, grad)
    exact = formulas(storage, graph, reduce, x, w, grad)
    for name, value in got.items():
        assert value is None or (value.cpu() - exact[name]).abs().max() <= 0.02 * (1 + exact[name].abs().max()), name


@pytest.mark.parametrize("storage", STORAGES, ids="/".join)
def test_gradients_against_fp64(route, storage):
    """Rounded stochastically: near the exact gradients, and in their direction."""
    torch.manual_seed(0)
    ei = torch.randint(0, 60, (2, 900))
    x, w = torch.randn(60, 3, 16, requires_grad=True), torch.rand(900, 3, 1, requires_grad=True)
    graph, grad = OpGraph(ei.to(route.device), 60, 60), torch.randn(60, 3, 16)
    got = results(use(route, storage), graph, "sum", x.to(route.device), w.to(route.device),
                  grad.to(route.device))
    leaves = [t.detach().double().requires_grad_() for t in (x, w)]
    out = aggregation.plain(OpGraph(ei, 60, 60), prepared("sum", *leaves, 900))
    out.backward(grad.double())
    for name, exact in (("out", out.detach()), ("x", leaves[0].grad), ("weight", leaves[1].grad)):
        assert relative(got[name].cpu(), exact) < 0.02, name
        assert torch.cosine_similarity(got[name].cpu().double().flatten(), exact.flatten(),
                                       0) > 0.9998, name


@pytest.mark.long
def test_gradients_are_unbiased(route):
    """Over many draws the mean of the features' gradient goes to that of the gradient as it is."""
    torch.manual_seed(0)
    ei = torch.randint(0, 6, (2, 30))
    x, w = torch.randn(6, 16), torch.rand(30, 1)
    graph, grad = OpGraph(ei.to(route.device), 6, 6), torch.randn(6, 16).to(route.device)
    draws = 300 if route.name != "cuda" else 1000
    exact = results(use(route, Storage("int8", "fp32")), graph, "sum", x.to(route.device),
                    w.to(route.device), grad)
    found = [results(use(route, Storage("int8", "int8")), graph, "sum", x.to(route.device),
                     w.to(route.device), grad)
             for _ in range(draws)]
    for name in ("x", "weight"):
        all_ = torch.stack([f[name] for f in found]).double()
        error, spread = all_.mean(0) - exact[name], all_.std(0) / draws**0.5
        assert (error.abs() <= 6 * spread + 1e-5).all(), name
        assert (all_.std(0) > 0).any(), "something is drawn"


def test_zero_rows_constant_rows_and_an_outlier(route, nearest):
    ei = torch.stack([torch.arange(8), torch.arange(8)]).to(route.device)
    x = torch.randn(8, 16)
    x[0], x[1], x[2, 5] = 0, 1.75, 1e5
    graph = OpGraph(ei, 8, 8)
    got = results(use(route, Storage("int8", "int8")), graph, "sum", x.to(route.device), None,
                  x.to(route.device))
    for value in (got["out"].cpu(), got["x"].cpu()):
        assert not value[0].any() and torch.allclose(value[1], x[1]) and value[2, 5] == 1e5 and not value[2, :5].any()
        assert (value[3:] - x[3:]).abs().max() <= x[3:].abs().max() / 253


def test_what_is_not_finite_stays_in_its_rows_and_raises_the_flag(route):
    ei = torch.tensor([[0, 1, 2], [0, 1, 1]]).to(route.device)
    x = torch.randn(3, 16)
    x[0, 3] = float("nan")
    used = use(route, Storage("int8", "int8"))
    out = quantized.run(used, OpGraph(ei, 3, 3), prepared("sum", x.to(route.device), None, 3)).cpu()
    assert out[0].isnan().all() and out[1].isfinite().all() and not out[2].any()
    assert used.entry.watch.flags(route.device).tolist() == [1, 0]


def test_a_backward_that_is_recorded_is_that_of_fp32(route):
    torch.manual_seed(0)
    ei = edges(20, 5, 5).clamp(max=4)
    graph = OpGraph(ei.to(route.device), 5, 5)
    found = []
    used = use(route, Storage("int8", "int8"))
    for run in (lambda given: quantized.run(used, graph, given),
                lambda given: aggregation.plain(graph, given)):
        torch.manual_seed(1)
        x, w = (torch.randn(5, 8).to(route.device).requires_grad_(),
                torch.rand(20, 1).to(route.device).requires_grad_())
        first = torch.autograd.grad(run(prepared("sum", x, w, 20)).sum(), (x, w), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))])
    for got, exact in zip(*found):
        assert relative(got.detach(), exact.detach()) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features(route, nearest, dtype):
    ei = edges()
    x, w = inputs("edge", ei, dtype=dtype, device=route.device)
    graph, grad = OpGraph(ei.to(route.device), N,
                          M), torch.randn(M, *x.shape[1:]).to(route.device, dtype)
    for backward in rows.FORMATS:
        storage = Storage("int8", backward)
        exact = formulas(storage, graph, "sum", x.float(), w.float(), grad.float())
        judge(results(use(route, storage), graph, "sum", x, w, grad), exact, 0.02)


def test_what_cannot_be_quantized():
    ei = edges()
    graph = OpGraph(ei, N, M)
    for reduce, kind, code in (("max", "edge", "GA603"), ("sum", "channel", "GA603")):
        x, w = inputs(kind, ei)
        assert quantized.unfit(graph, prepared(reduce, x, w, E)).code == code
    assert quantized.unfit(OpGraph(ei[:, :0], N, M),
                           prepared("sum", inputs("none", ei)[0], None, 0)).code == "GA303"
