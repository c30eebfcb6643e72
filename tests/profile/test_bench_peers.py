"""The suite that runs layers beside compiled ones and other packages' kernels."""
from __future__ import annotations

import dataclasses
import json
import sys
import types

import pytest
import torch

pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main
from gnnaccel.adapters.pyg.bench import layers as attention
from gnnaccel.adapters.pyg.bench import plain
from gnnaccel.profile.bench import (compiled, peers, relation_graph, shapes, suite_peers,
                                    timing)

GRAPH = shapes.make(shapes.SHAPES["tiny"], "cpu")


@pytest.mark.parametrize("name", [n for n, peer in peers.PEERS.items() if peer.package is None])
def test_a_peer_computes_what_the_layer_does(name):
    ours = suite_peers.step_of(name, GRAPH)
    theirs = suite_peers.peer_step(peers.PEERS[name], name, GRAPH)
    for key, value in ours.results().items():
        torch.testing.assert_close(theirs.results()[key], value, rtol=1e-4, atol=1e-5)


@pytest.fixture
def turbo(monkeypatch):
    """A stand-in for the package that computes what its functions say, by dense products."""
    class Graph:
        def __init__(self, edge_index, nodes):
            self.mask = torch.zeros(nodes, nodes).index_put_(
                (edge_index[1], edge_index[0]), torch.ones(edge_index.shape[1]), accumulate=True)

        @classmethod
        def from_edge_list(cls, edge_index, num_nodes, is_directed):
            return cls(edge_index, num_nodes)

        def to(self, device):
            return self

    def softmax(scores, graph):
        weights = graph.mask * (scores - scores.max()).exp()
        return weights / weights.sum(1, keepdim=True).clamp(min=1e-30)

    def gatv2(graph, x, x_neighbors, attention_weights, negative_slope):
        pairs = torch.nn.functional.leaky_relu(x[:, None, 0] + x_neighbors[None, :, 0],
                                               negative_slope)
        return softmax(pairs @ attention_weights[0], graph) @ x_neighbors[:, 0]

    def transformer(graph, x, Q, K, V, scale):
        return softmax(scale * K[:, 0] @ Q[:, 0].T, graph) @ V[:, 0]

    def reduction(graph, X, reduce):
        rows = X[None].masked_fill(graph.mask[:, :, None] == 0, -torch.inf).amax(1)
        return rows.masked_fill(rows == -torch.inf, 0)

    module = types.SimpleNamespace(AdjacencyForwardBackwardWithNodeBuckets=Graph,
                                   gatv2_aggr=gatv2, graph_transformer_aggr=transformer,
                                   reduction_aggr=reduction, __spec__=object())
    monkeypatch.setitem(sys.modules, "turbo_gnn", module)


@pytest.mark.parametrize("name", [n for n, peer in peers.PEERS.items() if peer.package])
def test_a_package_is_called_with_the_layers_own_maps(name, turbo):
    assert peers.PEERS[name].missing is None
    ours = suite_peers.step_of(name, GRAPH)
    theirs = suite_peers.peer_step(peers.PEERS[name], name, GRAPH)
    torch.testing.assert_close(theirs.results()["output"], ours.results()["output"], rtol=1e-4,
                               atol=1e-5)


def test_every_layer_of_the_suite_is_known():
    assert set(peers.PEERS) <= set(suite_peers.LAYERS)
    for name in suite_peers.LAYERS:
        assert name in plain.LAYERS or attention.resolve(name).name == name


@pytest.mark.long
def test_relations_beside_pygs_faster_layer(tmp_path):
    out = tmp_path / "peers.json"
    assert main(["bench", "--suite", "peers", "--quick", "--device", "cpu", "--shapes",
                 "tiny-typed", "--out", str(out)]) == 0
    timed = [(r["layer"], r["impl"]) for r in json.loads(out.read_text())["records"] if r["timing"]]
    assert timed == [("RGCN 64", "native"), ("RGCN 64", "gnnaccel"), ("FastRGCN 64", "native")]


@pytest.mark.long
def test_relations_compiled():
    found = list(compiled.compiled_records(
        [(relation_graph.SHAPES["tiny-typed"], "FastRGCN 64")], "cpu",
        {"seed": 0, "order": "random", "effort": dataclasses.asdict(timing.QUICK),
         "kind": "relation"}, 120.0))
    assert [(r.kind, r.layer, r.mode, r.impl) for r in found] == [
        ("relation", "FastRGCN 64", mode, "compiled") for mode in compiled.MODES]
    assert all(r.timing or r.error for r in found) and found[-1].timing


@pytest.mark.long
def test_a_quick_run_says_what_is_not_installed(tmp_path):
    out = tmp_path / "peers.json"
    assert main(["bench", "--suite", "peers", "--quick", "--device", "cpu", "--layers",
                 "gcn64,gatv21x64", "--out", str(out)]) == 0
    records = json.loads(out.read_text())["records"]
    found = {(r["layer"], r["impl"]): r for r in records if r["impl"]}
    assert found["GCN 64", "cuSPARSE"]["timing"] and found["GCN 64", "native"]["timing"]
    assert found["GCN 64", "cuSPARSE"]["values"]["output rel_l2"] < 1e-5
    assert "turbo_gnn is not installed" in found["GATv2 1x64", "Turbo-GNN"]["error"]
