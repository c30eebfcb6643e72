"""Operations with tensors on a GPU and a DGL that has no kernels there, against DGL's own on the
CPU."""
from __future__ import annotations

import dgl
import pytest
import torch

import gnnaccel
from tests.dgl import graphs, op_cases
from tests.dgl.bridged import place  # noqa: F401  (a fixture)
from tests.dgl.graphs import E, N
from tests.helpers import relative

FEATURES = dict(u=(N, 2, 4), v=(N, 2, 4), e=(E, 2, 1))
NAMES = ["copy_u_sum", "copy_e_mean", "copy_u_max", "copy_e_min", "u_mul_e_sum", "u_add_e_mean",
         "u_sub_e_max", "u_div_e_sum", "u_mul_e_min", "u_add_v", "v_mul_u", "u_dot_v", "e_mul_v",
         "e_sub_u", "copy_u", "copy_v", "edge_softmax"]


def operands(name: str) -> list[torch.Tensor]:
    if name == "edge_softmax" or name.startswith("copy"):
        targets = "e" if name == "edge_softmax" else name[5]
    else:
        targets = name[0] + name.split("_")[2]
    return [torch.randn(FEATURES[t]) for t in targets]


def results(function, g, given, device) -> list[torch.Tensor]:
    """Output and gradients, on the host."""
    leaves = [t.clone().requires_grad_() for t in given]
    out = op_cases.finite(function(g, *(t.to(device) for t in leaves)))
    torch.manual_seed(5)
    out.backward(torch.randn(out.shape).to(device))
    return [out.detach().to("cpu"), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", NAMES)
def test_operations(place, name, idtype):
    g, given, function = op_cases.bare().astype(idtype), operands(name), getattr(dgl.ops, name)
    with gnnaccel.disabled():
        expected = results(function, g, given, "cpu")
    gnnaccel.reset_stats()
    got = results(function, g.to(place), given, place)
    routes = {route for entry in gnnaccel.stats().values() for route in entry["routes"]}
    assert routes == ({"torch"} if place.index == 0 and not torch.cuda.is_available() else {"cuda"})
    for a, b in zip(got, expected):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("by", ["dst", "src"])
def test_several_relations(place, by):
    g = op_cases.typed()
    scores = [torch.randn(g.num_edges(t), 2, 1) for t in g.canonical_etypes]

    def softmax(g, *scores):
        return torch.cat(list(dgl.ops.edge_softmax(g, dict(zip(g.canonical_etypes, scores)),
                                                   norm_by=by).values()))

    with gnnaccel.disabled():
        expected = results(softmax, g, scores, "cpu")
    for a, b in zip(results(softmax, g.to(place), scores, place), expected):
        assert relative(a, b) < 1e-5


def test_inside_disabled_blocks_torch_operations_run(place):
    g, x = graphs.square(), torch.randn(N, 4)
    with gnnaccel.disabled():
        expected = dgl.ops.copy_u_sum(g, x)
        got = dgl.ops.copy_u_sum(g.to(place), x.to(place))
    assert relative(got.to("cpu"), expected) < 1e-5 and not gnnaccel.stats()


def test_what_is_not_understood_is_the_hosts_error(place):
    g, x = graphs.square().to(place), torch.randn(N, 4).to(place)
    for wrong in (lambda: dgl.ops.copy_u_sum(g, x[1:]),
                  lambda: dgl.ops.u_mul_e_sum(g, x, torch.ones(E).double().to(place)),
                  lambda: dgl.ops.copy_u_sum(g, x.long())):
        with pytest.raises(dgl.DGLError):
            wrong()


def test_steps_move_nothing_to_the_host(place):
    from tests.dgl import simulated

    if torch.cuda.is_available():
        pytest.skip("transfers are counted where the device is simulated")
    g, x, e = graphs.square().to(place), torch.randn(N, 2,
                                                     4).to(place), torch.randn(E, 2, 1).to(place)

    def step():
        score = dgl.ops.edge_softmax(g, dgl.ops.u_dot_v(g, x, x) + e)
        out = dgl.ops.u_mul_e_sum(g, x,
                                  score).sum() + dgl.ops.copy_u_mean(g,
                                                                     x).sum() + dgl.ops.u_add_e_max(
                                                                         g, x, e).sum()
        torch.autograd.grad(out, (x, e))

    x.requires_grad_()
    e.requires_grad_()
    step()
    before = dict(simulated.transfers)
    step()
    assert dict(simulated.transfers) == before
