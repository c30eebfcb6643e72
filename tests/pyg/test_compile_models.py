"""Whole models under torch.compile with ``enable(compile=True)``: compilers, modes, memory."""
from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.utils.checkpoint
from torch_geometric import nn

import gnnaccel
from tests.pyg import graphs, hetero_graphs
from tests.pyg.compiling import (Net, compiles, on, reset, route,  # noqa: F401
                                  same, step)
from tests.pyg.graphs import F
from tests.pyg.judge import close

BACKENDS = ["aot_eager", *(pytest.param(name, marks=pytest.mark.long)
                           for name in ("inductor", "eager"))]
NAMES = "GATConv", "GCNConv", "SAGEConv"


def compiled_calls():
    return sum(entry.get("compiled", 0) for entry in gnnaccel.stats().values())


def records():
    from gnnaccel.adapters.pyg.compile import operators

    gc.collect()
    return len(operators._records)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_training(route, inputs, backend):
    native = Net().to(route.device)
    ours = copy.deepcopy(native)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    target = torch.randint(0, 4, (len(inputs[0]),), device=route.device)
    losses = []
    for model in (native, compiled):
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = torch.nn.functional.nll_loss(model(*inputs), target)
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
        on(route)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for a, b in zip(native.parameters(), ours.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_modes(route, inputs, backend):
    model = Net(dropout=0.5).to(route.device).eval()
    expected = model(*inputs).detach()
    on(route)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert close(compiled(*inputs), expected)
    with torch.inference_mode():
        assert close(compiled(*inputs), expected)
    assert close(compiled(*inputs), expected)
    assert compiled_calls() == 9
    model.train()
    assert not close(compiled(*inputs), expected)
    model.eval()
    assert close(compiled(*inputs), expected)
    for name in NAMES:
        assert set(gnnaccel.stats()[name]["routes"]) == {route.backend}, gnnaccel.stats()


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_compiled_runs_natively_after_disable(route, inputs, backend):
    model = nn.SAGEConv(F, 4).to(route.device)
    expected = step(model, *inputs)
    on(route)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    same(step(compiled, *inputs), expected)
    gnnaccel.reset_stats()
    with gnnaccel.disabled():
        same(step(compiled, *inputs), expected)
    gnnaccel.disable()
    same(step(compiled, *inputs), expected)
    assert gnnaccel.stats() == {}
    on(route)
    same(step(compiled, *inputs), expected)
    assert compiled_calls() == 1


@pytest.mark.long
def test_kernels_run_inside(emulated):
    inputs = graphs.features(), graphs.square()
    model = Net()
    expected = step(model, *inputs)
    on(emulated)
    same(step(torch.compile(model, backend="aot_eager", fullgraph=True), *inputs), expected)
    assert all(gnnaccel.stats()[name] == {"calls": 1, "routes": {"cuda": 1}, "reasons": {},
                                          "compiled": 1} for name in NAMES)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_before_it_was_enabled(route, inputs, backend):
    model = nn.SAGEConv(F, 4).to(route.device)
    compiled = torch.compile(model, backend=backend)
    expected = step(compiled, *inputs)
    on(route, compile=False)
    same(step(compiled, *inputs), expected)
    gnnaccel.enable(compile=True)  # which compiles it anew
    same(step(compiled, *inputs), expected)
    assert compiled_calls() == 1


@pytest.mark.long
def test_blocks(route, inputs):
    model = nn.SAGEConv(F, 4).to(route.device)
    expected = step(model, *inputs)
    compiled = torch.compile(model, backend="aot_eager")
    reset()
    for _ in range(2):
        with gnnaccel.enabled(backend=route.backend, when="supported", compile=True):
            same(step(compiled, *inputs), expected)
        same(step(compiled, *inputs), expected)
    assert compiled_calls() == 2


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_the_compiler_uses_again(route, inputs, backend):
    """Edges and features that are made inside the compiled model, some in the same memory."""
    convs = torch.nn.ModuleList([nn.SAGEConv(F, F) for _ in range(4)]).to(route.device)

    class Rewired(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = convs

        def forward(self, x, edges):
            for i, conv in enumerate(self.convs):
                x = conv(torch.sin(x) * 2, (edges * (i + 2) + i) % 29)
                x = torch.cos(x * 1.1)
            return x

    expected = step(Rewired(), *inputs)
    on(route)
    compiled = torch.compile(Rewired(), backend=backend, fullgraph=True)
    for _ in range(2):
        same(step(compiled, *inputs), expected)
    with torch.no_grad():
        assert close(compiled(*inputs), expected[0])
    assert compiled_calls() == 12


@pytest.mark.long
def test_edges_that_the_model_writes_to(route, inputs):
    conv = nn.SAGEConv(F, 8).to(route.device)

    def shifted(x, edges):
        first = conv(x, edges)
        edges.copy_((edges + 1) % 29)
        return first + conv(x, edges)

    x, edges = inputs
    expected = [shifted(x, written := edges.clone()), shifted(x, written)]
    on(route)
    compiled = torch.compile(shifted, backend="aot_eager", fullgraph=True)
    written = edges.clone()
    assert all(close(compiled(x, written), out) for out in expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_is_kept_for_backward_is_let_go_of(route, inputs, backend):
    model = Net().to(route.device)
    on(route)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    before = records()
    out = compiled(*inputs)
    assert records() == before + 3
    out.sum().backward()
    del out
    assert records() == before
    compiled(*inputs)  # and nobody goes back
    assert records() == before


@pytest.mark.long
def test_backward_twice(route, inputs):
    model = Net().to(route.device)
    on(route)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(*inputs).square().sum()
    first = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(out, list(model.parameters()))
    assert all(map(torch.equal, first, second))


@pytest.mark.long
def test_hooks_of_saved_tensors_are_told(route, inputs):
    model = Net().to(route.device)
    on(route)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="what a layer kept for its backward is gone"):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            step(compiled, *inputs)


@pytest.mark.long
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints(route, inputs, inside):
    # on a GPU what is random in a checkpoint inside of compiled code draws from a generator of the
    # compiler's, so that it is not comparable
    model = Net(dropout=0.0 if inside and route.device.type == "cuda" else 0.5).to(route.device)
    on(route)

    def checkpointed(x, edges):
        return torch.utils.checkpoint.checkpoint(model if inside else compiled, x, edges,
                                                 use_reentrant=False)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, edges):
            return checkpointed(x, edges)

    expected = step(model, *inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    whole = torch.compile(Whole(), backend="aot_eager", fullgraph=True) if inside else Whole()
    before = records()
    same(step(whole, *inputs), expected)
    assert records() == before and compiled_calls() > 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_dropout_in_a_compiled_checkpoint_is_that_of_the_forward(route, backend):
    """With equal scores and an identity for the map the layer is a random matrix M, so that <x, d
    |M x|^2 / dx> is 2 |M x|^2, if backward has the same M."""
    from torch_geometric.nn import GATConv

    layer = GATConv(8, 8, dropout=0.5, bias=False).to(route.device)
    with torch.no_grad():
        layer.lin.weight.copy_(torch.eye(8))
        for att in (layer.att_src, layer.att_dst):
            att.zero_()
    x = torch.randn(30, 8, device=route.device, requires_grad=True)
    edges = torch.randint(0, 30, (2, 200), device=route.device)
    on(route)

    @torch.compile(backend=backend, fullgraph=True)
    def whole(x):
        return torch.utils.checkpoint.checkpoint(layer, x, edges, use_reentrant=False)

    seen = []
    for _ in range(3):
        out = whole(x)
        twice = 2 * out.square().sum()
        grad, = torch.autograd.grad(out.square().sum(), x)
        torch.testing.assert_close((grad * x).sum(), twice, rtol=1e-4, atol=1e-4)
        seen.append(out.detach())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert compiled_calls() >= 3


@pytest.mark.long
def test_layers_are_let_go_of_with_the_model(route, inputs):
    from gnnaccel.adapters.pyg.compile import standins

    model = Net().to(route.device)
    on(route)
    step(torch.compile(model, backend="aot_eager", fullgraph=True), *inputs)
    held = len(standins._shadows)
    assert held >= 5
    del model
    reset()
    gc.collect()
    assert len(standins._shadows) <= held - 5


@pytest.mark.long
def test_parameters_that_change(route, inputs):
    model = Net().to(route.device)
    on(route)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step(compiled, *inputs)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # in place, as optimizers do
    same(step(compiled, *inputs), step(model, *inputs))
    for p in model.parameters():
        p.data = p.data * 0.5  # elsewhere
    same(step(compiled, *inputs), step(model, *inputs))
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()}, assign=True)
    same(step(compiled, *inputs), step(model, *inputs))
    model.double()
    inputs = inputs[0].double(), inputs[1]
    same(step(compiled, *inputs), step(model, *inputs))


