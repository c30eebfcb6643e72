"""Graphs of DGL, cut into parts; and DGL's METIS."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from gnnaccel.dispatch.distributed import cutting
from gnnaccel.errors import PartitionError
from tests.distributed import graphs
from tests.distributed.test_partition import edges_of, parts_of

dgl = pytest.importorskip("dgl")


def homogeneous(dtype=torch.int64):
    data = graphs.homogeneous()
    graph = dgl.graph((data.edge_index[0].to(dtype), data.edge_index[1].to(dtype)),
                      num_nodes=data.num_nodes)
    graph.ndata.update(x=data.x, label=data.y, train_mask=data.train_mask)
    graph.edata["weight"] = data.edge_weight
    return graph


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_every_node_and_edge_is_in_one_part(tmp_path, dtype):
    graph = homogeneous(dtype)
    graph.ndata["_ID"] = torch.arange(graph.num_nodes())  # DGL's own, of a graph cut out of another
    found, seen = {}, 0
    for part in parts_of(distributed.partition(graph, 3, out=tmp_path / "out"), 3):
        found.update(edges_of(part))
        seen += len(part.own)
        for name in ("x", "label", "train_mask"):
            assert torch.equal(part.data[name], graph.ndata[name][part.own])
        assert torch.equal(part.data.weight, graph.edata["weight"][part.edge_ids["node", "to",
                                                                                 "node"]])
        assert "_ID" not in part.data
    assert seen == graph.num_nodes()
    assert found == dict(enumerate(torch.stack(graph.edges(order="eid")).T.tolist()))


def test_the_parts_are_those_of_the_same_graph_in_pyg(tmp_path):
    right = graphs.cut(graphs.homogeneous(), 2, tmp_path / "pyg")["random"]
    graph = homogeneous()
    way = graphs.assignments(graphs.homogeneous(), 2)["random"]
    mine = distributed.partition(graph, 2, way, out=tmp_path / "dgl")
    for a, b in zip(parts_of(mine, 2), parts_of(right, 2)):
        assert torch.equal(a.data.edge_index, b.data.edge_index)
        assert torch.equal(a.rows["node"].send_rows, b.rows["node"].send_rows)


def test_types_are_cut_each(tmp_path):
    data = graphs.heterogeneous()
    graph = dgl.heterograph({relation: tuple(data[relation].edge_index)
                             for relation in data.edge_types},
                            {kind: data[kind].num_nodes for kind in data.node_types})
    graph.nodes["paper"].data["x"] = data["paper"].x
    graph.edges["writes"].data["w"] = torch.arange(30.0)
    parts = parts_of(distributed.partition(graph, 2, out=tmp_path / "out"), 2)
    for part in parts:
        assert torch.equal(part.data["paper"].x, data["paper"].x[part.rows["paper"].own])
        relation = "author", "writes", "paper"
        assert torch.equal(part.data[relation].w, part.edge_ids[relation].float())
    for relation in data.edge_types:
        found = {}
        for part in parts:
            found.update(edges_of(part, relation))
        assert found == dict(enumerate(data[relation].edge_index.T.tolist()))


def test_what_cannot_be_cut(tmp_path):
    graph = homogeneous()
    block = dgl.to_block(graph, torch.arange(5))
    with pytest.raises(PartitionError, match="this is a block"):
        distributed.partition(block, 2, out=tmp_path / "out")
    graph.edata["x"] = torch.zeros(graph.num_edges())
    with pytest.raises(PartitionError, match="x: a part has one place for names"):
        distributed.partition(graph, 2, out=tmp_path / "out")
    with pytest.raises(PartitionError, match="a DGLGraph, not a list"):
        distributed.partition([1], 2, out=tmp_path / "out")


@pytest.mark.skipif(not hasattr(dgl, "metis_partition_assignment"),
                    reason="this DGL has no METIS")
@pytest.mark.parametrize("host", ["dgl", "pyg"])
def test_metis_by_dgl_cuts_few_edges(tmp_path, monkeypatch, host, capsys):
    from torch_geometric import typing
    from torch_geometric.data import Data

    find = cutting.importlib.util.find_spec
    monkeypatch.setattr(cutting.importlib.util, "find_spec",
                        lambda name: None if name in ("pymetis", "torch_sparse") else find(name))
    monkeypatch.setattr(typing, "WITH_METIS", False, raising=False)
    g = graphs.generator(0)
    inside = torch.randint(0, 30, (2, 400), generator=g)
    edges = torch.randperm(60, generator=g)[torch.cat([inside, inside + 30,
                                                       torch.tensor([[3], [40]])], 1)]
    data = (dgl.graph(tuple(edges), num_nodes=60) if host == "dgl"
            else Data(edge_index=edges, num_nodes=60))
    folder = distributed.partition(data, 2, "metis", out=tmp_path / "out")
    assert sum(len(part.rows["node"].halo) for part in parts_of(folder, 2)) <= 2
    assert not capsys.readouterr().out
