"""Single layers under torch.compile with ``enable(compile=True)``: each call is one operator."""
from __future__ import annotations

import pytest
import torch
import torch_geometric
from torch_geometric import nn

import gnnaccel
from tests.pyg import graphs
from tests.pyg.compiling import (CASES, compiles, on, pna, reset, route,  # noqa: F401
                                  same, step, truth)
from tests.pyg.graphs import F, M
from tests.pyg.judge import close

INDUCTOR = ["aot_eager", *(pytest.param(name, marks=pytest.mark.long)
                           for name in ("inductor", "eager"))]


def compiled_calls(name):
    return gnnaccel.stats().get(name, {}).get("compiled", 0)


#: cases that no faster route takes
NATIVE_INSIDE = ("GATConv of means", "RGATConv scaled", "PNAConv deep")


def quick(label):
    """Whether the case is among those of `make test`."""
    return " " not in label


@pytest.mark.parametrize("backend", INDUCTOR)
@pytest.mark.parametrize("label", [label if quick(label)
                                   else pytest.param(label, marks=pytest.mark.long)
                                   for label in CASES])
def test_a_layer_is_one_operator(route, label, backend):
    layer, more = CASES[label]()
    layer, more = layer.to(route.device), [t.to(route.device) for t in more]
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    expected = truth(layer, x, edges, *more)
    on(route)
    eager = step(layer, x, edges, *more), gnnaccel.stats()
    reset()
    same(step(torch.compile(layer, backend=backend, fullgraph=True), x, edges, *more), expected)
    name, stats = type(layer).__name__, gnnaccel.stats()
    assert stats[name].pop("compiled") == 1 and stats[name] == eager[1][name]
    assert label in NATIVE_INSIDE or set(stats[name]["routes"]) == {route.backend}


@pytest.mark.parametrize("name", ["GATConv", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "GATv2Conv", "TransformerConv", "SAGEConv", "GINConv", "RGATConv", "GraphConv"))])
def test_pairs_of_features(route, name):
    layer = {"GATConv": lambda: nn.GATConv((F, F), 8, 2, add_self_loops=False),
             "GATv2Conv": lambda: nn.GATv2Conv((F, F), 8, 2, add_self_loops=False),
             "TransformerConv": lambda: nn.TransformerConv((F, F), 8, 2),
             "SAGEConv": lambda: nn.SAGEConv((F, F), 8),
             "RGATConv": lambda: nn.RGATConv(F, 8, 3),
             "GraphConv": lambda: nn.GraphConv((F, F), 8),
             "GINConv": lambda: nn.GINConv(torch.nn.Linear(F, 8))}[name]().to(route.device)

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, other, edges):
            return self.layer((x, other), edges, *types)

    x, other = graphs.features().to(route.device), graphs.features(M).to(route.device)
    inputs = x, other, graphs.bipartite().to(route.device)
    types = [inputs[2][0] % 3] if name == "RGATConv" else []
    expected = step(Both(), *inputs)
    on(route)
    same(step(torch.compile(Both(), backend="aot_eager", fullgraph=True), *inputs), expected)
    assert compiled_calls(name) == 1


@pytest.mark.long
def test_the_same_tensor_twice_has_its_gradient_once(route):
    layer = nn.SAGEConv((F, F), 8).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, edges):
            return self.layer((x, x), edges)

    expected = step(Twice(), x, edges)
    on(route)
    for backend in ("aot_eager", "eager"):
        reset()
        same(step(torch.compile(Twice(), backend=backend, fullgraph=True), x, edges), expected)


@pytest.mark.long
def test_graphs_of_a_shape_class_share_what_is_compiled(route):
    layer = nn.GATConv(F, 8, 2).to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for nodes, edges in ((30, 150), (40, 170), (25, 90)):
        x = graphs.features(nodes).to(route.device)
        ei = graphs.square(nodes, edges).to(route.device)
        got, expected = step(compiled, x, ei), step(layer, x, ei)
        same(got, expected)
    assert compiles() == 1 and compiled_calls("GATConv") == 3


OTHER_OPTIONS = {"AGNNConv": ("add_self_loops", False), "RGATConv": ("negative_slope", 0.7),
                 "APPNP": ("alpha", 0.4), "TAGConv": ("normalize", False),
                 "PNAConv": (), "GraphConv": (), "GINEConv": (),
                 "SGConv": ("add_self_loops", False)}


@pytest.mark.parametrize("name", ["PNAConv", *(pytest.param(name, marks=pytest.mark.long)
                                               for name in OTHER_OPTIONS if name != "PNAConv")])
def test_sizes_and_options_of_layers(route, name):
    """Graphs change without compiling anew, options with it."""
    layer = CASES[name]()[0].to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)

    def inputs(nodes, edges):
        more = {"RGATConv": [torch.randint(0, 3, (edges,))],
                "GINEConv": [graphs.edge_features(edges, F)]}.get(name, [])
        given = graphs.features(nodes), graphs.square(nodes, edges), *more
        return [t.to(route.device) for t in given]

    for sizes in ((30, 150), (40, 170), (25, 90)):
        given = inputs(*sizes)
        same(step(compiled, *given), truth(layer, *given))
    assert compiles() == 1 and compiled_calls(name) == 3
    if OTHER_OPTIONS[name]:
        setattr(layer, *OTHER_OPTIONS[name])
        same(step(compiled, *given), truth(layer, *given))
        assert compiles() == 2 and compiled_calls(name) == 4


