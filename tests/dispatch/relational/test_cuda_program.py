"""Programs that end in a sum as one node of autograd, with and without what is added, against fp64
on torch operations."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.relational import cuda_program, cuda_steps, torch_maps
from gnnaccel.dispatch.relational import added as adding
from gnnaccel.dispatch.relational.added import ADDED, Added
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from gnnaccel.dispatch.run import attention
from tests.dispatch.relational.test_cuda_maps import leaves, on
from tests.helpers import assert_accurate, relative
from tests.relational_cases import OUT, STATEMENTS, K, statement, tensors, typed

SUMS = [name for name in STATEMENTS if name.startswith("rgcn") and "weighted" not in name]
TERMS = ["none", "root", "root of x", "bias", "both", "root of types", "bias of types",
         "both of types", "turned"]
each_sum = pytest.mark.parametrize("name", SUMS)
each_term = pytest.mark.parametrize("terms", TERMS)


def operands_of(name: str, graph, terms: str) -> dict[str, torch.Tensor]:
    found = dict(tensors(name, graph))
    types = 3 if "types" in terms else 1
    width = found["x"].shape[1] if terms == "root of x" else K + 1
    if terms != "none" and not terms.startswith("bias"):
        found["+matrix"] = torch.randn(types,
                                       *((OUT, width)
                                         if terms == "turned"
                                         else (width, OUT))).double().requires_grad_()
        if terms != "root of x":
            found["+rows"] = torch.randn(graph.num_dst, width).double().requires_grad_()
    if terms.startswith(("bias", "both", "turned")):
        found["+bias"] = torch.randn(types, OUT).double().requires_grad_()
    return found


def split(given: dict, terms: str, graph) -> tuple[dict, Added | None]:
    own = {k: t for k, t in given.items() if not k.startswith("+")}
    if terms == "none":
        return own, None
    sizes = ((graph.num_dst // 2, 0, graph.num_dst - graph.num_dst // 2)
             if "types" in terms else (graph.num_dst,))
    rows = own["x"] if terms == "root of x" else given.get("+rows")
    matrix, bias = (t if t is None or len(sizes) > 1 else t[0]
                    for t in (given.get("+matrix"), given.get("+bias")))
    return own, Added(sizes, rows, matrix, bias, terms == "turned")


def by_torch(program, view, given, terms, graph):
    own, added = split(given, terms, graph)
    out = run(program, view, own, torch_maps, attention.run_torch)
    return out if added is None else adding.add(out, added, view)


def by_kernels(program, view, given, terms, graph):
    own, added = split(given, terms, graph)
    return cuda_program.run(program, view, own if added is None else {**own, ADDED: added})


def results(out, given: dict, create_graph: bool = False) -> dict[str, torch.Tensor]:
    cotangent = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype,
                               device=out.device).view(out.shape)
    grads = torch.autograd.grad(out, list(given.values()), cotangent, create_graph=create_graph)
    return {"out": out, **dict(zip(given, grads))}


@pytest.mark.long
@each_sum
@each_term
@pytest.mark.parametrize("kind",
                         [dict(), dict(edges=0), dict(num_relations=1), dict(num_relations=300)],
                         ids=str)
def test_values_and_gradients(device, name, terms, kind):
    graph = typed(**kind)
    given = operands_of(name, graph, terms)
    stated = fuse(compact(statement(name)))
    exact = results(by_torch(stated, on(None, graph), given, terms, graph), given)
    single = leaves(None, given)
    plain = results(by_torch(stated, on(None, graph), single, terms, graph), single)
    seen = 0
    for how, program in orderings(statement(name)):
        program = fuse(compact(program))
        if cuda_steps.steps_of(program) is None:
            continue
        seen += 1
        placed = leaves(device, given)
        got = results(by_kernels(program, on(device, graph), placed, terms, graph), placed)
        for label, value in got.items():
            assert_accurate(f"{how}, {label}", value.detach().cpu(), plain[label].detach(),
                            exact[label].detach())
        with torch.no_grad():
            again = by_kernels(program, on(device, graph), placed, terms, graph)
        # a GPU may have built the structure with its rows in another order
        assert torch.equal(again,
                           got["out"]) if device.type == "cpu" else relative(again,
                                                                             got["out"]) < 1e-6
    assert seen >= 2


@each_sum
@pytest.mark.parametrize("wanted", ["x", "weight", "+rows", "+matrix", "+bias"])
def test_some_gradients(device, name, wanted):
    """What is not asked for is not computed, and what is does not depend on it."""
    graph = typed()
    given = leaves(device, operands_of(name, graph, "both"))
    wanted = "bases" if wanted == "weight" and "bases" in name else wanted
    program, view = fuse(compact(statement(name))), on(device, graph)
    expected = results(by_kernels(program, view, given, "both", graph), given)
    alone = {k: t.detach().requires_grad_(k == wanted) for k, t in given.items()}
    out = by_kernels(program, view, alone, "both", graph)
    got = results(out, {wanted: alone[wanted]})
    assert torch.equal(got[wanted],
                       expected[wanted]) if wanted not in ("x",
                                                           ) else relative(got["x"],
                                                                           expected["x"]) < 1e-6


@each_sum
@pytest.mark.parametrize("terms", ["root of x", "both of types"])
def test_second_derivatives(device, name, terms):
    graph = typed(edges=30, num_src=8, num_dst=8, num_relations=3)
    given = operands_of(name, graph, terms)
    program = fuse(compact(statement(name)))

    def second(out, given):
        first = results(out, given, create_graph=True)
        weighted = sum((i + 1) * g.pow(2).sum() for i, g in enumerate(first.values()))
        return torch.autograd.grad(weighted, list(given.values()))

    expected = second(by_torch(program, on(None, graph), given, terms, graph), given)
    placed = leaves(device, given)
    got = second(by_kernels(program, on(device, graph), placed, terms, graph), placed)
    for a, b in zip(got, expected):
        assert relative(a.cpu().double(), b) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("terms", ["none", "both of types"])
def test_half_types(device, dtype, terms):
    graph = typed()
    given = operands_of("rgcn mean", graph, terms)
    program = fuse(compact(statement("rgcn mean")))
    exact = results(by_torch(program, on(None, graph), given, terms, graph), given)
    placed = leaves(device, given, dtype)
    got = results(by_kernels(program, on(device, graph), placed, terms, graph), placed)
    for label, value in got.items():
        assert value.dtype is dtype and relative(value.cpu().double(),
                                                 exact[label]) < (5e-3
                                                                  if dtype is torch.float16
                                                                  else 4e-2)
