"""Normalisation and self loops, made once per graph."""
from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
import torch_geometric.utils
from torch_geometric.data import Data
from torch_geometric.nn import (APPNP, ChebConv, ClusterGCNConv, EGConv, GCNConv, GraphConv, LEConv,
                                SimpleConv, TAGConv)
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm  # by a user, before enable()
from torch_geometric.transforms import GCNNorm

import gnnaccel
from gnnaccel.adapters.pyg.propagate import graph_norm, kept_results
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.judge import close, compare
from tests.staleness import refused


def named() -> dict[tuple[str, str], object]:
    """Every name in PyG's modules of a function that is kept, or that stands in its place."""
    wanted = ("gcn_norm", "add_self_loops", "remove_self_loops", "add_remaining_self_loops")
    return {(m, n): v for m, module in list(sys.modules.items()) if m.startswith("torch_geometric")
            and module is not None
            for n, v in list(vars(module).items()) if getattr(v, "__name__", None) in wanted}


def norm(ei, w=None, nodes=N, **options):
    return gcn_conv.gcn_norm(ei, w, nodes, **options)


@pytest.fixture
def unused():
    """How many results were kept since one was used again; put back afterwards."""
    found = kept_results.unused
    before = found[0]
    yield found
    found[0] = before


@pytest.fixture
def on():
    """Enabled."""
    with gnnaccel.enabled():
        yield


def test_every_name_is_replaced_and_restored():
    before, norm_before = named(), vars(ChebConv)["__norm__"]
    for _ in range(2):
        with gnnaccel.enabled():
            changed = {key for key, v in named().items() if v is not before[key]}
            users = {m.rpartition(".")[2] for m, n in changed if n == "gcn_norm"}
            assert users >= {"gcn_conv", "sg_conv", "tag_conv", "ssg_conv", "appnp", "lg_conv",
                             "arma_conv", "gcn2_conv", "mixhop_conv", "eg_conv", "label_prop"}
            assert {key for key in changed if key[1] != "gcn_norm"} == {
                ("torch_geometric.nn.conv.cluster_gcn_conv", "remove_self_loops"),
                ("torch_geometric.nn.conv.cluster_gcn_conv", "add_self_loops"),
                ("torch_geometric.nn.conv.eg_conv", "add_remaining_self_loops"),
                ("torch_geometric.nn.conv.simple_conv", "add_self_loops"),
                ("torch_geometric.nn.conv.gcn_conv", "add_remaining_self_loops"),
                ("torch_geometric.utils.laplacian", "remove_self_loops"),
                ("torch_geometric.utils.laplacian", "add_self_loops")}
            assert ChebConv.__norm__ is not norm_before
        assert named() == before and vars(ChebConv)["__norm__"] is norm_before


def test_the_same_tensors_each_time(on):
    ei, w = graphs.square(), torch.rand(E)
    for args in ((ei,), (ei, w)):
        norm(*args)
        first, second = norm(*args), norm(*args)
        assert (first[0] is second[0]
                and (first[1] is second[1]) is (len(args) == 1)), "nothing of weights is kept"
        assert all(map(torch.equal, first, gcn_norm(*args, num_nodes=N)))


WRITES = {"data": lambda w: w.data.mul_(torch.rand(E)),
          "numpy": lambda w: w.numpy().__imul__(torch.rand(E).numpy()),
          "in place": lambda w: w.mul_(torch.rand(E)), "set_": lambda w: w.data.set_(torch.rand(E))}


@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize("options", [dict(), dict(improved=True), dict(add_self_loops=False),
                                     dict(flow="target_to_source")])
def test_weights_written_to_unseen(on, write, options):
    ei, w = graphs.square(), torch.rand(E)
    for _ in range(4):
        got = norm(ei, w, **options)
        assert all(map(torch.equal, got, gcn_norm(ei, w, N, **options)))
        WRITES[write](w)


