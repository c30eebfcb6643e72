"""PNAConv with its options, held against the host."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import PNAConv
from torch_geometric.nn.aggr import DegreeScalerAggregation, MeanAggregation, VarAggregation

import gnnaccel
from gnnaccel.dispatch.ops import several, towers
from gnnaccel.dispatch.ops.plain import PlainSpec
from gnnaccel.dispatch.plan import planner
from tests.pyg.graphs import E, EDGE, F, N, edge_features, features, square
from tests.pyg.judge import close, compare, on_routes

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
#: a standard deviation's slope has no bound where it comes to zero, and the host's variance is a
#: difference of large numbers
FLOOR = 3e-6


def layer(aggregators=AGGREGATORS, scalers=SCALERS, width: int = F, out: int = 8,
          **options) -> PNAConv:
    degrees = torch.bincount(torch.bincount(square()[1], minlength=N))
    return PNAConv(width, out, list(aggregators), list(scalers), degrees, **options)


@on_routes("aggregators", [AGGREGATORS, ["max"], ["sum", "var"], ["mean", "sum", "min"]],
           [["std"], ["min", "max", "sum", "mean"]])
def test_aggregators(route, aggregators):
    compare(route, layer(aggregators), features(), square(), floor=FLOOR)


def test_deviations_of_sources_that_lie_far_from_zero(by_torch):
    """Whose messages do not, since they are differences of both ends: what is of the source alone is
    twenty, and neighbours are nearly alike."""
    module, x = layer(["std"], ["identity"]), 20 + features() * 0.05
    with torch.no_grad():
        lin = module.pre_nns[0][0]
        lin.weight[:, :F] = -torch.eye(F)
        lin.weight[:, F:] = torch.eye(F)
        lin.bias.zero_()
    compare(by_torch, module, x, square(), floor=3e-5)


@on_routes("options",
           [dict(towers=2), dict(towers=4, divide_input=True), dict(post_layers=2),
            dict(train_norm=True)])
def test_options(route, options):
    compare(route, layer(["mean", "max"], **options), features(), square(), floor=FLOOR)


@on_routes("scalers", [["linear"], ["inverse_linear", "identity"]], [SCALERS[1:]])
def test_scalers(route, scalers):
    compare(route, layer(["mean", "max"], scalers), features(), square(), floor=FLOOR)


@on_routes("width", [1, 7], [64, 130])
def test_widths(route, width):
    compare(route, layer(["mean", "min"], width=width), features(width=width), square(),
            floor=FLOOR)


def test_in_eval_mode_without_gradients(route):
    compare(route, layer().requires_grad_(False), features(), square(), train=False, require=False,
            floor=FLOOR)


@pytest.mark.parametrize("made, args, code", [

    (lambda: layer(pre_layers=2), lambda: (features(), square()), "GA208"),
    (lambda: layer(["mean", "mul"]), lambda: (features(), square()), "GA201"),
    (lambda: layer(["mean", "mean"]), lambda: (features(), square()), "GA201")])
def test_what_is_left_to_pyg(route, made, args, code):
    module, given = made().to(route.device), [t.to(route.device) for t in args()]
    expected = module(*given)
    with route.on(on_fallback="native"):
        assert torch.equal(module(*given), expected) or close(module(*given), expected)
    assert list(gnnaccel.stats()["PNAConv"]["reasons"]) == [code]


def test_explained():
    text = str(gnnaccel.explain_program(layer(), features(), square()))
    assert "several:mean,min,max,std" in text and f"{F} channels" in text


def test_hooks_of_a_map_keep_the_layer_native(route):
    module, seen = layer().to(route.device), []
    module.pre_nns[0][0].register_forward_hook(lambda *_: seen.append(1))
    with route.on(on_fallback="native"):
        module(features().to(route.device), square().to(route.device))
    assert seen and list(gnnaccel.stats()["PNAConv"]["reasons"]) == ["GA208"]


def test_no_tensor_has_the_size_of_the_edges(emulated, monkeypatch):
    """The point of it: what is E x F in the host is N x F here."""
    nodes, edges = 10, 400
    module = layer(["mean", "max"]).to(emulated.device)
    x, edge_index = torch.randn(nodes, F).requires_grad_(), torch.randint(0, nodes, (2, edges))
    with emulated.on():
        module(x, edge_index)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t,
                                                      lambda t: t):
            module(x, edge_index).sum().backward()
    assert saved and max(saved) < edges * F
    assert E < edges


# --- features of edges ----------------------------------------------------------------------------

def with_edges(aggregators=AGGREGATORS, scalers=SCALERS, **options) -> PNAConv:
    return layer(aggregators, scalers, **{"edge_dim": EDGE, **options})


@on_routes("aggregators", [AGGREGATORS, ["max"], ["sum", "var"]],
           [["std"], ["mean", "std", "sum", "max"], ["var", "min"]])
def test_aggregators_with_edges(route, aggregators):
    compare(route, with_edges(aggregators), features(), square(), edge_features(), floor=FLOOR)


@on_routes("options", [dict(towers=4), dict(towers=4, divide_input=True), dict(post_layers=2)],
           [dict(towers=2, train_norm=True), dict(towers=3, divide_input=True, post_layers=3, out=9),
            dict(towers=2, out=2)])
def test_options_with_edges(route, options):
    compare(route, with_edges(**options), features(), square(), edge_features(), floor=FLOOR)


@on_routes("scalers", [["linear"], ["identity"]], [SCALERS[1:], ["inverse_linear", "identity"]])
def test_scalers_with_edges(route, scalers):
    compare(route, with_edges(["mean", "max"], scalers, towers=2), features(), square(),
            edge_features(), floor=FLOOR)


@on_routes("width,size", [(7, 1), (1, 30)], [(64, 50), (130, 3)])
def test_widths_with_edges(route, width, size):
    """Whose two maps of edges' features are multiplied first, or not."""
    compare(route, with_edges(["mean", "min"], width=width, edge_dim=size, towers=2),
            features(width=width), square(), edge_features(width=size), floor=FLOOR)


