"""What has to stay with the host's own code: each cause with its reason, the host's own result and
the host's own errors."""
from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch_geometric.nn import AGNNConv, FiLMConv, GATConv, SumAggregation

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F, M, N
from tests.pyg.judge import close, native_because, took
from tests.pyg.layers import NAMES, build


# ---- the layer ----

@pytest.mark.parametrize("kind", ["propagate", "message", "aggregate", "edge_update"])
@pytest.mark.parametrize("when", ["_pre", ""])
def test_message_passing_hooks(route, inputs, kind, when):
    layer, log = GATConv(F, 8, 2).to(route.device), []
    handle = getattr(layer, f"register_{kind}_forward{when}_hook")(lambda *args: log.append(1))
    native_because(route, "GA501", lambda: layer(*inputs))
    assert len(log) == 2
    handle.remove()
    gnnaccel.reset_stats()
    with route.on():
        layer(*inputs)
    took(route, 1)


@pytest.mark.parametrize("register",
                         ["register_forward_hook", "register_forward_pre_hook",
                          "register_full_backward_hook"])
def test_hooks_of_the_aggregation(route, inputs, register):
    layer = GATConv(F, 8, 2).to(route.device)
    getattr(layer.aggr_module, register)(lambda *args: None)
    native_because(route, "GA501", lambda: layer(*inputs))


@pytest.mark.long
def test_explaining_and_decomposed(route, inputs):
    layer = GATConv(F, 8, 2).to(route.device)
    layer.explain, layer._edge_mask, layer._apply_sigmoid = (True,
                                                             torch.ones(graphs.E + N,
                                                                        device=route.device), False)
    layer._loop_mask = inputs[1][0] != inputs[1][1]
    layer._edge_mask = layer._edge_mask[:graphs.E]
    native_because(route, "GA502", lambda: layer(*inputs))
    layer.explain = None
    with route.on():
        layer(*inputs)
    parts = AGNNConv(decomposed_layers=2).to(route.device)
    native_because(route, "GA503", lambda: parts(*inputs), "AGNNConv")


class Doubled(GATConv):
    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha)


class Renamed(GATConv):
    """Overrides nothing that computes."""

    def extra(self):
        return 1


class Later(GATConv):
    """A forward of its own, around the host's."""

    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


@pytest.mark.long
def test_subclasses(route, inputs):
    doubled = Doubled(F, 8, 2).to(route.device)
    expected = doubled(*inputs)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        got = doubled(*inputs)
    # the messages within the layer's own code may still be read
    assert close(got, expected) and gnnaccel.stats()["Doubled"]["reasons"]["GA205"] == 1
    for layer in (Renamed(F, 8, 2).to(route.device), Later(F, 8, 2).to(route.device)):
        expected = layer(*inputs)
        gnnaccel.reset_stats()
        with route.on():
            got = layer(*inputs)
        assert gnnaccel.stats()[type(layer).__name__]["routes"] == {route.backend: 1} and close(got, expected)


@pytest.mark.parametrize("method", ["message", "edge_update", "aggregate", "update"])
def test_a_method_of_the_object(route, inputs, method):
    layer = GATConv(F, 8, 2).to(route.device)
    original = getattr(layer, method)
    setattr(layer, method, lambda *args, **kwargs: original(*args, **kwargs) * 2)
    native_because(route, "GA205", lambda: layer(*inputs))


@pytest.mark.parametrize("aggr", ["mean", "max", ["add", "max"], SumAggregation()], ids=str)
def test_aggregations(route, inputs, aggr):
    layer = GATConv(F, 8, 2, aggr=aggr).to(route.device)
    if not isinstance(aggr, SumAggregation):
        if isinstance(aggr, list):
            layer.concat, layer.bias = False, None
        native_because(route, "GA201", lambda: layer(*inputs))
        return
    expected = layer(*inputs)
    with route.on():
        assert close(layer(*inputs), expected)


@pytest.mark.long
def test_flow_and_node_dim(route, inputs):
    turned = FiLMConv(F, 8, 2, flow="target_to_source").to(route.device)
    types = torch.arange(inputs[1].shape[1], device=route.device) % 2
    native_because(route, "GA202", lambda: turned(*inputs, types), "FiLMConv")
    layer = build("AGNNConv", device=route.device)
    layer.node_dim = 0
    native_because(route, "GA202", lambda: layer(*inputs), "AGNNConv")


# ---- the arguments ----

@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_torch_sparse_adjacency(route, inputs, layout):
    layer, (x, ei) = GATConv(F, 8, 2, add_self_loops=False).to(route.device), inputs
    dense = torch.zeros(N, N, device=route.device)
    dense[ei[1], ei[0]] = 1.0
    adjacency = {"coo": dense.to_sparse_coo, "csr": dense.to_sparse_csr}[layout]()
    native_because(route, "GA204", lambda: layer(x, adjacency))


