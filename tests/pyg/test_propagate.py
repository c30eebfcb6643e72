"""Layers that users wrote, with stock messages: one operation over the graph, against PyG's own propagate."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

import gnnaccel
from gnnaccel.dispatch import records, rules
from gnnaccel.dispatch.ops import aggregation_cuda
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import close, compare, native_again, on_routes, took

POSITIONS = ("x", "edge_index", "weight")


class Copying(MessagePassing):
    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)

    def message(self, x_j):
        return x_j


class Inherited(MessagePassing):
    """With the message of MessagePassing itself."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Weighing(MessagePassing):
    def forward(self, x, edge_index, weight=None, size=None):
        return self.propagate(edge_index, x=x, edge_weight=weight, size=size)

    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


class Heads(MessagePassing):
    def __init__(self, **options):
        super().__init__(**{"node_dim": 0, **options})

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, alpha=weight)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * x_j


class Gating(MessagePassing):
    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, x=x, gate=weight)

    def message(self, x_j, gate):
        return x_j * gate.sigmoid()


class Updating(MessagePassing):
    def __init__(self):
        super().__init__("mean")
        self.lin = torch.nn.Linear(F, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, own=x)

    def update(self, aggregated, own):
        return self.lin(aggregated) + own[:, :4]


@on_routes("aggr", ["sum", "add", "mean"])
def test_sums_and_means(route, aggr):
    compare(route, Weighing(aggr=aggr), graphs.features(), graphs.square(), torch.randn(E), positions=POSITIONS)
    compare(route, Copying(aggr=aggr), graphs.features(), graphs.square(), positions=POSITIONS)


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema_on_torch_operations(aggr):
    """Equal messages included: the gradient is shared."""
    from tests.routes import opened

    x = torch.randn(N, F).round()
    with opened("torch") as route:
        compare(route, Weighing(aggr=aggr), x, graphs.square(), torch.randn(E), positions=POSITIONS)
        compare(route, Copying(aggr=aggr), x, graphs.square(), positions=POSITIONS)


@pytest.mark.skipif(not aggregation_cuda.EVEN_SHARES, reason="they have no kernels")
@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema(route, aggr):
    x = torch.randn(N, F).round()
    compare(route, Weighing(aggr=aggr), x, graphs.square(), torch.randn(E), positions=POSITIONS)
    compare(route, Copying(aggr=aggr), x, graphs.square(), positions=POSITIONS)


@pytest.mark.skipif(aggregation_cuda.EVEN_SHARES, reason="they have kernels")
def test_extrema_stay_native_without_kernels(emulated):
    x, ei = graphs.features(), graphs.square()
    layer = Copying(aggr="max")
    expected = layer(x, ei)
    with emulated.on(on_fallback="native", records=1):
        assert native_again(layer(x, ei), expected)
    assert [r["code"] for r in gnnaccel.records()[0]["rejected"]] == ["GA208", "GA406"]


@on_routes("width", [1, 7, 64], [128, 200])
def test_widths(route, width):
    compare(route, Weighing(), graphs.features(N, width), graphs.square(), torch.randn(E), positions=POSITIONS)


def test_messages_of_the_base_class(route):
    compare(route, Inherited(), graphs.features(), graphs.square(), positions=POSITIONS)


def test_absent_weights(route):
    compare(route, Weighing(), graphs.features(), graphs.square(), positions=POSITIONS)


@on_routes("width", [1, 5])
def test_heads(route, width):
    compare(route, Heads(), torch.randn(N, 3, width), graphs.square(), torch.randn(E, 3), positions=POSITIONS)
    compare(route, Heads(aggr="mean"), torch.randn(N, 3, width), graphs.square(), torch.randn(E, 1), positions=POSITIONS)


def test_weights_per_channel(route):
    compare(route, Gating(), graphs.features(), graphs.square(), torch.randn(E, F), positions=POSITIONS)


def test_update(route):
    compare(route, Updating(), graphs.features(), graphs.square(), positions=POSITIONS)


