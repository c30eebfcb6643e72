"""What a DGL without CUDA cannot do on a device: one clear error each."""
from __future__ import annotations

import subprocess
import sys
import warnings

import dgl
import pytest
import torch

import gnnaccel
from gnnaccel.errors import GnnaccelError, HostLimitError
from tests.dgl import bridged
from tests.dgl.bridged import ids, place  # noqa: F401  (a fixture)


def loader(g, nodes, **options):
    sampler = dgl.dataloading.NeighborSampler([2])
    return dgl.dataloading.DataLoader(g, nodes, sampler, batch_size=4, **options)


@pytest.mark.parametrize("make,nodes",
                         [(bridged.homogeneous, [1, 2, 5]),
                          (bridged.hetero, {"b": [0, 2], "a": [1]})], ids=["homogeneous", "hetero"])
def test_all_neighbours_are_no_sample(make, nodes, place):
    def asked(g):
        seeds = ({kind: ids(g, of_kind) for kind, of_kind in nodes.items()}
                 if type(nodes) is dict else ids(g, nodes))
        found = dgl.sampling.sample_neighbors(g, seeds, -1)
        return [found.edges[etype].data[dgl.EID].sort()[0] for etype in g.canonical_etypes]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridged.against_host(make, asked, place)


def test_loader_of_all_neighbours(place):
    g = bridged.homogeneous().to(place)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    _, seeds, blocks = next(iter(dgl.dataloading.DataLoader(g, g.nodes(), sampler, batch_size=4,
                                                            device=place)))
    assert seeds.tolist() == [0, 1, 2, 3] and blocks[1].device == place
    assert blocks[1].num_edges() == int(g.in_degrees(seeds).sum())


def test_a_layer_that_learns_from_walks(place):
    g = dgl.heterograph({("a", "r", "b"): ([0, 0, 2, 1], [1, 2, 1, 0]),
                         ("b", "s", "a"): ([1, 2, 1, 0], [0, 0, 2, 1])}).to(place)
    layer = dgl.nn.MetaPath2Vec(g, ["r", "s"], window_size=1, emb_dim=4).to(place)
    found = layer.sample(ids(g, [0, 1]))
    layer(*[t.to(place) for t in found]).backward()


@pytest.mark.parametrize("name,do", [
    ("graph", lambda g: g.pin_memory_()),
    ("index", lambda g: g._graph.pin_memory()),
    ("array", lambda g: dgl.ndarray.array([1]).pin_memory_()),
])
def test_uva(name, do, place):
    with pytest.raises(HostLimitError, match=r"UVA.*Leave the graph.*DataLoader"):
        do(bridged.homogeneous())


def test_pinning_in_place_names_the_limit(place):
    with pytest.raises(dgl.DGLError, match="UVA"):
        dgl.utils.pin_memory_inplace(torch.zeros(3))


def test_rows_of_pinned_tensors(place):
    with pytest.raises(HostLimitError, match="UVA"):
        dgl.utils.gather_pinned_tensor_rows(torch.zeros(3, 2), torch.tensor([1], device=place))


def test_gpu_cache(place):
    with pytest.raises(HostLimitError, match="GPUCache"):
        dgl.cuda.GPUCache(10, 4)


def test_option_of_the_loader(place):
    g = bridged.homogeneous()
    with pytest.raises(HostLimitError, match="GPUCache"):
        loader(g, g.nodes(), device=place, gpu_cache={"node": {"x": 4}})


@pytest.mark.parametrize("do", [
    lambda g: dgl.metis_partition(g, 2),
    lambda g: dgl.partition_graph_with_halo(g,
                                            torch.zeros(g.num_nodes(), dtype=torch.int64,
                                                        device=g.device), 1),
    lambda g: dgl.distributed.partition_graph(g, "name", 2, "folder", part_method="random"),
], ids=["metis", "halo", "distributed"])
def test_partitioning_a_graph_on_the_device(do, place):
    with pytest.raises(HostLimitError,
                       match=r"cannot partition a graph that is on the GPU.*CPU alone.*g\.cpu\(\)"):
        do(ring().to(place))


def ring() -> dgl.DGLGraph:
    """A graph without parallel edges, at which METIS crashes."""
    return dgl.graph((torch.arange(30), (torch.arange(30) + 1) % 30))


def test_partitioning_a_graph_on_the_host(place):
    parts = dgl.metis_partition(ring(), 2)
    assert all(part.to(place).device == place for part in parts.values())


def test_pinning_of_an_optimizers_state(place):
    embedding = dgl.nn.NodeEmbedding(10, 4, "pinned", init_func=lambda t: t.zero_())
    with pytest.raises(HostLimitError, match="SparseAdam.*Leave use_uva off"):
        dgl.optim.SparseAdam([embedding], lr=0.1, use_uva=True)


def test_errors_are_gnnaccels_own():
    assert issubclass(HostLimitError,
                      GnnaccelError) and issubclass(HostLimitError, NotImplementedError)


def test_without_the_bridge_errors_are_dgls():
    with pytest.raises(dgl.DGLError):
        bridged.homogeneous().pin_memory_()


def test_sparse_names_the_limit(place):
    from gnnaccel.adapters.dgl.bridge import limits

    if limits._has_sparse():
        pytest.skip("this DGL has dgl.sparse")
    with pytest.raises(ImportError,
                       match=rf"dgl_sparse library for torch {torch.__version__.split('+')[0]}, "
                       r"only for 2\."):
        import dgl.sparse  # noqa: F401
    with pytest.raises(ImportError, match=r"g\.adj_external\(\)"):
        bridged.homogeneous().to(place).adj()
    gnnaccel.disable()
    assert "dgl.sparse" not in sys.modules
    with pytest.raises(FileNotFoundError):
        bridged.homogeneous().adj()


@pytest.mark.long
def test_nothing_is_imported_for_it():
    code = ("import sys, gnnaccel\ngnnaccel.enable()\n"
            "assert not gnnaccel.status()['bridge']['active'] and 'dgl' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