@pytest.mark.parametrize("name", NAMES)
def test_float64(route, inputs, name):
    layer, x = build(name, device=route.device).double().eval(), inputs[0].double()
    if route.backend == "cuda":
        native_because(route, "GA203", lambda: layer(x, inputs[1]), name)
        return
    expected = layer(x, inputs[1])
    with route.on():
        got = layer(x, inputs[1])
    assert got.dtype == torch.float64 and close(got, expected, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float64_under_autocast(route, inputs, name):
    """Autocast leaves float64 alone."""
    layer, x = build(name, device=route.device).double().eval(), inputs[0].double()
    with torch.autocast(route.device.type, torch.bfloat16):
        expected = layer(x, inputs[1])
        with route.on(on_fallback="native"):
            got = layer(x, inputs[1])
    assert expected.dtype == got.dtype == torch.float64 and close(got, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(route, inputs, name, dtype):
    layer, (x, ei) = build(name, device=route.device).eval(), inputs
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    exact = layer.double()(x.double(), ei)
    layer = layer.to(dtype)

    def found():
        out = layer(x, ei)
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    native = found()
    with route.on():
        got = found()
    took(route, 1)
    for mine, theirs in zip(got, native):
        assert mine.dtype == theirs.dtype == dtype and torch.isfinite(mine).all()
        assert (mine - theirs).double().norm() < 0.05 * theirs.double().norm() + 0.02
    error = (got[0].double() - exact).norm() / exact.norm()
    assert error < 2 * (native[0].double() - exact).norm() / exact.norm() + 2 * torch.finfo(
        dtype).eps


def test_wide_heads(route, inputs):
    layer = GATConv(F, 513, 1).to(route.device)
    if route.backend == "cuda":
        native_because(route, "GA207", lambda: layer(*inputs))


@pytest.mark.long
def test_shapes_that_the_host_takes_and_we_do_not(route, inputs):
    x, ei = inputs
    wide = build("SuperGATConv", device=route.device).eval()
    cube = x.view(3, 10, F)
    native_because(route, "GA206", lambda: wide(cube, ei % 3), "SuperGATConv")
    edge = GATConv(F, 8, 2, edge_dim=4, add_self_loops=False).to(route.device)
    native_because(route, "GA206",
                   lambda: edge(x, ei, graphs.edge_features().to(route.device).unsqueeze(1)))
    pair = GATConv((F, F), 8, 2, add_self_loops=False).to(route.device)
    native_because(route, "GA206", lambda: pair((x, None), ei, size=(N, None)))


BAD_CALLS = {
    "3d": lambda l, x, ei: l(x.view(3, 10, F), ei), "no argument": lambda l, x, ei: l(),
    "no edges": lambda l, x, ei: l(x),
    "wrong keyword": lambda l, x, ei: l(x, ei, nonsense=1), "twice": lambda l, x, ei: l(x, ei, x=x),
    "too many": lambda l, x, ei: l(x, ei, None, None, None, None, None), "x is None": lambda l, x,
    ei: l(None, ei),
    "width": lambda l, x, ei: l(x[:, 1:], ei), "three": lambda l, x, ei: l((x, x, x), ei),
    "list": lambda l, x, ei: l(x.tolist(), ei),
    "edges as list": lambda l, x, ei: l(x, ei.tolist()), "float edges": lambda l, x,
    ei: l(x, ei.float()),
    "three rows": lambda l, x, ei: l(x, torch.cat([ei, ei[:1]])), "int x": lambda l, x,
    ei: l(x.long(), ei),
    "dtype": lambda l, x, ei: l(x.double(), ei), "size": lambda l, x, ei: l(x, ei, size=(M, M)),
    "edge_attr rows": lambda l, x, ei: l(x, ei, torch.randn(3, 4, device=x.device)),
    "edge_attr dtype": lambda l, x,
    ei: l(x, ei, torch.randn(graphs.E, 4, device=x.device).double()),
    "edge_attr list": lambda l, x, ei: l(x, ei, [1.0]), "edge_attr width": lambda l, x,
    ei: l(x, ei, x.new_ones(graphs.E, 5)),
    "meta": lambda l, x, ei: l(x.to("meta"), ei.to("meta")),
}


@pytest.mark.parametrize("what", list(BAD_CALLS))
def test_wrong_calls_raise_what_the_host_raises(route, inputs, what):
    layer = GATConv(F, 8, 2, edge_dim=4, add_self_loops=what != "meta").to(route.device)
    if what == "meta":
        layer = GATConv(F, 8, 2).to("meta")
    with pytest.raises(Exception) as native:
        BAD_CALLS[what](layer, *inputs)
    with route.on(on_fallback="native"), pytest.raises(Exception) as got:
        BAD_CALLS[what](layer, *inputs)
    assert got.type is native.type and (str(got.value) == str(native.value)
                                        or "shapes cannot" in str(got.value))


def test_ids_out_of_range(route, inputs):
    x, ei = inputs
    if route.backend == "cuda":
        pytest.skip("reported later; see test_gpu.py")
    with route.on(), pytest.raises(IndexError, match="source ids from 0 to 30, but there are 30"):
        bad = ei.clone()
        bad[0, 0], bad[0, 1] = N, 0
        GATConv(F, 8, 2)(x, bad)


# ---- the surroundings ----

@pytest.mark.long
def test_functorch(route, inputs):
    layer, (x, ei) = GATConv(F, 8, 2).to(route.device), inputs
    native_because(route, "GA405", lambda: torch.func.grad(lambda x: layer(x, ei).pow(2).sum())(x))
    native_because(route, "GA405", lambda: torch.func.jvp(lambda x: layer(x, ei), (x,), (x,))[1])
    params = {k: torch.stack([p, p * 2]).detach() for k, p in layer.named_parameters()}
    call = torch.func.vmap(lambda p: torch.func.functional_call(layer, p, (x, ei)))
    native_because(route, "GA405", lambda: call(params))


def test_forward_mode(route, inputs):
    layer, (x, ei) = GATConv(F, 8, 2).to(route.device), inputs

    def tangent():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x), ei)).tangent

    native_because(route, "GA405", tangent)


