"""Running Programs one operation at a time: order of edges, odd ids, dtypes, what is kept,
derivatives of whole layers."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel.dispatch.ir.program import (DST, EDGE, PAIR_DST, PAIR_SRC, PARAM, RELATION, SRC, Op,
                                          Program, op)
from gnnaccel.dispatch.relational import torch_maps
from gnnaccel.dispatch.relational.execute import run
from gnnaccel.dispatch.relational.passes import compact, fuse, orderings
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import attention
from tests.helpers import relative
from tests.relational_cases import (STATEMENTS, Typed, assert_same, by_edges, statement, tensors,
                                    typed, value)

each_statement = pytest.mark.parametrize("name", STATEMENTS)


def programs(name: str) -> dict[str, Program]:
    """The statement and all that the passes can make of it."""
    found = {how + ", fused": fuse(compact(program)) for how, program in orderings(statement(name))}
    return {"as stated": statement(name), **found}


# ---- the layers ----

@each_statement
def test_renaming_relations_changes_nothing(name):
    graph = typed()
    operands = tensors(name, graph)
    order = torch.randperm(graph.num_relations)
    renamed = Typed(graph.src, graph.dst, order[graph.relation], 12, 12, 5)
    by_relation = [n for n, domain in statement(name).inputs if domain == RELATION]
    moved = {n: t[order.argsort()] if n in by_relation else t for n, t in operands.items()}
    for how, program in programs(name).items():
        assert_same(value(program, renamed.view(), moved), value(program, graph.view(), operands),
                    operands, how)


@each_statement
def test_the_order_of_edges_changes_nothing(name):
    graph = typed()
    operands = tensors(name, graph)
    order = torch.randperm(len(graph.src))
    other = Typed(graph.src[order], graph.dst[order], graph.relation[order], 12, 12, 5)
    moved = {n: t[order] if n in ("a_edge", "edges", "norm") else t for n, t in operands.items()}
    for how, program in programs(name).items():
        assert_same(value(program, other.view(), moved), value(program, graph.view(), operands),
                    operands, how)


@each_statement
def test_second_derivatives(name):
    graph = typed(edges=5, num_src=3, num_dst=3, num_relations=2)
    operands = tensors(name, graph)
    leaves = {n: t for n, t in operands.items() if t.is_floating_point()}
    direction = {n: torch.randn_like(t) for n, t in leaves.items()}

    # one number for each input: full Jacobians of all would take a minute
    def along(steps, program, view):
        moved = {n: t.detach() + s * direction[n]
                 for (n, t), s in zip(leaves.items(), steps.unbind())}
        return value(program, view, {**operands, **moved}).pow(2).sum()

    start = torch.zeros(len(leaves), dtype=torch.float64, requires_grad=True)
    for program in programs(name).values():
        view = graph.view()
        assert gradcheck(lambda s: along(s, program, view),
                         start) and gradgradcheck(lambda s: along(s, program, view), start)


@each_statement
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(name, dtype):
    graph = typed()
    exact = tensors(name, graph)
    low = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in exact.items()}
    expected = by_edges(name, graph, exact).detach()
    tolerance = 1e-5 if dtype is torch.float32 else 0.15
    for how, program in programs(name).items():
        got = value(program, graph.view(), low)
        assert got.dtype is dtype
        assert (
            got.reshape(
                expected.shape).double() - expected).norm() <= tolerance * expected.norm(), how


@each_statement
def test_modes_without_gradients(name):
    graph = typed()
    operands = tensors(name, graph)
    for program in programs(name).values():
        expected, view = value(program, graph.view(), operands), graph.view()
        with torch.inference_mode():
            assert torch.equal(value(program, view, operands), expected)
        # training on what inference built
        assert_same(value(program, view, operands), expected, operands)


@each_statement
def test_backward_after_the_edges_are_gone(name):
    graph = typed()
    structure = tuple(t.clone() for t in graph.structure)
    operands = tensors(name, graph)
    expected = by_edges(name, graph, operands)
    for how, program in programs(name).items():
        own = tuple(t.clone() for t in structure)
        view = RelationView(own, 12, 12, 5)
        view.statistics()
        out = value(program, view, operands)
        for t in own:
            t.zero_()
        del own, t
        assert_same(out, expected, operands, how)


# ---- node ids ----

@pytest.mark.parametrize("name",
                         [n for n in STATEMENTS if n.startswith("embedding") and "own" not in n])
def test_ids_as_indexing_reads_them(name):
    graph = typed()
    operands = tensors(name, graph)
    for how, program in programs(name).items():
        expected = value(program, graph.view(), operands)
        below = {**operands, "ids": operands["ids"] - 9}  # tables have 9 rows
        assert_same(value(program, graph.view(), below), expected, operands, how)
        for wrong in (9, -10, 1 << 40):
            ids = operands["ids"].clone()
            ids[graph.src[0]] = wrong
            with pytest.raises((IndexError, RuntimeError), match="out of (range|DATA bounds)"):
                value(program, graph.view(), {**operands, "ids": ids})


# ---- operations that the layers use in few ways ----

def plain(*ops: Op, **inputs) -> tuple[Program, dict]:
    domains = {name: domain for name, (domain, _) in inputs.items()}
    return Program("test", tuple(domains.items()), ops,
                   "out"), {name: t for name, (_, t) in inputs.items()}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("by_relation", [False, True])
def test_linear(blocks, transposed, by_relation):
    graph = typed()
    k, n = (2, 3) if blocks else (4, 5)
    matrix = rand(*((5,) if by_relation else ()), *((2,) if blocks else ()),
                  *((n, k) if transposed else (k, n)))
    program, operands = plain(op("linear", "h", "x@src", "w@rel" if by_relation else "w",
                                 transposed=transposed),
                              op("mean_sum", "out", "h", mean=False), x=(SRC, rand(12, 4)),
                              w=(RELATION if by_relation else PARAM, matrix))
    w = matrix.transpose(-1, -2) if transposed else matrix
    w = w[graph.relation] if by_relation else w.expand(60, *w.shape)
    rows = operands["x"][graph.src].unflatten(1, (-1, k))
    message = torch.einsum("ebk,ebkn->ebn", rows, w if blocks else w.unsqueeze(1)).flatten(1)
    expected = torch.zeros(12, message.shape[1],
                           dtype=torch.float64).index_add(0, graph.dst, message)
    for made in (program, compact(program), fuse(compact(program))):
        assert_same(value(made, graph.view(), operands), expected, operands)


def test_sums_with_edge_rows_and_both_scopes():
    graph = typed()
    for scope, group in (("dst", graph.dst), ("pair_dst", graph.dst * 5 + graph.relation)):
        program, operands = plain(op("segment_softmax", "a", "s", scope=scope),
                                  op("aggregate", "out", "a", "e", heads=2), s=(EDGE, rand(60, 2)),
                                  e=(EDGE, rand(60, 6)))
        p = operands["s"].exp()
        alpha = p / torch.zeros(60, 2, dtype=torch.float64).index_add(0, group, p)[group]
        message = alpha.unsqueeze(-1) * operands["e"].view(60, 2, 3)
        expected = torch.zeros(12, 2, 3, dtype=torch.float64).index_add(0, graph.dst, message)
        assert_same(value(program, graph.view(), operands), expected, operands, scope)


def test_softmax_of_large_scores():
    program, operands = plain(op("segment_softmax", "a", "s", scope="dst"),
                              op("aggregate", "out", "a", "x@src", heads=1),
                              s=(EDGE, torch.full((60, 1), 1e4, dtype=torch.float64)),
                              x=(SRC, torch.ones(12, 3, dtype=torch.float64)))
    graph = typed()
    out = value(program, graph.view(), operands).flatten(1)
    reached = torch.zeros(12, dtype=torch.bool).index_fill(0, graph.dst, True)
    torch.testing.assert_close(out, reached.double().unsqueeze(1).expand(12, 3))


def test_weights_of_wide_results_are_wide():
    """As autocast has it, under which exp is in fp32: 1 + a weight of bf16 would be a weight of
    seven bits, and the gradient of the scores a difference of such."""
    graph, rows = typed(), torch.randint(96, 128, (12, 1)).to(torch.bfloat16)
    program, operands = plain(op("segment_softmax", "alpha", "s", scope="dst"),
                              op("raise_positive", "raised", "alpha"),
                              op("aggregate", "out", "raised", "x@src", heads=1),
                              s=(EDGE, torch.randn(len(graph.src), 1).to(torch.bfloat16)),
                              x=(SRC, rows))
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given = {n: t.detach().to(dtype).requires_grad_() for n, t in operands.items()}
        wide = torch.promote_types(dtype, torch.float32)
        out = run(program, graph.view(), given, torch_maps, attention.run_torch, wide)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), list(given.values()))))
    for got, exact in zip(*found):
        assert relative(got, exact) < 2 * torch.finfo(torch.bfloat16).eps


def test_dropout_drops_its_share():
    program, operands = plain(op("dropout", "kept", "s", p=0.25),
                              op("aggregate", "out", "kept", "x@src", heads=1),
                              s=(EDGE, torch.ones(4000, 1).double()),
                              x=(SRC, torch.ones(1, 1).double()))
    graph = typed(edges=4000, num_src=1, num_dst=2)
    out = value(program, graph.view(), operands)
    assert 3800 < out[0].item() < 4200
    assert out[0].item() * 0.75 == pytest.approx(round(out[0].item() * 0.75),
                                                 abs=1e-6), "each edge counts 1 / 0.75 or nothing"


# ---- what is kept ----

def test_values_go_when_nothing_reads_them_any_more():
    graph, alive = typed(), {}

    class Watching:
        take = staticmethod(torch_maps.take)

        @staticmethod
        def multiply(pairs, rows, weight, transposed=False, gather=None):
            out = torch_maps.multiply(pairs, rows, weight, transposed, gather)
            alive["h"] = weakref.ref(out)
            return out

        @staticmethod
        def aggregate(graph, rows, weight=None):
            gc.collect()
            alive.setdefault("during", [n for n in ("h",) if alive[n]() is not None])
            return torch_maps.aggregate(graph, rows, weight)

    program = Program("test", (("x", SRC), ("w", RELATION)), (
        Op("linear", "h", ("x@src", "w@rel"), domain=PAIR_SRC),
        Op("leaky_relu", "g", ("h",), (("slope", 0.1),), PAIR_SRC),
        op("mean_sum", "out", "g@pair_src", mean=False)), "out")
    with torch.no_grad():
        run(program, graph.view(), dict(x=rand(12, 4), w=rand(5, 4, 3)), Watching, None)
    assert alive["during"] == []


def test_a_value_is_taken_once_for_each_domain():
    graph, taken = typed(), []

    class Watching:
        aggregate, multiply = staticmethod(torch_maps.aggregate), staticmethod(torch_maps.multiply)

        @staticmethod
        def take(rows, gather):
            taken.append((gather.coarse, gather.fine))
            return torch_maps.take(rows, gather)

    program = Program("test", (("x", SRC), ("y", DST)), (
        op("add", "a", "x@src", "y@dst"), op("mul", "b", "a", "x@src"),
        op("add", "c", "b", "x@src", "y@dst"),
        op("mean_sum", "out", "c", mean=False)), "out")
    run(program, graph.view(), dict(x=rand(12, 4), y=rand(12, 4)), Watching, None)
    assert sorted(taken) == [(DST, EDGE), (SRC, EDGE)]


def test_operands_are_left_alone():
    graph = typed()
    operands = tensors("rgcn mean", graph)
    before = dict(operands)
    value(statement("rgcn mean"), graph.view(), operands)
    assert operands.keys() == before.keys() and all(operands[n] is t for n, t in before.items())


# ---- fused attention ----

@pytest.mark.parametrize("name, source, target",
                         [("rgat", PAIR_SRC, DST), ("rgat within edge pair", PAIR_SRC, PAIR_DST),
                          ("hgt", PAIR_SRC, DST)])
@pytest.mark.parametrize("out", [None, torch.float64])
def test_the_call_of_a_fused_attention(name, source, target, out):
    graph, calls = typed(), []
    view, operands = graph.view(), {n: t.detach().float() for n, t in tensors(name, graph).items()}

    def attend(call, given):
        calls.append(call)
        return attention.run_torch(call, given)

    how = 1 if name == "hgt" else 0  # with the prior in the map
    run(fuse(compact(orderings(statement(name))[how][1])), view, operands, torch_maps, attend, out)
    call, = calls
    assert call.graph is view.graph(source,
                                    target) and call.heads == 2 and call.width == (2
                                                                                   if name == "hgt"
                                                                                   else 3)
    assert call.out_dtype is (out
                              or torch.float32) and call.attention.score == ("dot"
                                                                             if name == "hgt"
                                                                             else "terms")
