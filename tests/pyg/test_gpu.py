"""What only a GPU can show: waiting, streams, CUDA graphs, memory, sizes, devices."""
from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch_geometric

import gnnaccel
from gnnaccel.dispatch.graph import cache
from gnnaccel.errors import GraphError
from tests.pyg import graphs
from tests.pyg.graphs import F, N
from tests.pyg.judge import close, judge, run, took
from tests.pyg.layers import NAMES, WITH_DROPOUT, build

pytestmark = pytest.mark.gpu


@pytest.fixture
def inputs(gpu):
    return graphs.features().to(gpu.device), graphs.square().to(gpu.device)


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_graph(nodes: int, edges: int) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges), device="cuda")


# ---- waiting ----

def test_the_watch_sees_a_wait(gpu):
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "SuperGATConv"])
def test_no_waiting_over_one_graph(gpu, inputs, name, dropout):
    layer = build(name, device=gpu.device,
                  **(dict(dropout=dropout) if name in WITH_DROPOUT else {}))
    x, ei = inputs
    x.requires_grad_()
    with gpu.on():
        for _ in range(3):
            layer(x, ei).sum().backward()
        with no_waiting():
            for _ in range(3):
                layer(x, ei).sum().backward()
    took(gpu, 6)


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_no_waiting_over_fresh_graphs(gpu, name, loops):
    layer = build(name, add_self_loops=loops, device=gpu.device)
    batches = [(torch.randn(n, F, device="cuda"), random_graph(n, 6 * n)) for n in range(500, 520)]
    with gpu.on():
        for x, ei in batches[:8]:
            layer(x, ei).sum().backward()
        torch.cuda.synchronize()
        with no_waiting():
            for x, ei in batches[8:]:
                layer(x, ei).sum().backward()
    took(gpu, 20)


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_no_waiting_over_fresh_lists_of_edges(gpu, name):
    layer = getattr(torch_geometric.nn, name)(64, 8).to(gpu.device)
    batches = [(torch.randn(n, 64, device="cuda", requires_grad=True), random_graph(n, 120_000))
               for n in range(5000, 5020)]
    with gpu.on(when="profitable", on_fallback="native"):
        for x, ei in batches[:8]:
            layer(x, ei).sum().backward()
        with no_waiting():
            for x, ei in batches[8:]:
                layer(x, ei).sum().backward()
        assert gnnaccel.cache.info()["entries"] == 0
    took(gpu, 20)


# ---- autocast ----

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_autocast(gpu, inputs, name, dtype):
    layer, (x, ei) = build(name, device=gpu.device).eval(), inputs
    x.requires_grad_()

    def found(autocast: bool = True):
        with torch.autocast("cuda", dtype, enabled=autocast):
            out = layer(x, ei)
        return [out.detach(),
                *torch.autograd.grad(out.float().pow(2).sum(), [x, *layer.parameters()],
                                     allow_unused=True)]

    exact, native = found(False), found()
    with gpu.on():
        got = found()
    largest = max(g.norm() for g in exact[1:] if g is not None)
    for mine, theirs, truth in zip(got, native, exact):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            allowed = 2 * (theirs
                           - truth).norm() + torch.finfo(dtype).eps * truth.norm() + 1e-3 * largest
            assert (mine - truth).norm() <= allowed


# ---- CUDA graphs and streams ----

@pytest.mark.parametrize("name", list(NAMES))
def test_captured_forward(gpu, inputs, name):
    layer, (x, ei) = build(name, device=gpu.device).eval(), inputs
    side = torch.cuda.Stream()
    with gpu.on(), torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(x, ei)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, ei)
        for scale in (1.0, -2.0, 0.3):
            x.copy_(graphs.features().cuda() * scale)
            graph.replay()
            with gnnaccel.disabled():
                assert close(out, layer(x, ei))


def test_captured_training_step(gpu, inputs):
    layer, (x, ei) = build("GATConv", device=gpu.device), inputs
    with gpu.on():
        step = torch.cuda.make_graphed_callables(layer, (x.clone().requires_grad_(), ei),
                                                 allow_unused_input=True)
        fresh = torch.randn_like(x).requires_grad_()
        got, = torch.autograd.grad(step(fresh, ei).pow(2).sum(), fresh)
    expected, = torch.autograd.grad(build_like(layer)(fresh, ei).pow(2).sum(), fresh)
    assert close(got, expected)


