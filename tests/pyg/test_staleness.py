"""A repeated call takes a short way. Whatever changes between two otherwise equal calls has to be
seen."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, MaxAggregation

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F, N
from tests.pyg.judge import as_native, close, spread, took
from tests.pyg.layers import CLASSES, NAMES, build
from tests.staleness import refused

SETTINGS = {
    "GATConv": dict(concat=False, negative_slope=0.7, add_self_loops=False, bias=None),
    "GATv2Conv": dict(concat=False, negative_slope=0.7, add_self_loops=False, bias=None),
    "TransformerConv": dict(concat=False, root_weight=False),
    "AGNNConv": dict(add_self_loops=False),
    "SuperGATConv": dict(concat=False, negative_slope=0.7, add_self_loops=False, bias=None,
                         attention_type="SD"),
}


def warmed(route, layer, inputs):
    """The layer after calls that leave whatever a repeated call reuses."""
    for _ in range(3):
        layer(*inputs)
    took(route, 3)
    gnnaccel.reset_stats()
    return layer


@pytest.mark.parametrize("name,setting",
                         [(name, setting) for name, found in SETTINGS.items() for setting in found])
def test_settings_of_the_layer(route, inputs, name, setting):
    layer = build(name, device=route.device).eval()
    with route.on():
        warmed(route, layer, inputs)
        if setting == "concat":
            layer.bias = None
            layer.lin_skip = torch.nn.Linear(F, 8, device=route.device)
        setattr(layer, setting, SETTINGS[name][setting])
        as_native(lambda: layer(*inputs))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "AGNNConv"])
def test_training_mode_and_dropout(route, inputs, name):
    layer = build(name, device=route.device, dropout=1.0).eval()
    with route.on():
        warmed(route, layer, inputs)
        assert not close(layer(*inputs), layer.train()(*inputs), 0.01)
        assert close(layer.eval()(*inputs), layer(*inputs), 1e-6)
        layer.train().dropout = 0.0
        assert close(layer(*inputs), layer.eval()(*inputs), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_replaced_and_changed(route, inputs, name):
    layer = build(name, device=route.device).eval()
    with route.on():
        warmed(route, layer, inputs)
        layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})
        as_native(lambda: layer(*inputs))
        for owner in list(layer.modules()):
            for key, value in list(owner.named_parameters(recurse=False)):
                setattr(owner, key, torch.nn.Parameter(torch.randn_like(value)))
        as_native(lambda: layer(*inputs))
        layer.reset_parameters()
        as_native(lambda: layer(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_wanted_later(route, inputs, name):
    layer, (x, ei) = build(name, device=route.device).eval().requires_grad_(False), inputs
    with route.on():
        warmed(route, layer, inputs)
        assert not layer(x, ei).requires_grad
        x.requires_grad_()
        grad, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
        with torch.no_grad():
            assert not layer(x, ei).requires_grad
        with gnnaccel.disabled():
            expected, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
        assert close(grad, expected)
        layer.requires_grad_()
        layer(x.detach(), ei).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


CAUSES = {
    "message hook": ("GA501",
                     lambda layer: layer.register_message_forward_hook(lambda m, i, o: o * 2)),
    "aggregation hook": ("GA501",
                         lambda layer: layer.aggr_module.register_forward_hook(lambda m, i,
                                                                               o: o * 2)),
    "aggregation": ("GA201", lambda layer: setattr(layer, "aggr_module", MaxAggregation())),
    "method": ("GA205", lambda layer: setattr(layer, "message", lambda x_j, alpha: x_j)),
    "rule": ("GA101", gnnaccel.exclude),
    "class": ("GA205", lambda layer: setattr(layer, "__class__", Other)),
}


class Other(GATConv):
    def message(self, x_j, alpha):
        return x_j * alpha.unsqueeze(-1) * 2


@pytest.mark.parametrize("what", list(CAUSES))
def test_causes_that_come_later(route, inputs, what):
    layer = build("GATConv", device=route.device).eval()
    code, change = CAUSES[what]
    with route.on():
        warmed(route, layer, inputs)
        change(layer)
    with route.on(on_fallback="native"):
        as_native(lambda: layer(*inputs), 0.0)
    assert gnnaccel.stats()[type(layer).__name__] == {"calls": 1, "routes": {"native": 1},
                                                      "reasons": {code: 1}}


def test_an_aggregation_of_another_class(route, inputs):
    layer = build("GATConv", device=route.device).eval()
    with route.on(on_fallback="native"):
        warmed(route, layer, inputs)
        layer.aggr_module.__class__ = MaxAggregation
        as_native(lambda: layer(*inputs), 0.0)


def test_causes_that_come_later_and_go(route, inputs):
    layer, (x, ei) = build("GATConv", device=route.device).eval(), inputs
    with route.on(on_fallback="native"):
        expected = warmed(route, layer, inputs)(x, ei)
        handle = layer.register_message_forward_hook(lambda m, i, o: o * 2)
        assert not close(layer(x, ei), expected, 0.01)
        handle.remove()
        assert close(layer(x, ei), expected, 1e-6)
        torch.func.grad(lambda x: layer(x, ei).sum())(x)
        assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA501": 1, "GA405": 1}
        gnnaccel.exclude("GATConv")
        layer(x, ei)
        gnnaccel.reset_rules()
        layer(x, ei)
    assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 3, route.backend: 3}


@pytest.mark.long
@pytest.mark.parametrize("part", ["lin_key", "lin_value", "lin_query", "lin_skip"])
def test_hooks_on_maps_that_come_later(route, inputs, part):
    layer = build("TransformerConv", heads=1, device=route.device).eval()
    with route.on():
        warmed(route, layer, inputs)
        getattr(layer, part).register_forward_hook(lambda m, i, o: o * 2)
        as_native(lambda: layer(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_other_inputs(route, inputs, name):
    layer, (x, ei) = build(name, device=route.device).eval(), inputs
    with route.on():
        warmed(route, layer, inputs)
        as_native(lambda: layer(x * 2, ei))
        as_native(lambda: layer(torch.cat([x, x]), ei))
        as_native(lambda: layer(x, ei.flip(1).contiguous()))
        if name != "TransformerConv":  # the host's own refuses int32
            as_native(lambda: layer(x, ei.int()))
        with torch.inference_mode():
            as_native(lambda: layer(x, ei))
            as_native(lambda: layer(x, ei.clone()))
        ei[0, :9] = (ei[0, :9] + 1) % N
        as_native(lambda: layer(x, ei))
        ei.data = graphs.square().to(ei.device)
        as_native(lambda: layer(x, ei))
        ei.set_(graphs.square(edges=70).to(ei.device))
        as_native(lambda: layer(x, ei))


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_that_change(route, inputs, name):
    layer, (x, ei) = build(name, device=route.device).eval(), inputs
    with route.on():
        warmed(route, layer, inputs)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            layer.to(dtype)
            as_native(lambda dtype=dtype: layer(x.to(dtype), ei), 0.03)
        with torch.autocast(route.device.type, torch.bfloat16):
            as_native(lambda: layer(x, ei), 0.03)
            with torch.autocast(route.device.type, enabled=False):
                as_native(lambda: layer(x, ei))


@pytest.mark.long
def test_a_parameter_of_another_dtype_in_the_same_object(route, inputs):
    """Module.to changes parameters in place; the dtype of the host's result hangs on it."""
    layer, (x, ei) = build("AGNNConv", device=route.device), (inputs[0].half(), inputs[1])
    with route.on():
        warmed(route, layer, (x, ei))
        assert layer(x, ei).dtype == torch.float32
        layer.half()
        as_native(lambda: layer(x, ei), 0.01)


