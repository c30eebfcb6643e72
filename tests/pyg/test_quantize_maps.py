"""Linear maps of quantized layers, and Tango's primitives and rules by name: what runs inside one
layer's step."""
from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, GraphConv, SAGEConv

import gnnaccel
from gnnaccel.cuda.attention import additive_backward
from gnnaccel.cuda.int8 import int8_gemm, quantize
from gnnaccel.cuda.int8.quantize import Int8Rows
from gnnaccel.cuda.traverse import aggregate
from gnnaccel.dispatch.quantized import rows
from tests.helpers import relative
from tests.pyg.quantized_nets import F, H, Net, forced, graph, step  # noqa: F401


def maps(report):
    return {row.name: (row.asked, row.ran, row.quantized) for row in report.maps}


class Weighted(torch.nn.Module):
    """Sums with a weight per edge that has a gradient, and two linear maps."""

    def __init__(self, edges):
        super().__init__()
        self.conv, self.weight = GraphConv(F, H), torch.nn.Parameter(torch.rand(edges))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, self.weight)


@pytest.fixture
def seen(monkeypatch):
    """Calls of the int8 kernels, by primitive."""
    found = Counter()

    def spy(owner, attribute, name, operands):
        native = getattr(owner, attribute)

        def called(*args, **kwargs):
            found[name] += all(type(args[i]) is Int8Rows for i in operands)
            return native(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, called)

    spy(int8_gemm, "product", "GEMM", (0, 1))
    spy(aggregate, "forward", "SPMM", (2,))
    spy(aggregate, "edge_dot", "SDDMM", (2, 3))
    spy(quantize, "int8_rows", "quantization", ())
    return found


# ---- Tango's primitives ----

def test_quantized_gemm_spmm_and_sddmm_with_reuse_between_them(kernels, graph, seen):
    """One step of out = W1 sum_e w_e x_j + W2 x_i, all in int8 but the weights' gradients."""
    x, ei = graph
    model = Weighted(ei.shape[1])
    exact = step(copy.deepcopy(model).double(), x.double(), ei)
    model.to(kernels.device)
    with kernels.on():
        gnnaccel.quantize(model, overrides={"conv": "int8"}, guard=False)
        got = step(model, x.to(kernels.device), ei.to(kernels.device))
    assert seen["GEMM"] == 4, "two maps, forward and the gradients of their inputs"
    assert seen["SPMM"] == 2, "the sum, and its gradient"
    assert seen["SDDMM"] == 1, "the edge weights' gradient"
    # forward: x for the sum and a map, the sum, two weights; backward: the result's gradient for
    # both maps, the sum's for its two
    # products, two weights by input channel
    assert seen["quantization"] == 4 + 4
    for name, value in exact.items():
        assert relative(got[name].cpu(), value) < 0.03, name
        assert torch.cosine_similarity(got[name].cpu().double().flatten(), value.flatten(),
                                       0) > 0.999, name


