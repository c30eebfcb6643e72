"""Estimates of relational calls: what they grow with, what is unknown, and that clear cases come
out right."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.relational import costs, statements
from gnnaccel.dispatch.relational.request import RelationalRequest

LAYERS = ("RGCNConv", "FastRGCNConv", "RGATConv", "HGTConv", "HEATConv", "FiLMConv", "HeteroLinear",
          "HeteroConv", "HeteroBasisConv", "dgl.RelGraphConv", "dgl.RelGraphConv bdd",
          "dgl.HGTConv", "dgl.HeteroGraphConv", "dgl.TypedLinear", "dgl.TypedLinear sorted",
          "dgl.TypedLinear bdd")


def request(native="RGCNConv", nodes=13, edges=16, relations=7, width=64, device="cpu", grad=False,
            fresh=False):
    """Sizes in bits."""
    shapes = (("x", (width,)), ("weight", (width, width)))
    return RelationalRequest(statements.rgcn(True, False), native, shapes, torch.float32,
                             torch.float32, device, nodes, nodes, edges, relations, grad, fresh)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("estimate", [costs.cuda, costs.torch_backend, costs.native])
def test_more_work_costs_more(estimate, grad):
    base = estimate(request(grad=grad))
    assert base > 0
    for more in (dict(edges=19), dict(width=256), dict(relations=10)):
        assert estimate(request(grad=grad, **more)) > base
    assert estimate(request(grad=True)) > estimate(request(grad=False))


@pytest.mark.parametrize("device, estimate", [("cuda", costs.cuda), ("cpu", costs.torch_backend)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_new_graph_pays_for_its_structure(device, estimate, grad):
    fixed, per_edge = cost.constants()["relational"][device]["structure"]["training"
                                                                          if grad else "forward"]
    # of which nothing else was measured there
    layer = "RGCNConv" if device == "cpu" else "dgl.RelGraphConv"
    extra = estimate(request(layer, grad=grad, fresh=True)) - estimate(request(layer, grad=grad))
    assert extra == pytest.approx(fixed + per_edge * 2**16)


def test_what_is_unknown():
    assert costs.torch_backend(request(device="cuda")) is None
    assert costs.native(request(device="cuda")) is None
    assert costs.native(request("HANConv")) is None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("native", LAYERS)
def test_every_layer_has_a_rate(native, grad):
    assert costs.native(request(native, grad=grad)) > 0


@pytest.mark.parametrize("native", ["RGCNConv", "FastRGCNConv", "RGATConv"])
@pytest.mark.parametrize("grad", [False, True])
def test_many_relations_pay_and_tiny_fresh_graphs_do_not(native, grad):
    big = request(native, grad=grad)  # the size of AIFB: measured at 17 times and more
    assert costs.torch_backend(big) * 5 < costs.native(big)
    tiny = request(native, nodes=6, edges=8, relations=2, width=16, grad=grad, fresh=True)
    assert costs.torch_backend(tiny) > costs.native(tiny)


@pytest.mark.parametrize("grad", [False, True])
def test_the_host_hides_what_its_device_does_over_new_graphs(grad):
    """Up to where the device takes longer: only then more edges make kernels pay."""
    def asked(bits):
        return request("HeteroConv", edges=bits, relations=3, width=128, device="cuda", grad=grad,
                       fresh=True)

    assert costs.native(asked(12)) == costs.native(asked(17))
    assert costs.native(asked(17)) < costs.cuda(asked(17))
    assert costs.native(asked(22)) > costs.cuda(asked(22))