def test_deterministic_mode_and_options(route, inputs):
    layer = build("GATv2Conv", device=route.device).eval()
    with route.on():
        warmed(route, layer, inputs)
        torch.use_deterministic_algorithms(True)
        try:
            as_native(lambda: layer(*inputs))
        finally:
            torch.use_deterministic_algorithms(False)
    with gnnaccel.enabled(include=["GATConv"], when="supported"):
        layer(*inputs)
    assert gnnaccel.stats()["GATv2Conv"]["reasons"] == {"GA102": 1}


@pytest.mark.parametrize("name", NAMES)
def test_copies_have_their_own_memory(route, inputs, name):
    import copy
    layer = build(name, device=route.device).eval()
    with route.on():
        warmed(route, layer, inputs)
        twin = copy.deepcopy(layer)
        spread(twin).load_state_dict({k: torch.randn_like(v) for k, v in twin.state_dict().items()})
        as_native(lambda: twin(*inputs))
        as_native(lambda: layer(*inputs))
    assert type(twin) is CLASSES[name]


@pytest.mark.long
@pytest.mark.parametrize("fill", ["mean", 1.5])
def test_edges_of_an_edge_gat_edited_in_deterministic_mode_under_autocast(route, fill):
    """Another graph, checkpoints and edits in place between calls. A slope of 1: next to the kink
    of leaky_relu bf16 decides about the slope, and whichever rounding differs, ours or the host's,
    gives other gradients."""
    layer = spread(GATConv(F, 8, edge_dim=3, fill_value=fill, negative_slope=1.0)).to(route.device)

    def results(x, edges, attr):
        x, attr = (t.detach().clone().requires_grad_() for t in (x, attr))
        with torch.autocast(route.device.type, torch.bfloat16):
            out = layer(x, edges, attr)
        return [out, *torch.autograd.grad(out.square().sum(), [x, attr, *layer.parameters()])]

    def agree(x, edges, attr):
        with gnnaccel.disabled():
            native = results(x, edges.clone(), attr)
        for _ in range(2):
            for ours, host in zip(results(x, edges, attr), native):
                least = 1e-2 * max(t.norm() for t in native)
                assert (ours - host).norm() <= 0.05 * max(host.norm(), least)

    with route.on():
        for deterministic in (False, True, False):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            try:
                for nodes in (N, 7):
                    x, edges = route.put(torch.randn(nodes, F), torch.randint(0, nodes, (2, 60)))
                    attr = torch.randn(60, 3).to(route.device)
                    agree(x, edges, attr)
                    checkpoint(layer, x.clone().requires_grad_(), edges, attr,
                               use_reentrant=True).sum().backward()
                    for edit in (lambda: edges.add_(1).remainder_(nodes),
                                 lambda: edges[:, 4].fill_(2), lambda: edges[0].fill_(1)):
                        edit()
                        agree(x, edges, attr)
            finally:
                torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", SETTINGS)
def test_none_after_edges_that_are_gone(route, inputs, name):
    """None is no tensor that has died: the host's own error comes."""
    x, edge_index = inputs
    layer = build(name, device=route.device).eval()
    with route.on(on_fallback="native"):
        for _ in range(3):
            edges = edge_index.clone()
            layer(x, edges)
            layer(x, edges)
        del edges
        refused(layer, (x, None))
        as_native(lambda: layer(x, edge_index))
