"""Additive attention with values and gradients in int8: exact but for fp32's rounding, given the
rows."""
from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.attention import additive, additive_backward
from gnnaccel.cuda.int8 import quantize
from gnnaccel.cuda.int8.quantize import Int8Rows, bf16_rows, int8_rows
from gnnaccel.cuda.traverse.dropout import OFF, draw
from tests.attention_cases import Problem, by_torch, graph, terms
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, assert_accurate, on_devices, relative

pytestmark = pytest.mark.usefixtures("poison")

SIZES = [(8, 8), (1, 1), (3, 5), (1, 64), (1, 128), (4, 16), (2, 40), (12, 20), (1, 47), (2, 512),
         (40, 2)]


@dataclass
class Case:
    """Attention over terms of its own, whose values and gradients are in these formats."""

    problem: Problem
    row: torch.dtype
    grad: torch.dtype | None
    dropout: float = 0.0

    def run(self) -> tuple[dict[str, Tensor], Problem, object]:
        """The kernels' results, the problem that they solve, in what its rows stand for, and its
        call."""
        p, t = self.problem, self.problem.tensors
        values, exact_x = stored(t["x"], self.row)
        given, exact_grad = stored(p.grad_out(), self.grad or torch.float32,
                                   quantize.key(p.graph.device))
        a_edge, dropout = (t.get("a_edge"),
                           draw(self.dropout, p.graph.device) if self.dropout else OFF)
        v = additive.variant(p.heads, p.width, self.row, torch.float32, a_edge is not None,
                             dropout.on, True, p.graph.wide, self.grad)
        by_dst, by_src = p.graph.csc(), p.graph.csr()
        out, saved = additive.forward(v, by_dst, t["a_src"], t.get("a_dst"), values, 0.2, a_edge,
                                      dropout)
        att = torch.zeros(p.heads, p.width, device=p.graph.device)
        g = additive_backward.backward(v, by_dst, by_src, saved, given, t["a_src"],
                                       t.get("a_dst"), values, att, None, 0.2, a_edge,
                                       a_edge is not None, dropout)
        got = {"out": out, "x": g.values, "a_src": g.a_src, "a_dst": g.a_dst, "a_edge": g.a_edge}
        exact = replace(p, tensors=t | {"x": exact_x}, grad=exact_grad)
        call = exact.call()
        call.dropout = dropout
        return {name: value for name, value in got.items() if name == "out"
                or name in t}, exact, call


def stored(x: Tensor, dtype: torch.dtype,
           key: quantize.Key | None = None) -> tuple[Tensor | Int8Rows, Tensor]:
    """Rows in a format, and in fp64 what they stand for."""
    if dtype is not torch.int8:
        rows = bf16_rows(x, key) if dtype is torch.bfloat16 else x
        return rows, rows.double()
    rows = int8_rows(x, key)
    return rows, (rows.data[:,
                            :rows.width].double() * rows.scale.double().unsqueeze(1)).view(x.shape)


def check(case: Case, floor: float = 2e-6) -> dict[str, Tensor]:
    got, problem, call = case.run()
    plain, exact = (by_torch(problem, call, dtype) for dtype in (torch.float32, torch.float64))
    for name, value in got.items():
        assert value.dtype is torch.float32
        assert_accurate(name, value, plain[name], exact[name], FLOOR if name == "out" else floor,
                        3.0)
    return got


# ---- numbers ----

@on_devices("heads,width", SIZES)
def test_sizes(device, heads, width):
    check(Case(terms(graph(device), heads, width), torch.int8, torch.int8))


@on_devices("row,grad",
            [(torch.int8, None), (torch.int8, torch.bfloat16), (torch.float32, torch.int8),
             (torch.int8, torch.float32)])
@pytest.mark.parametrize("size", [(8, 8), (3, 5)], ids=str)
def test_formats(device, row, grad, size):
    check(Case(terms(graph(device), *size), row, grad))


@pytest.mark.parametrize("size", [(8, 8), (3, 5), (1, 64)], ids=str)
@pytest.mark.parametrize("edge, dst, dropout",
                         [(True, True, 0.0), (False, False, 0.0), (True, True, 0.4),
                          (False, True, 1.0)])
def test_terms(device, chunk_edges, size, edge, dst, dropout):
    chunk_edges(33)
    check(Case(terms(graph(device), *size, dst, edge, dropout), torch.int8, torch.int8, dropout))


