"""Several reduces as one operation: by kernels and by torch operations, against PyG's aggregations
and each other."""
from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnaccel.dispatch.ops.call import Kernel, compile_reason
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.multi_reduce import REDUCES, multi_reduce
from gnnaccel.dispatch.policy.reasons import Reason
from tests.attention_cases import skewed_edges
from tests.helpers import FLOOR, assert_accurate, on_devices

F64 = torch.float64
PNA = ("mean", "min", "max", "std")
#: the hubs of `skewed_edges` share dozens of edges: equal terms, whose roundings all go one way
_FLOOR = 3 * FLOOR


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def judged(graph: OpGraph, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None = None,
           zero_share: bool = True, of_edges: bool = False, added: Tensor | None = None) -> None:
    """The kernels' result and gradients against torch operations in fp32 and fp64."""
    results = []
    for dtype, way in ((x.dtype, "kernel"), (x.dtype, "plain"), (F64, "plain")):
        more = weight if added is None else added
        a, w = leaves(x.to(dtype), None if more is None else more.to(dtype))
        call = multi_reduce(graph, a, reduces, w if added is None else None, zero_share, of_edges,
                            w if added is not None else None)
        if way == "kernel":
            assert isinstance(call.kernel,
                              Kernel) and compile_reason(call.kernel) is None, call.kernel
        out = call.kernel.run() if way == "kernel" else call.plain()
        grad = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape).cos()
        if "std" in reduces:
            grad[:, reduces.index("std")] *= out[:, reduces.index("std")] > 0.1
        results.append((out,
                        *torch.autograd.grad(out, [t for t in (a, w) if t is not None],
                                             grad.to(dtype))))
    for name, got, plain, exact in zip(("out", "x", "weight"), *results):
        assert got.dtype == x.dtype
        assert_accurate(name, got.detach(), plain.detach(), exact.detach(), _FLOOR)


def graph_of(device, src=40, dst=30, edges=200) -> OpGraph:
    return OpGraph(skewed_edges(src, dst, edges, device), src, dst)


@on_devices("reduces,shape,weight",
            [(PNA, (8,), ""), (("max",), (3, 5), "head"), (REDUCES, (7,), "edge"),
             (("min", "sum"), (), ""), (("max",), (2, 3, 4), "edge"),
             (("mean", "max"), (130,), "")])
def test_against_operations(device, reduces, shape, weight):
    graph = graph_of(device)
    x = torch.randn(40, *shape).mul(4).round().div(4).to(device)
    w = {"": None, "edge": torch.randn(200),
         "head": torch.randn(200, shape[0] if shape else 1)}[weight]
    for zero_share in (True, False):
        judged(graph, x, reduces, None if w is None else w.to(device), zero_share)


@on_devices("reduces,shape",
            [(PNA, (8,)), (("max",), (3, 5)), (REDUCES, ()), (("sum", "var"), (130,))])
def test_messages_of_edges(device, reduces, shape):
    graph = graph_of(device)
    judged(graph, torch.randn(200, *shape).mul(4).round().div(4).to(device), reduces, of_edges=True)


@on_devices("reduces,shape",
            [(PNA, (8,)), (("max",), (3, 5)), (REDUCES, ()), (("var",), (7,)), (PNA, (375,))])
@pytest.mark.parametrize("zero_share", [True, False])
def test_rows_of_edges_that_are_added(device, reduces, shape, zero_share):
    x, added = (torch.randn(rows, *shape).mul(4).round().div(4).to(device) for rows in (40, 200))
    judged(graph_of(device), x, reduces, None, zero_share, added=added)