# ---- graphs ----

@on_routes("pair", ["both", "source alone"])
def test_two_kinds_of_nodes(route, pair):
    x = (graphs.features(), graphs.features(M, 5) if pair == "both" else None)
    size = None if pair == "both" else (N, M)
    compare(route, Weighing(), x, graphs.bipartite(), torch.randn(E), size=size, positions=POSITIONS,
            require=False)


def test_sizes(route):
    compare(route, Copying(), graphs.features(), graphs.bipartite(), (N, M), positions=("x", "edge_index", "size"))
    compare(route, Copying(), graphs.features(), graphs.square(), (N, None), positions=("x", "edge_index", "size"))


def test_sizes_that_do_not_fit(route):
    layer = Copying()
    with route.on(on_fallback="native"), pytest.raises(ValueError, match="expected size"):
        layer(graphs.features().to(route.device), graphs.square().to(route.device), (N + 1, N))


def test_against_the_flow(route):
    compare(route, Weighing(flow="target_to_source"), graphs.features(), graphs.square(), torch.randn(E), positions=POSITIONS)
    compare(route, Copying(flow="target_to_source", aggr="mean"), graphs.features(), graphs.bipartite().flip(0), (M, N),
            positions=("x", "edge_index", "size"))


def test_edge_index_of_pygs(route):
    ei = graphs.square()
    layer, x = Weighing(), graphs.features().to(route.device)
    w = torch.randn(E).to(route.device)
    kept = EdgeIndex(ei.to(route.device), sparse_size=(N, N))
    expected = layer(x, kept, w)
    with route.on():
        assert close(layer(x, kept, w), expected)
    took(route, 1)


def test_one_graph_in_both_directions(route):
    """The structures of a graph and of its reverse are told apart."""
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    there, back = Copying(), Copying(flow="target_to_source")
    expected = there(x, ei), back(x, ei)
    for _ in range(2):
        with route.on():
            assert close(there(x, ei), expected[0]) and close(back(x, ei), expected[1])


# ---- native ----

class Asymmetric(Weighing):
    def message(self, x_i, x_j, edge_weight):
        return (x_j - x_i) * edge_weight.view(-1, 1)


class Summing(Weighing):
    def aggregate(self, inputs, index, dim_size):
        return super().aggregate(inputs, index, dim_size=dim_size) * 2


class ByEdge(Copying):
    def update(self, aggregated, x_i):
        return aggregated


def hooked(layer):
    layer.register_message_forward_hook(lambda module, args, out: out * 2)
    return layer


def replaced(layer):
    layer.message = lambda x_j, edge_weight: 3 * x_j
    return layer


def explained(layer):
    layer.explain = True
    layer._edge_mask, layer._apply_sigmoid = torch.linspace(0, 1, E), False
    return layer


def decomposed(layer):
    layer.decomposed_layers = 2
    return layer


def with_module_hook(layer):
    layer.aggr_module.register_forward_hook(lambda module, args, out: out + 1)
    return layer


NATIVE = {"message": (Asymmetric, "GA211"), "aggregate": (Summing, "GA211"), "update": (ByEdge, "GA211"),
          "hook": (lambda: hooked(Weighing()), "GA501"), "replaced": (lambda: replaced(Weighing()), "GA205"),
          "aggregation": (lambda: Weighing(aggr="std"), "GA201"), "several": (lambda: Weighing(aggr=["std", "softmax"]), "GA201"),
          "aggregation hook": (lambda: with_module_hook(Weighing()), "GA501"),
          "node_dim": (lambda: Weighing(node_dim=-1), "GA206")}


@pytest.mark.parametrize("name", NATIVE)
def test_native(name):
    make, code = NATIVE[name]
    layer, w = make(), torch.randn(E)
    x, ei = (graphs.features(F, N) if name == "node_dim" else graphs.features()), graphs.square()
    args = (x, ei) if isinstance(layer, Copying) else (x, ei, None if name == "node_dim" else w)
    expected = layer(*args)
    with gnnaccel.enabled(when="supported", records=1):
        assert torch.equal(layer(*args), expected)
    (record,) = gnnaccel.records()
    assert (record["route"], record["rejected"][0]["code"], record["layer"]) == ("native", code, type(layer).__name__)
    with gnnaccel.enabled(when="supported", on_fallback="raise"), pytest.raises(gnnaccel.errors.FallbackError, match=code):
        layer(*args)