def test_dispatch_modes_see_the_hosts_operations(route, inputs):
    from torch.utils.flop_counter import FlopCounterMode
    layer = GATConv(F, 8, 2).to(route.device)

    def flops():
        with FlopCounterMode(display=False) as counter:
            layer(*inputs)
        return torch.tensor(counter.get_total_flops())

    assert native_because(route, "GA405", flops) > 0


# ---- weights that do not fit the layer's attributes ----

def raises_as_the_host(route, layer, inputs, name):
    """The layer, which is refused by kernels, raises the host's error."""
    with pytest.raises(Exception) as native:
        layer(*inputs)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"), pytest.raises(native.type):
        layer(*inputs)
    assert gnnaccel.stats()[name]["reasons"] == {"GA206": 1}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name, attribute, value",
                         [("GATConv", "heads", 1), ("GATConv", "heads", 4),
                          ("GATConv", "out_channels", 4), ("GATv2Conv", "heads", 4),
                          ("GATv2Conv", "out_channels", 12), ("TransformerConv", "heads", 4),
                          ("TransformerConv", "out_channels", 4), ("SuperGATConv", "heads", 4)])
def test_an_attribute_that_is_no_longer_that_of_the_weights(route, inputs, name, attribute, value,
                                                            called):
    """Kernels would read beyond the weights. The host raises."""
    if route.device.type == "cuda" and name != "GATConv" and (attribute, value) != (
            "out_channels", 4):
        pytest.skip("the host's own code fails an assertion on the device")
    layer = build(name, device=route.device)
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*inputs)
    setattr(layer, attribute, value)
    raises_as_the_host(route, layer, inputs, name)


@pytest.mark.parametrize("name, attribute", [("GATConv", "att_src"), ("GATConv", "att_dst"),
                                             ("GATv2Conv", "att")])
def test_a_vector_for_all_heads(route, inputs, name, attribute):
    """The host broadcasts it."""
    layer = build(name, device=route.device)
    setattr(layer, attribute, torch.nn.Parameter(torch.randn(1, 1, 8, device=route.device)))
    native_because(route, "GA206", lambda: layer(*inputs), name)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_a_bias_for_all_channels(route, inputs, name):
    """The host broadcasts it, and so does what runs after the kernels."""
    layer = build(name, device=route.device)
    with route.on():
        layer(*inputs)
    layer.bias = torch.nn.Parameter(torch.full((1,), 2.0, device=route.device))
    expected = layer(*inputs)
    gnnaccel.reset_stats()
    with route.on():
        got = [layer(*inputs) for _ in range(2)]
    assert all(close(one, expected) for one in got)
    took(route, 2)


@pytest.mark.parametrize("name, module", [("GATv2Conv", "lin_l"), ("GATv2Conv", "lin_r"),
                                          ("TransformerConv", "lin_query"),
                                          ("TransformerConv", "lin_value")])
