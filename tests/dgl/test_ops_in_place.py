"""What a script changes in place: results, and operands after the call. Nothing raises or counts
where DGL's own does not."""
from __future__ import annotations

import copy

import dgl
import dgl.nn as dnn
import pytest
import torch
from torch import Tensor

import gnnaccel
from tests.dgl import graphs, op_cases
from tests.dgl.bridged import place  # noqa: F401  (a fixture)
from tests.dgl.op_cases import features, finite, per_relation, per_type, typed
from tests.helpers import relative

#: operation, and where its operands are
RESULTS = {"copy_u_sum": "u", "copy_e_sum": "e", "copy_u_mean": "u", "copy_u_max": "u",
           "copy_e_min": "e", "u_mul_e_sum": "ue", "u_add_e_sum": "ue", "u_add_e_max": "ue",
           "u_mul_e_min": "ue", "u_dot_v": "uv", "u_add_v": "uv", "u_mul_v": "uv", "copy_u": "u",
           "copy_v": "v"}
#: those whose operands DGL does not need again
OPERANDS = ["copy_u_sum", "copy_e_sum", "copy_u_mean", "copy_e_mean", "copy_u_max", "copy_e_max",
            "u_add_e_max", "u_sub_e_min", "u_add_v", "copy_u", "edge_softmax"]
TARGETS = {**RESULTS, "copy_e_mean": "e", "copy_e_max": "e", "u_sub_e_min": "ue",
           "edge_softmax": "e"}


def grown(out: Tensor) -> Tensor:
    """``out``, of which the finite numbers are doubled and less one, in place."""
    return finite(out.mul_(2).sub_(1))


def with_gradients(function, given: list[Tensor], device="cpu") -> list[Tensor]:
    """What ``function`` makes of copies of ``given`` that are no leaves, and the gradients."""
    leaves = [t.clone().requires_grad_() for t in given]
    outs = function(*(t.to(device) * 1 for t in leaves))
    torch.manual_seed(5)
    sum((out * torch.randn(out.shape).to(device)).sum() for out in outs).backward()
    return [*(out.detach().cpu() for out in outs), *(leaf.grad for leaf in leaves)]


def against_host(function, given: list[Tensor], block, move=None, device="cpu") -> None:
    with gnnaccel.disabled():
        expected = with_gradients(function, given)
    with block:
        got = with_gradients(move or function, given, device)
    for a, b in zip(got, expected):
        assert a is not None and (not b.numel() or relative(a, b) < 1e-5)


@pytest.mark.parametrize("name", RESULTS)
def test_results(route, name):
    g, given = graphs.square(), [features(t, (2, 4)) for t in TARGETS[name]]

    def function(*x):
        return [grown(getattr(dgl.ops, name)(g.to(x[0].device), *x))]

    against_host(function, given, route.on(), device=route.device)


def changing_operands(name: str, g):
    def function(*x):
        out = finite(getattr(dgl.ops, name)(g, *x))
        for t in x:
            t.add_(1)
        return [out]

    return function


@pytest.mark.parametrize("name", OPERANDS)
def test_operands(route, name):
    g, given = graphs.square(), [features(t, (2, 4)) for t in TARGETS[name]]
    against_host(changing_operands(name, g), given, route.on(),
                 changing_operands(name, g.to(route.device)), route.device)


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_on_the_bridge(place, name):
    g, given = graphs.square(), [features(t, (2, 4)) for t in TARGETS[name]]
    against_host(changing_operands(name, g), given, gnnaccel.enabled(),
                 changing_operands(name, g.to(place)), place)


@pytest.mark.parametrize("name",
                         ["u_add_e_max", "u_sub_e_min", "u_mul_e_min", "copy_u_sum", "u_mul_e_sum"])