@pytest.mark.parametrize("change", [explained, decomposed])
def test_what_goes_round_the_classs_own_propagate(change):
    """Explainers and decomposition put the general propagate on the object."""
    layer, args = Weighing(), (graphs.features(), graphs.square(), torch.randn(E))
    with gnnaccel.enabled(when="supported"):
        taken = layer(*args)
        changed = change(copy.deepcopy(layer))(*args)
    assert close(changed, change(copy.deepcopy(layer))(*args))
    assert close(taken, changed) is (change is decomposed)


def test_sparse_adjacency():
    ei = graphs.square()
    adj = torch.sparse_coo_tensor(ei.flip(0), torch.rand(E), (N, N)).coalesce()
    layer, x = Weighing(), graphs.features()
    expected = layer(x, adj)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(x, adj), expected)
    assert gnnaccel.stats()["Weighing"]["reasons"] == {"GA204": 1}


def test_no_edges():
    layer, x, ei = Copying(), graphs.features(), torch.empty(2, 0, dtype=torch.int64)
    with gnnaccel.enabled(when="supported", on_fallback="raise"):
        assert not layer(x, ei).any()
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA303": 1}


# ---- repeated calls ----

def test_repeated_calls_follow_changes(route):
    """The short way, with everything that may change between calls changed."""
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    w = torch.randn(E).to(route.device)

    def check(*args):
        expected = layer(*args)
        with route.on():
            for _ in range(2):
                assert close(layer(*args), expected)

    check(x, ei, w)
    check(x, ei)
    check(x[:, :5], ei, w)
    check(x.clone(), ei, w.clone())
    ei[0, 0], ei[1, 0] = 1, 2
    check(x, ei, w)
    check(torch.cat([x, x]), ei, w)
    layer.aggr_module = Weighing(aggr="mean").aggr_module
    check(x, ei, w)
    layer.flow = "target_to_source"
    check(x, ei, w)


def test_a_replaced_message_is_noticed(route, monkeypatch):
    layer, x, ei = Copying(), graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(2):
            layer(x, ei)
        monkeypatch.setattr(Copying, "message", lambda self, x_j: 2 * x_j)
        assert close(layer(x, ei), 2 * Inherited()(x, ei))


def test_hooks_registered_later(route):
    layer, x, ei = Copying(), graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(3):
            before = layer(x, ei)
        hooked(layer)
        assert close(layer(x, ei), 2 * before)


def test_the_structure_may_go(route):
    from gnnaccel.dispatch import cache

    layer, x, ei = Copying(), graphs.features().to(route.device), graphs.square().to(route.device)
    expected = layer(x, ei)
    with route.on():
        for _ in range(3):
            assert close(layer(x, ei), expected)
            cache.clear()


def test_graphs_are_not_kept_alive(route):
    import gc
    import weakref

    layer, x = Copying(), graphs.features().to(route.device)
    ei = graphs.square().to(route.device)
    gone = weakref.ref(ei)
    with route.on():
        for _ in range(3):
            layer(x, ei)
    del ei
    gc.collect()
    assert gone() is None


def test_records(route):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on(records=8):
        for _ in range(2):
            layer(x.clone().requires_grad_(), ei).sum().backward()
    first, backward, again, _ = gnnaccel.records()
    for record in gnnaccel.records():
        records.validate(record)
    assert (first["layer"], first["host"], first["route"], first["dtype"]) == ("Weighing", "pyg", route.backend, "float32")
    assert first["graph"] == dict(num_src=N, num_dst=N, num_edges=E)
    assert (first["cache"], again["cache"]) == ("miss", "hit")
    assert (backward["direction"], backward["forward_call"]) == ("backward", first["call"])


