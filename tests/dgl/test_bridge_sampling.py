"""Sampling where DGL would do it on the GPU: ``use_uva=True``, and graphs that are there. The host
samples, batches come to the device, and one warning says so."""
from __future__ import annotations

import warnings

import dgl
import dgl.nn as dnn
import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.bridge import limits
from gnnaccel.errors import HostLimitError
from tests.dgl import bridged, simulated
from tests.dgl.bridged import ids, place  # noqa: F401  (a fixture)

MODES = ["mixed", "puregpu"]


@pytest.fixture(autouse=True)
def told():
    """What was told before is forgotten."""
    limits._told.clear()


def whole(mode: str, place, make=bridged.homogeneous):
    """A graph where the mode has it, and what the loader needs for it."""
    g = make()
    return (g, {"use_uva": True}) if mode == "mixed" else (g.to(place), {})


def loader(g, seeds, sampler, place, **options):
    return dgl.dataloading.DataLoader(g, seeds, sampler, device=place, **options)


def neighbours(**options):
    return dgl.dataloading.NeighborSampler([3, 3], **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefetch", [True, False])
def test_batches_of_neighbours(mode, prefetch, place):
    g, options = whole(mode, place)
    names = {"prefetch_node_feats": ["x"], "prefetch_edge_feats": ["w"]} if prefetch else {}
    seeds = torch.arange(g.num_nodes(), device=place)
    seen = []
    for nodes, out, blocks in loader(g, seeds, neighbours(**names), place, batch_size=16,
                                     shuffle=True, **options):
        first = blocks[0]
        bridged.same(first.srcdata["x"], g.ndata["x"].cpu()[nodes.cpu()], place)
        bridged.same(first.edata["w"], g.edata["w"].cpu()[first.edata[dgl.EID].cpu()], place)
        _edges_of(g, first)
        assert int(first.in_degrees().max()) <= 3 and nodes.device == out.device == place
        seen += out.tolist()
    assert sorted(seen) == list(range(g.num_nodes()))


def _edges_of(g, block):
    """The edges of the block are edges of the graph."""
    u, v = block.edges()
    src, dst = g.cpu().find_edges(block.edata[dgl.EID].cpu())
    assert torch.equal(block.srcdata[dgl.NID][u].cpu(), src)
    assert torch.equal(block.dstdata[dgl.NID][v].cpu(), dst)


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_a_heterograph(mode, place):
    g, options = whole(mode, place, bridged.hetero)
    seeds = {"a": ids(g, [0, 1, 2]).to(place), "b": ids(g, [0, 2]).to(place)}
    sampler = neighbours(prefetch_node_feats={"a": ["x"]})
    for nodes, _, blocks in loader(g, seeds, sampler, place, batch_size=2, **options):
        bridged.same(blocks[0].srcnodes["a"].data["x"], g.nodes["a"].data["x"].cpu()[nodes["a"].cpu()],
                     place)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("negative", ["dgl", "own"])
def test_batches_of_edges(mode, negative, place):
    """Link prediction, with tensors of the sampler on the device, as scripts put them there."""
    g, options = whole(mode, place)
    weights = torch.ones(g.num_nodes(), device=place)

    def own(graph, eids):
        src, _ = graph.find_edges(eids)
        return src, weights.multinomial(len(src), replacement=True).to(src.dtype)

    reverse = torch.arange(g.num_edges(), device=place).flip(0)
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        neighbours(prefetch_node_feats=["x"]), exclude="reverse_id", reverse_eids=reverse,
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(1) if negative == "dgl" else own)
    seeds = torch.arange(g.num_edges(), device=place)
    for nodes, pairs, negatives, blocks in loader(g, seeds, sampler, place, batch_size=32,
                                                  **options):
        for graph in (pairs, negatives, *blocks):
            assert graph.device == place
        bridged.same(blocks[0].srcdata["x"], g.ndata["x"].cpu()[nodes.cpu()], place)
        excluded = torch.cat([pairs.edata[dgl.EID].cpu(), reverse.cpu()[pairs.edata[dgl.EID].cpu()]])
        assert not torch.isin(blocks[-1].edata[dgl.EID].cpu(), excluded).any()
        assert len(negatives.edges()[0]) == len(pairs.edges()[0])
    assert sampler.reverse_eids.device == place and sampler.negative_sampler is not None