@pytest.mark.parametrize("chunk", [1024, 150, 16])
@pytest.mark.parametrize("size", [(8, 8), (1, 48), (12, 20)], ids=str)
def test_long_rows(device, chunk_edges, size, chunk):
    chunk_edges(chunk)
    check(Case(terms(graph(device, 60, 50, 900), *size), torch.int8, torch.int8))


def test_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    check(Case(terms(graph(device, wide=True), 4, 16, True, True), torch.int8, torch.int8))


@pytest.mark.parametrize("size", [(8, 8), (1, 32)], ids=str)
def test_rows_that_are_not_like_others(device, size):
    p = terms(graph(device), *size)
    p.tensors["x"][1], p.tensors["x"][2], p.tensors["x"][3, 0, 0] = 0.0, -2.5, 1e4
    p.grad_out()[0], p.grad_out()[4], p.grad_out()[5, 0, 1] = 0.0, 1.5, 1e4
    # the gradient of a_src is a small difference of large numbers
    check(Case(p, torch.int8, torch.int8), 3e-5)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    check(Case(terms(graph(device, num_src, num_dst, edges), 4, 16), torch.int8, torch.int8))


def test_what_is_not_finite_is_not_lost(device):
    p = terms(graph(device), 8, 8)
    p.tensors["x"][7, 1, 2], p.grad_out()[3, 0, 1] = float("inf"), float("nan")
    got, _, _ = Case(p, torch.int8, torch.int8).run()
    edges = p.graph.edges()
    enters, leaves = edges.dst[edges.src == 7].unique(), edges.src[edges.dst == 3].unique()
    assert len(enters) and torch.isnan(got["out"][enters]).all() and torch.isnan(
        got["x"][leaves]).all()
    others = torch.ones(30, dtype=torch.bool, device=device)
    others[enters] = False
    assert torch.isfinite(got["out"][others]).all()


# ---- what quantizing does ----

def test_close_to_what_was_quantized(device):
    p = terms(graph(device), 4, 16, True, True)
    got, _, call = Case(p, torch.int8, torch.int8).run()
    exact = by_torch(p, call, torch.float64)
    for name, value in got.items():
        assert relative(value, exact[name]) < 0.03, name
        assert torch.cosine_similarity(value.double().flatten(), exact[name].flatten(),
                                       0) > 0.999, name


@pytest.mark.long
def test_gradients_are_unbiased(device):
    """The mean over draws comes as close to the gradients of the unrounded output gradient as its
    own spread allows."""
    case = Case(terms(graph(device), 1, 16), torch.int8, torch.int8)
    _, solved, call = case.run()
    exact = by_torch(replace(solved, grad=case.problem.grad_out()), call, torch.float64)
    draws = [case.run()[0] for _ in range(120)]
    for name in ("x", "a_src", "a_dst"):
        found = torch.stack([d[name].double() for d in draws])
        spread = found.std(0) / len(draws)**0.5
        seen = spread > 1e-4 * exact[name].abs().mean()
        z = (found.mean(0) - exact[name].view(found.shape[1:]))[seen] / spread[seen]
        assert seen.any() and z.abs().max() < 7 and z.mean().abs() < 0.6 and 0.5 < z.std() < 1.6, name


# ---- order, memory, refusals ----

@pytest.mark.parametrize("size", [(8, 8), (3, 5)], ids=str)
def test_scheduling_does_not_change_the_result(chunk_edges, size):
    chunk_edges(16)

    def made():
        case = Case(terms(graph("cpu"), *size), torch.int8, None)
        return lambda: case.run()[0]

    in_any_order(made)


def test_inputs_that_do_not_fit(device):
    p = terms(graph(device), 3, 5)
    v = additive.variant(3, 5, torch.int8, torch.float32)
    a_src, a_dst, rows = p.tensors["a_src"], p.tensors["a_dst"], int8_rows(p.tensors["x"])
    with pytest.raises(ValueError, match="values is torch.float32; the variant takes torch.int8"):
        additive.forward(v, p.graph.csc(), a_src, a_dst, p.tensors["x"], 0.2)
    with pytest.raises(ValueError, match="values is Int8Rows of 14 channels; the variant takes 15"):
        additive.forward(v, p.graph.csc(), a_src, a_dst, replace(rows, width=14), 0.2)
    with pytest.raises(ValueError, match="pmf=True"):
        additive.forward(v, p.graph.csc(), a_src, a_dst, rows, 0.2, pmf=True)
    with pytest.raises(ValueError, match="values is Int8Rows.*torch.float32"):
        additive.forward(replace(v, row=torch.float32), p.graph.csc(), a_src, a_dst, rows, 0.2)