def test_rows_of_edges_alone_want_a_gradient(device):
    graph, x = graph_of(device), torch.randn(40, 6).to(device)
    added = torch.randn(6, 200).to(device).t().requires_grad_()
    call = multi_reduce(graph, x, PNA, added=added)
    for got, expected in zip(*(torch.autograd.grad(run().square().sum(), added)
                               for run in (call.kernel.run, call.plain))):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(call.kernel.run(), call.plain(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [dict(weight=torch.ones(200)), dict(of_edges=True)])
def test_rows_of_edges_beside_weights(more):
    call = multi_reduce(graph_of("cpu"), torch.randn(40, 6), PNA, added=torch.randn(200, 6), **more)
    assert isinstance(call.kernel, Reason) and call.kernel.code == "GA206"


def test_rows_of_edges_that_do_not_fit():
    for added in (torch.randn(200, 5), torch.randn(199, 6), torch.randn(200, 6).double()):
        call = multi_reduce(graph_of("cpu"), torch.randn(40, 6), PNA, added=added)
        assert isinstance(call.kernel, Reason) and call.kernel.code == "GA206"


@settings(max_examples=20, deadline=None)
@given(src=st.integers(1, 9), dst=st.integers(1, 9), edges=st.integers(1, 60),
       width=st.sampled_from([1, 3, 8]), hub=st.booleans(), seed=st.integers(0, 99))
def test_ugly_graphs(src, dst, edges, width, hub, seed):
    assume(src * width >= 8)  # of a few numbers all may be what is left of larger ones
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver
    torch.manual_seed(seed)
    ends = torch.stack([torch.randint(0, src, (edges,)), torch.randint(0, dst, (edges,))])
    if hub:
        ends[1] = 0
    with driver.using(EmulatedDriver()):
        judged(OpGraph(ends, src, dst), torch.randint(-2, 3, (src, width)).float(),
               ("max", "min", "sum"))


def test_rows_that_are_not_contiguous(device):
    x = torch.randn(8, 40).to(device).t()
    judged(graph_of(device), x, PNA)


@on_devices("reduce", ["var", "std"])
def test_a_variance_can_be_changed_in_place(device, reduce):
    edges = skewed_edges(30, 20, 200, device)
    graph = OpGraph(edges, 30, 20)
    grads = []
    for change in (lambda out: out.add_(1.0), lambda out: out + 1.0):
        x = torch.randn(30, 8,
                        generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        change(multi_reduce(graph, x, (reduce,)).kernel.run()).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_as_pyg_has_it():
    """The operations are PyG's aggregations, gradients included."""
    aggr = pytest.importorskip("torch_geometric.nn.aggr")
    graph = graph_of("cpu")
    x = torch.randn(40, 6, dtype=F64).mul(4).round().div(4)
    src, dst = graph.edge_index
    for name in REDUCES:
        one, other = leaves(x, x)
        got = multi_reduce(graph, one, (name,)).plain()[:, 0]
        native = getattr(aggr,
                         f"{name.capitalize()}Aggregation")()(other[src], dst, dim_size=30, dim=0)
        assert torch.allclose(got, native, atol=1e-7)
        grad = torch.randn_like(got) * (got > 0.1 if name == "std" else 1)
        assert torch.allclose(*(torch.autograd.grad(o, t, grad)[0]
                                for o, t in ((got, one), (native, other))), atol=1e-7)


@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_second_derivatives(device):
    graph = graph_of(device, 8, 6, 20)
    x, w = leaves(torch.randn(8, 3), torch.rand(20))
    grads = []
    for way in ("kernel", "plain"):
        call = multi_reduce(graph, x, ("var", "max"), w)
        out = call.kernel.run() if way == "kernel" else call.plain()
        (d_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(d_x.square().sum(), (x, w)))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*grads))


def test_gradcheck():
    x, w = leaves(torch.randn(6, 3, dtype=F64), torch.rand(12, dtype=F64) + 0.5)
    graph = graph_of("cpu", 6, 4, 12)
    reduces = ("sum", "mean", "var", "max", "min")
    assert torch.autograd.gradcheck(lambda x, w: multi_reduce(graph, x, reduces, w).plain(), (x, w))


@pytest.mark.parametrize("device", ["emulated"], indirect=True)
@pytest.mark.parametrize("x, weight, edges, code", [
    (torch.randn(40, 3), None, 0, "GA303"), (torch.randn(40, 3, dtype=F64), None, 20, "GA203"),
    (torch.randn(40, 0), None, 20, "GA203"),
    (torch.randn(40, 3, 2), torch.randn(20, 2), 20, "GA206")])
def test_what_no_kernel_computes(device, x, weight, edges, code):
    graph = OpGraph(skewed_edges(40, 30, edges), 40, 30)
    call = multi_reduce(graph, x, ("max",), weight)
    assert isinstance(call.kernel, Reason) and call.kernel.code == code
