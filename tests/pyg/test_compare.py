"""compare(): right layers are found right, wrong ones are caught and opted out, and scripts do not
notice."""
from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch_geometric.nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, GINConv, HeteroLinear, PNAConv, RGCNConv, SAGEConv

import gnnaccel
from gnnaccel.cuda.runtime import driver, sources
from gnnaccel.dispatch.observe import watch
from gnnaccel.dispatch.ops import aggregation_cpu
from gnnaccel.dispatch.run import attention
from gnnaccel.profile import compare as comparing
from gnnaccel.profile.compare import Comparer
from tests.helpers import relative
from tests.pyg import graphs
from tests.pyg.graphs import E, F
from tests.pyg.layers import NAMES, build
from tests.pyg.own_layers import Copying


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables that fold nothing, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "200")


class Between(torch.nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x)


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = GATConv(F, 8, 2, dropout=dropout)
        self.norm = torch.nn.BatchNorm1d(16)
        self.between = Between(16, 16)
        self.last = build("GATv2Conv", features=16)

    def forward(self, x, edge_index):
        return self.last(self.between(self.norm(self.first(x, edge_index)).relu(), edge_index),
                         edge_index)


@pytest.fixture
def inputs():
    return graphs.features(), graphs.square()


def broken(change):
    """The torch backend with ``change`` made to what it gives."""
    native = attention.run_torch
    return lambda call, tensors: change(native(call, tensors))


def off_by_a_thousandth(out):
    return out * 1.001


def with_wrong_gradients(out):
    return out + 0.001 * (out - out.detach())


def with_a_nan(out):
    return torch.where(torch.arange(out.numel()).view(out.shape) == 5, torch.nan, out)


def with_another_dtype(out):
    return out.double()


# ---- right layers ----

@pytest.mark.parametrize("name", NAMES)
def test_layers_agree(route, name, inputs):
    layer = build(name).to(route.device)
    with route.on():
        found = gnnaccel.compare(layer, *route.put(*inputs))
    (one,) = found.layers
    assert found.ok and one.verdict == "same" and one.route == route.backend and one.kernel, str(
        found)
    wanted = {"out", "grad input [0][0]", *(f"grad {k}" for k, _ in layer.named_parameters())}
    assert {e.name for e in one.errors} == wanted
    assert one.native_ms > 0 and one.ours_ms > 0 and (one.ours_bytes is None) == (route.device.type
                                                                                  == "cpu")


def test_relational_layers_agree(route, inputs):
    x, edge_index = route.put(*inputs)
    edge_type = torch.randint(0, 4, (E,), device=route.device)
    layer, linear = route.put(RGCNConv(F, 8, 4, num_bases=2), HeteroLinear(F, 8, 3))
    with route.on():
        first = gnnaccel.compare(layer, x, edge_index, edge_type)
        second = gnnaccel.compare(linear, x,
                                  torch.randint(0, 3, (x.shape[0],), device=route.device))
    assert [one.verdict
            for one in first.layers + second.layers] == ["same", "same"], f"{first}{second}"


PLAIN = {"GCN": lambda: GCNConv(F, 8), "SAGE": lambda: SAGEConv(F, 8),
         "GIN": lambda: GINConv(torch.nn.Linear(F, 8)),
         "several": lambda: SAGEConv(F, 8, ["mean", "sum"]),
         "PNA": lambda: PNAConv(F, 8, ["mean", "std", "max"], ["identity"],
                                torch.tensor([1, 3, 5])),
         "own": Copying, "against": lambda: Copying(flow="target_to_source")}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_layers_agree(route, name, inputs):
    layer = PLAIN[name]().to(route.device)
    with route.on():
        found = gnnaccel.compare(layer, *route.put(*inputs))
    (one,) = found.layers
    assert found.ok and one.verdict == "same" and one.route == route.backend and one.kernel, str(
        found)
    assert one.layer == type(layer).__name__ and one.native_ms > 0 and one.ours_ms > 0
    names = {e.name for e in one.errors}
    assert "out" in names and any(name.startswith("grad input") for name in names)


@pytest.mark.parametrize("change",
                         [off_by_a_thousandth, with_wrong_gradients, with_a_nan,
                          with_another_dtype])
