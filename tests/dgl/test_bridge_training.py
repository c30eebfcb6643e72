"""Unmodified scripts (those of ``examples/dgl``) and steps of training on a device, simulated or
real, held against the host."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import dgl
import dgl.nn as dnn
import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from tests.dgl import bridged, simulated
from tests.dgl.bridged import gpu_place, place  # noqa: F401  (fixtures)

EXAMPLES = Path(__file__).parents[2] / "examples" / "dgl"
SMALL = {"gat": ["--nodes", "200", "--epochs", "5"], "rgcn": ["--nodes", "120", "--epochs", "5"],
         "hgt": ["--nodes", "120", "--epochs", "4"],
         "graph_classification": ["--graphs", "60", "--epochs", "3"],
         "sage_sampling": ["--nodes", "200", "--epochs", "2", "--fanout", "-1"]}


def script(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"dgl_example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def agree(got: dict, want: dict, name: str) -> None:
    """The first losses differ by rounding alone; what rounding does to later ones must not show in
    the accuracy."""
    torch.testing.assert_close(torch.tensor(got["losses"][:4]), torch.tensor(want["losses"][:4]),
                               rtol=2e-2, atol=1e-3,
                               msg=lambda m: f"{name}: losses {got['losses']} on the device, "
                               f"{want['losses']} on " f"the host: {m}")
    assert abs(got["accuracy"] - want["accuracy"]) < 0.1, f"{name}: accuracy {got['accuracy']}, on the host {want['accuracy']}"


@pytest.mark.long
@pytest.mark.parametrize("name", ["gat", "rgcn", "hgt", "graph_classification"])
def test_scripts(name, place, monkeypatch):
    main = script(name, monkeypatch)
    with gnnaccel.disabled():
        want = main(SMALL[name])
    agree(main([*SMALL[name], "--device", "cuda"]), want, name)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_sampling_script(workers, place, monkeypatch):
    main = script("sage_sampling", monkeypatch)
    arguments = [*SMALL["sage_sampling"], "--workers", str(workers)]
    want = main(arguments)
    agree(main([*arguments, "--device", "cuda"]), want, f"sage with {workers} workers")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {}, {"pin_prefetcher": True}, {"pin_prefetcher": False}, {"use_prefetch_thread": True},
    {"use_prefetch_thread": False},
    {"use_alternate_streams": True}, {"use_alternate_streams": False}, {"num_workers": 2},
    {"num_workers": 1, "pin_prefetcher": True, "use_prefetch_thread": True,
     "use_alternate_streams": True}], ids=str)
def test_ways_to_load(options, gpu_place):
    """Features, labels and sums over blocks arrive as they are on the host, however they travel."""
    g = bridged.homogeneous()
    sampler = dgl.dataloading.NeighborSampler([-1, -1], prefetch_node_feats=["x"],
                                              prefetch_edge_feats=["w"])
    summed = dgl.ops.u_mul_e_sum(g, g.ndata["x"], g.edata["w"])
    loaded = dgl.dataloading.DataLoader(g, g.nodes(), sampler, batch_size=7, device="cuda",
                                        **options)
    for nodes, seeds, (block, last) in loaded:
        assert {t.device
                for t in (nodes, seeds, block.srcdata["x"],
                          block.edata["w"])} == {gpu_place} == {block.device}
        got = dgl.ops.u_mul_e_sum(block, block.srcdata["x"], block.edata["w"])
        assert torch.allclose(got.cpu(), summed[block.dstdata[dgl.NID].cpu()], atol=1e-4)
        assert torch.equal(block.srcdata["x"].cpu(),
                           g.ndata["x"][nodes.cpu()]) and last.num_dst_nodes() == len(seeds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_scripts_switch_it_on_themselves(name, gpu_place, monkeypatch):
    gnnaccel.disable()
    main = script(name, monkeypatch)
    agree(main([*SMALL[name], "--device", "cuda", "--accelerate"]), main(SMALL[name]), name)


SAMPLERS = {
    "neighbors": lambda: dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["x"],
                                                         prefetch_edge_feats=["w"]),
    "all neighbors": lambda: dgl.dataloading.MultiLayerFullNeighborSampler(2),
    "labor": lambda: dgl.dataloading.LaborSampler([3, 3]),
    "shadow": lambda: dgl.dataloading.ShaDowKHopSampler([3, 3]),
    "edges": lambda: dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.NeighborSampler([3]),
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(2)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_loaders_from_the_host(name, workers, place):
    g = bridged.homogeneous()
    seeds = torch.arange(g.num_edges() if name == "edges" else g.num_nodes())
    loader = dgl.dataloading.DataLoader(g, seeds, SAMPLERS[name](), device=place, batch_size=16,
                                        num_workers=workers)
    seen = 0
    for batch in loader:
        seen += 1
        _all_on(place, batch)
        if isinstance(batch[-1], list):
            block = batch[-1][-1]
            x = torch.randn(block.num_src_nodes(), 4).to(place)
            assert dnn.SAGEConv(4, 2, "mean").to(place)(block, x).device == place
            assert torch.equal(block.in_degrees().cpu(), block.cpu().in_degrees())
    assert seen == -(-len(seeds) // 16)
    assert g.device.type == "cpu"


def _all_on(place, value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for v in value:
            _all_on(place, v)
    elif isinstance(value, dgl.DGLGraph):
        assert value.device == place
        for frame in (*value._node_frames, *value._edge_frames):
            _all_on(place, dict(frame))
    else:
        assert value.device == place


def test_batches_of_graphs(place):
    graphs = [bridged.homogeneous() for _ in range(6)]
    for g, numbers in dgl.dataloading.GraphDataLoader(list(zip(graphs, range(6))), batch_size=3):
        there = g.to(place)
        assert there.batch_size == 3 and there.batch_num_nodes().device == place
        assert [h.num_edges() for h in dgl.unbatch(there)] == [150] * 3 and numbers.shape == (3,)
    together = dgl.batch([g.to(place) for g in graphs])
    assert together.device == place and torch.equal(together.in_degrees().cpu(),
                                                    dgl.batch(graphs).in_degrees())


# --- a steady state makes no transfers ------------------------------------------------------------

class _Degrees(torch.nn.Module):
    """A layer as users write them: normalised by degrees, with a softmax over edges."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(12, 4)

    def forward(self, g, x):
        with g.local_scope():
            g.ndata["h"] = self.linear(x) * g.out_degrees().clamp(min=1).rsqrt()[:, None]
            src, dst = g.edges()
            weights = dgl.ops.edge_softmax(g, (x[src] * x[dst]).sum(1, keepdim=True))
            return dgl.ops.u_mul_e_sum(g, g.ndata["h"],
                                       weights) / g.in_degrees().clamp(min=1)[:, None]


