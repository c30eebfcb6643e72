"""Cases of the table that the host itself refuses, or gets wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")

from tests.oracle import histories, table
from tests.oracle.graphs import Case, Draw, one_type
from tests.oracle.modes import MODES
from tests.oracle.trees import layers_in_a_row


def trial(backend, make) -> table.Trial:
    return table.Trial(make, 1, MODES["grad"], backend)


def test_what_reads_past_the_end_is_known_before_a_gpu_runs_it(backend):
    """There it would end the process."""
    from torch_geometric.nn import GraphConv

    def fine(look: int) -> Case:
        return one_type(Draw("a graph", look), GraphConv(8, 4))

    def turned(look: int) -> Case:
        case = fine(look)
        x, edge_index = case.args
        edge_index = edge_index.clone()
        edge_index[0, 0] = x.shape[0]
        return Case(case.module, (x, edge_index))

    assert not trial(backend, fine).out_of_range()
    assert trial(backend, turned).out_of_range()


def test_what_the_host_gets_wrong_with_indices_of_32_bits(backend):
    """Gradients of its maximum are not finite then, with gnnaccel and without."""
    assert table.check(31000328000725, backend, "NNConv", "grad") == ("NNConv --mode grad", None)


def test_the_floor_knows_the_layers_of_a_net():
    """Those of one relation each stand side by side."""
    from torch_geometric import nn

    net = nn.Sequential("x, e", [(nn.GCNConv(8, 8), "x, e -> x"), (nn.GCNConv(8, 4), "x, e -> x")])
    side = nn.HeteroConv({("a", "to", t): nn.SAGEConv(8, 4) for t in "ab"})
    assert [layers_in_a_row(m) for m in (nn.GCNConv(8, 4), net, side)] == [1, 2, 1]


def test_a_layer_that_keeps_a_result_has_a_copy():
    """SuperGATConv keeps its scores while it trains, and a tensor with a history has no copy."""
    import torch
    from torch_geometric.nn import SuperGATConv

    layer = SuperGATConv(4, 4).train()
    layer(torch.randn(5, 4), torch.randint(5, (2, 9)))
    assert not layer.att_x.is_leaf
    wide = histories.copied(layer).double()
    assert wide.att_l.dtype == torch.float64 and layer.att_l.dtype == torch.float32
