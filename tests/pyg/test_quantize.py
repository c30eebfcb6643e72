"""`gnnaccel.quantize` on PyG's layers: what is quantized, what is told, and that all of it goes
back."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, HeteroConv, PNAConv, SAGEConv

import gnnaccel
from gnnaccel.errors import UnknownLayerError
from tests.helpers import relative
from tests.pyg.quantized_nets import KINDS, E, F, H, N, Net, forced, graph, quantized_calls, step  # noqa: F401

def formats(report):
    return {row.name: (row.asked, None if row.reason is None else row.reason[:5])
            for row in report.rows}


# ---- numbers, on every route ----

@pytest.mark.parametrize("form, error", [("int8", 0.02), ("bf16", 0.006)])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_against_the_hosts_own_in_fp64(route, graph, kind, form, error):
    """The result and every gradient of a quantized layer: how far, and in which direction."""
    x, ei = 0.1 * graph[0], graph[1]  # in the middle of GIN's tanh
    layer = KINDS[kind](F, H)
    exact = step(copy.deepcopy(layer).double(), x.double(), ei)
    layer.to(route.device)
    with route.on():
        gnnaccel.quantize(layer, form)
        got = step(layer, x.to(route.device), ei.to(route.device))
        assert quantized_calls(layer) == [1]
    for name, value in exact.items():
        allowed = 4 * error if "att" in name else error  # small differences of large numbers
        assert relative(got[name].cpu(), value) < allowed, name
        assert torch.cosine_similarity(got[name].cpu().double().flatten(), value.flatten(),
                                       0) > 1 - allowed**2, name


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_models_against_the_hosts_own_in_fp64(route, graph, kind):
    """Errors of three layers go through one another; the direction of every gradient stays."""
    x, ei = graph
    model = Net(kind)
    exact = step(copy.deepcopy(model).double(), x.double(), ei)
    model.to(route.device)
    with route.on():
        gnnaccel.quantize(model)
        got = step(model, x.to(route.device), ei.to(route.device))
        assert quantized_calls(model) == [1, 1, 0]
    for name, value in exact.items():
        assert relative(got[name].cpu(), value) < 0.15, name
        assert torch.cosine_similarity(got[name].cpu().double().flatten(), value.flatten(),
                                       0) > 0.99, name


@pytest.mark.long
def test_kernels_and_torch_operations_agree(emulated, graph):
    """To nearest they compute the same."""
    x, ei = graph
    torch.use_deterministic_algorithms(True)
    try:
        for kind in KINDS:
            model = Net(kind)
            with emulated.on():
                gnnaccel.quantize(model)
                kernels = step(model, x, ei)
            with forced():
                plain = step(model, x, ei)
            assert quantized_calls(model) == [2, 2, 0]
            for name, value in plain.items():
                # a tie may round either way
                assert relative(kernels[name], value) < 2e-3, (kind, name)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backward", ["fp32", "bf16", "int8"])
def test_formats_of_the_gradient(graph, backward):
    x, ei = graph
    conv = GCNConv(F, H)
    with forced():
        gnnaccel.quantize(conv, "int8", backward=backward)
        first, second = step(conv, x, ei)["x"], step(conv, x, ei)["x"]
    assert torch.equal(first, second) is (backward == "fp32"), "stochastic rounding draws anew"
    assert gnnaccel.quant_report(conv).rows[0].ran == ("int8"
                                                       if backward == "int8"
                                                       else f"int8/{backward}")


def test_draws_repeat_with_torchs_seed(graph):
    x, ei = graph
    conv, found = GCNConv(F, H), []
    with forced():
        gnnaccel.quantize(conv)
        for seed in (1, 1, 2):
            x_ = x.clone().requires_grad_()
            out = conv(x_, ei)
            torch.manual_seed(seed)
            found.append(torch.autograd.grad(out.square().sum(), x_)[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.long
def test_training_goes_as_far_as_in_fp32(graph):
    x, ei = graph
    y, losses = torch.randint(0, 5, (N,)), {}
    for form in (None, "bf16", "int8"):
        torch.manual_seed(1)
        model = Net("gcn")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        with forced():
            if form:
                gnnaccel.quantize(model, form)
            for _ in range(60):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x, ei), y)
                loss.backward()
                optimizer.step()
        losses[form] = float(loss.detach())
    assert losses[None] < 0.9 and all(abs(losses[form] - losses[None]) < 0.1
                                      for form in losses), losses


# ---- nothing by itself ----

@pytest.mark.parametrize("when", ["profitable", "supported"])
def test_enable_alone_quantizes_nothing(graph, when):
    model = Net()
    with gnnaccel.enabled(when=when, backend="torch"):
        first = model(*graph)
        assert torch.equal(model(*graph), first)
    assert not gnnaccel.quant_report().rows
    assert relative(first.detach(),
                    copy.deepcopy(model).double()(graph[0].double(), graph[1]).detach()) < 1e-6


def test_before_enable_it_warns(graph):
    with pytest.warns(RuntimeWarning, match="takes effect from gnnaccel.enable"):
        gnnaccel.quantize(Net())


def test_a_call_that_gains_nothing_runs_in_fp32(graph):
    model = Net()
    model.convs[1] = GATConv(H, H // 4, heads=4)
    with gnnaccel.enabled():
        gnnaccel.quantize(model)
        for _ in range(5):
            out = model(*graph)
    assert torch.equal(out, model(*graph))
    rows = gnnaccel.quant_report(model).rows
    assert [row.quantized for row in rows] == [0, 0,
                                               0] and all(row.in_fp32 == 5
                                                          for row in rows), "short ways count too"
    assert rows[0].reasons == rows[1].reasons == {"GA607": 5} and gnnaccel.quant_report(
        model).share_in_fp32() == 1.0


# ---- reversible, and nothing on the model ----

def test_state_dict_copies_and_pickles(graph):
    model = Net("gat")
    before = copy.deepcopy(model.state_dict())
    attributes = [sorted(m.__dict__) for m in model.modules()]
    with forced():
        plain = model(*graph)
        gnnaccel.quantize(model)
        quantized = model(*graph)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(*graph), plain), "a copy is an ordinary model"
            assert not gnnaccel.quant_report(other).rows
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k])
                                               and after[k].dtype == before[k].dtype
                                               for k in before)
    assert [sorted(m.__dict__) for m in model.modules()] == attributes
    assert not torch.equal(quantized, plain)


def test_dequantize_restores(graph):
    model = Net()
    with forced():
        plain = model(*graph)
        gnnaccel.quantize(model)
        assert not torch.equal(model(*graph), plain)
        assert gnnaccel.dequantize(model) == 3
        assert torch.equal(model(*graph), plain) and not gnnaccel.quant_report(model).rows
        assert gnnaccel.dequantize(model) == 0


def test_settings_go_with_their_model(graph):
    with forced():
        gnnaccel.quantize(Net())
    assert not gnnaccel.quant_report().rows


def test_quantizing_again_replaces_the_setting(graph):
    model = Net()
    with forced():
        gnnaccel.quantize(model, "int8")
        model(*graph)
        gnnaccel.quantize(model, "bf16")
        model(*graph)
    assert [row.ran for row in gnnaccel.quant_report(model).rows] == ["bf16", "bf16", None]


# ---- which layers ----

def test_the_last_layer_stays_fp32(graph):
    with forced():
        assert formats(gnnaccel.quantize(Net())) == {
            "convs.0": ("int8", None), "convs.1": ("int8", None), "convs.2": ("fp32", "GA602")}


def test_a_layer_by_itself_is_quantized(graph):
    conv = GCNConv(F, H)
    with forced():
        assert formats(gnnaccel.quantize(conv)) == {"GCNConv": ("int8", None)}


def test_filter_and_overrides(graph):
    with forced():
        model = Net("gcn", 4)
        report = gnnaccel.quantize(model, "int8",
                                   filter_fn=lambda module,
                                   name: name != "convs.1" and isinstance(module, GCNConv),
                                   overrides={"convs.2": "bf16", "convs.3": "int8"})
        model(*graph)
    assert formats(report) == {"convs.0": ("int8", None), "convs.1": ("fp32", "GA601"),
                               "convs.2": ("bf16", None), "convs.3": ("int8", None)}
    assert [row.ran for row in gnnaccel.quant_report(model).rows] == ["int8", None, "bf16", "int8"]


def test_the_longest_name_wins(graph):
    with forced():
        report = gnnaccel.quantize(Net(), "fp32", overrides={"convs.1": "int8", "convs": "bf16"})
    assert [row.asked for row in report.rows] == ["bf16", "int8", "bf16"]


def test_what_cannot_be_quantized_says_why(graph):
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = GATv2Conv(F, H), SAGEConv(F, H, aggr="max"), GCNConv(F, H)
            self.d = HeteroConv({("u", "to", "u"): SAGEConv(F, H)})
            self.e = PNAConv(F, H, ["mean", "max"], ["identity"], torch.ones(5))
            self.f, self.g = GCNConv(F, H), GCNConv(H, 3)

    with forced():
        report = gnnaccel.quantize(Mixed())
        reasons = {row.name: row.reason for row in report.rows}
        assert "GATv2Conv" in reasons["a"] and "MaxAggregation" in reasons["b"] and reasons[
            "c"] is None
        assert any(name.startswith("d.convs") and "HeteroConv runs its layers as one" in text
                   for name, text in reasons.items()
                   if text)
        assert reasons["e"].startswith("GA603") and reasons["f"] is None and reasons[
            "g"].startswith("GA602")
        with pytest.raises(ValueError,
                           match="'b' is a SAGEConv, which cannot have int8 rows: the aggregation "
                           "is MaxAggregation"):
            gnnaccel.quantize(Mixed(), overrides={"b": "int8"})


def test_nothing_to_quantize_warns():
    with forced():
        with pytest.warns(RuntimeWarning,
                          match="nothing of Linear is quantized: it has no aggregation layer"):
            gnnaccel.quantize(torch.nn.Linear(2, 2))
        with pytest.warns(RuntimeWarning, match="convs.0: GA602"):
            gnnaccel.quantize(Net(depth=1))


@pytest.mark.parametrize("call, error, text", [
    (lambda m: gnnaccel.quantize(m, "int4"), ValueError, "Did you mean 'int8'"),
    (lambda m: gnnaccel.quantize(m, backward="fp16"), ValueError, "backward='fp16'"),
    (lambda m: gnnaccel.quantize(m, overrides={"conv.1": "int8"}), UnknownLayerError,
     "Did you mean 'convs.1'"),
    (lambda m: gnnaccel.quantize(m, overrides={"head": "int8"}), UnknownLayerError,
     "no aggregation layer in it"),
    (lambda m: gnnaccel.quantize(m, overrides={"convs.1": "in8"}), ValueError,
     "Did you mean 'int8'"),
    (lambda m: gnnaccel.quantize(m, guard={"rate": 1}), ValueError, "guard has no option 'rate'"),
    (lambda m: gnnaccel.quantize("model"), TypeError, "torch.nn.Module"),
    (lambda m: gnnaccel.dequantize(3), TypeError, "torch.nn.Module"),
    (lambda m: gnnaccel.precision("int7").__enter__(), ValueError, "Did you mean 'int8'")])
def test_wrong_arguments(call, error, text):
    with forced(), pytest.raises(error, match=text):
        call(Net())
    assert not gnnaccel.quant_report().rows, "nothing was kept"


# ---- telling ----

def test_records_and_report(graph):
    model = Net()
    with forced(records=20):
        gnnaccel.quantize(model)
        step(model, *graph)
        forward = [r for r in gnnaccel.records() if r["direction"] == "forward"]
    assert [r["storage"] for r in forward] == ["int8", "int8", None]
    assert forward[2]["rejected"][-1]["code"] == "GA602" and "int8 rows" in forward[0]["kernel"]
    report = gnnaccel.quant_report(model)
    assert report.as_dicts()[0]["ran"] == "int8" and 0 < report.rows[
        0].error < 0.02 and report.rows[0].guard == "passed"
    text = str(report)
    assert "convs.0 (GCNConv)" in text and "GA602" in text and "passed" in text


@pytest.mark.long
def test_inference_before_training(graph):
    x, ei = graph
    for kind in KINDS:
        model = Net(kind)
        with forced():
            gnnaccel.quantize(model, guard={"every": 1})
            with torch.inference_mode():
                first = model(x, ei)
            assert torch.equal(first, step(model, x, ei)["out"])
        assert quantized_calls(model) == [2, 2, 0]


def test_autocast_rows_are_quantized_too(route, graph):
    x, ei = (t.to(route.device) for t in graph)
    layer = GCNConv(F, H).to(route.device)
    twin = copy.deepcopy(layer).double()
    exact = twin(x.double(), ei)
    with route.on(), torch.autocast(route.device.type, torch.bfloat16):
        gnnaccel.quantize(layer)
        out = layer(x, ei)
        out.float().square().sum().backward()
    assert quantized_calls(layer) == [1] and relative(out.detach().cpu(),
                                                      exact.detach().cpu()) < 0.03
    exact.square().sum().backward()
    assert torch.cosine_similarity(layer.lin.weight.grad.cpu().double().flatten(),
                                   twin.lin.weight.grad.cpu().flatten(), 0) > 0.999


def test_mini_batches_of_another_graph_each(graph):
    model = Net("sage")
    with forced():
        gnnaccel.quantize(model)
        for seed in range(4):
            torch.manual_seed(seed)
            model(torch.randn(20 + seed, F), torch.randint(0, 20, (2, 100)))
    assert quantized_calls(model) == [4, 4, 0]
