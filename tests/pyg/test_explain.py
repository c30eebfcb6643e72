"""`explain_program`: what it shows of a call, without enabling or computing anything."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, RGCNConv, SAGEConv, TAGConv

import gnnaccel
from gnnaccel.dispatch.observe import watch
from tests.pyg.graphs import E, F, features, square

R = 5


def relational(**options) -> tuple:
    torch.manual_seed(0)
    return RGCNConv(F, 8, R, **options), features(), square(), torch.randint(0, R, (E,))


def test_a_relational_layer():
    layer, *inputs = relational(num_bases=2)
    found = gnnaccel.explain_program(layer, *inputs)
    assert found.reason is None and found.stated.name == "rgcn"
    names = [o.name for o in found.optimised.orderings]
    assert set(names) == {"as stated", "aggregate_first", "aggregate_first + per_basis"}
    assert [o.seconds
            for o in found.optimised.orderings] == sorted(o.seconds
                                                          for o in found.optimised.orderings)
    text = str(found)
    assert "h = linear(x@src, weight@rel)\n" in text and "[PAIR_SRC]" in text, "before and after compaction"
    assert f"{E} edges, {R} relations" in text and "<- taken" in text and text.count(
        str(found.optimised.program)) >= 1
    pairs = {(int(s), int(r)) for s, r in zip(inputs[1][0], inputs[2])}
    assert found.optimised.statistics.pairs_src == len(pairs)


def test_an_attention_layer_and_its_kernel():
    text = str(gnnaccel.explain_program(GATConv(F, 8), features(), square()))
    assert text.startswith("GATConv as stated:\ngat(") and text.endswith(
        "fused: additive attention, score 'additive'")


def test_the_way_that_an_attention_layer_goes(route):
    layer = GATConv(F, 8).to(route.device)
    inputs = [t.to(route.device) for t in (features(), square())]
    with route.on():
        found = gnnaccel.explain_program(layer, *inputs)
    assert found.decision.route == route.backend and f"\ngoes to {found.decision.plan.kernel}, estimated" in str(found)
    with gnnaccel.enabled(exclude=["GATConv"]):
        assert "goes to the host's own code; GA101" in str(gnnaccel.explain_program(layer, *inputs))


@pytest.mark.parametrize("make, calls, formula", [
    (lambda: GCNConv(F, 8), 1, "out[i] = sum of weight[e] * x[j]"),
    (lambda: SAGEConv(F, 8, ["mean", "max"]), 1, "mean, max of x[j]"),
    (lambda: TAGConv(F, 8, K=2), 2, "sum of weight[e]")])
def test_message_passing_of_layers_without_an_adapter(route, make, calls, formula):
    layer, inputs = make().to(route.device), [t.to(route.device) for t in (features(), square())]
    gnnaccel.reset_stats()
    state = torch.get_rng_state()
    with route.on():
        found = gnnaccel.explain_program(layer, *inputs)
        assert {one.decision.route for one in found.inside} == {route.backend}
    assert len(found.inside) == calls and formula in str(found) and str(found).count(
        "\ngoes to ") == calls
    assert gnnaccel.stats() == {} and torch.equal(torch.get_rng_state(),
                                                  state) and not watch._watchers
    assert not gnnaccel.status()["enabled"]


def test_message_passing_that_stays_native_says_why():
    layer = SAGEConv(F, 8, aggr="median")
    found = gnnaccel.explain_program(layer, features(), square())
    assert [one.reason.code
            for one in found.inside] == [
                "GA201"] and "SAGEConv runs the host's own code: GA201" in str(found)


def test_why_a_call_is_native():
    layer, *inputs = relational(aggr="max")
    found = gnnaccel.explain_program(layer, *inputs)
    assert found.reason.code == "GA201" and found.stated is None
    assert str(found).startswith("RGCNConv runs the host's own code: GA201 ")


def test_unknown_layers_are_refused():
    with pytest.raises(TypeError,
                       match="Linear is no layer that gnnaccel knows; it knows .*RGCNConv"):
        gnnaccel.explain_program(torch.nn.Linear(2, 2), torch.randn(1, 2))


def test_nothing_is_enabled_nor_computed():
    layer, x, edge_index, edge_type = relational()
    gnnaccel.reset_stats()
    x.requires_grad_()
    gnnaccel.explain_program(layer, x, edge_index, edge_type)
    assert gnnaccel.status()["enabled"] is False and gnnaccel.stats() == {}
    assert x.grad is None


def test_a_subclass_and_an_enabled_session():
    class Mine(RGCNConv):
        pass

    torch.manual_seed(0)
    layer = Mine(F, 8, R)
    with gnnaccel.enabled(passes=("compaction",)):
        found = gnnaccel.explain_program(layer, features(), square(), torch.randint(0, R, (E,)))
    assert found.layer == "Mine" and [o.name for o in found.optimised.orderings] == ["as stated"]