def test_second_derivatives(route, name):
    """Of forms whose backward keeps less than all operands; against torch operations."""
    g, given = op_cases.bare(), [features(t, (2, 4)) for t in TARGETS[name]]

    def second(device) -> list[Tensor]:
        leaves = [t.clone().to(device).requires_grad_() for t in given]
        out = finite(getattr(dgl.ops, name)(g.to(device), *leaves))
        grads = torch.autograd.grad((out ** 3).sum(), leaves, create_graph=True)
        return [t.cpu() for t in torch.autograd.grad(sum((t ** 2).sum() for t in grads), leaves)]

    with gnnaccel.enabled(backend="torch", when="supported"):
        expected = second("cpu")
    with route.on():
        for a, b in zip(second(route.device), expected):
            assert relative(a, b) < 1e-5


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_several_relations(route, reduce):
    """Results by type of nodes share no memory that autograd guards, and what is in no loss has
    gradients of 0."""
    g = typed()
    given = per_type(g, (4,))

    def function(*x, device="cpu"):
        h = g.to(device)
        h.ndata["x"] = dict(zip(h.ntypes, x))
        h.update_all(dgl.function.copy_u("x", "m"), getattr(dgl.function, reduce)("m", "y"))
        return [grown(h.nodes["b"].data["y"])]

    against_host(function, given, route.on(on_fallback="native"),
                 lambda *x: function(*x, device=route.device), route.device)


def softmax(g, by: str):
    def function(*scores):
        found = dgl.ops.edge_softmax(g, dict(zip(g.canonical_etypes, scores)), norm_by=by)
        return [found[g.canonical_etypes[0]] * 2]

    return function


@pytest.mark.parametrize("by", ["dst", "src"])
def test_softmax_of_one_relation_alone(route, by):
    g = typed()
    against_host(softmax(g, by), per_relation(g, (2, 1)), route.on(),
                 softmax(g.to(route.device), by), route.device)


@pytest.mark.parametrize("by", ["dst", "src"])
def test_softmax_of_one_relation_alone_on_the_bridge(place, by):
    g = typed()
    against_host(softmax(g, by), per_relation(g, (2, 1)), gnnaccel.enabled(),
                 softmax(g.to(place), by), place)


@pytest.mark.parametrize("function", ["gsddmm", "softmax"])
def test_relations_are_changed_one_by_one(route, function):
    g = typed()
    h = g.to(route.device)
    with route.on():
        if function == "gsddmm":
            for kind in h.ntypes:
                h.nodes[kind].data["x"] = torch.randn(h.num_nodes(kind), 4,
                                                      device=route.device).requires_grad_()
            h.apply_edges(dgl.function.u_add_v("x", "x", "y"))
            found = [h.edges[t].data["y"] for t in h.canonical_etypes]
        else:
            scores = {t: torch.randn(h.num_edges(t), 2, device=route.device)
                      for t in h.canonical_etypes}
            found = list(dgl.ops.edge_softmax(h, scores).values())
    before = [t.detach().clone() for t in found]
    found[0].zero_()
    for a, b in zip(found[1:], before[1:]):
        assert torch.equal(a, b)


LAYERS = {"GraphConv": lambda: dnn.GraphConv(8, 4, norm="none", bias=False,
                                             allow_zero_in_degree=True),
          "GATConv": lambda: dnn.GATConv(8, 4, 2),
          "RelGraphConv": lambda: dnn.RelGraphConv(8, 4, 3),
          "RelGraphConv basis": lambda: dnn.RelGraphConv(8, 4, 3, "basis", 2, bias=False,
                                                         self_loop=False),
          "DotGatConv": lambda: dnn.DotGatConv(8, 4, 2)}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_before_an_activation_in_place(route, name):
    layer = LAYERS[name]()
    g, types = graphs.square(), torch.randint(0, 3, (graphs.E,))

    def function(x):
        more = (types.to(x.device),) if name.startswith("Rel") else ()
        return [
            torch.nn.ReLU(inplace=True)(copy.deepcopy(layer).to(x.device)(g.to(x.device), x,
                                                                          *more))]

    against_host(function, [torch.randn(graphs.N, 8)], route.on(on_fallback="native"),
                 device=route.device)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_segments_reduced_without_gradients(route, reduce):
    """torch lets nobody change a view that was made so in place with gradients."""
    lengths, x = torch.tensor([2, 0, 3], device=route.device), torch.randn(5, 3)
    factor = torch.tensor(2.0, device=route.device, requires_grad=True)

    def found():
        with torch.no_grad():
            out = dgl.ops.segment_reduce(lengths, x.to(route.device), reduce)
        out.mul_(factor)
        return finite(out.detach()).cpu()

    with gnnaccel.disabled():
        expected = found()
    with route.on():
        assert torch.equal(found(), expected)
