"""dgl.ops on our routes against DGL's own kernels, over operations, reductions, targets and
shapes."""
from __future__ import annotations

from itertools import product

import dgl
import dgl.function as fn
import pytest
import torch

from tests.dgl import graphs, op_cases
from tests.dgl.graphs import E, N
from tests.dgl.judge import compare, on_routes
from tests.dgl.op_cases import PAIRS, SHAPES, Op, features, named

REDUCES = ["sum", "max", "min", "mean"]
BINARY = ["add", "sub", "mul", "div"]
ENDS = [f"{a}_{{}}_{b}" for a, b in product("uve", "uve") if a != b]
label = str


@on_routes("name,shape",
           [(f"{kind}_{reduce}", shape) for kind, reduce in (("copy_u", "sum"), ("copy_e", "mean"))
            for shape in SHAPES[:6]],
           [(f"{kind}_{reduce}", shape) for kind in ("copy_u", "copy_e") for reduce in REDUCES
            for shape in SHAPES])
def test_copies_reduced(route, name, shape):
    compare(route, named(name), graphs.square(), features(name[5], shape))


@on_routes("name,shapes",
           [("u_mul_e_sum", pair) for pair in PAIRS] + [("u_sub_e_mean", PAIRS[6]),
                                                        ("u_div_e_sum", PAIRS[5])],
           [(f"u_{op}_e_{reduce}", pair) for op in BINARY for reduce in REDUCES for pair in PAIRS])
def test_pairs_reduced(route, name, shapes):
    compare(route, named(name), graphs.square(), features("u", shapes[0]), features("e", shapes[1]))


@on_routes("name,shapes",
           [("u_add_v", pair) for pair in PAIRS] + [("v_mul_u", PAIRS[6]), ("e_div_v", PAIRS[2])],
           [(end.format(op), pair) for end in ENDS for op in BINARY for pair in PAIRS])
def test_edgewise(route, name, shapes):
    compare(route, named(name), graphs.square(), features(name[0], shapes[0]),
            features(name[-1], shapes[1]))


DOTS = [((), ()), ((1,), (1,)), ((5,), (5,)), ((64,), (64,)), ((2, 4), (2, 4)), ((2, 4), (1, 4)),
        ((4,), (3, 4)), ((2, 3, 4), (3, 4)), ((2, 130), (2, 130))]


@on_routes("name,shapes", [("u_dot_v", pair) for pair in DOTS] + [("v_dot_u", DOTS[4])],
           [(end.format("dot"), pair) for end in ENDS
            for pair in DOTS] + [("u_dot_v", ((600,), (600,)))])
def test_dots(route, name, shapes):
    compare(route, named(name), graphs.square(), features(name[0], shapes[0]),
            features(name[-1], shapes[1]))


@on_routes("name,shape", [("copy_u", (2, 4)), ("copy_v", (7,))],
           list(product(["copy_u", "copy_v"], SHAPES)))
def test_copies_to_edges(route, name, shape):
    compare(route, named(name), graphs.square(), features(name[5], shape))


@on_routes("by,shape",
           [("dst", (4, 1)), ("src", (4,)), ("dst", (1,)), ("src", (3, 1)), ("dst", ()),
            ("dst", (40, 1))], list(product(["dst", "src"], SHAPES)))
def test_edge_softmax(route, by, shape):
    compare(route, Op(dgl.ops.edge_softmax, norm_by=by), graphs.square(), 3 * features("e", shape))


def test_edge_softmax_of_some_edges(route):
    g, ids = graphs.square(), torch.randperm(E)[:40]
    compare(route, Op(lambda g, x, ids: dgl.ops.edge_softmax(g, x, ids)), g, torch.randn(40, 3, 1),
            ids)


# ---- graphs ----

GRAPHS = {"square": graphs.square, "int32": lambda: graphs.square().int(),
          "bipartite": graphs.bipartite, "block": graphs.block, "bare": op_cases.bare,
          "loop": lambda: dgl.graph(([0], [0])),
          "one relation": lambda: op_cases.typed()["a", "r", "b"],
          "reversed": lambda: dgl.reverse(graphs.square()),
          "csc": lambda: dgl.graph(("csc", graphs.square().adj_tensors("csc"))),
          "no edges": lambda: dgl.graph(([], []), num_nodes=4)}


