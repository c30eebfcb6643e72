"""What RGCNConv and FastRGCNConv leave to the host, with its results and its errors; and edges of
unknown type."""
from __future__ import annotations

import pytest
import torch
import torch_geometric
from torch_geometric.nn import FastRGCNConv, MeanAggregation, RGCNConv, SumAggregation

import gnnaccel
from gnnaccel.cuda.structures import pairs
from gnnaccel.dispatch.relational import view
from gnnaccel.errors import GraphError
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import close, native_again, native_because, took
from tests.pyg.test_fallbacks import native_because

R = 6
CLASSES = {"RGCNConv": RGCNConv, "FastRGCNConv": FastRGCNConv}
each_class = pytest.mark.parametrize("name", CLASSES)


@pytest.fixture
def inputs(route):
    return tuple(t.to(route.device)
                 for t in (graphs.features(), graphs.square(), torch.randint(0, R, (E,))))


# ---- the structure ----

@each_class
def test_the_route_says_what_finds_the_pairs(route, inputs, name, monkeypatch):
    """Kernels where kernels run; elsewhere nothing but torch."""
    asked = []
    for where, what in ((pairs, "number"), (view, "pairs_of")):
        call = getattr(where, what)
        monkeypatch.setattr(where, what, lambda *args, what=what,
                            call=call: asked.append(what) or call(*args))
    layer = CLASSES[name](F, 8, R).to(route.device)
    expected = layer(*inputs)
    with route.on():
        assert close(layer(*inputs), expected)
    assert asked == (["pairs_of"] * 2 if route.name == "torch" else ["number"])


# ---- the layer ----

@pytest.mark.parametrize("aggr", ["max", "min", "mul", "std", ["add", "max"]], ids=str)
def test_aggregations(route, inputs, aggr):
    layer = RGCNConv(F, F, R, aggr=aggr, root_weight=False, bias=False).to(route.device)
    if isinstance(aggr, list):
        native_because(route, "GA201", lambda: layer(*inputs), "RGCNConv")
    else:
        native_because(route, "GA201", lambda: layer(*inputs), "RGCNConv")


# ---- weights that do not fit the layer ----

@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("options, attribute, value",
                         [({"num_blocks": 2}, "out_channels", 4),
                          ({"num_blocks": 2}, "out_channels", 16),
                          ({"num_blocks": 2}, "num_relations", R + 1),
                          ({"num_bases": 2}, "num_relations", R + 1)])
def test_an_attribute_that_is_no_longer_that_of_the_weights(route, inputs, options, attribute,
                                                            value, called):
    layer = RGCNConv(F, 8, R, **options).to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*inputs)
    setattr(layer, attribute, value)
    native_because(route, "GA206", lambda: layer(*inputs), "RGCNConv")


def test_blocks_of_one_row_that_the_host_broadcasts(route, inputs):
    layer = RGCNConv(F, 8, R, num_blocks=2).to(route.device)
    layer.weight = torch.nn.Parameter(layer.weight.detach()[:, :, :1])
    native_because(route, "GA206", lambda: layer(*inputs), "RGCNConv")


@each_class
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("called", [False, True])
def test_a_bias_or_root_that_is_broadcast(route, inputs, name, bias, called):
    layer = CLASSES[name](F, 8, R).to(route.device)
    with route.on(on_fallback="native"):
        for _ in range(3 * called):
            layer(*inputs)
    weight = torch.nn.Parameter(torch.randn(1, device=route.device) if bias else
                                torch.randn(F, 1, device=route.device))
    setattr(layer, "bias" if bias else "root", weight)
    expected = layer(*inputs)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), [weight])
    with route.on():
        got = layer(*inputs)
        assert close(got, expected)
        assert close(torch.autograd.grad(got.sin().sum(), [weight])[0], wanted)


def test_aggregations_of_the_fast_layer(route, inputs):
    for aggr in ("max", MeanAggregation()):
        layer = FastRGCNConv(F, 8, R, aggr=aggr).to(route.device)
        native_because(route, "GA201", lambda: layer(*inputs), "FastRGCNConv")


def test_a_module_as_the_aggregation(route, inputs):
    layer = RGCNConv(F, 8, R, aggr=MeanAggregation()).to(route.device)
    expected = layer(*inputs)
    with route.on():
        assert close(layer(*inputs), expected)