STEPS = {
    "GAT": lambda: dnn.GATConv(12, 4, 2),
    "GAT, zero degrees allowed": lambda: dnn.GATConv(12, 4, 2, allow_zero_in_degree=True),
    "GraphConv": lambda: dnn.GraphConv(12, 4),
    "SGConv": lambda: dnn.SGConv(12, 4),
    "SAGE": lambda: dnn.SAGEConv(12, 4, "mean"),
    "GIN": lambda: dnn.GINConv(torch.nn.Linear(12, 4)),
    "own layer": _Degrees,
}


def step(name, place):
    """A training step of one layer, warmed up."""
    g = bridged.homogeneous().to(place)
    layer, x = STEPS[name]().to(place), g.ndata["x"]
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    target = torch.zeros(len(x), dtype=torch.long, device=place)

    def run():
        optimizer.zero_grad()
        F.cross_entropy(layer(g, x).reshape(len(x), -1), target).backward()
        optimizer.step()

    for _ in range(4):
        run()
    return run


# whose adapter takes no simulated features
@pytest.mark.parametrize("name", [name for name in STEPS if name != "GAT"])
def test_steps_leave_the_structure_on_the_device(name, monkeypatch):
    with simulated.device(monkeypatch) as found:
        gnnaccel.enable(backend="torch")
        run = step(name, found)
        simulated.transfers.clear()
        run()
        assert not simulated.transfers
        gnnaccel.disable()


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_steps_make_no_transfers(name, gpu_place):
    run = step(name, gpu_place)
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    found = sorted({n for n in names if "HtoD" in n or "DtoH" in n})
    assert not found, f"{name}: {found}; all: {sorted(set(names))[:60]}"
    assert any(event.device_type == torch.autograd.DeviceType.CUDA
               for event in profile.events()), "the profiler saw no kernel"