def test_clusters(place, tmp_path):
    """As Cluster-GCN's example calls it: numbers of clusters on the GPU, the graph on the host."""
    g = dgl.graph((torch.arange(60), (torch.arange(60) + 1) % 60))
    g.ndata.update(x=torch.randn(60, 4), mask=torch.arange(60) % 2 == 0)
    sampler = dgl.dataloading.ClusterGCNSampler(g, 6, str(tmp_path / "parts.pkl"),
                                                prefetch_ndata=["x", "mask"])
    found = []
    for part in loader(g, torch.arange(6).to(place), sampler, place, batch_size=2, shuffle=True,
                       use_uva=True):
        nodes = part.ndata[dgl.NID].cpu()
        bridged.same(part.ndata["x"], g.ndata["x"][nodes], place)
        bridged.same(part.ndata["mask"], g.ndata["mask"][nodes], place)
        bridged.same(part.edges(), g.subgraph(nodes).edges(), place)
        found += nodes.tolist()
    assert sorted(found) == list(range(60))


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_edges(mode, place):
    g, options = whole(mode, place)
    g.edata["p"] = (torch.arange(g.num_edges(), device=g.device) % 2).float()
    seeds = torch.arange(g.num_nodes(), device=place)
    for _, _, blocks in loader(g, seeds, neighbours(prob="p"), place, batch_size=50, **options):
        assert blocks[0].device == place and (blocks[0].edata[dgl.EID].cpu() % 2 == 1).all()