@each_class
def test_another_aggregation_set_later(route, inputs, name):
    """RGCNConv takes it; the host's fast layer goes on by the name that it was made with."""
    layer = CLASSES[name](F, 8, R).to(route.device)
    averaged = layer(*inputs)
    layer.aggr_module = SumAggregation()
    expected = layer(*inputs)
    assert close(expected, averaged) == (name == "FastRGCNConv")
    with route.on():
        assert close(layer(*inputs), expected)


@each_class
@pytest.mark.parametrize("kind", ["propagate", "message", "aggregate"])
def test_message_passing_hooks(route, inputs, name, kind):
    layer, log = CLASSES[name](F, 8, R).to(route.device), []
    handle = getattr(layer, f"register_{kind}_forward_hook")(lambda *args: log.append(1))
    native_because(route, "GA501", lambda: layer(*inputs), name)
    assert log
    handle.remove()
    gnnaccel.reset_stats()
    with route.on():
        layer(*inputs)
    took(route, 1)


@each_class
def test_flow(route, inputs, name):
    layer = CLASSES[name](F, 8, R, flow="target_to_source").to(route.device)
    native_because(route, "GA202", lambda: layer(*inputs), name)


class Doubled(RGCNConv):
    def message(self, x_j, edge_type_ptr):
        return 2 * super().message(x_j, edge_type_ptr)


class FastDoubled(FastRGCNConv):
    def aggregate(self, inputs, edge_type, index, dim_size=None):
        return 2 * super().aggregate(inputs, edge_type, index, dim_size)


class Renamed(RGCNConv):
    """Overrides nothing that computes."""


class FastRenamed(FastRGCNConv):
    """Overrides nothing that computes."""


@pytest.mark.parametrize("cls", [Doubled, FastDoubled])
def test_subclasses_that_compute(route, inputs, cls):
    """By the host's forward, within which nothing is read: what super() gives runs natively."""
    layer = cls(F, 8, R).to(route.device)
    expected = layer(*inputs)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        got = layer(*inputs)
    found = gnnaccel.stats()[cls.__name__]
    assert set(found["routes"]) == {"native"} and found["reasons"]["GA205"] == 1
    assert close(got, expected)


