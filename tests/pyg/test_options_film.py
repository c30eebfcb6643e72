"""FiLMConv with its options, held against the host."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import FiLMConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.dispatch.ops import aggregation_cost
from tests.pyg.graphs import E, F, M, bipartite, features, square
from tests.pyg.judge import compare, on_routes

R = 5


def types(edges: int = E, relations: int = R, empty: int = 2) -> torch.Tensor:
    """Relations of edges, none of which is ``empty``."""
    found = torch.randint(0, relations - 1, (edges,))
    return found + (found >= empty)


@on_routes("options", [{}, {"aggr": "add"}, {"act": None}], [{"act": torch.nn.ReLU()}])
def test_options(route, options):
    torch.manual_seed(0)
    compare(route, FiLMConv(F, 8, R, **options), features(), square(), types())


@pytest.mark.long
@on_routes("width", [1, 7], [64])
def test_widths(route, width):
    torch.manual_seed(1)
    compare(route, FiLMConv(3, width, R), features(width=3), square(), types())


@on_routes("options", [{}], [{"aggr": "add"}])
def test_bipartite(route, options):
    torch.manual_seed(2)
    x = (features(), features(M, 5))
    compare(route, FiLMConv((F, 5), 8, R, **options), x, bipartite(), types())


def test_permuted_edges_and_unknown_types_change_nothing(route):
    torch.manual_seed(3)
    layer, x, edge_index, edge_type = FiLMConv(F, 8,
                                               R).to(route.device), features(), square(), types()
    order = torch.randperm(E)
    wild = torch.cat([edge_type, torch.tensor([R, R + 3])])  # the host's loop never meets them
    more = torch.cat([edge_index, torch.tensor([[1, 2], [3, 4]])], 1)
    x = x.to(route.device)
    with route.on():
        outs = [layer(x, ei.to(route.device), et.to(route.device)) for ei, et in
                ((edge_index, edge_type), (edge_index[:, order], edge_type[order]), (more, wild))]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs[0], layer(x, more.to(route.device), wild.to(route.device)),
                               rtol=1e-5, atol=1e-5)


def test_what_overflows_to_minus_infinity_is_cut_off(route):
    torch.manual_seed(5)
    layer, x, edge_index, edge_type = FiLMConv(F, 8,
                                               R).to(route.device), 1e25 * features().to(
                                                   route.device), square(), types()
    edge_index, edge_type = edge_index.to(route.device), edge_type.to(route.device)
    expected = layer(x, edge_index, edge_type)
    with route.on():
        got = layer(x, edge_index, edge_type)
    assert expected.isinf().any() and not expected.isnan().any()
    assert torch.equal(got.isinf(), expected.isinf()) and not got.isnan().any()


def test_derivatives():
    torch.manual_seed(4)
    layer = FiLMConv(3, 2, 3, act=None).double()  # a kink would spoil finite differences
    x = torch.randn(6, 3).double().requires_grad_()
    edge_index, edge_type = torch.randint(0, 6, (2, 15)), torch.randint(0, 3, (15,))
    with gnnaccel.enabled(when="supported", on_fallback="raise"):
        assert torch.autograd.gradcheck(lambda x: layer(x, edge_index, edge_type), (x,))
        assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index, edge_type), (x,))


@pytest.mark.parametrize("options, code",
                         [({"act": torch.nn.Tanh()}, "GA208"),
                          ({"aggr": "max"}, "GA201"),
                          ({"nn": torch.nn.Sequential(torch.nn.Linear(F, 16))}, "GA208")])
def test_what_runs_natively(options, code):
    layer = FiLMConv(**{"in_channels": F, "out_channels": 8, "num_relations": R, **options})
    x, edge_index, edge_type = features(), square(), types()
    with gnnaccel.enabled(when="supported", records=1):
        got = layer(x, edge_index, edge_type)
        assert gnnaccel.records()[-1]["rejected"][0]["code"] == code
    assert torch.equal(got, layer(x, edge_index, edge_type))


# --- one relation: message passing like any other layer's -----------------------------------------

@pytest.mark.parametrize("name,shape", [("lins", (1, F)), ("films", (1,)), ("films", ()),
                                        ("films", (1, 16))], ids=str)
def test_parameters_that_are_broadcast(emulated, name, shape):
    layer, x, edges, kinds = FiLMConv(F, 8, R), features(), square(), types()
    with emulated.on():
        layer(x, edges, kinds)
    part = getattr(layer, name)[1]
    (part.weight if name == "lins" else part.bias).data = torch.randn(shape)
    expected = layer(x, edges, kinds)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        torch.testing.assert_close(layer(x, edges, kinds), expected)
    assert "GA206" in gnnaccel.stats()["FiLMConv"]["reasons"]


@pytest.mark.parametrize("part", ["lins.1.weight", "films.1.weight", "films.1.bias"])
def test_parameters_of_another_dtype_fail_as_with_the_host(emulated, part):
    layer, x, edges, kinds = FiLMConv(F, 8, R), features(), square(), types()
    with emulated.on():
        layer(x, edges, kinds)
    found = layer.get_parameter(part)
    found.data = found.data.half()
    with pytest.raises(RuntimeError):
        layer(x, edges, kinds)
    with emulated.on(on_fallback="native"), pytest.raises(RuntimeError):
        layer(x, edges, kinds)


@pytest.mark.parametrize("count", [R - 1, R + 1])
def test_another_number_of_relations(emulated, count):
    """PyG takes the maps there are."""
    layer, x, edges, kinds = FiLMConv(F, 8, R), features(), square(), types()
    layer.num_relations = count
    expected = layer(x, edges, kinds)
    with emulated.on(on_fallback="native"):
        torch.testing.assert_close(layer(x, edges, kinds), expected)


def films(width: int = F) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, 12), torch.nn.ReLU(), torch.nn.Linear(12, 16))


@pytest.mark.parametrize("options", [
    {}, {"act": None}, {"aggr": "max"}, {"nn": films()}, {"aggr": "add", "act": torch.nn.Tanh()}, {"aggr": "min", "act": None},
    {"act": torch.nn.LeakyReLU(0.3)}, {"flow": "target_to_source"},
    {"act": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())}])
def test_options_with_one_relation(kernels, options):
    torch.manual_seed(0)
    compare(kernels, FiLMConv(F, 8, **options), features(), square())


@pytest.mark.parametrize("width", [1, 7, 64, 320])
def test_widths_with_one_relation(kernels, width):
    torch.manual_seed(1)
    compare(kernels, FiLMConv(3, width), features(width=3), square())


@pytest.mark.parametrize("options", [{}, {"aggr": "max"}, {"nn": films(5)}])
def test_bipartite_with_one_relation(kernels, options):
    torch.manual_seed(2)
    compare(kernels, FiLMConv((F, 5), 8, **options), (features(), features(M, 5)), bipartite())


def test_maps_that_are_initialised_late_with_one_relation(kernels):
    torch.manual_seed(3)
    layer = FiLMConv(-1, 8)
    layer(features(), square())
    compare(kernels, layer, features(), square())
    late, x, edges = FiLMConv(-1, 8).to(kernels.device), features(), square()
    with kernels.on():
        found = late(x.to(kernels.device), edges.to(kernels.device))
    torch.testing.assert_close(found.cpu(), late.cpu()(x, edges), rtol=1e-5, atol=1e-5)


def test_edges_change_between_calls_with_one_relation(kernels):
    torch.manual_seed(4)
    layer = FiLMConv(F, 8)
    for edges in (square(), square()[:, :7], square()):
        compare(kernels, layer, features(), edges)


class Floor(torch.nn.Module):
    def forward(self, x):
        return x.floor()


@pytest.mark.parametrize("options, code", [({"act": Floor()}, "GA208"),
                                           ({"aggr": "median"}, "GA201")])
def test_what_runs_natively_with_one_relation(emulated, options, code):
    layer, x, edges = FiLMConv(F, 8, **options), features(), square()
    with emulated.on(on_fallback="native", records=1):
        got = layer(x, edges)
        assert gnnaccel.records()[-1]["rejected"][0]["code"] == code
    assert torch.equal(got, layer(x, edges))


def test_a_call_with_one_relation_counts_once(emulated):
    """The whole layer is not asked about first."""
    with emulated.on():
        FiLMConv(F, 8)(features(), square())
    assert gnnaccel.stats()["FiLMConv"]["routes"] == {"cuda": 1}


def test_relations_are_never_passed_one_by_one(emulated):
    """Where the layer with relations is native, so is each of them."""
    layer = FiLMConv(F, 8, R, aggr="max")
    with emulated.on(on_fallback="native"):
        layer(features(), square(), types())
    assert gnnaccel.stats()["FiLMConv"]["routes"] == {"native": 1}


def test_a_subclass_with_one_relation(emulated):
    class Mine(FiLMConv):
        pass

    with emulated.on():
        layer = Mine(F, 8)
        layer(features(), square())
        assert Mine._orig_propagate is not Mine.propagate
    assert gnnaccel.stats()["Mine"]["routes"] == {"cuda": 1}
    assert not getattr(Mine._orig_propagate, "routed", False)
    assert not getattr(Mine.propagate, "routed", False)


@pytest.mark.parametrize("nodes, edges, width, pays", [(5000, 60_000, 320, True),
                                                       (3000, 30_000, 64, False)])
def test_whether_a_new_graph_pays_on_a_gpu(emulated, nodes, edges, width, pays):
    """PyG's `film.py` has batches as the first, each over another graph."""
    layer, x = FiLMConv(width, width), torch.randn(nodes, width)
    beta, gamma = layer.films[0](x).split(width, -1)
    with emulated.on():
        found = reading.read(layer, torch.randint(0, nodes, (2, edges)),
                             dict(x=layer.lins[0](x), beta=beta, gamma=gamma))
    for mode in ("forward", "training"):
        estimate = aggregation_cost._on_cuda(found.graph, found.given, mode)
        assert (estimate.gain > estimate.structure) is pays
