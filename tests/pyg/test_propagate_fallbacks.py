"""Calls of propagate that stay native, and why."""
from __future__ import annotations

import copy
import types

import pytest
import torch
from torch_geometric import utils
from torch_geometric.nn import GATConv, GCNConv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.judge import close
from tests.pyg.own_layers import Copying, Weighing, hooked


class Asymmetric(Weighing):
    def message(self, x_i, x_j, edge_weight):
        return (x_j - x_i).abs() * edge_weight.view(-1, 1)


class Difference(Weighing):
    def message(self, x_i, x_j, edge_weight):
        return (x_j - x_i) * edge_weight.view(-1, 1)


class Summing(Weighing):
    def aggregate(self, inputs, index, dim_size):
        return super().aggregate(inputs, index, dim_size=dim_size) * index.numel()


class ByEdge(Copying):
    def update(self, aggregated, x_i):
        return aggregated


class Gathering:
    """Gathers twice of what there is."""

    def _index_select(self, src, index):
        return 2 * src.index_select(self.node_dim, index)


class GatheringWeighing(Gathering, Weighing):
    pass


class GatheringGAT(Gathering, GATConv):
    def forward(self, x, edge_index, w):
        return super().forward(x, edge_index)


def gathering(layer):
    layer._index_select = types.MethodType(Gathering._index_select, layer)
    return layer


def replaced(layer):
    layer.message = lambda x_j, edge_weight: 3 * x_j
    return layer


def explained(layer):
    layer.explain = True
    layer._edge_mask, layer._apply_sigmoid = torch.linspace(0, 1, E), False
    return layer


def decomposed(layer):
    layer.decomposed_layers = 2
    return layer


def with_module_hook(layer):
    layer.aggr_module.register_forward_hook(lambda module, args, out: out + 1)
    return layer


NATIVE = {"message": (Asymmetric, "GA211"), "difference": (Difference, "GA211"),
          "aggregate": (Summing, "GA211"), "update": (ByEdge, "GA211"),
          "hook": (lambda: hooked(Weighing()), "GA501"),
          "replaced": (lambda: replaced(Weighing()), "GA205"),
          "gathers": (GatheringWeighing, "GA205"),
          "gathers by itself": (lambda: gathering(Weighing()), "GA205"),
          "a layer of PyG's": (lambda: GatheringGAT(F, 4), "GA205"),
          "aggregation": (lambda: Weighing(aggr="mul"), "GA201"),
          "several": (lambda: Weighing(aggr=["std", "mul"]), "GA201"),
          "aggregation hook": (lambda: with_module_hook(Weighing()), "GA501")}


@pytest.mark.parametrize("name", NATIVE)
def test_native(name):
    make, code = NATIVE[name]
    layer, w = make(), torch.randn(E)
    x, ei = graphs.features(), graphs.square()
    args = (x, ei) if isinstance(layer, Copying) else (x, ei, w)
    expected = layer(*args)
    with gnnaccel.enabled(when="supported", records=1):
        assert torch.equal(layer(*args), expected)
    (record,) = gnnaccel.records()
    assert (record["route"], record["rejected"][0]["code"],
            record["layer"]) == ("native", code, type(layer).__name__)
    with gnnaccel.enabled(when="supported",
                          on_fallback="raise"), pytest.raises(gnnaccel.errors.FallbackError,
                                                              match=code):
        layer(*args)


@pytest.mark.long
@pytest.mark.parametrize("change", [explained, decomposed])
def test_what_goes_round_the_classs_own_propagate(change):
    """Explainers and decomposition put the general propagate on the object."""
    layer, args = Weighing(), (graphs.features(), graphs.square(), torch.randn(E))
    with gnnaccel.enabled(when="supported"):
        taken = layer(*args)
        changed = change(copy.deepcopy(layer))(*args)
    assert close(changed, change(copy.deepcopy(layer))(*args))
    assert close(taken, changed) is (change is decomposed)


def test_sparse_adjacency():
    ei = graphs.square()
    adj = torch.sparse_coo_tensor(ei.flip(0), torch.rand(E), (N, N)).coalesce()
    layer, x = Weighing(), graphs.features()
    expected = layer(x, adj)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(x, adj), expected)
    assert gnnaccel.stats()["Weighing"]["reasons"] == {"GA204": 1}


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema_on_a_cpu_are_no_fallback(aggr):
    """The host's own code is as good there."""
    ei = torch.randint(0, 2000, (2, 25000))
    layer, x = Copying(aggr=aggr), torch.randn(2000, 8)
    expected = layer(x, ei)
    with gnnaccel.enabled(on_fallback="raise", records=1):
        assert torch.equal(layer(x, ei), expected)
    assert [r["code"] for r in gnnaccel.records()[0]["rejected"]] == ["GA401", "GA301"]


@pytest.mark.long
def test_no_edges():
    layer, x, ei = Copying(), graphs.features(), torch.empty(2, 0, dtype=torch.int64)
    with gnnaccel.enabled(when="supported", on_fallback="raise"):
        assert not layer(x, ei).any()
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA303": 1}


def test_edges_that_were_cached_inside_a_transform(route):
    """A tensor of a transform that has ended has no memory that a structure could be known by."""
    layer = GCNConv(F, 8, cached=True).to(route.device)
    x, edge_index = graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        torch.func.grad(lambda x: layer(x, edge_index).sum())(x)
        got = [layer(x, edge_index) for _ in range(2)]
    expected = layer(x, edge_index)
    assert all(close(one, expected) for one in got)


def test_a_softmax_on_the_meta_device(route):
    """Of which torch does not say whether autocast is on."""
    rows, index = torch.empty(5, 2, device="meta"), torch.empty(5, dtype=torch.long, device="meta")
    with route.on(on_fallback="native"):
        assert utils.softmax(rows, index, num_nodes=3).shape == (5, 2)
