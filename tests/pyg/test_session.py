"""enable() to disable() with the real host: options, rules, counts and records of real calls."""
from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch_geometric.nn
from torch_geometric.nn import GATConv, GATv2Conv

import gnnaccel
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.policy.reasons import KINDS
from tests import probes
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, E, F, N
from tests.pyg.judge import close, took
from tests.pyg.layers import CLASSES, NAMES, build


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GATConv(F, 8, 2), GATConv(16, 8, 2)])
        self.last = GATv2Conv(16, 4)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.last(x, edge_index)


# ---- in and out ----

def test_disable_puts_the_very_functions_back():
    before = {name: cls.__dict__["forward"] for name, cls in CLASSES.items()}
    script, attributes = torch.jit.script, {name: set(vars(cls)) for name, cls in CLASSES.items()}
    for _ in range(2):
        gnnaccel.enable()
        assert all(cls.__dict__["forward"] is not before[name] for name, cls in CLASSES.items())
        gnnaccel.disable()
        assert all(cls.__dict__["forward"] is before[name]
                   for name, cls in CLASSES.items()) and torch.jit.script is script
    assert {name: set(vars(cls)) for name, cls in CLASSES.items()} == attributes


def test_wrappers_look_like_the_originals():
    import inspect
    before = {name: (inspect.signature(cls.forward), cls.forward.__doc__, cls.forward.__qualname__)
              for name, cls in CLASSES.items()}
    gnnaccel.enable()
    for name, cls in CLASSES.items():
        assert (inspect.signature(cls.forward), cls.forward.__doc__,
                cls.forward.__qualname__) == before[name]


@pytest.mark.parametrize("when", ["before", "after"])
def test_before_or_after_the_model(route, inputs, when):
    model = Net().to(route.device) if when == "before" else None
    gnnaccel.enable(backend=route.backend, when="supported")
    model = model or Net().to(route.device)
    got = model(*inputs)
    took(route, 3)
    gnnaccel.disable()
    gnnaccel.reset_stats()
    assert close(model(*inputs), got) and gnnaccel.stats() == {}


def test_backward_after_the_block_and_after_disable(route, inputs):
    layer, (x, ei) = build("GATConv", device=route.device), inputs
    expected, = torch.autograd.grad(layer(x.requires_grad_(), ei).pow(2).sum(), x)
    with route.on():
        inside = layer(x, ei)
    gnnaccel.enable(backend=route.backend, when="supported")
    enabled = layer(x, ei)
    gnnaccel.disable()
    for out in (inside, enabled):
        assert close(torch.autograd.grad(out.pow(2).sum(), x)[0], expected)