@pytest.mark.long
def test_options_that_change_are_compiled_anew(route):
    layer = nn.GATConv(F, 8, 2).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    same(step(compiled, x, edges), step(layer, x, edges))
    layer.negative_slope, layer.add_self_loops = 0.7, False
    same(step(compiled, x, edges), step(layer, x, edges))
    assert compiles() == 2


@pytest.mark.long
def test_layers_of_equal_options_share_what_is_compiled(route):
    """As regional compilation of a deep model does."""
    layers = [nn.GATConv(F, F, concat=False).to(route.device) for _ in range(3)]
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    on(route)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def block(layer, x):
        return layer(x, edges).relu()

    for layer in layers:
        assert close(block(layer, x), layer(x, edges).relu())
    assert compiles() == 1 and compiled_calls("GATConv") == 3


@pytest.mark.long
@pytest.mark.parametrize("grad", [True, False])
def test_calls_that_repeat_are_remembered(route, monkeypatch, grad):
    from gnnaccel.adapters.pyg import _Guarded

    stated = []
    state = _Guarded.state
    monkeypatch.setattr(_Guarded, "state", lambda *given: stated.append(given) or state(*given))
    layer = nn.GATConv(F, 8, 2).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        if grad:
            step(compiled, x, edges)
        else:
            with torch.no_grad():
                compiled(x, edges)
    assert len(stated) == 1 and compiled_calls("GATConv") == 4


@pytest.mark.parametrize("backend", INDUCTOR)
@pytest.mark.parametrize("name", ["GATConv", *(pytest.param(name, marks=pytest.mark.long)
                                               for name in ("GATv2Conv", "TransformerConv",
                                                            "RGATConv", "APPNP"))])
def test_dropout_is_that_of_the_forward(route, name, backend):
    layer = (nn.APPNP(2, 0.1, dropout=0.5) if name == "APPNP"
             else getattr(nn, name)(F, 8, 3, dropout=0.5)).to(route.device)
    inputs = [graphs.features().to(route.device), graphs.square().to(route.device)]
    inputs += [inputs[1][0] % 3] if name == "RGATConv" else []
    on(route)
    expected = step(layer, *inputs)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    same(step(compiled, *inputs), expected)
    assert not close(compiled(*inputs), compiled(*inputs))
    layer.eval()
    assert close(compiled(*inputs), layer(*inputs))


@pytest.mark.long
@pytest.mark.parametrize("backend", INDUCTOR)
def test_two_calls_with_dropout_are_two(route, backend):
    layer = nn.GATConv(F, 8, 2, dropout=0.5).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    on(route)

    @torch.compile(backend=backend, fullgraph=True)
    def views(x):
        return layer(x, edges), layer(x, edges)

    first, second = views(x.requires_grad_())
    assert not close(first, second)


def test_gradients_of_gradients(route):
    """Of what compiles without AOTAutograd, as ever."""
    layer = nn.GATConv(F, 8, 2, dropout=0.0).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)

    def twice(model):
        given = x.clone().requires_grad_()
        grad, = torch.autograd.grad(model(given, edges).square().sum(), given, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [given, *layer.parameters()],
                                   allow_unused=True)

    expected = twice(layer)
    on(route)
    got = twice(torch.compile(layer, backend="eager", fullgraph=True))
    assert all(a is b is None or close(a, b, 1e-4) for a, b in zip(got, expected))
    assert compiled_calls("GATConv") == 1


# --- what stays as it was -------------------------------------------------------------------------

class Mine(nn.GATConv):
    pass


def hooked():
    layer = nn.GATConv(F, 8, 2)
    layer.lin.register_forward_hook(lambda module, given, out: out * 2)
    return layer


def replaced():
    layer = nn.GATConv(F, 8, 2)
    layer.message = lambda x_j, alpha: x_j * 2 * alpha.unsqueeze(-1)
    return layer


def parametrised():
    layer = nn.GATConv(F, 8, 2)
    torch.nn.utils.parametrizations.weight_norm(layer.lin)
    return layer


def other_aggregation():
    layer = nn.GATConv(F, 8, 2)
    layer.aggr_module = torch_geometric.nn.aggr.MaxAggregation()
    return layer


def half_gradient():
    layer = pna(["std", "mean"])
    layer.aggr_module.aggr.aggrs[0].var_aggr.semi_grad = True
    return layer


def other_maps():
    layer = nn.GATConv(F, 8, 2)
    layer.lin = torch.nn.Sequential(layer.lin, torch.nn.ReLU())
    return layer