def build_like(layer):
    """The same layer, natively and without whatever was put on the object."""
    twin = build(type(layer).__name__, device="cuda")
    twin.load_state_dict(layer.state_dict())
    return twin


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_another_stream_uses_the_graph(gpu, name):
    layer = build(name, device=gpu.device)
    x, ei = torch.randn(20_000, F, device="cuda",
                        requires_grad=True), random_graph(20_000, 1_000_000)
    expected, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(5):
        cache.clear()
        found = []
        with gpu.on():
            for stream in streams:  # the first builds, the others must wait for it
                with torch.cuda.stream(stream):
                    found.append(torch.autograd.grad(layer(x, ei).pow(2).sum(), x)[0])
        torch.cuda.synchronize()
        assert all(close(grad, expected, 1e-4) for grad in found)


# ---- memory ----

@pytest.mark.parametrize("name,budget",
                         [("GATConv", 1.0), ("GATv2Conv", 1.0), ("TransformerConv", 1.0),
                          ("AGNNConv", 1.0)])
def test_nothing_of_the_size_of_the_edges(gpu, name, budget):
    """Forward and backward, once the structure is there, take less than 4 bytes for each edge."""
    nodes, edges = 10_000, 4_000_000
    layer = build(name, device=gpu.device)
    x, ei = torch.randn(nodes, F, device="cuda", requires_grad=True), random_graph(nodes, edges)

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x, ei).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    with gpu.on():
        peak()
        used = peak()
    native = peak()
    assert used < budget * edges * 4 < native


# ---- sizes ----

@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_a_large_graph_by_sorting(gpu, name):
    nodes, edges = 200_000, (1 << 22) + 1000
    x = torch.randn(nodes, F, device="cuda", requires_grad=True)
    _judge_large(gpu, build(name, heads=1, device=gpu.device), x, random_graph(nodes, edges))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_hub(gpu, name, side):
    nodes, hub = 2_000, 300_000
    ei = random_graph(nodes, hub + 10_000)
    ei[side, :hub] = 7
    layer = build(name, device=gpu.device).eval()
    _judge_large(gpu, layer, torch.randn(nodes, F, device="cuda", requires_grad=True), ei)


def _judge_large(gpu, layer, x, ei) -> None:
    exact = run(copy.deepcopy(layer).double(), [x.detach().double().requires_grad_(), ei], {})
    plain = run(layer, [x, ei], {})
    with gpu.on():
        got = run(layer, [x.detach().clone().requires_grad_(), ei], {})
    took(gpu, 1)
    wrong = judge([(got, plain, exact)], floor=2e-6)
    assert not wrong, wrong


# ---- bad ids ----

@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("bad", [-1, N])
def test_ids_out_of_range_are_reported_later(gpu, inputs, end, bad):
    layer, (x, ei) = build("GATConv", device=gpu.device), inputs
    ei[end, 4] = bad
    with gpu.on():
        with pytest.raises(GraphError, match="outside the graph"):
            for _ in range(2):  # the device may report while the first call is still on its way
                assert torch.isfinite(layer(x, ei)).all()
                torch.cuda.synchronize()
        good = graphs.square().to(gpu.device)
        layer(x, good)
        torch.cuda.synchronize()
        layer(x, good)


# ---- repeatable ----

@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_runs_repeat_bit_for_bit(gpu, name, deterministic, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    nodes = 3_000
    ei, x = random_graph(nodes, 90_000), torch.randn(nodes, F, device="cuda", requires_grad=True)
    ei[1, :20_000], ei[0, 20_000:40_000] = 3, 5
    layer = build(name, device=gpu.device).eval()
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = []
        for _ in range(4):
            cache.clear()
            with gpu.on():
                found.append(run(layer, [x, ei.clone()], {}))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(other[k], t) for k, t in found[0].items() if t is not None)


# ---- devices ----

def test_features_and_edges_on_different_devices(gpu, inputs):
    layer, (x, ei) = build("GATConv", device=gpu.device), inputs
    with pytest.raises(Exception) as native:
        layer(x, ei.cpu())
    with gpu.on(on_fallback="native"), pytest.raises(type(native.value)):
        layer(x, ei.cpu())
    assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA204": 1}