@pytest.mark.long
def test_frozen_parameters(route, inputs):
    model = Net().to(route.device)
    for p in model.first.parameters():
        p.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(model(*inputs).square().sum(), trained)
    on(route)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs).square().sum(), trained)
    assert all(close(a, b, 1e-4) for a, b in zip(got, expected))


@pytest.mark.long
def test_each_layer_of_a_heteroconv_is_an_operator(route):
    x, edges = hetero_graphs.on(route.device, hetero_graphs.features(), hetero_graphs.edges())
    layer = hetero_graphs.hetero().to(route.device)
    expected = layer(x, edges)
    on(route)
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, edges)
    hetero_graphs.same(got, expected)
    assert gnnaccel.stats()["SAGEConv"]["compiled"] == len(edges)


@pytest.mark.long
def test_export_takes_the_hosts_code(route, inputs):
    model = Net().to(route.device).eval()
    expected = model(*inputs)
    on(route)
    program = torch.export.export(model, inputs)
    assert "gnnaccel" not in str(program.graph)
    assert close(program.module()(*inputs), expected)
    assert compiled_calls() == 0


@pytest.mark.long
def test_graphs_that_break(route, inputs):
    model = Net().to(route.device)

    def broken(x, edges):
        x = model.first(x, edges)
        torch._dynamo.graph_break()
        return model.second(x, edges)

    expected = broken(*inputs)
    on(route)
    assert close(torch.compile(broken, backend="aot_eager")(*inputs), expected)
    assert compiled_calls() == 2 and compiles() == 2