def test_small_calls_go_native_without_a_look():
    layer, x, ei = Weighing(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gnnaccel.enabled():
        assert torch.equal(layer(x, ei), expected)
    assert gnnaccel.stats() == {"Weighing": dict(calls=1, routes={"native": 1}, reasons={"GA301": 1})}


def test_a_graph_that_comes_again_is_taken_over_in_time():
    """Natively at first, then on our way, and at once where one call pays for all."""
    ei = torch.randint(0, 3000, (2, 15000))
    layer, x = Weighing(), torch.randn(3000, 16)
    expected = layer(x, ei)
    with gnnaccel.enabled():
        for _ in range(60):
            assert close(layer(x, ei), expected)
    routes = gnnaccel.stats()["Weighing"]["routes"]
    assert 5 < routes["native"] < 55 and routes["torch"] == 60 - routes["native"]
    gnnaccel.reset_stats()
    with gnnaccel.enabled():
        for _ in range(3):
            layer(x, ei.clone())
    assert gnnaccel.stats()["Weighing"]["routes"] == {"native": 3}


def test_checkpoints_find_the_same_route(route):
    from torch.utils.checkpoint import checkpoint

    layer, ei = Weighing(), graphs.square().to(route.device)
    for options in ({}, {"when": "profitable", "on_fallback": "native"}):
        x = graphs.features().to(route.device).requires_grad_()
        layer(x, ei).pow(2).sum().backward()
        expected, x.grad = x.grad, None
        with route.on(**options):
            for _ in range(3):
                x.grad = None
                checkpoint(layer, x, ei, use_reentrant=False).pow(2).sum().backward()
                assert close(x.grad, expected)


# ---- modes ----

@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, mode):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    with mode():
        expected = layer(x, ei)
        with route.on():
            for _ in range(2):
                assert close(layer(x, ei), expected)
    with route.on():  # what was built inside is good for training
        layer(x.clone().requires_grad_(), ei).sum().backward()
    took(route, 3)


def test_edges_made_in_inference_mode(route):
    layer, x = Weighing(), graphs.features().to(route.device)
    with torch.inference_mode():
        ei = graphs.square().to(route.device)
        expected = layer(x, ei)
        with route.on():
            assert close(layer(x, ei), expected)


def test_second_derivatives(route):
    layer, ei = Weighing(aggr="mean"), graphs.square()
    x, w = torch.randn(N, 3), torch.randn(E)

    def second(device, dtype):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, w)]
        grads = torch.autograd.grad(layer(leaves[0], ei.to(device), leaves[1]).pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)

    exact = second("cpu", torch.float64)
    with route.on():
        got = second(route.device, torch.float32)
    assert all(close(a.cpu().double(), b) for a, b in zip(got, exact))


def test_deterministic_mode(route):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    torch.use_deterministic_algorithms(True)
    try:
        with route.on():
            outs = [layer(x.clone().requires_grad_(), ei) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*outs)


def test_autocast(emulated):
    """A layer's features are of the half type then, its weights are not: the messages, and so the result, are fp32."""
    layer, x, ei, w = Weighing(), graphs.features().bfloat16(), graphs.square(), torch.randn(E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x, ei, w)
        with emulated.on():
            for _ in range(2):
                got = layer(x, ei, w)
                assert got.dtype == expected.dtype == torch.float32 and close(got, expected)
    exact = layer(x.double(), ei)
    with emulated.on():
        got = layer(x, ei)
    assert got.dtype == torch.bfloat16 and close(got.double(), exact, 1e-2)


def test_transforms_are_left_to_pyg():
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    with gnnaccel.enabled(when="supported"):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert torch.autograd.forward_ad.unpack_dual(layer(dual, ei)).tangent is not None
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA405": 1}


def test_compiled_regions():
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gnnaccel.enabled(when="supported"):
        assert close(torch.compile(layer, backend="eager")(x, ei), expected)
    assert not gnnaccel.stats()