@pytest.mark.parametrize("name",
                         ["copy_u_sum", "u_mul_e_sum", "copy_e_max", "u_add_e_min", "u_mul_e_mean"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_reductions_over_graphs(route, kind, name):
    g = GRAPHS[kind]()
    x, e = torch.randn(g.num_src_nodes(), 3, 4), torch.randn(g.num_edges(), 3, 1)
    feats = (x, e) if name[0] == "u" else (x,) if name[5] == "u" else (e,)
    if kind == "no edges" and (route.name == "emulated" or name[-3:] in ("max", "min")):
        pytest.skip("kernels are not asked there, and DGL's own backward fails")
    compare(route, named(name), g, *feats)


@pytest.mark.parametrize("name", ["u_add_v", "u_dot_v", "e_mul_v", "copy_u", "edge_softmax"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_edges_over_graphs(route, kind, name):
    g = GRAPHS[kind]()
    sizes = {"u": (g.num_src_nodes(), 3, 4), "v": (g.num_dst_nodes(), 3, 4),
             "e": (g.num_edges(), 3, 1)}
    feats = {target: torch.randn(size) for target, size in sizes.items()}
    chosen = (["e"] if name == "edge_softmax" else [name[-1]]
              if name.startswith("copy") else [name[0], name[-1]])
    if kind == "no edges" and route.name == "emulated":
        pytest.skip("kernels are not asked there")
    compare(route, named(name), g, *(feats[c] for c in chosen))


def test_infinities_where_no_edge_enters(route):
    g, x = op_cases.bare().to(route.device), torch.randn(N, 3).to(route.device)
    expected = [getattr(dgl.ops, f"copy_u_{r}")(g, x) for r in ("max", "min")]
    with route.on():
        for r, value in zip(("max", "min"), expected):
            assert torch.equal(getattr(dgl.ops, f"copy_u_{r}")(g, x), value) and value.isinf().any()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_first_of_equals_gets_the_gradient(route, reduce):
    g = dgl.graph((torch.tensor([5, 1, 2, 3, 0, 4]), torch.zeros(6, dtype=torch.long)),
                  num_nodes=7).to(route.device)
    x = torch.ones(6, 3, device=route.device, requires_grad=True)
    with route.on():
        getattr(dgl.ops, f"copy_e_{reduce}")(g, x)[0].sum().backward()
    assert x.grad[0].eq(1).all() and not x.grad[1:].any()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_loses(route, reduce):
    nan = float("nan")
    g = dgl.graph((torch.tensor([0, 1, 2, 3, 0]), torch.tensor([0, 0, 1, 1, 2])),
                  num_nodes=4).to(route.device)
    x = torch.tensor([[nan], [2.0], [nan], [nan], [3.0]], device=route.device)
    expected = getattr(dgl.ops, f"copy_e_{reduce}")(g.to("cpu"), x.cpu())
    with route.on():
        assert torch.equal(getattr(dgl.ops, f"copy_e_{reduce}")(g, x).cpu(), expected)


# ---- strides ----

@pytest.mark.long
def test_features_that_are_not_contiguous(route):
    g = graphs.square()
    compare(route, named("u_mul_e_sum"), g, torch.randn(N, 4, 3).transpose(1, 2),
            torch.randn(E, 6)[:, ::2].unsqueeze(-1))
    compare(route, named("u_add_v"), g, torch.randn(N, 16)[:, ::2], torch.randn(8, N).t())
    compare(route, named("u_dot_v"), g, torch.randn(N, 16)[:, ::2], torch.randn(8, N).t())
    compare(route, Op(dgl.ops.edge_softmax), g, torch.randn(E, 8)[:, ::2].contiguous())
    compare(route, named("copy_u_max"), g, torch.randn(N, 16)[:, 1:8])


def test_features_that_negate_their_numbers(route):
    """Their memory holds the opposites. Of DGL's own code only segment_mm knows, so the truth is
    here the result for other features."""
    g, lengths = graphs.square().to(route.device), torch.tensor([5, 0, 7]).to(route.device)
    x, e, weight = (t.to(route.device) for t in (torch.randn(N, 8), torch.randn(E, 8),
                                                 torch.randn(3, 8, 4)))
    for call in (lambda x, e: dgl.ops.u_mul_e_sum(g, x, e), lambda x, e: dgl.ops.u_dot_v(g, x, x),
                 lambda x, e: dgl.ops.copy_e_max(g, e), lambda x, e: dgl.ops.edge_softmax(g, e),
                 lambda x, e: dgl.ops.segment_mm(x[:12], weight, lengths),
                 lambda x, e: dgl.ops.segment_reduce(lengths, x[:12], "mean")):
        expected = call(-x, -e)
        with route.on():
            found = call(torch._neg_view(x), torch._neg_view(e))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


# ---- by segment ----

LENGTHS = [[3, 0, 5, 1], [0, 0, 7], [4, 3, 0, 0], [1]]


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_segment_reduce(route, reduce, shape, lengths):
    compare(route, Op(dgl.ops.segment_reduce, reducer=reduce), torch.tensor(lengths),
            torch.randn(sum(lengths), *shape), positions=("lengths", "x"))


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("lengths", [[3, 9], [2, 3, 4], [4, 100_000]], ids=label)
def test_segments_that_end_behind_the_rows(emulated, reduce, lengths):
    """DGL reads what lies there; kernels read and write nothing beyond."""
    around = torch.full((4096, 4), float("nan"))
    x = around[100:105].normal_()
    with emulated.on():
        got = dgl.ops.segment_reduce(torch.tensor(lengths), x, reduce)
    ends = [min(sum(lengths[:i]), 5) for i in range(len(lengths) + 1)]
    for row, first, last in zip(got, ends, ends[1:]):
        if last > first:
            part = x[first:last]
            torch.testing.assert_close(row, part.sum(0) if reduce == "sum" else part.amax(0))


def test_segment_softmax(route):
    compare(route, Op(dgl.ops.segment_softmax), torch.tensor([3, 2, 5, 1]), torch.randn(11, 4),
            positions=("lengths", "x"), calls=2)


@on_routes("k,n", [(16, 8), (5, 3)], [(64, 64), (1, 1), (130, 12)])
def test_segment_mm(route, k, n):
    compare(route, Op(dgl.ops.segment_mm), torch.randn(20, k), torch.randn(4, k, n),
            torch.tensor([5, 0, 12, 3]), positions=("a", "b", "lengths"))


@pytest.mark.parametrize("lengths", [[3, 4, 9], [8, 0, 0], [2, 100_000, 1], [9, -4, 3]], ids=label)
def test_products_of_segments_that_end_behind_the_rows(emulated, lengths):
    """DGL reads what lies there; kernels read and write nothing beyond."""
    around = torch.full((4096, 16), float("nan"))
    x = around[100:108].normal_().requires_grad_()
    weight = torch.randn(3, 16, 16, requires_grad=True)
    with emulated.on():
        got = dgl.ops.segment_mm(x, weight, torch.tensor(lengths))
        got.sum().backward()
    ends = [0]
    for length in lengths:
        ends.append(min(ends[-1] + max(length, 0), 8))
    for i, (first, last) in enumerate(zip(ends, ends[1:])):
        part = x[first:last].detach()
        torch.testing.assert_close(got[first:last], part @ weight[i])
        torch.testing.assert_close(weight.grad[i], part.sum(0).unsqueeze(1).expand(16, 16))


@on_routes("k,n", [(16, 8), (5, 3)], [(64, 64), (1, 1), (130, 12)])
def test_gather_mm(route, k, n):
    index = torch.randint(0, 4, (20,))
    compare(route, Op(lambda a, b, i: dgl.ops.gather_mm(a, b, idx_b=i)), torch.randn(20, k),
            torch.randn(4, k, n), index, positions=("a", "b", "index"))


@on_routes("k", [12], [3])
def test_gather_mm_with_both_indices(route, k):
    rows, index = torch.randint(0, 9, (20,)), torch.randint(0, 4, (20,))
    compare(route, Op(lambda a, b, i, j: dgl.backend.gather_mm(a, b, i, j)), torch.randn(9, k),
            torch.randn(4, k, k), rows, index, positions=("a", "b", "rows", "index"))


# ---- messages ----

def passed(message, reduce, *features):
    def forward(g, *values):
        with g.local_scope():
            for (frame, key), value in zip(features, values):
                getattr(g, frame)[key] = value
            g.update_all(message, reduce)
            return g.dstdata["out"]

    return Op(forward)


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_update_all(route, reduce):
    reduce = getattr(fn, reduce)("m", "out")
    for g in (graphs.square(), graphs.block()):
        x, e = torch.randn(g.num_src_nodes(), 4), torch.randn(g.num_edges(), 1)
        compare(route, passed(fn.copy_u("x", "m"), reduce, ("srcdata", "x")), g, x)
        compare(route, passed(fn.u_mul_e("x", "e", "m"), reduce, ("srcdata", "x"), ("edata", "e")),
                g, x, e)


def test_messages_to_both_ends(route):
    """A message that no fused operation makes goes to the edges first."""
    g = graphs.square()
    message = passed(fn.u_add_v("x", "y", "m"), fn.sum("m", "out"), ("srcdata", "x"),
                     ("dstdata", "y"))
    compare(route, message, g, torch.randn(N, 4), torch.randn(N, 4), calls=2)


def test_apply_edges(route):
    def forward(g, x):
        with g.local_scope():
            g.ndata["x"] = x
            g.apply_edges(fn.u_dot_v("x", "x", "s"))
            return g.edata["s"]

    compare(route, Op(forward), graphs.square(), torch.randn(N, 2, 4))
