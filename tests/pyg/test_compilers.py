"""torch.jit, torch.compile, torch.fx and PyG's own transformations, used while gnnaccel is
enabled."""
from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch_geometric.nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GATConv, GATv2Conv, to_hetero

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F
from tests.pyg.judge import close, spread, took
from tests.pyg.layers import NAMES, build


def enable(route) -> None:
    gnnaccel.enable(backend=route.backend, when="supported")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = spread(GATConv(F, 8, 2)), spread(GATv2Conv(16, 4))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x, edge_index).relu(), edge_index)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Scripted(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index).relu()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_script(route, inputs, quiet, name):
    model = Scripted(build(name)).to(route.device).eval()
    expected, native = model(*inputs), scripted(model)
    enable(route)
    patched = type(model.conv).forward
    script = scripted(model)
    assert type(model.conv).forward is patched and hasattr(patched, "__wrapped__")
    if isinstance(native, str):  # this version of the host cannot be scripted at all
        assert isinstance(script, str)
        return
    gnnaccel.reset_stats()
    assert close(script(*inputs), expected) and gnnaccel.stats() == {}
    assert close(model(*inputs), expected)
    took(route, 1)


def scripted(model):
    """The script, or torch's refusal."""
    try:
        return torch.jit.script(model)
    except RuntimeError as refusal:
        return str(refusal)


def test_scripting_sees_the_originals(quiet):
    seen = []

    class Watching(torch.nn.Module):
        def __prepare_scriptable__(self):
            seen.append(GATConv.forward)
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    native = GATConv.forward
    gnnaccel.enable()
    torch.jit.script(Watching())
    assert set(seen) == {native} and GATConv.forward is not native


def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def scripted_for_the_caller(cls):
    return torch.jit.script(cls, _frames_up=1)


@pytest.mark.parametrize("script", [lambda cls: torch.jit.script(cls),
                                    lambda cls: torch.jit.script(obj=cls),
                                    scripted_for_the_caller],
                         ids=["by place", "by name", "for the caller"])
def test_a_class_is_scripted_with_the_names_around_it(quiet, script):
    gnnaccel.enable()

    class Halves:
        def __init__(self, times: int):
            self.times = times

        def of(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = half(x)
            return x

    def quarter(x: torch.Tensor) -> torch.Tensor:
        return Halves(2).of(x)

    assert script(Halves) is Halves
    assert torch.jit.script(quarter)(torch.ones(1)) == 0.25


def test_a_script_that_fails_leaves_the_patches_in(route, inputs, quiet):
    class Bad(Scripted):
        def forward(self, x, edge_index):
            return eval("x")

    enable(route)
    patched = GATConv.forward
    with pytest.raises(Exception):  # noqa: B017 - of whatever kind torch raises
        torch.jit.script(Bad(GATConv(F, 8, 2)))
    assert GATConv.forward is patched


@pytest.mark.parametrize("name", NAMES)
def test_trace(route, inputs, quiet, name):
    model = build(name, device=route.device).eval()
    x, ei = inputs
    expected = torch.jit.trace(model, inputs, check_trace=False)
    enable(route)
    gnnaccel.reset_stats()
    traced = torch.jit.trace(model, inputs, check_trace=False)
    assert set(gnnaccel.stats()[name]["reasons"]) == {"GA404"}
    other = graphs.square(edges=90).to(route.device)
    assert close(traced(x * 2, other),
                 model(x * 2, other)) and close(expected(x, ei), traced(x, ei))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_compile(route, inputs, quiet, name):
    torch._dynamo.reset()
    model = build(name, device=route.device).eval()
    x = inputs[0].clone().requires_grad_()
    out = model(x, inputs[1])
    expected = out.detach(), torch.autograd.grad(out.sum(), x)[0]
    enable(route)
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(x, inputs[1])
    got = out.detach(), torch.autograd.grad(out.sum(), x)[0]
    assert all(close(a, b) for a, b in zip(got, expected))
    inside = gnnaccel.stats().get(name, {"routes": {}})["routes"]
    assert set(inside) <= {"native"}
    assert close(model(*inputs), expected[0])
    assert gnnaccel.stats()[name]["routes"][route.backend] == 1


ONE_GRAPH = {
    "GCNConv": lambda: torch_geometric.nn.GCNConv(F, 4, add_self_loops=False),
    "LGConv": torch_geometric.nn.LGConv,
    "ARMAConv": lambda: torch_geometric.nn.ARMAConv(F, 4),
    "TAGConv": lambda: torch_geometric.nn.TAGConv(F, 4),
}


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_layers_that_normalise_compile_to_one_graph(route, inputs, quiet, name):
    """torch.compile traces PyG's function that weighs the edges, and nothing that stands before
    it."""
    layer = ONE_GRAPH[name]().to(route.device)
    expected = layer(*inputs)
    enable(route)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert close(compiled(*inputs), expected)


def test_loops_are_added_inside_a_compiled_graph(route, inputs, quiet):
    add = torch_geometric.utils.add_self_loops
    module = torch_geometric.nn.conv.cluster_gcn_conv  # its name stands for what gnnaccel put there

    def looped(edge_index):
        return module.add_self_loops(edge_index, num_nodes=graphs.N)[0]

    enable(route)
    torch.compiler.reset()
    compiled = torch.compile(looped, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs[1]), add(inputs[1], num_nodes=graphs.N)[0])