def test_a_constant_for_each_loop_and_the_last_of_several(on):
    """Loops that are there keep their weights; of repeated ones the last counts, as in PyG."""
    ei, w = (torch.tensor([[0, 0, 0, 1, 2], [0, 0, 1, 1, 0]]),
             torch.tensor([3.0, 5.0, 7.0, 11.0, 13.0]))
    for _ in range(3):
        edges, weights = gcn_conv.add_remaining_self_loops(ei, w, 2.0, 4)
        expected = torch_geometric.utils.add_remaining_self_loops(ei, w, 2.0, 4)
        assert torch.equal(edges, expected[0]) and torch.equal(weights, expected[1])
        assert {tuple(e): float(v) for e, v in zip(edges.t().tolist(), weights)}[3, 3] == 2.0


LAYERS_WITH_WEIGHTS = {
    "GCNConv": lambda: GCNConv(F, 4),
    "GCNConv, no loops": lambda: GCNConv(F, 4, add_self_loops=False),
    "GCNConv, as given": lambda: GCNConv(F, 4, normalize=False),
    "GraphConv": lambda: GraphConv(F, 4),
    "ChebConv": lambda: ChebConv(F, 4, 3),
    "ChebConv, rw": lambda: ChebConv(F, 4, 3, normalization="rw"),
    "TAGConv": lambda: TAGConv(F, 4), "LEConv": lambda: LEConv(F, 4),
    "APPNP": lambda: APPNP(2, 0.1),
    "SimpleConv": lambda: SimpleConv(combine_root="self_loop")}


@pytest.mark.parametrize("name", list(LAYERS_WITH_WEIGHTS))
def test_layers_whose_weights_are_written_to_unseen(route, name):
    """On every route, and on those that are counted native, nothing of the old weights is used."""
    layer = LAYERS_WITH_WEIGHTS[name]().to(route.device)
    x, ei, w = route.put(graphs.features(), graphs.square(), torch.rand(E))
    lasting = (name.startswith("ChebConv")
               and {"lambda_max": torch.tensor(2.0, device=route.device)} or {})
    with torch.no_grad():
        for options in (dict(on_fallback="native"),
                        dict(when="profitable", on_fallback="native", backend="auto")):
            with route.on(**options):
                for _ in range(5):
                    got = layer(x, ei, w, **lasting)
                    with gnnaccel.disabled():
                        assert close(got, layer(x, ei, w, **lasting))
                    w.data.mul_(torch.rand_like(w))


def test_by_every_option(on):
    ei, w = graphs.square(), torch.rand(E)
    calls = [(ei, None, {}), (ei, w, {}), (ei, w, dict(improved=True)),
             (ei, w, dict(add_self_loops=False)), (ei, w, dict(flow="target_to_source")),
             (ei, None, dict(dtype=torch.float64)), (ei.flip(0), w, {})]
    for _ in range(2):
        for edges, weights, options in calls:
            got = norm(edges, weights, **options)
            assert all(map(torch.equal, got, gcn_norm(edges, weights, N, **options)))
    assert norm(ei, w, N + 5)[0].shape[1] == norm(ei, w)[0].shape[1] + 5


def test_changes_in_place_are_noticed(on):
    ei, w = graphs.square(), torch.rand(E)
    for change in (lambda: ei.copy_(graphs.square()), lambda: w.mul_(torch.rand(E)),
                   lambda: norm(ei, w)[1].mul_(2), lambda: norm(ei, w)[0].zero_(),
                   lambda: norm(ei, w)[1].requires_grad_()):
        norm(ei, w), norm(ei, w)
        change()
        for _ in range(2):
            got = norm(ei, w)
            assert all(map(torch.equal, got, gcn_norm(ei, w, N))) and not got[1].requires_grad


def test_nothing_is_kept_longer_than_the_graph(on):
    # then the caller's tensor is among the results
    for options in ({}, dict(add_self_loops=False)):
        ei = graphs.square()
        norm(ei, **options)
        gone = weakref.ref(ei), weakref.ref(norm(ei, **options)[1])
        norm(ei, **options)
        assert cache.info()["entries"] == 1
        del ei
        gc.collect()
        assert gone[0]() is None and gone[1]() is None and cache.info()["entries"] == 0