def test_tracing():
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    with gnnaccel.enabled(when="supported"):
        traced = torch.jit.trace(layer, (x, ei))
    assert close(traced(x, ei), layer(x, ei))


# ---- classes, copies, rules ----

def test_layers_are_as_before(route):
    layer, x, ei = Updating().to(route.device), graphs.features().to(route.device), graphs.square().to(route.device)
    expected = layer(x, ei)
    with route.on():
        clones = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        assert all(close(clone(x, ei), expected) for clone in clones)
        assert "propagate" not in layer.__dict__


def test_classes_are_restored():
    Weighing(), Inherited()
    before = {cls: dict(vars(cls)) for cls in (MessagePassing, Weighing, Inherited)}
    with gnnaccel.enabled():
        assert vars(Weighing)["propagate"].__wrapped__ is before[Weighing]["propagate"]
        assert Weighing.propagate.__module__ == before[Weighing]["propagate"].__module__

        class Later(Weighing):
            pass

        native = MessagePassing.propagate
        Later()
        kept = vars(Later)["_orig_propagate"], vars(Later)["_jinja_propagate"]
        assert Later.propagate.routed and not any(getattr(function, "routed", False) for function in kept)
        assert MessagePassing.propagate is native
    assert before == {cls: dict(vars(cls)) for cls in before}
    assert not hasattr(Later.propagate, "routed") and vars(Later)["propagate"] is vars(Later)["_jinja_propagate"]
    with gnnaccel.enabled():
        assert Later.propagate.routed
    Later()(graphs.features(), graphs.square())


def test_classes_whose_propagate_pyg_cannot_write(route):
    """Without source text PyG falls back to the general one."""
    space = {"MessagePassing": MessagePassing}
    exec("class Typed(MessagePassing):\n"
         "    def forward(self, x, edge_index):\n        return self.propagate(edge_index, x=x)\n"
         "    def message(self, x_j):\n        return x_j\n", space)
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on():
        layer = space["Typed"]()
        assert close(layer(x, ei), Inherited()(x, ei))
    assert space["Typed"].propagate is MessagePassing.propagate and "propagate" not in vars(space["Typed"])


def test_a_propagate_of_the_users_is_left_alone():
    class Own(Weighing):
        def propagate(self, edge_index, size=None, **kwargs):
            return kwargs["x"] * 5

    with gnnaccel.enabled(when="supported"):
        x = graphs.features()
        assert torch.equal(Own()(x, graphs.square()), x * 5)
    assert not gnnaccel.stats() and not hasattr(Own.propagate, "routed")


def test_rules(route):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    for target in (Weighing, layer, "inner"):
        gnnaccel.reset_stats()
        rules.reset_rules()
        if target == "inner":
            gnnaccel.name_layers(torch.nn.ModuleDict({"inner": layer}))
        with route.on():
            layer(x, ei)
            gnnaccel.exclude(target)
            layer(x, ei)
            gnnaccel.include(target)
            layer(x, ei)
        assert gnnaccel.stats()["Weighing"] == dict(calls=3, routes={route.backend: 2, "native": 1}, reasons={"GA101": 1})
    gnnaccel.reset_stats()
    with route.on(include=["GATConv"]):
        Weighing()(x, ei)
    assert gnnaccel.stats()["Weighing"]["routes"] == {"native": 1}
    with gnnaccel.disabled(), route.on():
        layer(x, ei)
    with route.on(exclude=["GCNConv"]):  # a known name
        layer(x, ei)
    gnnaccel.reset_stats()
    with route.on(), gnnaccel.disabled():
        layer(x, ei)
    assert not gnnaccel.stats()


@pytest.mark.gpu
def test_captured_graphs(gpu):
    layer, x, ei = Weighing(), torch.randn(N, F, device=gpu.device), graphs.square().to(gpu.device)
    expected = layer(x, ei)
    with gpu.on():
        for _ in range(3):
            layer(x, ei)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = layer(x, ei)
    out.zero_()
    captured.replay()
    assert close(out, expected)
