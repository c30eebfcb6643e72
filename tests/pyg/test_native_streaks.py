"""Native calls in a row, of which most are not looked at, and what ends such a row."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GraphConv, MessagePassing, SAGEConv, TAGConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import calls
from gnnaccel.adapters.pyg.propagate.new_graphs_native import READ_SMALL_AT
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.memory.native_cache import STREAK, UNLOOKED
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.call_counts import counted
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.graphs import F

GAIN, STRUCTURE = 1.0, 3.0
LOOKED = 9  # Python calls of a native call that is looked at, at the least


@pytest.fixture
def emulated_gpu(emulated, monkeypatch):
    """Where structures of more than 500 edges pay at once, and others after some calls."""
    def estimate(graph, given, grad):
        return Estimate(99.0 if graph.num_edges > 500 else GAIN, STRUCTURE, 1.0, 100.0)

    monkeypatch.setattr(aggregation_cost, "estimate", estimate)
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)
    with gnnaccel.enabled(backend="cuda"):
        yield


def batch(edges: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    return graphs.features(), graphs.square(edges=edges)


def in_a_row(layer, times: int = STREAK + 1) -> None:
    for _ in range(times):
        layer(*batch())
    assert routes(layer) == {"native": times}


def unlooked(layer, args) -> bool:
    return counted(lambda: layer(*args)).python < LOOKED


@pytest.mark.long
def test_most_calls_are_not_looked_at_and_all_are_counted(emulated_gpu):
    layer, times = SAGEConv(F, 5), 40
    in_a_row(layer)
    found = [unlooked(layer, batch()) for _ in range(times)]
    assert abs(sum(found) - times * UNLOOKED / (UNLOOKED + 1)) <= 1
    assert gnnaccel.stats()["SAGEConv"] == {
        "calls": STREAK + 1 + times, "routes": {"native": STREAK + 1 + times},
        "reasons": {"GA301": STREAK + 1 + times}}


def test_results_are_the_hosts(emulated_gpu):
    layer = SAGEConv(F, 5)
    for _ in range(3 * STREAK):
        args = batch()
        with gnnaccel.disabled():
            expected = layer(*args)
        assert torch.equal(layer(*args), expected)


def test_a_graph_that_comes_again_gains_in_the_end(emulated_gpu):
    layer, args = SAGEConv(F, 5), batch()
    in_a_row(layer)
    for _ in range(4 * STREAK):
        layer(*args)
    assert routes(layer)["cuda"] > 2 * STREAK


def test_batches_that_come_again_gain_in_the_end(emulated_gpu):
    """Those of a list, over which each epoch goes."""
    layer, batches = SAGEConv(F, 5), [batch() for _ in range(6)]
    in_a_row(layer)
    for _ in range(6 * STREAK):
        for args in batches:
            layer(*args)
    assert routes(layer)["cuda"] > 4 * STREAK


def matrix(edges: int = 90, nodes: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of nodes, and a graph of them as a sparse matrix."""
    ids = torch.stack([torch.arange(edges) % nodes, torch.arange(edges) // 3 % nodes])
    return graphs.features(nodes), torch.sparse_coo_tensor(
        ids, torch.ones(edges), (nodes, nodes)).coalesce().to_sparse_csr()


@pytest.mark.long
def test_matrices_in_a_row(emulated_gpu):
    layer = SAGEConv(F, 5)
    for _ in range(STREAK + 1):
        layer(*matrix())
    assert sum(unlooked(layer, matrix()) for _ in range(UNLOOKED + 1)) >= UNLOOKED - 1
    assert routes(layer) == {"native": 2 * STREAK + 1}
    args = matrix()
    for _ in range(4 * STREAK):  # one that comes again
        layer(*args)
    assert routes(layer)["cuda"] > 2 * STREAK


def test_lists_and_matrices_are_not_of_one_row(emulated_gpu):
    """On a GPU the host may have no code for one of them."""
    layer = SAGEConv(F, 5)
    in_a_row(layer)
    assert not unlooked(layer, matrix())
    assert unlooked(layer, batch())


def test_a_row_of_small_graphs(emulated_gpu, monkeypatch):
    """One call in eight notes its graph, which is found again, and none is read."""
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 1000)
    layer, noted, read = SAGEConv(F, 5), [], []
    native = calls.decide
    monkeypatch.setattr(calls, "decide", lambda *args: (read.append(1), native(*args))[1])
    batches = [batch() for _ in range(8 * STREAK)]
    for number, args in enumerate(batches):
        layer(*args)
        if number >= 2 * STREAK:
            record = ledger.ledgers.get(id(args[1]))
            noted.append(record is not None and record.sightings == 1)
    assert len(read) == 1 and sum(noted) == 6 * STREAK // (UNLOOKED + 1)
    assert routes(layer) == {"native": 8 * STREAK}
    for _ in range(6 * STREAK):
        layer(*batches[-1])
    assert routes(layer)["cuda"] > 3 * STREAK


def test_a_row_that_began_on_a_cpu(emulated_gpu, monkeypatch):
    """A model that goes to a GPU later is read there."""
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 20000)
    layer, placed = SAGEConv(F, 5), list(driver.in_place)
    driver.in_place.clear()
    try:
        for _ in range(3 * STREAK):
            layer(*batch(1200))
    finally:
        driver.in_place.extend(placed)
    for _ in range(READ_SMALL_AT * (UNLOOKED + 1)):
        layer(*batch(1200))
    assert routes(layer)["cuda"] > 0