class _Own(dgl.dataloading.Sampler):
    """A sampler as users write them, with a tensor where the batch will be."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def sample(self, g, indices):
        found = g.in_subgraph(indices)
        found.ndata["t"] = self.table
        return found


@pytest.mark.parametrize("mode", MODES)
def test_samplers_of_users(mode, place):
    g, options = whole(mode, place)
    table = torch.arange(g.num_nodes(), device=place if mode == "puregpu" else "cpu")
    seeds = torch.arange(g.num_nodes(), device=place)
    for found in loader(g, seeds, _Own(table), place, batch_size=50, **options):
        bridged.same(found.ndata["t"], table.cpu(), place)


# --- copied ahead ---------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", [*MODES, "host"])
def test_nothing_is_left_to_copy(mode, place, monkeypatch):
    """Edges, degrees and ids of a batch are on the device when the batch is handed out."""
    g, options = whole("mixed" if mode == "host" else mode, place)
    if mode == "host":
        options = {}
    seeds = torch.arange(g.num_nodes(), device="cpu" if mode == "host" else place)
    batches = list(loader(g, seeds, neighbours(prefetch_node_feats=["x"]), place, batch_size=32,
                          **options))
    simulated.transfers.clear()
    for _, _, blocks in batches:
        for block in blocks:
            block.edges()
            block.in_degrees()
            assert block.srcdata[dgl.NID].device == block.edata[dgl.EID].device == place
        blocks[0].srcdata["x"] + 1
    assert not simulated.transfers


def test_copies_go_by_a_stream_of_their_own(monkeypatch):
    with simulated.device(monkeypatch) as device:
        gnnaccel.enable(backend="torch")
        streams = []
        native = graphs.of_index
        monkeypatch.setattr(graphs, "of_index", lambda *args: (streams.append(list(simulated.on)),
                                                               native(*args))[1])
        g = bridged.homogeneous()
        found = loader(g, g.nodes().to(device), neighbours(), device, batch_size=50, use_uva=True)
        assert found.use_prefetch_thread and found.use_alternate_streams and found.pin_prefetcher
        [(_, _, blocks)] = list(found)
        assert streams and all(len(open_) == 1 for open_ in streams)
        for block in blocks:  # their memory is not used anew before the user's stream is done
            [edges] = graphs.kept_edges(block._graph)
            assert any(edges.edge_index is one for one in simulated.recorded)
        gnnaccel.disable()


def test_features_on_the_device_are_read_after_what_wrote_them(monkeypatch):
    with simulated.device(monkeypatch) as device:
        gnnaccel.enable(backend="torch")
        g = bridged.homogeneous().to(device)
        next(iter(loader(g, g.nodes(), neighbours(prefetch_node_feats=["x"]), device,
                         batch_size=50)))
        assert any(second is simulated.DEFAULT for _, second in simulated.waited)
        gnnaccel.disable()


# --- what is told ---------------------------------------------------------------------------------

@pytest.mark.parametrize("mode,text", [("mixed", "use_uva=True"), ("puregpu", "a graph on the GPU")])
def test_one_warning(mode, text, place):
    g, options = whole(mode, place)
    seeds = torch.arange(g.num_nodes(), device=place)
    with pytest.warns(RuntimeWarning, match=f"GA409 .*{text}.*built without CUDA") as caught:
        next(iter(loader(g, seeds, neighbours(), place, batch_size=16, **options)))
        next(iter(loader(g, seeds, neighbours(), place, batch_size=16, **options)))
    assert len([w for w in caught if "GA409" in str(w.message)]) == 1
    assert caught[0].filename == __file__


def test_a_graph_on_the_host_is_told_nothing(place):
    g = bridged.homogeneous()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "gnnaccel")
        next(iter(loader(g, g.nodes(), neighbours(), place, batch_size=16)))


def test_what_dgl_refuses_stays_refused(place):
    g = bridged.homogeneous()
    with pytest.raises(ValueError, match="num_workers must be 0"):
        loader(g, g.nodes(), neighbours(), place, use_uva=True, num_workers=1)
    with pytest.raises(ValueError, match="Graph must be on CPU"):
        loader(g.to(place), g.nodes().to(place), neighbours(), place, use_uva=True)


class _Ids(torch.utils.data.Dataset):
    """A data set that gives ids from the device."""

    def __init__(self, device):
        self.device = device

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.tensor([index], device=self.device)


def test_data_sets_on_the_device_cannot_be_moved(place):
    with pytest.raises(HostLimitError, match="ids on the CPU"):
        loader(bridged.homogeneous(), _Ids(place), neighbours(), place, use_uva=True)


# --- without a loader -----------------------------------------------------------------------------

SAMPLING = {
    "sample_neighbors": lambda g, s: dgl.sampling.sample_neighbors(g, s, 2),
    "method": lambda g, s: g.sample_neighbors(s, 2),
    "labor": lambda g, s: dgl.sampling.sample_labors(g, s, 2)[0],
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_a_graph_on_the_device(name, place):
    g = bridged.homogeneous().to(place)
    with pytest.warns(RuntimeWarning, match="GA409"):
        found = SAMPLING[name](g, ids(g, [1, 2]))
    assert found.device == place and found.edata[dgl.EID].device == place
    u, v = found.edges()
    assert g.has_edges_between(u, v).all() and set(v.tolist()) <= {1, 2}
    assert found.num_nodes() == g.num_nodes()


def test_walks_and_negatives_on_the_device(place):
    g = bridged.homogeneous().to(place)
    with pytest.warns(RuntimeWarning, match="GA409"):
        walks, _ = dgl.sampling.random_walk(g, ids(g, [1, 2]), length=2)
    assert walks.device == place and walks.shape == (2, 3) and walks[:, 0].tolist() == [1, 2]
    src, dst = dgl.sampling.global_uniform_negative_sampling(g, 20)
    assert src.device == place and not g.has_edges_between(src, dst).any()


# --- simple graphs --------------------------------------------------------------------------------

def parallel() -> dgl.DGLGraph:
    g = dgl.graph(([0, 0, 1, 0], [1, 1, 2, 2]))
    g.ndata["x"], g.edata["w"] = torch.randn(3, 2), torch.arange(4.0)
    return g


@pytest.mark.parametrize("make", [parallel, bridged.hetero])
@pytest.mark.parametrize("options", [{}, {"copy_ndata": False, "return_counts": None},
                                     {"copy_edata": True, "aggregator": "sum"},
                                     {"writeback_mapping": True}], ids=str)
def test_simple_graphs(make, options, place):
    torch.manual_seed(0)
    g = make()
    want = dgl.to_simple(g, **options)
    bridged.same(dgl.to_simple(g.to(place), **options), want, place)
    bridged.same(g.to(place).to_simple(**options), want, place)


# --- training -------------------------------------------------------------------------------------

def _labelled() -> dgl.DGLGraph:
    torch.manual_seed(1)
    g = bridged.homogeneous()
    g.ndata["label"] = torch.arange(g.num_nodes()) % 3
    g.ndata["feat"] = F.one_hot(g.ndata["label"], 3).float()
    return g


@pytest.mark.parametrize("mode", [*MODES, "cpu"])
def test_training_and_inference(mode, place):
    """The calls of DGL's example of GraphSAGE: training on samples, then layer by layer over all
    nodes."""
    device = torch.device("cpu") if mode == "cpu" else place
    g = _labelled()
    g = g.to(device if mode == "puregpu" else "cpu")
    layer = dnn.SAGEConv(3, 3, "mean").to(device)
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    sampler = dgl.dataloading.NeighborSampler([4], prefetch_node_feats=["feat"],
                                              prefetch_labels=["label"])
    batches = loader(g, torch.arange(g.num_nodes()).to(device), sampler, device, batch_size=16,
                     shuffle=True, use_uva=mode == "mixed")
    losses = []
    for _ in range(20):
        for _, _, (block,) in batches:
            loss = F.cross_entropy(layer(block, block.srcdata["feat"]), block.dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    found = torch.empty(g.num_nodes(), 3)
    feat = g.ndata["feat"].to(device)
    full = dgl.dataloading.MultiLayerFullNeighborSampler(1, prefetch_node_feats=["feat"])
    with torch.no_grad():
        for nodes, out, blocks in loader(g, torch.arange(g.num_nodes()).to(g.device), full, device,
                                         batch_size=16):
            found[out[0].item():out[-1].item() + 1] = layer(blocks[0], feat[nodes]).cpu()
        want = layer.cpu()(g.cpu(), feat.cpu())
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)
