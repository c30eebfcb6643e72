"""The operations of plain layers: kernels against torch operations in fp32 and fp64, results and
gradients."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.ops import gated_sums, neighbours
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.plain import in_degrees
from tests.attention_cases import skewed_edges
from tests.emulation.emulator import EmulatedDriver
from tests.helpers import assert_accurate, on_devices

F64 = torch.float64
#: the hubs of `skewed_edges` share dozens of edges: equal terms, whose roundings all go one way
_FLOOR = 3e-6  # as of sums over all nodes: one draw of a graph with one or two nodes may be unlucky
SRC, DST, E = 40, 30, 200
EVERYTHING = ("weight", "scale_src", "scale_dst", "bias")


def made(width: int, names: tuple[str, ...], device, src: int = SRC, dst: int = DST,
         edges: int = E) -> dict[str, Tensor]:
    shapes = dict(x=(src, width), weight=(edges,), scale_src=(src,), scale_dst=(dst,),
                  bias=(width,))
    found = {name: torch.randn(shapes[name]).to(device) for name in ("x", *names)}
    return {name: t.abs() if name.startswith("scale") else t for name, t in found.items()}


def judged(graph: OpGraph, operation, reduce: str, given: dict[str, Tensor]) -> None:
    results = []
    for dtype, way in ((torch.float32, operation.by_kernels),
                       (torch.float32, operation.by_operations), (F64, operation.by_operations)):
        leaves = {name: t.to(dtype).requires_grad_(not name.startswith("scale"))
                  for name, t in given.items()}
        out = way(graph, reduce, *(leaves.get(name) for name in operation.OPERANDS))
        outs = out if isinstance(out, tuple) else (out,)
        grads = [torch.linspace(-3, 3, t.numel(), device=t.device).view(t.shape).sin().to(dtype)
                 for t in outs]
        results.append([*outs,
                        *torch.autograd.grad(outs, [t for t in leaves.values() if t.requires_grad],
                                             grads)])
    for i, (got, plain, exact) in enumerate(zip(*results)):
        assert_accurate(str(i), got.detach(), plain.detach(), exact.detach(), _FLOOR)


@on_devices("reduce,width,names", [("sum", 8, ()), ("sum", 1, EVERYTHING), ("sum", 7, ("weight",)),
                                   ("sum", 64, ("scale_dst", "bias")),
                                   ("sum", 130, ("scale_src", "scale_dst")), ("max", 5, ()),
                                   ("max", 8, ("weight",))])
def test_neighbours(device, reduce, width, names):
    graph = OpGraph(skewed_edges(SRC, DST, E, device), SRC, DST)
    judged(graph, neighbours, reduce, made(width, names, device))


@on_devices("width", [1, 6, 64])
def test_gated_sums(device, width):
    graph = OpGraph(skewed_edges(SRC, DST, E, device), SRC, DST)
    rows = dict(left=SRC, right=DST, edge=E, values=SRC)
    judged(graph, gated_sums, "gated",
           {name: torch.randn(n, width).to(device) for name, n in rows.items()})


@settings(max_examples=20, deadline=None)
@given(src=st.integers(1, 9), dst=st.integers(1, 9), edges=st.integers(1, 60),
       names=st.sets(st.sampled_from(EVERYTHING)), hub=st.booleans(), seed=st.integers(0, 99))
def test_ugly_graphs(src, dst, edges, names, hub, seed):
    torch.manual_seed(seed)
    ends = torch.stack([torch.randint(0, src, (edges,)), torch.randint(0, dst, (edges,))])
    if hub:
        ends[1] = 0
    with driver.using(EmulatedDriver()):
        judged(OpGraph(ends, src, dst), neighbours, "sum",
               made(3, tuple(names), "cpu", src, dst, edges))


def test_rows_that_are_not_contiguous(device):
    graph = OpGraph(skewed_edges(SRC, DST, E, device), SRC, DST)
    judged(graph, neighbours, "sum",
           {**made(6, EVERYTHING, device), "x": torch.randn(6, SRC).to(device).t()})


@pytest.mark.parametrize("names", [(), ("weight", "scale_src", "scale_dst")])
def test_second_derivatives(device, names):
    graph = OpGraph(skewed_edges(8, 6, 20, device), 8, 6)
    given, found = made(3, names, device, 8, 6, 20), []
    for way in (neighbours.by_kernels, neighbours.by_operations):
        leaves = {name: t.clone().requires_grad_(not name.startswith("scale"))
                  for name, t in given.items()}
        out = way(graph, "sum", *(leaves.get(name) for name in neighbours.OPERANDS))
        (d_x,) = torch.autograd.grad(out.pow(3).sum(), leaves["x"], create_graph=True)
        found.append(torch.autograd.grad(d_x.square().sum(),
                                         [t for t in leaves.values() if t.requires_grad]))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*found))


def test_gradcheck():
    graph = OpGraph(skewed_edges(6, 4, 12), 6, 4)
    x, w, scale = torch.randn(6, 3, dtype=F64), torch.rand(12, dtype=F64), torch.rand(6, dtype=F64)
    assert torch.autograd.gradcheck(lambda x,
                                    w: neighbours.by_operations(graph, "sum", x, w, scale),
                                    (x.requires_grad_(), w.requires_grad_()))
    four = [torch.randn(n, 2, dtype=F64).requires_grad_() for n in (6, 4, 12, 6)]
    assert torch.autograd.gradcheck(lambda *t: gated_sums.by_operations(graph, "gated", *t), four)


def test_degrees_from_either_structure(device):
    graph = OpGraph(skewed_edges(SRC, DST, E, device), SRC, DST)
    assert torch.equal(in_degrees(graph, True).long(), in_degrees(graph, False))


def test_a_recorded_gradient_of_the_bias_alone(device):
    graph = OpGraph(skewed_edges(SRC, DST, E, device), SRC, DST)
    given = made(8, ("scale_dst", "bias"), device)
    bias = given["bias"].requires_grad_()
    out = neighbours.by_kernels(graph, "sum", given["x"], None, None, given["scale_dst"], bias)
    (d_bias,) = torch.autograd.grad(out.square().sum(), bias, create_graph=True)
    assert torch.equal(torch.autograd.grad(d_bias.sum(), bias)[0], torch.full_like(bias, 2 * DST))