def test_quantized_sddmm_of_attention(emulated, graph, monkeypatch):
    """The scores' gradient is made of inner products of the stored values and the stored
    gradient."""
    found, native = [], additive_backward.backward

    def spy(*args, **kwargs):
        found.extend(type(args[i]) for i in (4, 7))
        return native(*args, **kwargs)

    monkeypatch.setattr(additive_backward, "backward", spy)
    layer = GATConv(F, H // 4, heads=4)
    with emulated.on():
        gnnaccel.quantize(layer)
        step(layer, *graph)
    assert found == [Int8Rows, Int8Rows]


# ---- Tango's rules ----

def test_gradients_are_rounded_stochastically_and_features_to_nearest(graph, monkeypatch):
    draws, native = [], rows.store

    def spy(x, form, draw, *more):
        draws.append(draw)
        return native(x, form, draw, *more)

    monkeypatch.setattr(rows, "store", spy)
    model = GCNConv(F, H)
    with forced():
        gnnaccel.quantize(model, guard=False)
        out = model(graph[0].requires_grad_(), graph[1])
        assert draws == [False] * 3, "x, the weight, x W"
        draws.clear()
        out.sum().backward()
    assert draws == [True, True,
                     False], "the result's gradient, that of x W, and the weight by input channel"


def test_weight_gradients_are_fp32(graph):
    """They are those of the host for the very gradient that reaches the map."""
    layer, reached = SAGEConv(F, H), []
    with forced():
        gnnaccel.quantize(layer)
        out = layer(*graph)
        out.register_hook(lambda g: reached.append(g))
        out.square().sum().backward()
    exact = reached[0].double().t() @ graph[0].double()
    assert relative(layer.lin_r.weight.grad,
                    exact) < 1e-6 and layer.lin_r.weight.grad.dtype is torch.float32


def test_the_layer_before_the_softmax_and_logits_of_attention_keep_their_maps(graph):
    with forced():
        assert set(maps(gnnaccel.quantize(Net("sage")))) == {f"convs.{i}.{lin}" for i in (0, 1)
                                                             for lin in ("lin_l", "lin_r")}
        assert not gnnaccel.quantize(Net("gat")).maps, "scores are made of what GAT's map gives"
        assert not gnnaccel.quantize(Net("gcn"), "bf16").maps


# ---- which maps ----

def test_maps_by_name_and_back(graph):
    model = Net("gcn")
    with forced():
        plain = model(*graph)
        report = gnnaccel.quantize(model, overrides={"convs.1.lin": "fp32", "convs.2": "int8"})
        assert maps(report) == {"convs.0.lin": ("int8", None, 0), "convs.2.lin": ("int8", None, 0)}
        step(model, *graph)
        report = gnnaccel.quant_report(model)
        assert [row.quantized for row in report.maps] == [1,
                                                          1] and report.as_dicts()[-1][
                                                              "layer"] == "Linear"
        assert 0 < report.maps[0].error < 0.03 and "convs.0.lin (Linear)" in str(report)
        with gnnaccel.precision("fp32"):
            assert torch.equal(model(*graph), plain)
        gnnaccel.quantize(model, "bf16")
        assert not gnnaccel.quant_report(model).maps, "the new setting has none"
        gnnaccel.quantize(model)
        with gnnaccel.precision("bf16"):
            model(*graph)
        assert gnnaccel.quant_report(model).maps[0].reasons == {"GA603": 1}
        assert gnnaccel.dequantize(model) == 3 and torch.equal(model(*graph), plain)
        with pytest.raises(ValueError,
                           match="'convs.0.lin' is a linear map, which can be 'int8' or 'fp32'"):
            gnnaccel.quantize(model, overrides={"convs.0.lin": "bf16"})


def test_what_keeps_a_map_fp32(graph):
    x, ei = graph
    model = Net("gcn")
    with gnnaccel.enabled(when="supported", backend="torch"):
        gnnaccel.quantize(model)
        with torch.autocast("cpu", torch.bfloat16):
            model(x, ei)
        assert [row.reasons for row in gnnaccel.quant_report(model).maps] == [{"GA603": 1}] * 2
    with gnnaccel.enabled():
        gnnaccel.quantize(model)
        out = model(x, ei)
        assert [row.reasons for row in gnnaccel.quant_report(model).maps] == [{"GA604": 1}] * 2
    assert torch.equal(out, model(x, ei))
    with gnnaccel.enabled(when="supported", backend="torch"):
        gnnaccel.exclude(model.convs[0])
        gnnaccel.quantize(model)
        model(x, ei)
        assert [row.reasons
                for row in gnnaccel.quant_report(model).maps] == [{"GA607": 1},
                                                                  {}], "its layer is excluded"


def test_features_that_negate_their_numbers_keep_a_map_fp32(kernels, graph):
    """Their memory holds the opposites; the call before was in int8."""
    x, ei = (t.to(kernels.device) for t in graph)
    model = GraphConv(F, H).to(kernels.device)
    expected = model(-x, ei)
    with kernels.on(on_fallback="native"):
        gnnaccel.quantize(model, guard=False)
        model(x, ei)
        found = model(torch._neg_view(x), ei)
        assert 1 in [row.quantized for row in gnnaccel.quant_report(model).maps]
    assert relative(found, expected) < 0.05


def test_the_guard_of_a_map(graph, caplog):
    """A channel a thousand times the others: all else of its rows becomes zero."""
    x, ei = graph[0].clone(), graph[1]
    x[:, 0] *= 1000
    model = Net("gcn")
    with forced(on_fallback="native"):
        gnnaccel.quantize(model, guard={"every": 1})
        for _ in range(3):
            model(x, ei)
    row = gnnaccel.quant_report(model).maps[0]
    assert row.guard == "failed" and row.in_fp32 == 2 and "outliers" in row.reason and "convs.0.lin goes back" in caplog.text


def test_without_quantize_nothing_is_asked(graph):
    model = Net("sage")
    with forced(on_fallback="native"), gnnaccel.precision("int8"):
        for _ in range(3):
            model(*graph)
    assert not gnnaccel.quant_report(model).maps, "a block says nothing of maps"


def test_a_map_gives_the_rows_that_are_gathered_next(kernels, graph, seen):
    """GCN: out = A (x W). From the second call on the product is stored where it is made, and comes
    out the same."""
    model, found, graph = GCNConv(F,
                                  H).to(kernels.device), [], [t.to(kernels.device) for t in graph]
    with kernels.on():
        gnnaccel.quantize(model, guard=False)
        for stored in (3, 2, 2):  # x, W, x W
            seen.clear()
            with torch.no_grad():
                found.append(model(*graph))
            assert seen["quantization"] == stored and seen["GEMM"] == seen["SPMM"] == 1
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