def test_maps_of_edges_are_multiplied_first_where_that_is_less():
    encoder, weight = torch.randn(6, 4).double(), torch.randn(18, 6).double()
    bias = torch.randn(18).double()
    for edges in (1, 500):
        edge = torch.randn(edges, 4).double()
        torch.testing.assert_close(towers.of_edges(edge, encoder, None, weight, bias)[1],
                                   edge @ encoder.t() @ weight.t())


def test_edges_without_gradients(route):
    module, x = with_edges(towers=2).to(route.device), features().to(route.device).requires_grad_()
    edge_index, edge = square().to(route.device), edge_features().to(route.device)
    found = []
    for on in (False, True):
        with route.on() if on else gnnaccel.disabled():
            out = module(x, edge_index, edge)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])))
    for got, expected in zip(*found[::-1]):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-4)


def test_in_eval_mode_without_gradients_with_edges(route):
    compare(route, with_edges().requires_grad_(False), features(), square(), edge_features(),
            train=False, require=False, floor=FLOOR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_with_edges(kernels, dtype):
    """As near to the truth as the host is, within the rounding of what is rounded."""
    torch.manual_seed(1)
    module = with_edges(["mean", "max", "min"], towers=2).to(kernels.device)
    given = [t.to(kernels.device) for t in (features(), edge_features())]
    edge_index = square().to(kernels.device)
    exact = module.double()(given[0].double(), edge_index, given[1].double())
    module, (x, edge) = module.to(dtype), [t.to(dtype) for t in given]
    plain = module(x, edge_index, edge)
    with kernels.on():
        got = module(x, edge_index, edge)
    assert got.dtype == dtype
    errors = [(one.double() - exact).norm() / exact.norm() for one in (got, plain)]
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps


def test_maps_that_are_initialised_late_with_edges(route):
    module = with_edges(edge_dim=-1).to(route.device)
    given = [t.to(route.device) for t in (features(), square(), edge_features())]
    with route.on(on_fallback="native"):
        module(*given)
        got = module(*given)
    assert gnnaccel.stats()["PNAConv"]["routes"] == {"native": 1, route.backend: 1}
    torch.testing.assert_close(got, module(*given), rtol=1e-4, atol=1e-4)


def test_edges_whose_features_change(route):
    """A call that repeats another one but for these."""
    module = with_edges(towers=2).to(route.device)
    given = [t.to(route.device) for t in (features(), square())]
    for _ in range(4):
        edge = edge_features().to(route.device)
        expected = module(*given, edge)
        with route.on():
            torch.testing.assert_close(module(*given, edge), expected, rtol=1e-4, atol=1e-4)


def replaced(name: str) -> PNAConv:
    module = with_edges()
    if name == "hook":
        module.edge_encoder.register_forward_hook(lambda *_: None)
    elif name == "module":
        module.edge_encoder = torch.nn.Sequential(module.edge_encoder, torch.nn.ReLU())
    return module


@pytest.mark.parametrize("made, code", [
    (lambda: with_edges(pre_layers=2), "GA208"), (lambda: replaced("hook"), "GA208"),
    (lambda: replaced("module"), "GA208")])
def test_what_is_left_to_pyg_with_edges(route, made, code):
    module = made().to(route.device)
    given = [t.to(route.device) for t in (features(), square(), edge_features())]
    expected = module(*given)
    with route.on(on_fallback="native"):
        assert close(module(*given), expected)
    assert list(gnnaccel.stats()["PNAConv"]["reasons"]) == [code]


@pytest.mark.parametrize("change", ["none", "rows", "width", "dtype"])
def test_edges_that_the_host_refuses(route, change):
    module = with_edges().to(route.device)
    edge = {"none": None, "rows": edge_features(E - 1), "width": edge_features(width=EDGE + 1),
            "dtype": edge_features().double()}[change]
    given = [t if t is None else t.to(route.device) for t in (features(), square(), edge)]
    with route.on(on_fallback="native"), pytest.raises(RuntimeError):
        module(*given)


def test_maps_after_the_sums_that_have_hooks_are_called(route):
    module, seen = with_edges(towers=2).to(route.device), []
    for nn in module.post_nns:
        nn[0].register_forward_hook(lambda *_: seen.append(1))
    given = [t.to(route.device) for t in (features(), square(), edge_features())]
    expected = module(*given)
    with route.on():
        torch.testing.assert_close(module(*given), expected, rtol=1e-4, atol=1e-4)
    assert len(seen) == 4


def _post_bias(module, value):
    module.post_nns[0][0].bias.data = value


def _lin_degree(module, value):
    module.aggr_module.avg_deg_lin.data = value


def _log_degree(module, value):
    module.aggr_module.avg_deg_log.data = value


@pytest.mark.parametrize("called", [0, 3])
@pytest.mark.parametrize("make", [layer, with_edges])
@pytest.mark.parametrize("change, value", [
    (_post_bias, torch.tensor(0.5)), (_post_bias, torch.randn(1)), (_post_bias, torch.randn(1, 8)),
    (_lin_degree, torch.tensor([[2.0]])), (_log_degree, torch.rand(4 * F) + 1)])
def test_biases_and_degrees_that_are_broadcast(route, make, change, value, called):
    made, x, ei = make(scalers=["identity", "amplification", "linear"]), features(), square()
    more = () if make is layer else (edge_features(),)
    made, x, ei, *more = [t.to(route.device) for t in (made, x, ei, *more)]
    with route.on():
        for _ in range(called):
            made(x, ei, *more)
    change(made, value.to(route.device))
    expected = made(x, ei, *more)
    expected.sum().backward()
    grads = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    with route.on(on_fallback="native"):
        got = made(x, ei, *more)
        got.sum().backward()
    assert close(got, expected)
    assert all(close(p.grad, grad) for p, grad in zip(made.parameters(), grads))


@pytest.mark.parametrize("called", [0, 3])
@pytest.mark.parametrize("maps", ["pre_nns.0.0", "post_nns.0.0", "edge_encoder"])
def test_biases_in_another_dtype_fail_as_with_pyg(route, maps, called):
    made, args = (with_edges(towers=2, divide_input=True).to(route.device),
                  (features(), square(), edge_features()))
    args = [t.to(route.device) for t in args]
    with route.on():
        for _ in range(called):
            made(*args)
    bias = made.get_submodule(maps).bias
    bias.data = bias.data.half()
    with pytest.raises(RuntimeError):
        made(*args)
    with route.on(on_fallback="native"), pytest.raises(RuntimeError):
        made(*args)


def seconds(width: int, edges: int, towers: int, grad: bool) -> tuple[float, float]:
    """Of a call with edges over a new graph on a GPU, by kernels and natively."""
    stated = PlainSpec("PNAConv with edges", several.name_of(AGGREGATORS, True), False,
                       width * towers, torch.float32, edges // 2, edges // 2, edges, False, towers)
    request = stated.request("cuda", grad, 1)
    return planner.PLAIN[0].seconds(request), planner.native_plain(request)


def test_what_a_call_over_a_new_graph_is_estimated_to_take():
    """Many towers, or a large graph, gain at once; few towers over small ones do not."""
    for size, kernels in (((75, 6000, 5, True), True), ((75, 6000, 1, True), False),
                          ((75, 6000, 2, False), False), ((75, 6000, 5, False), True),
                          ((64, 2_000_000, 1, True), True), ((64, 2_000_000, 1, False), True)):
        ours, native = seconds(*size)
        assert (ours < native) is kernels, (size, ours, native)


def test_nothing_speaks_against_kernels_over_a_known_graph():
    request = PlainSpec("PNAConv with edges", several.name_of(AGGREGATORS, True), False, 8,
                        torch.float32, 4, 4, 9, False, 1).request("cuda", True, 0)
    assert planner.PLAIN[0].seconds(request) is None


@pytest.mark.parametrize("options", [{}, dict(towers=2), dict(towers=4, divide_input=True)])
def test_second_derivatives_with_edges(route, options):
    torch.manual_seed(2)
    module = with_edges(["mean", "max", "var"], ["identity", "attenuation"], **options)
    module = module.to(route.device)
    edge_index, found = square().to(route.device), []
    inputs = [t.to(route.device).requires_grad_() for t in (features(), edge_features())]
    for on in (False, True):
        with route.on() if on else gnnaccel.disabled():
            out = module(inputs[0], edge_index, inputs[1])
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        parameters = [*inputs, module.pre_nns[0][0].weight, module.edge_encoder.weight]
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), parameters))
    for got, expected in zip(*found[::-1]):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


class _Tripled(VarAggregation):
    def forward(self, *args, **kwargs):
        return 3 * super().forward(*args, **kwargs)


def _other_variance(module):
    module.aggr_module.aggr.aggrs[0].var_aggr = _Tripled()


def _one_scaled(module):
    module.aggr_module = DegreeScalerAggregation("mean", "identity", torch.tensor([1, 2, 3]))


def _unscaled(module):
    module.aggr_module = MeanAggregation()


@pytest.mark.parametrize("change", [_other_variance, _one_scaled, _unscaled])
@pytest.mark.parametrize("first", [True, False])
def test_aggregations_that_were_replaced(route, change, first):
    module = layer(["std"], ["identity"]).to(route.device)
    x, edge_index = features().to(route.device), square().to(route.device)
    with route.on(on_fallback="native"):
        if not first:
            for _ in range(3):
                module(x, edge_index)
            assert "native" not in gnnaccel.stats()["PNAConv"]["routes"]
        change(module)
        found = [module(x, edge_index) for _ in range(3)]
    assert all(close(one, module(x, edge_index), 1e-4) for one in found)