def test_larger_graphs_are_looked_at(emulated_gpu):
    layer = SAGEConv(F, 5)
    in_a_row(layer)
    layer(*batch(900))
    assert routes(layer)["cuda"] == 1


def test_each_mode_of_gradients_has_its_own(emulated_gpu):
    layer = SAGEConv(F, 5)
    in_a_row(layer)
    with torch.no_grad():
        assert not unlooked(layer, batch())
    assert unlooked(layer, batch())


@pytest.mark.long
def test_hops_of_a_layer_are_of_one_row(emulated_gpu):
    layer = TAGConv(F, 5, K=3, normalize=False)
    for _ in range(STREAK):
        layer(*batch())
    assert min(counted(lambda: layer(*batch())).python for _ in range(UNLOOKED)) < 3 * LOOKED


def test_rules_hold_from_the_next_call_on(emulated_gpu):
    """Of a layer that was excluded, and of one that was not."""
    layer, args = SAGEConv(F, 5), batch(900)
    gnnaccel.exclude(layer)
    for _ in range(2 * STREAK):
        layer(*args)
    assert gnnaccel.stats()["SAGEConv"]["reasons"] == {"GA101": 2 * STREAK}
    assert any(unlooked(layer, args) for _ in range(2))
    gnnaccel.include(layer)
    gnnaccel.reset_stats()
    layer(*args)
    assert routes(layer) == {"cuda": 1}
    gnnaccel.exclude(SAGEConv)
    gnnaccel.exclude(layer)
    layer(*args)
    assert routes(layer) == {"cuda": 1, "native": 1}


@pytest.mark.long
def test_an_excluded_layer_is_native_over_whatever_edges(emulated_gpu):
    """Lists and matrices in turn, also those that come again: none is looked at."""
    layer, again = SAGEConv(F, 5), batch(900)
    gnnaccel.exclude(layer)
    in_a_row(layer)
    for args in [matrix(), batch(900), again, again] * STREAK:
        assert unlooked(layer, args)
    assert gnnaccel.stats()["SAGEConv"]["reasons"] == {"GA101": 5 * STREAK + 1}


def test_other_options_begin_anew(emulated_gpu):
    layer = SAGEConv(F, 5)
    in_a_row(layer)
    with gnnaccel.enabled(backend="cuda", when="supported"):
        layer(*batch())
    assert routes(layer)["cuda"] == 1


def test_calls_in_checkpoints_are_looked_at(emulated_gpu):
    """A checkpoint makes its call twice, and both have to take the same way."""
    layer = SAGEConv(F, 5)
    in_a_row(layer)
    for _ in range(STREAK):
        x, edge_index = batch()
        x.requires_grad_()
        found = torch.autograd.grad(
            checkpoint(layer, x, edge_index, use_reentrant=False).square().sum(), x)[0]
        with gnnaccel.disabled():
            expected = torch.autograd.grad(layer(x, edge_index).square().sum(), x)[0]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("edges", [torch.zeros(2, 0, dtype=torch.long), torch.tensor(3),
                                   torch.zeros(3, 4, dtype=torch.long)], ids=str)
def test_edges_of_another_form(emulated_gpu, edges):
    """What the host makes of them stays what it is."""
    layer = GraphConv(F, 5)
    in_a_row(layer)
    x = graphs.features()
    try:
        with gnnaccel.disabled():
            expected = layer(x, edges)
    except Exception as theirs:
        with pytest.raises(type(theirs)):
            layer(x, edges)
    else:
        torch.testing.assert_close(layer(x, edges), expected)


class Turns(MessagePassing):
    """Messages with a form that kernels have and without one, in turns. Of calls over new graphs
    with several aggregations nothing is kept but that they were native."""

    def __init__(self):
        super().__init__(aggr=["sum", "max"])

    def forward(self, x, edge_index):
        rows = self.propagate(edge_index, x=x, w=None)
        return rows + self.propagate(edge_index, x=x, w=x.new_ones(edge_index.shape[1], 1))

    def message(self, x_j, w):
        return x_j if w is None else (x_j * w).cumsum(0)


def test_a_row_of_calls_without_a_form_is_of_one_kind_of_arguments(emulated_gpu):
    """Others over the same new graphs, large enough to gain, run by kernels meanwhile."""
    layer, times = Turns(), 3 * STREAK
    for _ in range(times):
        args = batch(900)
        with gnnaccel.disabled():
            expected = layer(*args)
        torch.testing.assert_close(layer(*args), expected)
    assert routes(layer) == {"cuda": times, "native": times}