@pytest.mark.long
def test_a_host_imported_after_enable():
    code = ("import sys, gnnaccel; gnnaccel.enable(when='supported', "
            "backend='torch'); assert 'torch_geometric' not in sys.modules\n"
            "import torch; from torch_geometric.nn import GATConv\n"
            "GATConv(4, 2)(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))\n"
            "assert gnnaccel.stats()['GATConv']['routes'] == {'torch': 1}, gnnaccel.stats()\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_status(route, inputs):
    assert gnnaccel.status()["enabled"] is False and gnnaccel.status()["backend"] is None
    layer = build("GATConv", device=route.device)
    with route.on(on_fallback="native"):
        layer(*inputs)
        layer(*inputs, return_attention_weights=True)
        found = gnnaccel.status()
    assert found["enabled"] and found["config"]["backend"] == route.backend and found["versions"][
        "torch_geometric"]
    assert found["counts"] == {"calls": 2, "routes": {route.backend: 1, "native": 1}}
    patched = found["hosts"]["pyg"]["patched"]
    assert {path.rsplit(".", 2)[-2] for path in patched if path.endswith(".forward")} >= set(NAMES)
    assert not found["hosts"]["pyg"]["pending"] and found["hosts"]["pyg"]["error"] is None


# ---- backends and profit ----

def test_backend_auto_takes_the_kernels_where_they_run(route, inputs):
    layer = build("GATConv", device=route.device)
    with gnnaccel.enabled(when="supported"):
        layer(*inputs)
    assert list(gnnaccel.stats()["GATConv"]["routes"]) == (["torch"]
                                                           if route.name == "torch" else ["cuda"])


def test_backend_cuda_without_a_gpu():
    layer = build("GATConv")
    with gnnaccel.enabled(backend="cuda", when="supported"):
        layer(graphs.features(), graphs.square())
    entry = gnnaccel.stats()["GATConv"]
    assert entry["routes"] == {"native": 1} and set(entry["reasons"]) <= {"GA401", "GA406"}


@pytest.mark.parametrize("name", NAMES)
def test_on_the_cpu_only_what_was_measured_to_pay(name, monkeypatch):
    from gnnaccel.dispatch.plan import cost, planner
    rates = dict(cost.constants())
    layer, call = build(name), (graphs.features(), graphs.square())
    monkeypatch.setattr(cost, "constants", lambda: {**rates, "cpu": {}})
    planner.forget()
    with gnnaccel.enabled():
        assert torch.equal(layer.eval()(*call), layer(*call))
    assert gnnaccel.stats()[name]["routes"] == {"native": 2} and set(
        gnnaccel.stats()[name]["reasons"]) <= {"GA301", "GA401"}


@pytest.mark.parametrize("how", ["warn", "raise"])
def test_on_fallback(route, inputs, how):
    layer, plain = build("GATConv", aggr="max",
                         device=route.device), build("GATConv", device=route.device)
    with route.on(on_fallback=how):
        if how == "raise":
            with pytest.raises(gnnaccel.errors.FallbackError, match=r"GA201.*aggr='add'"):
                layer(*inputs)
        else:
            probes.warn_again()
            with pytest.warns(RuntimeWarning,
                              match="GATConv runs natively: GATConv: GA201") as caught:
                for _ in range(3):
                    layer(*inputs)
            ours = [warning for warning in caught if "gnnaccel" in str(warning.message)]
            assert len(ours) == 1 and ours[0].filename == __file__
        plain(*inputs)
        gnnaccel.exclude(plain)
        plain(*inputs)  # the user's own wish is no fallback


# ---- rules ----

def routes_of(model, inputs) -> list[str]:
    """Of the model's three layers in the order they ran."""
    gnnaccel.clear_records()
    model(*inputs)
    return [r["route"] for r in gnnaccel.records() if r["direction"] == "forward"]


@pytest.mark.parametrize("rule,native", [
    (lambda m: gnnaccel.exclude(m.convs[0]), [0]), (lambda m: gnnaccel.exclude(m.convs), [0, 1]),
    (lambda m: gnnaccel.exclude("convs.1", model=m), [1]),
    (lambda m: gnnaccel.exclude(r"re:convs\.\d", model=m), [0, 1]),
    (lambda m: gnnaccel.exclude("GATConv"), [0, 1]), (lambda m: gnnaccel.exclude(GATv2Conv), [2]),
    (lambda m: gnnaccel.exclude("torch_geometric.nn.GATConv"), [0, 1]),
    (lambda m: (gnnaccel.exclude("GATConv"), gnnaccel.include(m.convs[1])), [0]),
    (lambda m: (gnnaccel.name_layers(m), gnnaccel.exclude("last")), [2])],
    ids=["instance", "parent", "name", "pattern", "class name", "class", "dotted", "precedence",
         "given name"])
def test_rules(route, inputs, rule, native):
    model = Net().to(route.device)
    gnnaccel.enable(backend=route.backend, when="supported", on_fallback="raise", records=20)
    assert routes_of(model, inputs) == [route.backend] * 3
    rule(model)
    assert routes_of(model,
                     inputs) == ["native" if i in native else route.backend for i in range(3)]
    codes = [r["rejected"][0]["code"] for r in gnnaccel.records() if r["route"] == "native"]
    assert codes == ["GA101"] * len(native)
    gnnaccel.reset_rules()
    assert routes_of(model, inputs) == [route.backend] * 3


def test_lists_of_enable(route, inputs):
    model = Net().to(route.device)
    gnnaccel.enable(backend=route.backend, when="supported", records=20, include=["GATv2Conv"])
    assert routes_of(model, inputs) == ["native", "native", route.backend]
    assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA102": 2}
    gnnaccel.enable(include=[], exclude=[GATv2Conv])
    assert routes_of(model, inputs) == [route.backend, route.backend, "native"]
    with gnnaccel.disabled():
        assert routes_of(model, inputs) == []


def test_an_attribute_of_the_class(route, inputs):
    class Mine(GATConv):
        __gnnaccel__ = False

    layer = Mine(F, 8, 2).to(route.device)
    with route.on():
        layer(*inputs)
    assert gnnaccel.stats()["Mine"]["reasons"] == {"GA103": 1}


# ---- records ----

def test_records_of_a_step(route, inputs):
    model = Net().to(route.device)
    gnnaccel.name_layers(model)
    with route.on(records=50):
        model(*inputs).sum().backward()
    found = gnnaccel.records()
    for record in found:
        records.validate(record)
        assert record["host"] == "pyg" and record["route"] == route.backend and record[
            "dtype"] == record["out_dtype"] == "float32"
        assert record["training"] and record["grad"] and not record["capturing"] and record[
            "autocast"] is None
    forward, backward = ([r for r in found if r["direction"] == d] for d in ("forward", "backward"))
    assert [r["name"] for r in forward] == ["convs.0", "convs.1",
                                            "last"] and [r["cache"]
                                                         for r in forward] == ["miss", "hit", "hit"]
    assert [r["forward_call"] for r in backward] == [r["call"] for r in reversed(forward)]
    assert all(r["graph"]["num_edges"] == E and r["graph"]["num_src"] == r["graph"]["num_dst"] == N
               for r in forward)
    assert all(r["graph"]["self_loops"] == N and r["overhead_us"] > 0 for r in forward)
    assert all(item["code"] in KINDS for r in found
               for item in r["rejected"]) and all(r["rejected"] for r in forward)
    assert len({r["call"] for r in found}) == 6


def test_records_of_native_calls(route, inputs):
    layer = build("GATConv", device=route.device, edge_dim=EDGE)
    with route.on(on_fallback="native", records=50):
        layer(*inputs, return_attention_weights=True)
        layer.eval()(inputs[0].double().float(), inputs[1][:, :0])
        gnnaccel.exclude(layer)
        layer(*inputs)
    found = gnnaccel.records()
    [records.validate(record) for record in found]
    assert [r["rejected"][0]["code"] for r in found] == ["GA208", "GA303", "GA101"]
    assert all(r["route"] == "native" and r["kernel"] is None
               for r in found) and [r["training"] for r in found] == [True, False, False]


def test_a_second_backward_and_second_derivatives_are_recorded(route, inputs):
    layer, (x, ei) = build("GATv2Conv", device=route.device), inputs
    with route.on(records=50):
        out = layer(x.requires_grad_(), ei)
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        grad, = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        grad.sum().backward()
    found = gnnaccel.records()
    [records.validate(record) for record in found]
    assert [r["direction"] for r in found][:3] == ["forward", "backward", "backward"]
    assert {r["forward_call"] for r in found[1:]} == {found[0]["call"]}
    assert found[2]["kernel"] == "torch backend"


def test_listening_changes_no_result(route, inputs):
    layer = build("TransformerConv", device=route.device)
    with route.on():
        expected = layer(*inputs)
    with route.on(records=5):
        assert torch.equal(layer(*inputs), expected)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_of_records_under_autocast(route, inputs, name):
    layer = build(name, device=route.device).eval()
    with route.on(records=5), torch.autocast(route.device.type, torch.bfloat16):
        out = layer(*inputs)
    record = gnnaccel.records()[-1]
    records.validate(record)
    assert record["autocast"] == "bfloat16" and record["out_dtype"] in (
        str(out.dtype).removeprefix("torch."), "bfloat16")
    assert record["dtype"] == ("float32" if name == "AGNNConv" else "bfloat16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, dict(bias=False, concat=False)], ids=str)
def test_autocast(route, inputs, name, dtype, options):
    layer = build(name, device=route.device, **({} if name == "AGNNConv" else options)).eval()
    with torch.autocast(route.device.type, dtype):
        native = layer(*inputs)
    with route.on(), torch.autocast(route.device.type, dtype):
        got = layer(*inputs)
    took(route, 1)
    exact = layer(*inputs)
    assert got.dtype == native.dtype
    assert (got - exact).norm() < 2 * (native
                                       - exact).norm() + 2 * torch.finfo(dtype).eps * exact.norm()


def test_the_hosts_public_names_are_the_patched_classes():
    gnnaccel.enable()
    for name, cls in CLASSES.items():
        assert getattr(torch_geometric.nn, name) is cls and hasattr(cls.forward, "__wrapped__")