def test_wrong_message_passing_is_caught_and_the_layer_opted_out(inputs, monkeypatch, change):
    net = torch.nn.ModuleDict({"good": GATConv(F, F), "bad": GCNConv(F, 8)})
    net.forward = lambda x, edge_index: net["bad"](net["good"](x, edge_index),
                                                   edge_index).float().nan_to_num()
    true = aggregation_cpu.run
    monkeypatch.setattr(aggregation_cpu, "run", lambda graph, given: change(true(graph, given)))
    with gnnaccel.enabled(backend="torch", when="supported"):
        found = gnnaccel.compare(net, *inputs)
        assert [(one.name, one.verdict)
                for one in found.layers] == [("good", "same"), ("bad", "mismatch")], str(found)
        gnnaccel.reset_stats()
        out = net(*inputs)
        assert gnnaccel.stats()["GCNConv"] == {"calls": 1, "routes": {"native": 1},
                                               "reasons": {"GA101": 1}}
    with gnnaccel.enabled(backend="torch", when="supported", exclude=["GCNConv"]):
        assert torch.equal(out, net(*inputs))


@pytest.mark.long
def test_a_loss_reaches_what_is_inside_a_native_layer(inputs, monkeypatch):
    """Structures that the first run leaves behind must not change which calls the second one
    sees."""
    net, given = torch.nn.Sequential(), []
    net.first, net.second = GCNConv(F, 8), GCNConv(8, 4)
    net.forward = lambda x, edge_index: net.second(net.first(x, edge_index), edge_index)
    shadowed = comparing.shadowed
    monkeypatch.setattr(comparing, "shadowed", lambda visit, record, upstream, name: (
        given.append(upstream), shadowed(visit, record, upstream, name))[1])
    with gnnaccel.enabled():
        found = gnnaccel.compare(net, torch.randn(20000, F), torch.randint(0, 20000, (2, 100_000)),
                                 loss=lambda out: out.sum())
    assert [(one.name, one.verdict)
            for one in found.layers] == [("first", "same"), ("second", "same")]
    assert {one.route for one in found.layers} == {"torch"}
    assert [part[0].shape for part in given] == [(20000, 8),
                                                 (20000, 4)] and (given[1][0] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_agree(dtype, inputs):
    with gnnaccel.enabled(backend="torch", when="supported"):
        found = gnnaccel.compare(build("GATConv").to(dtype), inputs[0].to(dtype), inputs[1])
    assert [one.verdict for one in found.layers] == ["same"], str(found)


def test_autocast_agrees(inputs):
    with gnnaccel.enabled(backend="torch", when="supported"), torch.autocast("cpu", torch.bfloat16):
        found = gnnaccel.compare(build("GATConv"), *inputs)
    assert [one.verdict for one in found.layers] == ["same"], str(found)


UGLY = {"one node": (1, torch.zeros(2, 3, dtype=torch.long)),
        "isolated nodes": (9, torch.tensor([[0, 1], [2, 2]])),
        "duplicates": (5, torch.tensor([[0] * 6 + [1], [1] * 6 + [1]])),
        "no edges": (5, torch.zeros(2, 0, dtype=torch.long))}


@pytest.mark.parametrize("graph", UGLY)
@pytest.mark.parametrize("name", NAMES)
def test_ugly_graphs(route, name, graph):
    nodes, edge_index = UGLY[graph]
    layer, x = build(name, width=1).to(route.device), graphs.features(nodes, F + 1)[:, :F]
    with route.on(on_fallback="native"):
        found = gnnaccel.compare(layer, *route.put(x, edge_index))
    assert [one.verdict for one in found.layers] == ["native"
                                                     if edge_index.numel() == 0
                                                     else "same"], str(found)


@pytest.mark.parametrize("value", [1e20, float("nan"), float("inf")])
def test_where_the_host_has_no_numbers_neither_need_we(value):
    x = torch.full((30, F), value)
    with gnnaccel.enabled(backend="torch", when="supported"):
        assert gnnaccel.compare(build("GATConv"), x, graphs.square()).ok


@pytest.mark.long
def test_dropout_is_off_and_said_to_be(route, inputs):
    net = Net(dropout=0.5).to(route.device)
    with route.on(on_fallback="native"):
        found = gnnaccel.compare(net, *route.put(*inputs))
    assert [one.verdict for one in found.layers] == ["same", "same"], str(found)
    assert "dropout is off" in found.layers[0].notes[0] and "not the same" in str(found)
    assert not found.layers[1].notes and all(m.training for m in net.modules())


def test_native_layers_are_listed_with_their_reason(inputs):
    with gnnaccel.enabled(exclude=["GATConv"], when="supported"):
        found = gnnaccel.compare(Net(), *inputs)
    assert [(one.name, one.verdict)
            for one in found.layers] == [("first", "native"), ("last", "same")]
    assert "GA101" in found.layers[0].notes[0]


def test_with_a_loss_the_gradients_are_those_that_reach_the_layer(inputs, monkeypatch):
    net, seen = Net(), []
    plain = copy.deepcopy(net)
    plain.first.register_forward_hook(lambda module, args,
                                      out: out.register_hook(lambda g: seen.append(g.clone()))
                                      and None)
    plain(*inputs).square().sum().backward()
    given = []
    shadowed = comparing.shadowed
    monkeypatch.setattr(comparing, "shadowed", lambda visit, record, upstream, name: (
        given.append(upstream), shadowed(visit, record, upstream, name))[1])
    with gnnaccel.enabled(when="supported"):
        found = gnnaccel.compare(net, *inputs, loss=lambda out: out.square().sum())
    assert found.ok and relative(given[0][0], seen[0]) < 1e-4
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.long
def test_the_model_is_as_before(route, inputs):
    net = Net(dropout=0.5).to(route.device)
    before, generator = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    objects = [*net.named_parameters(), *net.named_buffers()]
    with route.on(on_fallback="native", records=100):
        gnnaccel.compare(net, *route.put(*inputs), loss=lambda out: out.sum())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(v is w and v.grad is None
               for (_, v), (_, w) in zip(objects, [*net.named_parameters(), *net.named_buffers()]))
    assert torch.equal(torch.get_rng_state(), generator) and net.training and not watch._watchers


def test_switched_off_by_the_environment(inputs, monkeypatch):
    monkeypatch.setenv("GNNACCEL", "0")
    found = gnnaccel.compare(Net(), *inputs)
    assert found.layers == [] and "switched off by the environment" in str(found)


# ---- wrong ones ----

@pytest.mark.parametrize("change",
                         [off_by_a_thousandth, with_wrong_gradients, with_a_nan,
                          with_another_dtype])
def test_a_wrong_backend_is_caught_and_the_layer_opted_out(inputs, monkeypatch, caplog, change):
    net = Net()
    net.norm = torch.nn.Identity()  # which takes any dtype
    net.between.forward = lambda x, edge_index: x.float().nan_to_num()
    monkeypatch.setattr(attention, "run_torch", broken(change))
    with gnnaccel.enabled(backend="torch",
                          when="supported"), caplog.at_level(logging.WARNING, "gnnaccel"):
        found = gnnaccel.compare(net, *inputs)
        assert not found.ok and [one.verdict for one in found.layers] == ["mismatch", "mismatch"]
        assert "excluded from here on" in str(found) and "does not agree" in caplog.text
        gnnaccel.reset_stats()
        out = net.eval()(*inputs)
        assert gnnaccel.stats()["GATConv"] == {"calls": 1, "routes": {"native": 1},
                                               "reasons": {"GA101": 1}}
    assert torch.equal(out, net(*inputs))


def test_a_wrong_layer_alone_is_opted_out(inputs, monkeypatch):
    net = Net()
    native = attention.run_torch
    monkeypatch.setattr(attention, "run_torch", lambda call,
                        tensors: native(call, tensors) * (1.01 if call.heads == 2 else 1.0))
    net.last = build("GATv2Conv", heads=1, features=16)
    with gnnaccel.enabled(backend="torch", when="supported"):
        found = gnnaccel.compare(net, *inputs)
        assert [(one.name, one.verdict)
                for one in found.layers] == [("first", "mismatch"), ("last", "same")]
        gnnaccel.reset_stats()
        net(*inputs)
        assert gnnaccel.stats()["GATv2Conv"]["routes"] == {"torch": 1}


def test_only_the_gradients_that_are_wrong_are_named(inputs, monkeypatch):
    monkeypatch.setattr(attention, "run_torch", broken(with_wrong_gradients))
    with gnnaccel.enabled(backend="torch", when="supported"):
        (one,) = gnnaccel.compare(build("GATConv"), *inputs).layers
    assert {e.name for e in one.errors if not e.right} == {e.name for e in one.errors} - {"out"}
    assert "grad att_src (error" in one.notes[-1] and "out (" not in one.notes[-1]


WRONG = {  # a line of a kernel's source, the same with a mistake, and what is wrong then
    "additive": ("inverse = reciprocal(run.sum(), edges);", "inverse = 1.001f * reciprocal(run.sum(), edges);", True),
    "additive_backward": ("delta.hi + delta.lo", "1.01f * delta.hi", False)}


@pytest.mark.long
@pytest.mark.parametrize("route", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)],
                         indirect=True)