@pytest.mark.parametrize("called", [False, True])
def test_a_bias_of_a_map_for_all_channels(route, inputs, name, module, called):
    """The host broadcasts it; its gradient is one number."""
    layer, (x, edges) = build(name, device=route.device), inputs
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(x, edges)
    bias = torch.nn.Parameter(torch.full((1,), 0.5, device=route.device))
    getattr(layer, module).bias = bias
    expected = layer(x, edges)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), [bias])
    with route.on(on_fallback="native"):
        got = layer(x, edges)
        assert close(got, expected)
        assert close(torch.autograd.grad(got.sin().sum(), [bias])[0], wanted)


@pytest.mark.parametrize("name, weight, rows", [("GATConv", "bias", 1), ("GATConv", "bias", 8),
                                                ("GATConv", "lin.weight", 8),
                                                ("GATConv", "att_src", 0),
                                                ("GATv2Conv", "bias", 1), ("GATv2Conv", "att", 0),
                                                ("GATv2Conv", "lin_l.weight", 8)])
@pytest.mark.parametrize("moved", [False, True])
def test_data_of_a_known_weight_becomes_shorter(route, inputs, name, weight, rows, moved):
    """The parameter is the object that it was, and may lie where it lay."""
    if route.device.type == "cuda" and weight.startswith("lin"):
        pytest.skip("the host's own code fails an assertion on the device")
    layer = build(name, device=route.device)
    with torch.no_grad(), route.on(on_fallback="native"):
        for _ in range(3):
            layer(*inputs)
    found = layer.get_parameter(weight)
    found.data = found.data[:rows].clone() if moved else found.data[:rows]

    def call():
        with torch.no_grad():
            return layer(*inputs)

    try:
        expected = call()
    except Exception as error:
        with route.on(on_fallback="native"), pytest.raises(type(error)):
            call()
    else:
        with route.on(on_fallback="native"):
            assert close(call(), expected)


@pytest.mark.parametrize("weight", ["att_src", "att_dst", "bias"])
@pytest.mark.parametrize("called", [False, True])
def test_one_weight_of_a_wider_dtype(route, inputs, weight, called):
    """The result has it."""
    layer = build("GATConv", device=route.device)
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*inputs)
    setattr(layer, weight, torch.nn.Parameter(getattr(layer, weight).detach().double()))
    expected = layer(*inputs)
    with route.on(on_fallback="native"):
        got = layer(*inputs)
    assert got.dtype == expected.dtype == torch.float64 and close(got, expected)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("width", [8, 24])
def test_a_map_of_edges_of_another_width(route, inputs, name, width):
    """Kernels would read beyond its rows, or other edges'. The host raises."""
    layer = build(name, device=route.device, edge_dim=4)
    given = *inputs, torch.randn(inputs[1].shape[1], 4, device=route.device)
    with route.on():
        layer(*given)
    layer.lin_edge = torch.nn.Linear(4, width, device=route.device)
    with pytest.raises(Exception) as native:
        layer(*given)
    with route.on(on_fallback="native"), pytest.raises((native.type, RuntimeError)):
        layer(*given)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name, vector", [("GATConv", "att_src"), ("GATv2Conv", "att"),
                                          ("SuperGATConv", "att_l")])
@pytest.mark.parametrize("form", ["none", "transposed", "of one more axis"])
def test_a_vector_that_the_host_refuses(route, inputs, name, vector, form, called):
    if route.device.type == "cuda" and name == "GATConv":
        pytest.skip("the host's own code fails an assertion on the device")
    layer = build(name, device=route.device)
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*inputs)
    found = getattr(layer, vector).detach()
    forms = {"none": None, "transposed": found.transpose(1, 2), "of one more axis": found[None]}
    made = forms[form]
    setattr(layer, vector, made if made is None else torch.nn.Parameter(made.clone()))
    raises_as_the_host(route, layer, inputs, name)


def test_the_dtype_of_each_vector_counts(route, inputs):
    layer = build("SuperGATConv", device=route.device)
    layer.att_r.data = layer.att_r.data.double()
    expected = layer(*inputs)
    with route.on(on_fallback="native"):
        got = layer(*inputs)
    assert got.dtype == expected.dtype == torch.float64 and close(got, expected)


class Transposing(torch.nn.Module):
    """A map whose weight has its channels in the second dimension."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(F, 16))

    def forward(self, x):
        return x @ self.weight


def test_a_map_of_the_users_own_may_hold_its_weight_otherwise(route, inputs):
    layer = build("GATConv", device=route.device)
    layer.lin = Transposing().to(route.device)
    expected = layer(*inputs)
    with route.on():
        assert close(layer(*inputs), expected)
    took(route, 1)