@pytest.mark.parametrize("cls", [Renamed, FastRenamed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subclasses_that_do_not(route, inputs, cls, dtype):
    """In low precision the two layers' results differ in their dtype."""
    layer, (x, ei, et) = cls(F, 8, R).to(route.device, dtype), inputs
    expected = layer(x.to(dtype), ei, et)
    with route.on():
        got = layer(x.to(dtype), ei, et)
    took(route, 1)
    assert close(got, expected, 1e-5 if dtype is torch.float32 else 0.03)


@each_class
def test_a_method_of_the_object(route, inputs, name):
    layer = CLASSES[name](F, 8, R).to(route.device)
    original = layer.message
    layer.message = lambda *args, **kwargs: 2 * original(*args, **kwargs)
    native_because(route, "GA205", lambda: layer(*inputs), name)


@pytest.mark.long
def test_pyg_lib_averages_over_all_relations(route, inputs, monkeypatch):
    """What PyG does for means depends on sizes once pyg-lib is there; setting the switch says which
    of the two is meant."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_SEGMM", True)
    layer = RGCNConv(F, 8, R).to(route.device)
    native_because(route, "GA208", lambda: layer(*inputs), "RGCNConv")
    for options in (dict(aggr="add"), dict(num_bases=2), dict(num_blocks=2)):
        with route.on():
            RGCNConv(F, 8, R, **options).to(route.device)(*inputs)
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)
    with route.on():
        assert close(layer(*inputs), layer(*inputs))


# ---- the arguments ----

@each_class
def test_sparse_adjacency(route, inputs, name):
    layer, (x, ei, et) = CLASSES[name](F, 8, R).to(route.device), inputs
    adjacency = torch.sparse_coo_tensor(ei, torch.ones(E, device=route.device), (N, N)).coalesce()
    gnnaccel.reset_stats()
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError, match="GA204"):
        layer(x, adjacency, et)
    native_because(route, "GA204", lambda: layer(x, adjacency), name)


@each_class
@pytest.mark.parametrize("change, code", [
    ("no types", "GA204"), ("too few types", "GA206"), ("types of two dimensions", "GA206"),
    ("float types", "GA204"),
    ("bool types", "GA204"),
    ("a wide x", "GA206"), ("a flat x", "GA206"), ("float64", "GA203"), ("a list", "GA206"),
    ("a triple", "GA206"),
    ("no destination", "GA206"),
    ("ids and features", "GA206"), ("an argument more", "GA206"), ("a name that is none", "GA206"),
])
def test_wrong_arguments(route, inputs, name, change, code):
    if change == "ids and features" and route.device.type == "cuda":
        pytest.skip("natively these ids lead beyond the weights, from which CUDA does not recover")
    layer, (x, ei, et) = CLASSES[name](F, 8, R).to(route.device), inputs
    args, kwargs = {
        "no types": ((x, ei), {}), "too few types": ((x, ei, et[1:]), {}),
        "types of two dimensions": ((x, ei, et.view(-1, 2)), {}),
        "float types": ((x, ei, et.float()), {}), "bool types": ((x, ei, et > 2), {}),
        "a wide x": ((graphs.features(N, F + 1).to(x), ei, et), {}),
        "a flat x": ((x[:, 0], ei, et), {}), "float64": ((x.double(), ei, et), {}),
        "a list": (([x, x], ei, et), {}),
        "a triple": (((x, x, x), ei, et), {}), "no destination": (((x, None), ei, et), {}),
        "ids and features": (((torch.arange(N, device=x.device), x), ei, et), {}),
        "an argument more": ((x, ei, et, None), {}),
        "a name that is none": ((x, ei, et), dict(edge_attr=None)),
    }[change]
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError, match=code):
        layer(*args, **kwargs)
    try:
        expected = layer(*args, **kwargs)
    except Exception:
        native_because(route, code, lambda: layer(*args, **kwargs), name)
        return
    with route.on(on_fallback="native"):
        assert native_again(layer(*args, **kwargs), expected)


@each_class
@pytest.mark.parametrize("options", [{}, dict(num_blocks=4)], ids=str)
def test_types_in_bytes(route, inputs, name, options):
    """Some of the host's ways through the layer take them, others do not."""
    layer, (x, ei, et) = CLASSES[name](F, 8, R, **options).to(route.device), inputs
    if name == "RGCNConv" and options:
        native_because(route, "GA204", lambda: layer(x, ei, et.to(torch.int8)), name)
    else:
        native_because(route, "GA204", lambda: layer(x, ei, et.to(torch.int8)), name)


@each_class
def test_features_yet_to_be_negated(route, inputs, name):
    """Kernels would read what lies in memory."""
    layer, (x, ei, et) = CLASSES[name](F, 8, R).to(route.device), inputs
    layer(x, ei, et)
    native_because(route, "GA206", lambda: layer(torch._neg_view(x), ei, et), name)
    with route.on(on_fallback="native"):
        for given in (x, torch._neg_view(x), x):
            with gnnaccel.disabled():
                expected = layer(given, ei, et)
            assert close(layer(given, ei, et), expected)


def test_features_and_ids_that_the_fast_layer_takes(route, inputs):
    """It looks at each end's type by itself; so this runs natively, with the host's result."""
    layer, (x, ei, et) = FastRGCNConv(F, 8, R).to(route.device), inputs
    ids = torch.randint(0, F, (N,), device=x.device)
    native_because(route, "GA206", lambda: layer((x, ids), ei, et), "FastRGCNConv")


@each_class
def test_blocks_need_features(route, inputs, name):
    layer, (_, ei, et) = CLASSES[name](N, 8, R, num_blocks=2).to(route.device), inputs
    native_because(route, "GA206", lambda: layer(None, ei, et), name)


def test_more_nodes_than_rows(route, inputs):
    """The fast layer then reads the next relation's table; nothing is to be gained from repeating
    that."""
    _, ei, et = inputs
    ids = torch.arange(N, device=route.device) % 7
    layer = FastRGCNConv(7, 8, R + 40).to(route.device)
    native_because(route, "GA206", lambda: layer(ids, ei, et), "FastRGCNConv")


def test_ids_beyond_the_tables(route, inputs):
    _, ei, et = inputs
    layer = RGCNConv(7, 8, R).to(route.device)
    ids = torch.arange(N, device=route.device) % 8
    if route.device.type == "cuda":
        pytest.skip("an assertion on the device")
    with pytest.raises(IndexError):
        layer(ids, ei, et)
    with route.on(), pytest.raises((IndexError, RuntimeError), match="out of"):
        layer(ids, ei, et)


@each_class
def test_no_edges(route, inputs, name):
    layer, (x, ei, et) = CLASSES[name](F, 8, R).to(route.device), inputs
    native_because(route, "GA303", lambda: layer(x, ei[:, :0], et[:0]), name)


@each_class
def test_float64_needs_the_torch_backend(route, inputs, name):
    layer, (x, ei, et) = CLASSES[name](F, 8, R).to(route.device).double(), inputs
    if route.backend == "cuda":
        native_because(route, "GA203", lambda: layer(x.double(), ei, et), name)
        return
    expected = layer(x.double(), ei, et)
    with route.on():
        assert close(layer(x.double(), ei, et), expected, 1e-13)


@each_class
@pytest.mark.parametrize("at", ["x", "edge_index", "edge_type"])
def test_tensors_on_other_devices(route, inputs, name, at):
    layer = CLASSES[name](F, 8, R).to(route.device)
    given = {k: t.to("meta") if k == at else t
             for k, t in zip(("x", "edge_index", "edge_type"), inputs)}
    with route.on(), pytest.raises(gnnaccel.errors.FallbackError, match="GA20[46]"):
        layer(**given)


# ---- ids out of range ----

@pytest.mark.parametrize("value", [R, -1, 1 << 40])
@pytest.mark.parametrize("pair", [False, True])
def test_unknown_types_that_the_loop_passes_over(route, inputs, value, pair, monkeypatch):
    """With blocks, and where PyG is told its way, the host never looks at them."""
    x, ei, et = inputs
    et[[3, 70]] = value
    layers = [RGCNConv(F, 8, R, num_blocks=4).to(route.device)]
    if not pair:
        monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)
        layers += [RGCNConv(F, 8, R, **options).to(route.device)
                   for options in ({}, dict(num_bases=2), dict(aggr="add"))]
    else:
        ei, x = graphs.bipartite().to(route.device), (x, graphs.features(M).to(route.device))
    for layer in layers:
        expected = layer(x, ei, et)
        with route.on():
            assert close(layer(x, ei, et), expected)
    everything = torch.full_like(et, value)
    expected = layers[0](x, ei, everything)
    with route.on():
        assert close(layers[0](x, ei, everything), expected)


@pytest.mark.parametrize("value", [R, -1])
@pytest.mark.parametrize("name, options",
                         [("RGCNConv", {}), ("RGCNConv", dict(num_bases=2)), ("FastRGCNConv", {}),
                          ("FastRGCNConv", dict(num_bases=2)),
                          ("FastRGCNConv", dict(num_blocks=2))], ids=str)
def test_unknown_types_that_are_an_error(route, inputs, name, options, value):
    layer, (x, ei, et) = CLASSES[name](F, 8, R, **options).to(route.device), inputs
    et[3] = value
    if route.device.type == "cpu":
        with pytest.raises((RuntimeError, IndexError)):
            layer(x, ei, et)
    seen = rf"edge types from {min(0, value)} to {max(R - 1, value)}; they must lie in \[0, {R}\)"
    with route.on(), pytest.raises(GraphError, match=seen):
        layer(x, ei, et)


@each_class
@pytest.mark.parametrize("row, what", [(0, "source"), (1, "destination")])
def test_nodes_that_do_not_exist(route, inputs, name, row, what):
    layer, (x, ei, et) = CLASSES[name](F, 8, R).to(route.device), inputs
    ei[row, 5] = N
    with route.on(), pytest.raises(GraphError,
                                   match=rf"{what} ids from 0 to {N}; they must lie in \[0, {N}\)"):
        layer(x, ei, et)


@each_class
@pytest.mark.parametrize("attribute, value", [("num_relations", R + 2), ("num_relations", R - 1),
                                              ("out_channels", 5)])
def test_an_attribute_that_is_no_longer_that_of_the_weights(route, inputs, name, attribute, value):
    if route.device.type == "cuda" and value == R - 1:
        pytest.skip("the host's own code fails an assertion on the device")
    layer = CLASSES[name](F, 8, R).to(route.device)
    setattr(layer, attribute, value)
    try:
        layer(*inputs)
    except (IndexError, RuntimeError):
        native_because(route, "GA206", lambda: layer(*inputs), name)
    else:
        native_because(route, "GA206", lambda: layer(*inputs), name)
