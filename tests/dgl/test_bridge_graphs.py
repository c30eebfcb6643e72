"""Graphs made of graphs on a device, by a DGL without CUDA: as on the host."""
from __future__ import annotations

import copy
import pickle

import dgl
import dgl.function as fn
import dgl.geometry
import pytest
import torch

from gnnaccel.adapters.dgl import graphs as adapter
from tests.dgl import bridged
from tests.dgl.bridged import against_host, ids, place, same  # noqa: F401  (a fixture)

HOMOGENEOUS = {
    "adj_tensors coo": lambda g: g.adj_tensors("coo"),
    "adj_tensors csr": lambda g: g.adj_tensors("csr"),
    "adj_tensors csc": lambda g: g.adj_tensors("csc"),
    "adj_external": lambda g: g.adj_external(ctx=g.device).to_dense(),
    "inc": lambda g: g.inc("in", ctx=g.device).to_dense(),
    "reverse": lambda g: dgl.reverse(g, copy_ndata=True, copy_edata=True),
    "node_subgraph": lambda g: dgl.node_subgraph(g, ids(g, [3, 7, 5, 1])),
    "node_subgraph mask": lambda g: dgl.node_subgraph(g, g.nodes() % 2 == 0),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, ids(g, [0, 9, 100])),
    "edge_subgraph all nodes": lambda g: dgl.edge_subgraph(g, ids(g, [0, 9, 100]),
                                                           relabel_nodes=False),
    "in_subgraph": lambda g: dgl.in_subgraph(g, ids(g, [3, 7])),
    "out_subgraph": lambda g: dgl.out_subgraph(g, ids(g, [3, 7])),
    "khop": lambda g: dgl.khop_in_subgraph(g, 7, 1)[0].num_nodes(),
    "add_self_loop": dgl.add_self_loop,
    "remove_self_loop": dgl.remove_self_loop,
    "add_edges": lambda g: dgl.add_edges(g, ids(g, [0, 1]), ids(g, [2, 2])),
    "add_edges of lists": lambda g: dgl.add_edges(g, [0, 1], [2, 2]),
    "remove_edges": lambda g: dgl.remove_edges(g, ids(g, [0, 5])),
    "add_nodes": lambda g: dgl.add_nodes(g, 3),
    "remove_nodes": lambda g: dgl.remove_nodes(g, ids(g, [3])),
    "add_reverse_edges": dgl.add_reverse_edges,
    "long": lambda g: g.long(),
    "int": lambda g: g.int(),
    "formats": lambda g: (g.formats("csc").formats(), g.formats(["coo", "csr"])),
    "clone": lambda g: g.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "local_var": lambda g: g.local_var(),
    "batch": lambda g: dgl.batch([g, g, dgl.add_self_loop(g)]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([g, g])),
    "slice_batch": lambda g: dgl.slice_batch(dgl.batch([g, g]), 1),
    "to_block": lambda g: dgl.to_block(dgl.in_subgraph(g, ids(g, [3, 7])),
                                       ids(g, [3, 7])).num_nodes("SRC/_N"),
    "compact_graphs": lambda g: dgl.compact_graphs(dgl.in_subgraph(g, ids(g, [3, 7]))).num_edges(),
    "line_graph": lambda g: dgl.line_graph(g),
    "bfs": lambda g: [t.cpu().tolist() for t in dgl.bfs_nodes_generator(g, 7)][0],
    "to_networkx": lambda g: sorted(g.cpu().to_networkx().edges())[:9],
}
HETERO = {
    "relation": lambda g: g["r"],
    "relations of one pair": lambda g: g["a", :, "b"],
    "node_type_subgraph": lambda g: dgl.node_type_subgraph(g, ["a"]),
    "edge_type_subgraph": lambda g: dgl.edge_type_subgraph(g, ["r", "l"]),
    "node_subgraph": lambda g: dgl.node_subgraph(g, {"a": ids(g, [0, 1]), "b": ids(g, [0])}),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, {"r": ids(g, [0, 2]), "s": ids(g, [1])}),
    "to_homogeneous": lambda g: dgl.to_homogeneous(g, ndata=["x"], edata=["w"]),
    "there and back": lambda g: dgl.to_heterogeneous(dgl.to_homogeneous(g), g.ntypes,
                                                     g.etypes).canonical_etypes,
    "add_edges": lambda g: dgl.add_edges(g, ids(g, [0]), ids(g, [2]), etype="r"),
    "add_self_loop": lambda g: dgl.add_self_loop(g, etype="l"),
    "reverse": lambda g: dgl.reverse(g, copy_edata=True),
    "in_degrees": lambda g: {e: g.in_degrees(etype=e) for e in g.etypes},
    "out_degrees": lambda g: {e: g.out_degrees(etype=e) for e in g.etypes},
    "edges": lambda g: {e: g.edges(form="all", etype=e) for e in g.etypes},
    "adj_tensors": lambda g: {e: g.adj_tensors("csc", etype=e) for e in g.etypes},
    "batch": lambda g: dgl.batch([g, g]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([g, g])),
    "to_block": lambda g: dgl.to_block(g, {"a": g.nodes("a"), "b": g.nodes("b")}),
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "metapath": lambda g: dgl.metapath_reachable_graph(g, ["r", "s"]),
    "in_subgraph": lambda g: dgl.in_subgraph(g, {"a": ids(g, [1]), "b": ids(g, [2])}),
    "metagraph": lambda g: sorted(g.metagraph().edges()),
}