@pytest.mark.long
def test_compiled_models_that_hold_a_layer(route, inputs, quiet):
    torch._dynamo.reset()
    model = Net().to(route.device)
    expected = model(*inputs)
    enable(route)
    compiled = torch.compile(model, backend="eager", fullgraph=False)
    assert close(compiled(*inputs), expected)
    gnnaccel.disable()
    assert close(compiled(*inputs), expected)


def test_sequential(route, inputs):
    model = torch_geometric.nn.Sequential("x, edge_index", [
        (spread(GATConv(F, 8, 2)), "x, edge_index -> x"), torch.nn.ReLU(),
        (spread(GATConv(16, 4)), "x, edge_index -> x")])
    model = model.to(route.device)
    expected = model(*inputs)
    enable(route)
    assert close(model(*inputs), expected)
    took(route, 2)


class Hetero(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GATConv((-1, -1), 8, add_self_loops=False)
        self.last = GATv2Conv((-1, -1), 4, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.last(self.conv(x, edge_index).relu(), edge_index)


def hetero_inputs(device):
    x = {"a": torch.randn(20, 6), "b": torch.randn(12, 5)}
    edges = {("a", "to", "b"): graphs.bipartite(20, 12), ("b", "to", "a"): graphs.bipartite(12, 20),
             ("a", "near", "a"): graphs.square(20)}
    return {k: v.to(device) for k, v in x.items()}, {k: v.to(device) for k, v in edges.items()}


def test_to_hetero(route):
    x, edges = hetero_inputs(route.device)
    metadata = (list(x), list(edges))
    enable(route)
    model = to_hetero(Hetero(), metadata).to(route.device)
    with gnnaccel.disabled():
        expected = model(x, edges)  # fills the lazy sizes
    gnnaccel.reset_stats()
    got = model(x, edges)
    took(route, 2)  # each layer as one
    assert all(close(got[k], expected[k]) for k in expected)


def test_hetero_conv(route):
    x, edges = hetero_inputs(route.device)
    conv = torch_geometric.nn.HeteroConv({k: GATConv((x[k[0]].shape[1], x[k[2]].shape[1]), 8,
                                                     add_self_loops=False)
                                          for k in edges}, aggr="sum").to(route.device)
    expected = conv(x, edges)
    with route.on():
        got = conv(x, edges)
    took(route, 1)  # together; layers inside it are not called
    assert all(close(got[k], expected[k]) for k in expected)


def test_models_of_the_host(route, inputs):
    model = torch_geometric.nn.GAT(F, 16, 3, 4, heads=2, v2=True, jk="cat").to(route.device).eval()
    expected = model(*inputs)
    with route.on():
        got = model(*inputs)
    took(route, 3)
    assert close(got, expected)


@pytest.mark.parametrize("name", ["GATConv", "TransformerConv"])
def test_explainer(route, inputs, name):
    model = Scripted(build(name, heads=1)).to(route.device)

    def masks():
        torch.manual_seed(4)
        explainer = Explainer(copy.deepcopy(model), GNNExplainer(epochs=5),
                              explanation_type="model", node_mask_type="attributes",
                              edge_mask_type="object",
                              model_config=dict(mode="regression", task_level="node",
                                                return_type="raw"))
        found = explainer(*inputs)
        return found.node_mask, found.edge_mask

    expected = masks()
    enable(route)
    gnnaccel.reset_stats()
    got = masks()
    assert "GA502" in gnnaccel.stats()[name]["reasons"]
    assert all(close(a, b, 1e-4) for a, b in zip(got, expected))
    gnnaccel.reset_stats()
    model(*inputs)
    took(route, 1)