@pytest.mark.parametrize("family", WRONG)
def test_a_wrong_kernel_is_caught_and_its_layer_opted_out(route, inputs, monkeypatch, family):
    right, wrong, forward = WRONG[family]
    true = sources.source
    assert right in true(family)
    monkeypatch.setattr(sources, "source",
                        lambda name: true(name).replace(right, wrong)
                        if name == family else true(name))
    inputs = route.put(*inputs)
    net = Net().to(route.device).eval()
    # a driver that has built nothing yet
    with driver.using(type(driver.current())()), route.on(on_fallback="native"):
        found = gnnaccel.compare(net, *inputs)
        assert [(one.name, one.verdict)
                for one in found.layers] == [("first", "mismatch"), ("last", "same")], str(found)
        assert any(e.name == "out" and not e.right for e in found.layers[0].errors) == forward
        assert any(e.name.startswith("grad") and not e.right for e in found.layers[0].errors)
        gnnaccel.reset_stats()
        net(*inputs)
        assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA101": 1} and gnnaccel.stats()[
            "GATv2Conv"]["routes"] == {"cuda": 1}


# ---- along a script ----

def train(net, inputs, steps=4):
    torch.manual_seed(3)
    optimiser = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        net(*inputs).square().mean().backward()
        optimiser.step()
    return [p.detach().clone() for p in net.parameters()] + [torch.rand(3)]


