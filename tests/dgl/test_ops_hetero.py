"""Operations over several relations at once."""
from __future__ import annotations

import dgl
import dgl.function as fn
import pytest
import torch

import gnnaccel
from gnnaccel.errors import FallbackError
from tests.dgl import op_cases
from tests.dgl.judge import close, compare
from tests.dgl.op_cases import Op, finite, per_relation, per_type


def listed(name: str) -> Op:
    """The function of ``dgl.ops`` called so, of features given as lists."""
    return Op(lambda g, *sides: tuple(t for t in getattr(dgl.ops, name)(g, *sides) if t.numel()))


@pytest.mark.parametrize("name", ["copy_u_sum", "copy_e_sum", "u_mul_e_sum", "u_add_e_sum"])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_sums(route, name, shape):
    g = op_cases.typed()
    sides = {"u": per_type(g, shape), "e": per_relation(g, shape)}
    chosen = [sides[name[5]]] if name.startswith("copy") else [sides["u"], sides["e"]]
    compare(route, listed(name), g, *chosen)


@pytest.mark.parametrize("name", ["copy_u_max", "copy_u_min", "u_mul_e_max"])
def test_extremes_over_relations(route, name):
    """Against one graph of all relations: DGL's own forward leaves memory unset, and its backward
    fails."""
    g, reduce = op_cases.typed(empty=True), name[-3:]
    x, e = ([t.to(route.device).requires_grad_() for t in made]
            for made in (per_type(g, (4,)), per_relation(g, (4,))))
    g = g.to(route.device)
    chosen = [x, e] if "mul" in name else [x]
    with route.on(backend="auto"):
        got = getattr(dgl.ops, name)(g, *chosen)
    ends = {"b": [("a", "r", "b"), ("c", "s", "b")], "c": [("a", "t", "c")]}
    for kind, relations in ends.items():
        place = g.ntypes.index(kind)
        message = torch.cat(
            [x[g.ntypes.index(r[0])][g.edges(etype=r)[0]] * (e[g.get_etype_id(r)]
                                                             if "mul" in name else 1)
             for r in relations])
        to = torch.cat([g.edges(etype=r)[1] for r in relations])
        expected = torch.full((g.num_nodes(kind), 4), float("-inf" if reduce == "max" else "inf"),
                              device=route.device)
        expected = expected.scatter_reduce(0, to.unsqueeze(1).expand_as(message), message,
                                           f"a{reduce}")
        assert torch.equal(got[place], expected)
        weights = torch.randn_like(expected)
        wanted = [t for t in (x + e if "mul" in name else x) if t.numel()]
        mine, others = (torch.autograd.grad((finite(out) * weights).sum(), wanted,
                                            retain_graph=True, allow_unused=True)
                        for out in (got[place], expected))
        for t, one, other in zip(wanted, mine, others):
            one, other = (torch.zeros_like(t) if grad is None else grad for grad in (one, other))
            assert close(one, other)


@pytest.mark.parametrize("name", ["u_add_v", "u_mul_v", "u_dot_v", "copy_u"])
def test_edges(route, name):
    g = op_cases.typed()
    x = per_type(g, (2, 4))
    compare(route, Op(lambda g, *x: getattr(dgl.ops, name)(g, *x)), g,
            *([x] if name == "copy_u" else [x, per_type(g, (2, 4))]))


@pytest.mark.parametrize("by", ["dst", "src"])
@pytest.mark.parametrize("shape", [(1,), (4, 1), (3,)])
def test_edge_softmax(route, by, shape):
    g = op_cases.typed()

    def forward(g, *scores):
        return tuple(dgl.ops.edge_softmax(g, dict(zip(g.canonical_etypes, scores)),
                                          norm_by=by).values())

    compare(route, Op(forward), g, *per_relation(g, shape))


def test_gradients_of_unused_relations_are_zero(route):
    g = op_cases.typed().to(route.device)
    scores = [t.to(route.device).requires_grad_() for t in per_relation(g, (2, 1))]
    with route.on():
        out = dgl.ops.edge_softmax(g, dict(zip(g.canonical_etypes, scores)))
        out["a", "t", "c"].pow(2).sum().backward()
    assert all(t.grad is not None for t in scores)
    assert not scores[g.get_etype_id("r")].grad.any() and scores[g.get_etype_id("t")].grad.any()


@pytest.mark.parametrize("reduce", ["sum", "max", "mean"])
@pytest.mark.parametrize("across", ["sum", "mean", "stack"])
def test_multi_update_all(route, reduce, across):
    def forward(g, a, c):
        with g.local_scope():
            g.nodes["a"].data["x"], g.nodes["c"].data["x"] = a, c
            g.multi_update_all({r: (fn.copy_u("x", "m"), getattr(fn, reduce)("m", "y"))
                                for r in "rs"}, across)
            return g.nodes["b"].data["y"]

    g = op_cases.typed()
    compare(route, Op(forward), g, torch.randn(7, 4), torch.randn(5, 4), calls=2)


def test_update_all_across_relations(route):
    def forward(g, a, b, c):
        with g.local_scope():
            g.ndata["x"] = dict(a=a, b=b, c=c)
            g.update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
            return g.nodes["b"].data["y"], g.nodes["c"].data["y"]

    g = op_cases.typed()
    compare(route, Op(forward), g, *per_type(g, (4,)))
    assert set(gnnaccel.stats()) == {"dgl.gspmm_hetero"}


def test_several_shapes_are_left_to_dgl(route):
    g = op_cases.typed().to(route.device)
    scores = [torch.randn(g.num_edges(t), width, device=route.device)
              for t, width in zip(g.canonical_etypes, (1, 2, 3, 4))]
    with route.on(), pytest.raises(FallbackError if route.device.type == "cpu" else dgl.DGLError,
                                   match="several shapes"):
        dgl.ops.edge_softmax(g, dict(zip(g.canonical_etypes, scores)))