def test_weights_that_are_learned(on):
    ei, w = graphs.square(), torch.rand(E, requires_grad=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad(norm(ei, w)[1].pow(2).sum(), w)
        (expected,) = torch.autograd.grad(gcn_norm(ei, w, N)[1].pow(2).sum(), w)
        assert torch.equal(grad, expected)
    assert cache.info()["entries"] == 0


def test_made_without_gradients_serves_training(on):
    ei, layer, x = graphs.square(), GCNConv(F, 4), graphs.features()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            norm(ei), norm(ei)
    got = norm(ei)[1]
    assert not got.is_inference() and got._version == 0
    layer(x, ei).sum().backward()
    assert layer.lin.weight.grad is not None


def test_what_is_not_kept(on):
    with torch.inference_mode():
        ei = graphs.square()
        assert norm(ei)[0] is not norm(ei)[0]
    sparse = torch.sparse_coo_tensor(graphs.square(), torch.rand(E), (N, N)).coalesce()
    norm(sparse)
    with gnnaccel.disabled():
        ei = graphs.square()
        assert norm(ei)[0] is not norm(ei)[0]
    assert cache.info()["entries"] == 0


def test_byte_limit(on):
    ei = graphs.square()
    norm(ei), norm(ei)
    held = cache.info()["bytes"]
    assert held >= 20 * E


LAYERS = {"GCNConv": lambda **o: GCNConv(F, 4, **o), "ChebConv": lambda **o: ChebConv(F, 4, 3, **o),
          "ClusterGCNConv": lambda **o: ClusterGCNConv(F, 4, **o),
          "EGConv": lambda **o: EGConv(F, 8, aggregators=["sum"], **o),
          "SimpleConv": lambda **o: SimpleConv(combine_root="self_loop", **o)}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_layers_over_changing_graphs(name):
    """Two graphs in turn, one of them changed in place."""
    layer, x, one, two = LAYERS[name](), graphs.features(), graphs.square(), graphs.square()
    for step in range(6):
        ei = (one, two)[step % 2]
        expected = layer(x, ei)
        with gnnaccel.enabled(when="supported"):
            assert close(layer(x, ei), expected)
        if step == 3:
            one[1, :5] = 4


def test_a_transform_gives_tensors_of_its_own(on):
    """They are the user's, who may write to them unseen."""
    ei = graphs.square()
    made = [GCNNorm()(Data(edge_index=ei, num_nodes=N)) for _ in range(4)]
    made[0].edge_weight.data.zero_()
    assert (torch.equal(made[3].edge_weight, gcn_norm(ei, None, N)[1])
            and len({data.edge_weight.data_ptr() for data in made}) == 4)


def test_learned_weights_through_a_layer(route):
    compare(route, GCNConv(F, 4), graphs.features(), graphs.square(), torch.rand(E),
            positions=("x", "edge_index", "weight"))


@pytest.mark.long
def test_scripted_and_compiled():
    layer, x, ei = GCNConv(F, 4), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gnnaccel.enabled(when="supported"):
        assert close(torch.jit.script(layer)(x, ei), expected)
        assert close(torch.compile(layer, backend="eager")(x, ei), expected)
    assert cache.info()["entries"] == 0


@pytest.mark.parametrize("route", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)],
                         indirect=True)
@pytest.mark.parametrize("weight", [None, torch.rand(E), torch.rand(E).requires_grad_()],
                         ids=["none", "weights", "learned"])
@pytest.mark.parametrize("options", [{}, dict(add_self_loops=False)], ids=str)
@pytest.mark.parametrize("wrong", [-1, N + 3])
def test_ids_out_of_range_raise_before_the_host_reads_them(route, options, weight, wrong,
                                                           monkeypatch, unused):
    """On a GPU the host would fail an assertion on the device, which makes the process useless."""
    unused[0] = 0  # as if no graph had come before
    layer = GCNConv(F, 4, **options).to(route.device)
    x, right = graphs.features().to(route.device), graphs.square().to(route.device)
    weights = () if weight is None else (weight.to(route.device),)
    edges = right.clone()
    edges[0, 5] = wrong
    for mode in (torch.no_grad, torch.enable_grad):
        with (monkeypatch.context() as patch, route.on(on_fallback="native"), mode(),
              pytest.raises(IndexError, match=f"{wrong}.*valid indices")):
            patch.setattr(gcn_conv, "scatter",
                          lambda *args, **kwargs: pytest.fail("read by the host"))
            layer(x, edges, *weights)
    native = layer(x, right, *weights)  # the device still works
    with route.on(on_fallback="native"):
        assert close(layer(x, right, *weights), native)