def test_a_training_does_not_notice(route, inputs):
    inputs = route.put(*inputs)
    net = Net(dropout=0.3).to(route.device)
    twin = copy.deepcopy(net)
    with route.on(on_fallback="native", records=1000):
        plain, counts, records = train(net, inputs), gnnaccel.stats(), len(gnnaccel.records())
        gnnaccel.reset_stats()
        gnnaccel.clear_records()
        comparer = Comparer()
        with comparer:
            observed = train(twin, inputs)
        assert gnnaccel.stats() == counts and len(gnnaccel.records()) == records
    assert [one.verdict for one in comparer.result.layers] == ["same", "same"], str(comparer.result)
    exact = route.device.type == "cpu"
    assert all(torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4)
               for a, b in zip(plain, observed))


def test_a_script_never_gets_a_wrong_result(inputs, monkeypatch):
    net = Net(dropout=0.3)
    twin = copy.deepcopy(net)
    native = train(net, inputs)
    monkeypatch.setattr(attention, "run_torch", broken(off_by_a_thousandth))
    comparer = Comparer()
    with gnnaccel.enabled(backend="torch", when="supported"), comparer:
        observed = train(twin, inputs)
    assert [one.verdict for one in comparer.result.layers] == ["mismatch", "mismatch"]
    assert all(map(torch.equal, native, observed))


def test_a_layer_that_is_native_at_first_is_looked_at_again(inputs):
    layer = build("GATConv")
    comparer = Comparer()
    with gnnaccel.enabled(backend="torch", when="supported"), comparer:
        gnnaccel.exclude(layer)
        layer(*inputs)
        assert [one.verdict for one in comparer.result.layers] == ["native"]
        gnnaccel.include(layer)
        layer(*inputs)
        layer(*inputs)
    assert [one.verdict for one in comparer.result.layers] == ["same"]


def test_kinds_of_inputs_are_bounded():
    layer, comparer = build("GATConv"), Comparer()
    with gnnaccel.enabled(backend="torch", when="supported"), comparer:
        for nodes in (4, 5, 6, 20, 40, 100, 300, 700):
            layer(graphs.features(nodes), graphs.square(nodes, 30) % nodes)
    assert len(comparer.result.layers) == comparing._KINDS_PER_LAYER


def test_checkpoints_are_not_disturbed(inputs):
    layer, comparer = build("GATConv"), Comparer()
    x = inputs[0].requires_grad_()
    with gnnaccel.enabled(backend="torch", when="supported"), comparer:
        checkpoint(layer, *inputs, use_reentrant=False).sum().backward()
    first, x.grad = x.grad, None
    with gnnaccel.enabled(backend="torch", when="supported"):
        checkpoint(layer, *inputs, use_reentrant=False).sum().backward()
    assert torch.equal(first,
                       x.grad) and [one.verdict for one in comparer.result.layers] == ["same"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_are_compared(inputs, mode):
    with gnnaccel.enabled(backend="torch", when="supported"), Comparer() as comparer, mode():
        build("GATConv")(*inputs)
    (one,) = comparer.result.layers
    assert one.verdict == "same" and [e.name for e in one.errors] == ["out"], str(comparer.result)


def test_what_cannot_be_repeated_is_told_and_the_script_goes_on(inputs, monkeypatch):
    def fails(self, *args, **kwargs):
        raise OSError("no more of this")

    layer = build("GATConv")
    with gnnaccel.enabled(backend="torch", when="supported"), Comparer() as comparer:
        # Of the host's own code alone, and not on the path that is looked at before a layer is
        # taken over.
        monkeypatch.setattr(torch_geometric.nn.MessagePassing, "_index_select_safe", fails)
        assert layer(*inputs).shape == (30, 16)
    (one,) = comparer.result.layers
    assert one.verdict == "not compared" and one.notes == ["OSError: no more of this"]