NATIVE = {"a subclass": lambda: Mine(F, 8, 2), "a hook": hooked, "a method": replaced,
          "a parametrization": parametrised, "cached": lambda: nn.GCNConv(F, 8, cached=True),
          "another aggregation": lambda: nn.SAGEConv(F, 8, "median"),
          "several aggregations": lambda: nn.SAGEConv(F, 8, ["mean", "max"]),
          "an aggregation object": other_aggregation, "half of a gradient": half_gradient,
          "other maps": other_maps, "another activation": lambda: pna(pre_layers=2, act="elu"),
          "another flow": lambda: nn.GCNConv(F, 8, flow="target_to_source"),
          "a tensor to fill with": lambda: nn.GATConv(F, 8, fill_value=torch.ones(1))}


@pytest.mark.parametrize("label", [pytest.param(label, marks=pytest.mark.long)
                                   if label not in ("a hook", "a method") else label
                                   for label in NATIVE])
def test_what_is_not_described_is_traced_natively(route, label):
    layer = NATIVE[label]().to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    expected = step(layer, x, edges)
    on(route)
    same(step(torch.compile(layer, backend="eager"), x, edges), expected)
    found = gnnaccel.stats()
    # a compiler that breaks a graph traces again what came before
    assert label == "a subclass" or set(found[type(layer).__name__]["reasons"]) == {"GA404"}
    assert all("compiled" not in entry for name, entry in found.items() if name != "SimpleConv")


@pytest.mark.parametrize("rule", ["instance", *(pytest.param(rule, marks=pytest.mark.long)
                                                for rule in ("class", "name"))])
def test_rules_hold(route, rule):
    layer = nn.GATConv(F, 8, 2).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    expected = step(layer, x, edges)
    on(route)
    if rule == "name":
        model = torch.nn.ModuleDict({"here": layer})
        gnnaccel.exclude("here", model=model)
    else:
        gnnaccel.exclude(layer if rule == "instance" else "GATConv")
    same(step(torch.compile(layer, backend="eager"), x, edges), expected)
    assert gnnaccel.stats()["GATConv"]["reasons"].keys() == {"GA101"}
    assert compiled_calls("GATConv") == 0


@pytest.mark.long
def test_an_attention_loss_is_the_hosts(route):
    """What it is made of stays in the layer."""
    layer = nn.SuperGATConv(F, 8, 2, neg_sample_ratio=1.0).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    on(route)
    torch.compile(layer, backend="eager")(x, edges)
    assert layer.get_attention_loss() > 0 and compiled_calls("SuperGATConv") == 0
    layer.eval()
    reset()
    assert close(torch.compile(layer, backend="eager", fullgraph=True)(x, edges), layer(x, edges))
    assert compiled_calls("SuperGATConv") == 1


EXPORTED = {name: CASES[name] for name in ("PNAConv", "AGNNConv", "SuperGATConv", "GraphConv",
                                           "GINEConv", "RGATConv")}


@pytest.mark.parametrize("name", ["PNAConv", *(pytest.param(name, marks=pytest.mark.long)
                                               for name in EXPORTED if name != "PNAConv")])
def test_export_takes_the_hosts_code(route, name):
    layer, more = EXPORTED[name]()
    layer = layer.to(route.device).eval()
    inputs = tuple(t.to(route.device) for t in (graphs.features(), graphs.square(), *more))
    native = torch.export.export(layer, inputs)
    on(route)
    program = torch.export.export(layer, inputs)
    assert "gnnaccel" not in str(program.graph) and str(program.graph) == str(native.graph)
    assert close(program.module()(*inputs), layer(*inputs)) and compiled_calls(name) == 0


@pytest.mark.long
def test_attention_weights_are_the_hosts(route):
    layer = nn.GATConv(F, 8, 2, add_self_loops=False).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    expected = layer(x, edges, return_attention_weights=True)
    on(route)
    got = torch.compile(layer, backend="aot_eager")(x, edges, return_attention_weights=True)
    assert close(got[0], expected[0]) and close(got[1][1], expected[1][1])
    assert compiled_calls("GATConv") == 0


@pytest.mark.long
def test_autocast_is_the_hosts(route):
    layer = nn.GATConv(F, 8, 2).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)

    def mixed(model):
        with torch.autocast(route.device.type, dtype=torch.bfloat16):
            return model(x, edges)

    expected = mixed(layer)
    on(route)
    compiled = torch.compile(layer, backend="aot_eager")
    got = mixed(compiled)
    assert got.dtype is expected.dtype and close(got.float(), expected.float(), 3e-2)
    assert compiled_calls("GATConv") == 0
    assert close(compiled(x, edges), layer(x, edges))  # compiled anew, without autocast
    assert compiled_calls("GATConv") == 1


@pytest.mark.long
def test_without_the_option_the_compiler_sees_the_hosts_code(route):
    native = nn.GCNConv.forward
    layer = nn.GATConv(F, 8, 2).to(route.device)
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    gnnaccel.enable(backend=route.backend, when="supported")
    reset()
    assert nn.GCNConv.forward is native
    torch.compile(layer, backend="aot_eager")(x, edges)
    assert "GATConv" not in gnnaccel.stats()
