"""Whole relational Programs by the CUDA kernels, emulated and on a GPU, against fp64 edge by
edge."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.segment import segment_backward
from gnnaccel.dispatch.relational import cuda_maps, torch_maps
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.pairs import Pairs
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention
from tests.helpers import assert_accurate, relative
from tests.relational_cases import STATEMENTS, Typed, by_edges, statement, tensors, typed

each_statement = pytest.mark.parametrize("name", STATEMENTS)


def on(device, graph: Typed, **options) -> RelationView:
    """``device`` None: on the CPU, without kernels."""
    structure = tuple(t.to(device) for t in graph.structure)
    view = RelationView(structure, graph.num_src, graph.num_dst, graph.num_relations, own=True,
                        **options)
    view.kernels = device is not None
    view.statistics()
    return view


def leaves(device, operands: dict, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {n: t.detach().to(device, dtype).requires_grad_()
            if t.is_floating_point() else t.to(device)
            for n, t in operands.items()}


def results(out, operands: dict, create_graph: bool = False) -> dict[str, torch.Tensor]:
    """The output and, by name, the gradients of floating operands."""
    wanted = {n: t for n, t in operands.items() if t.is_floating_point()}
    cotangent = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype,
                               device=out.device).view(out.shape)
    grads = torch.autograd.grad(out, list(wanted.values()), cotangent, create_graph=create_graph,
                                allow_unused=True)
    return {"out": out,
            **{n: torch.zeros_like(t) if g is None else g
               for (n, t), g in zip(wanted.items(), grads)}}


def kernels(program, view, operands) -> torch.Tensor:
    return run(program, view, operands, cuda_maps, attention.run_cuda)


GRAPHS = {"any": dict(), "no edges": dict(edges=0), "one relation": dict(num_relations=1),
          "many relations": dict(num_relations=300),
          "bipartite": dict(num_src=7)}


@each_statement
@pytest.mark.parametrize("kind", GRAPHS)
def test_values_and_gradients(device, name, kind):
    if kind == "bipartite" and name.startswith(("rgat", "film")) and "pair" not in name:
        pytest.skip("sources are destinations here")
    graph = typed(**GRAPHS[kind])
    operands = tensors(name, graph)
    exact = results(by_edges(name, graph, operands), operands)
    single = leaves(None, operands)
    plain = results(by_edges(name, graph, single), single)
    # softmaxes of one edge: gradients of logits are zero but for what cancels
    floor = 1e-5 if "within" in name else 3e-6
    for how, program in orderings(statement(name)):
        for compaction in (True, False):
            given = leaves(device, operands)
            out = kernels(fuse(compact(program)), on(device, graph, compact=compaction), given)
            got = results(out.reshape(exact["out"].shape), given)
            for label, value in got.items():
                assert_accurate(f"{how}, {label}", value.detach().cpu(), plain[label].detach(),
                                exact[label].detach(), floor)


@each_statement
def test_second_derivatives(device, name):
    graph = typed(edges=30, num_src=8, num_dst=8, num_relations=3)
    operands = tensors(name, graph)

    def second(out, given):
        first = results(out, given, create_graph=True)
        weighted = sum((i + 1) * g.pow(2).sum() for i, g in enumerate(first.values()))
        wanted = [t for t in given.values() if t.is_floating_point()]
        return torch.autograd.grad(weighted, wanted, allow_unused=True)

    expected = second(by_edges(name, graph, operands), operands)
    single = leaves(None, operands)
    plain = second(by_edges(name, graph, single), single)
    for how, program in orderings(statement(name))[:3]:
        given = leaves(device, operands)
        got = second(kernels(fuse(compact(program)), on(device, graph),
                             given).reshape(by_edges(name, graph, operands).shape),
                     given)
        for a, b, c in zip(got, plain, expected):
            if c is not None:
                assert_accurate(how, a.cpu(), b, c, 1e-5, factor=4.0)


@each_statement
def test_results_may_be_changed_in_place(device, name):
    """As an activation does that follows; autograd forbids it where a Function returns a view."""
    graph = typed(edges=30, num_src=8, num_dst=8, num_relations=3)
    operands, program = tensors(name, graph), fuse(compact(statement(name)))

    def gradients(change) -> dict[str, torch.Tensor]:
        given = leaves(device, operands)
        return results(change(kernels(program, on(device, graph), given)), given)

    apart, in_place = gradients(lambda out: out * 2), gradients(lambda out: out.mul_(2))
    for label, value in apart.items():
        torch.testing.assert_close(in_place[label], value, rtol=1e-4, atol=1e-6)


# weights below the least number are not raised
@pytest.mark.parametrize("name", [n for n in STATEMENTS if "raised" not in n])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(device, name, dtype):
    graph = typed()
    exact = tensors(name, graph)
    expected = by_edges(name, graph, exact).detach()
    given = leaves(device, exact, dtype)
    for how, program in orderings(statement(name)):
        out = kernels(fuse(compact(program)), on(device, graph), given)
        limit = 0.02 if dtype is torch.float16 else 0.1
        assert out.dtype is dtype and relative(out.reshape(expected.shape).detach().cpu(),
                                               expected) < limit, how


@pytest.mark.parametrize("needs,together",
                         [((True, True), 1), ((True, False), 0), ((False, True), 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_gradients_of_a_product_come_from_one_kernel(device, monkeypatch, needs, together,
                                                          transposed):
    found, made = [], segment_backward.kernels
    monkeypatch.setattr(segment_backward, "kernels", lambda *args: found.append(1) or made(*args))
    ptr = torch.tensor([0, 0, 31, 64, 200], dtype=torch.int32, device=device)
    pairs = Pairs(ptr.new_empty(200), ptr[:0], ptr, ptr[:0])
    rows, cotangent = torch.randn(200, 2, 16, device=device), torch.randn(200, 2, 24, device=device)
    weight = torch.randn(4, 2, *((24, 16) if transposed else (16, 24)), device=device)
    got = {}
    for dtype, multiply in ((torch.float32, cuda_maps.multiply),
                            (torch.float64, torch_maps.multiply)):
        operands = [t.to(dtype).requires_grad_(need)
                    for t, need in zip((rows.clone(), weight.clone()), needs)]
        out = multiply(pairs, *operands, transposed)
        got[dtype] = torch.autograd.grad(out, [t for t in operands if t.requires_grad],
                                         cotangent.to(dtype))
    assert len(found) == together
    for ours, exact in zip(got[torch.float32], got[torch.float64]):
        assert ours.shape == exact.shape and relative(ours, exact) < 5e-7
