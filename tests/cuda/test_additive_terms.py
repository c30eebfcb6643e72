"""Additive attention whose terms come from elsewhere, forward and backward, by the rule of
`helpers.assert_accurate`."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.run import attention
from tests.attention_cases import SIZES, additive, by_kernels, by_torch, check, graph, terms
from tests.helpers import on_devices, relative

pytestmark = pytest.mark.usefixtures("poison")


@on_devices("heads,width", [(8, 8), (3, 5), (1, 1)], SIZES)
@pytest.mark.parametrize("dst", [True, False])
@pytest.mark.parametrize("edge", [True, False])
def test_sizes_and_terms(device, heads, width, dst, edge):
    check(terms(graph(device), heads, width, dst, edge))


@on_devices("heads,width", [(8, 8), (3, 5)])
@pytest.mark.parametrize("dropout", [0.3, 1.0])
def test_dropout(device, heads, width, dropout):
    check(terms(graph(device), heads, width, True, True, dropout))


@on_devices("pmf,chunk", [(False, 16), (True, 16), (True, 33)])
@pytest.mark.parametrize("edge", [True, False])
def test_split_rows(device, chunk_edges, pmf, chunk, edge):
    chunk_edges(chunk)
    problem = terms(graph(device), 3, 5, True, edge, pmf=pmf)
    check(problem)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert problem.graph.csc().split.sizes()[1] >= 1


@pytest.mark.parametrize("row, out",
                         [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
def test_half_rows(device, row, out):
    check(terms(graph(device), 3, 5, True, True, row=row, out=out))


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_slopes(device, slope):
    check(terms(graph(device), 3, 5, slope=slope))


@pytest.mark.parametrize("num_src, num_dst, edges", [(1, 1, 1), (40, 30, 0), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    check(terms(graph(device, num_src, num_dst, edges), 3, 5, True, True))


def test_terms_made_of_the_rows_are_gat(device):
    """The sources' gradient does not count the terms twice: their share comes by way of the
    terms."""
    view = graph(device)
    gat = additive(view, 3, 5, "bipartite")
    expected = by_kernels(gat)[0]
    t = {name: value.detach().requires_grad_() for name, value in gat.tensors.items()}
    made = {"x": t["x"], "a_src": (t["x"] * t["att_src"]).sum(-1),
            "a_dst": (t["x_dst"] * t["att_dst"]).sum(-1)}
    problem = terms(view, 3, 5)
    out = attention.run_cuda(problem.call(), made)
    grads = dict(zip(t, torch.autograd.grad(out, list(t.values()), gat.grad_out())))
    assert relative(out.detach(), expected["out"]) < 1e-6
    assert all(relative(grads[name], expected[name]) < 3e-6 for name in grads)


def test_the_kernels_prepared_are_those_that_run(device, monkeypatch):
    """No inner products with attention vectors are compiled for terms."""
    from gnnaccel.cuda.traverse import head_dot
    problem = terms(graph(device), 3, 5)
    monkeypatch.setattr(head_dot, "kernels", lambda *args: pytest.fail("head_dot is not needed"))
    monkeypatch.setattr(head_dot, "dot", lambda *args: pytest.fail("head_dot is not needed"))
    attention.prepare(programs.attention(problem.program), 3, 5, torch.float32, torch.float32, True,
                      8)
    got, call = by_kernels(problem)
    assert relative(got["out"], by_torch(problem, call, torch.float64)["out"]) < 1e-6