@pytest.mark.parametrize("name", HOMOGENEOUS)
@pytest.mark.parametrize("make", [bridged.homogeneous, bridged.int32], ids=lambda f: f.__name__)
def test_graphs_of_graphs(name, make, place):
    against_host(make, HOMOGENEOUS[name], place)


@pytest.mark.parametrize("name", HETERO)
def test_several_relations(name, place):
    against_host(bridged.hetero, HETERO[name], place)


TRANSFORMS = {
    "AddSelfLoop": lambda g: dgl.AddSelfLoop()(g),
    "AddReverse": lambda g: dgl.AddReverse(copy_edata=True)(g),
    "GCNNorm": lambda g: dgl.GCNNorm()(g.local_var()),
    "RowFeatNormalizer": lambda g: dgl.RowFeatNormalizer()(g).ndata,
    "SIGNDiffusion": lambda g: dgl.SIGNDiffusion(k=2, in_feat_name="x")(g).ndata,
    "FeatMask": lambda g: dgl.FeatMask(p=0.0, node_feat_names=["x"])(g),
    "DropEdge": lambda g: dgl.DropEdge(p=0.0)(g),
    "shortest_dist": lambda g: dgl.shortest_dist(g, root=None),
    "khop_graph": lambda g: dgl.khop_graph(g, 2).num_edges(),
    "node_homophily": lambda g: round(dgl.node_homophily(g, g.nodes() % 3), 4),
    "edge_homophily": lambda g: round(dgl.edge_homophily(g, g.nodes() % 3), 4),
    "knn_graph": lambda g: dgl.knn_graph(g.ndata["x"], 3).num_edges(),
    "segmented_knn_graph": lambda g: dgl.segmented_knn_graph(g.ndata["x"], 3,
                                                             [10, 20]).in_degrees(),
    "farthest points": lambda g: dgl.geometry.farthest_point_sampler(g.ndata["x"][None], 4,
                                                                     start_idx=0),
    "sort_csr_by_tag": lambda g: dgl.sort_csr_by_tag(g.local_var(), g.nodes() % 2).ndata,
    "topological": lambda g: [t.cpu().tolist()
                              for t in dgl.topological_nodes_generator(_chain(g.device))],
    "prop_nodes": lambda g: _propagated(g),
}


def _chain(device):
    return dgl.graph(([0, 1], [1, 2]), device=device)


def _propagated(g):
    g = g.local_var()
    dgl.prop_nodes_bfs(g, 7, fn.copy_u("x", "m"), fn.sum("m", "x"))
    return g.ndata["x"]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, place):
    against_host(bridged.homogeneous, TRANSFORMS[name], place)


def test_matching(place):
    g = bridged.homogeneous().to(place)
    found = dgl.geometry.neighbor_matching(g, g.edata["w"].flatten(), relabel_idx=False)
    assert found.device == place and found.min() >= 0 and found.max() < g.num_nodes()


def test_files_hold_graphs_of_the_host(place, tmp_path):
    g = bridged.hetero()
    dgl.save_graphs(str(tmp_path / "g.bin"), [g.to(place)], {"y": torch.arange(3).to(place)})
    (found,), labels = dgl.load_graphs(str(tmp_path / "g.bin"))
    assert found.device.type == "cpu" and labels[
        "y"].device.type == "cpu" and found.canonical_etypes == g.canonical_etypes
    same(found.to(place), g, place)


def test_bits_of_a_graph_keep_its_device(place):
    g = bridged.homogeneous().to(place)
    assert g.int().long().device == place and g.int().in_degrees().dtype == torch.int32


def test_relations_of_one_graph_share_their_structure(place):
    g = bridged.hetero().to(place)
    assert g["r"].device == place and g["r"]._graph is g["r"]._graph
    assert adapter.homogeneous(g["r"]).edge_index.data_ptr() == adapter.relation(g, "r").edge_index.data_ptr()