@pytest.mark.gpu
def test_graphs_that_are_new_each_time_are_not_waited_for(gpu, monkeypatch, unused):
    unused[0] = 0
    checks, aminmax = [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda *a: (checks.append(1), aminmax(*a))[1])
    layer, x = GCNConv(F, 4).to(gpu.device), graphs.features().to(gpu.device)
    with gpu.on(on_fallback="native"):
        for _ in range(20):
            layer(x, graphs.square().to(gpu.device))
        assert 0 < len(checks) <= 9
        kept = graphs.square().to(gpu.device)
        outs = [layer(x, kept) for _ in range(3)]
        assert 0 < len(checks) <= 10 and close(outs[2], outs[0])


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_matrices_have_no_ids_to_look_at(route, layout):
    """As a transform to sparse matrices makes them where torch-sparse is not installed."""
    x = graphs.features().to(route.device)
    adjacency = torch_geometric.utils.to_torch_coo_tensor(
        graphs.square(), size=(N, N)).to_sparse(layout=layout).to(route.device)
    layer = GCNConv(F, 4).to(route.device)
    native = layer(x, adjacency)
    with route.on(on_fallback="native"):
        assert close(layer(x, adjacency), native)


def test_ids_are_looked_at_once_for_each_graph(emulated, monkeypatch):
    from gnnaccel.adapters.pyg.propagate import graph_norm

    looks, native = [], graph_norm.checked
    monkeypatch.setattr(graph_norm, "checked", lambda *args: (looks.append(1), native(*args))[1])
    layer, x, ei, w = GCNConv(F, 4), graphs.features(), graphs.square(), torch.rand(E)
    with emulated.on():
        for weight in ((), (), (w,), (w,), (w,)):
            layer(x, ei, *weight)
    assert len(looks) <= 4  # on a CPU nothing is kept the first time; and once for weighted edges


def test_ids_of_graphs_that_never_come_again_are_not_asked_about(emulated, monkeypatch, unused):
    asked, layer = [], GCNConv(F, 4)
    monkeypatch.setattr(graph_norm, "_to_be_checked", lambda *args: bool(asked.append(1)))
    for tried, expected in ((0, 3), (kept_results.TRIED, 0)):
        unused[0] = tried
        del asked[:]
        with emulated.on(on_fallback="native"):
            for _ in range(3):
                layer(graphs.features(), graphs.square())
        assert len(asked) == expected


@pytest.mark.gpu
def test_results_that_nobody_asks_for_again_are_kept_no_more(on):
    """Over graphs that come once; as soon as one comes again, they are kept at once."""
    batches = [graphs.square().cuda() for _ in range(20)]
    norm(batches[0]), norm(batches[0])
    misses = []
    for batch in batches[1:]:
        norm(batch)
        misses.append(cache.info()["misses"])
    assert misses[0] < misses[4] < misses[-2] == misses[-1]
    norm(batches[-1])  # the second layer over it
    assert norm(batches[-1])[1] is norm(batches[-1])[1]
    fresh = graphs.square().cuda()
    assert norm(fresh)[1] is norm(fresh)[1]


@pytest.mark.gpu
def test_what_another_stream_computes(gpu):
    """A stream that finds what is kept waits until it is there."""
    edge_index = torch.randint(0, 1000, (2, 5000), device=gpu.device)
    torch.cuda.synchronize()

    def find() -> torch.Tensor:
        found = kept_results.find("turned", lambda edges: (edges.flip([0]),), (edge_index,), {},
                                unused=[0])
        return found[0]

    with gnnaccel.enabled():
        torch.cuda._sleep(100_000_000)  # cycles in which the stream is busy
        kept = find()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = find()
            seen = found.clone()
    torch.cuda.synchronize()
    assert found is kept and torch.equal(seen, edge_index.flip([0]))


@pytest.mark.parametrize("make", [GCNConv, TAGConv, lambda i, o: APPNP(2, 0.1)])
def test_what_is_no_list_of_edges_ends_in_the_hosts_error(emulated, on, make):
    layer, x, edge_index = make(F, F), graphs.features(), graphs.square()
    for args in ((edge_index, x), (x, 100 * edge_index.t()), (x, 100 * edge_index[:1])):
        refused(layer, args)
    compare(emulated, layer, x, edge_index, went=lambda: True)
