"""RGATConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch_geometric import EdgeIndex

from gnnaccel.errors import GraphError
from tests.helpers import relative
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, E, F, M, N
from tests.pyg.judge import close, on_routes
from tests.pyg.rgat import KINDS, MODES, MODS, PRODUCT, WITHIN, R, build, check, inputs, types

MODDED = [{**kind, "mod": mod} for kind in KINDS for mod in MODS]
LAYER = [dict(concat=False), dict(bias=False), dict(concat=False, bias=False), dict(num_bases=3),
         dict(num_blocks=2), dict(negative_slope=0.0), dict(negative_slope=1.5),
         dict(num_blocks=4, concat=False, **WITHIN), dict(num_bases=1, **PRODUCT),
         dict(concat=False, dim=3, mod="scaled", **PRODUCT), dict(num_blocks=2, mod="additive"),
         dict(num_bases=2, mod="f-additive", **WITHIN)]


# ---- options ----

@pytest.mark.long
@on_routes("shape", [(8, 2), (1, 1), (5, 3)], [(7, 1), (64, 1), (20, 12), (2, 40)])
@pytest.mark.parametrize("options", MODES, ids=["across", "within", "product", "product within"])
def test_shapes(route, shape, options):
    check(route, build(*shape, **options))


@on_routes("options", MODDED[:8] + MODDED[16:], MODDED[8:16])
def test_modified_attention(route, options):
    got = check(route, build(5, 3, **options))
    used = {"additive": {"w"}, "scaled": {"l1", "b1", "l2", "b2"}}.get(options["mod"], set())
    assert {name for name in ("w", "l1", "b1", "l2", "b2") if got[name] is not None} == used


@on_routes("options", LAYER)
def test_layer_options(route, options):
    check(route, build(**options))


@on_routes("options",
           [KINDS[5], dict(mod="additive"), dict(mod="scaled", **WITHIN), dict(concat=False)])
def test_in_eval_mode_without_gradients(route, options):
    check(route, build(**options).requires_grad_(False), train=False, require=False)


@pytest.mark.parametrize("options", [dict(mod="scaled"), KINDS[4]], ids=str)
def test_training_over_a_graph_first_seen_in_inference_mode(route, options):
    layer, (x, ei, et) = build(**options).to(route.device), inputs(route)
    with route.on():
        with torch.inference_mode():
            first = layer(x, ei, et)
        out = layer(x, ei, et)
        out.sum().backward()
    assert close(first, out) and layer.q.grad.isfinite().all()


@on_routes("options",
           [*KINDS[:3], KINDS[5], dict(mod="additive"), dict(mod="f-additive", num_bases=2),
            dict(num_blocks=2, mod="scaled")])
def test_edge_features(route, options):
    check(route, build(5, 3 if "num_blocks" not in options else 2, edge_dim=EDGE, **options),
          edge_attr=graphs.edge_features())


@pytest.mark.parametrize("options", [{}, PRODUCT], ids=["sum", "product"])
def test_one_feature_per_edge(route, options):
    check(route, build(edge_dim=1, **options), edge_attr=graphs.edge_features(width=None))


def test_edge_dim_without_edge_features(route):
    got = check(route, build(edge_dim=EDGE))
    assert got["lin_edge.weight"] is None and got["e"] is None


@pytest.mark.parametrize("how", ["hook", "bias"])
def test_an_edge_map_that_is_more_than_its_weight(route, how):
    layer = build(edge_dim=EDGE)
    if how == "hook":
        layer.lin_edge.register_forward_hook(lambda module, args, out: 2 * out)
    else:
        layer.lin_edge.bias = torch.nn.Parameter(torch.randn(16))
    check(route, layer, edge_attr=graphs.edge_features())


def test_an_edge_map_that_gives_a_row_per_relation(route):
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(R, 16))

        def forward(self, edge_attr):
            return self.weight

    layer = build(edge_dim=EDGE)
    layer.lin_edge = Table()
    check(route, layer, edge_attr=graphs.edge_features().requires_grad_(False), require=False)


@pytest.mark.parametrize("options",
                         [{}, WITHIN, dict(mod="scaled"), dict(mod="additive", **PRODUCT)], ids=str)
@pytest.mark.parametrize("form", [tuple, list])
def test_bipartite(route, options, form):
    """The host says that it takes one tensor, and takes two."""
    check(route, build(**options), form((graphs.features(), graphs.features(M))),
          graphs.bipartite())


def test_fewer_sources_than_destinations(route):
    check(route, build(mod="f-scaled"), (graphs.features(M), graphs.features()),
          graphs.bipartite(M, N))


@pytest.mark.parametrize("size", [(N, N), [N, N], torch.Size([N, N]), (None, N), (N, None)],
                         ids=str)
def test_size_that_says_nothing_new(route, size):
    check(route, build(), size=size)


def test_the_weights_kept_for_the_caller_are_dropped(route):
    layer, args = build().to(route.device), inputs(route)
    with route.on():
        layer(*args)
    assert layer._alpha is None


def test_weights_that_vanish_stay_zero_in_f_additive(route):
    """The host adds 1 to weights above zero, not to those that underflow."""
    layer = build(4, 1, channels=1, mod="f-additive", bias=False)
    with torch.no_grad():
        for p in (layer.weight, layer.q, layer.k):
            p.fill_(1.0)
    args = torch.tensor([[-100.0], [100.0],
                         [1.0]]), torch.tensor([[0, 1], [2, 2]]), torch.zeros(2, dtype=torch.long)
    native = layer(*args)
    with route.on():
        got = layer.to(route.device)(*(t.to(route.device) for t in args))
    assert close(got.cpu(), native)


# ---- graphs ----

def test_one_relation_for_all_edges(route):
    check(route, build(), edge_type=torch.full((E,), 3))


@pytest.mark.parametrize("options", KINDS[:5], ids=str)
def test_one_edge(route, options):
    check(route, build(**options), edge_index=torch.tensor([[4], [2]]), floor=1e-6, nothing=1.0)


@pytest.mark.long
def test_a_relation_for_every_edge(route):
    check(route, build(relations=E, mod="additive", **WITHIN), edge_type=torch.randperm(E),
          floor=1e-6, nothing=1e-3)


@pytest.mark.parametrize("options", [{}, dict(mod="additive", **WITHIN), KINDS[4]], ids=str)
def test_the_order_of_edges_and_relations_does_not_count(route, options):
    layer, (x, ei, et) = build(**options).to(route.device), inputs(route)
    edges, relations = torch.randperm(E).to(route.device), torch.randperm(R).to(route.device)
    with route.on(), torch.no_grad():
        first = layer(x, ei, et)
        assert close(layer(x, ei[:, edges], et[edges]), first)
        layer.weight.copy_(layer.weight[relations.argsort()])
        assert close(layer(x, ei, relations[et]), first)


@pytest.mark.long
@pytest.mark.parametrize("channels", [1, 7])
def test_odd_widths(route, channels):
    check(route, build(3, 1, channels), graphs.features(width=channels), floor=1e-6)


@pytest.mark.parametrize("form", ["transposed", "columns", "offset"])
def test_strides(route, form):
    x = {"transposed": torch.randn(F, N).t(), "columns": torch.randn(N, 2 * F)[:, ::2],
         "offset": torch.randn(N, F + 1)[:, 1:]}[form]
    edge_index = {"transposed": graphs.square().t().contiguous().t(),
                  "columns": graphs.square(edges=2 * E)[:, ::2],
                  "offset": graphs.square(edges=E + 1)[:, 1:]}[form]
    check(route, build(), x, edge_index, edge_type=types(2 * E)[::2])


@pytest.mark.parametrize("options", [dict(mod="scaled"), WITHIN], ids=str)
def test_int32_ids_give_what_int64_ids_do(route, options):
    """The host's own layer fails with int32 nodes, depending on sizes."""
    layer, (x, ei, et) = build(**options).to(route.device), inputs(route)
    found = []
    with route.on():
        for edge_index, edge_type in ((ei, et), (ei.int(), et), (ei, et.int()),
                                      (ei.int(), et.int())):
            out = layer(x.requires_grad_(), edge_index, edge_type)
            found.append((out, torch.autograd.grad(out.pow(2).sum(), x)[0]))
    assert all(close(a, b, 1e-6) for other in found[1:] for a, b in zip(other, found[0]))


@pytest.mark.parametrize("order", [None, "row", "col"])
def test_edge_index_class(route, order):
    index = EdgeIndex(graphs.square(), sparse_size=(N, N))
    check(route, build(), edge_index=index.sort_by(order).values if order else index)


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_large_and_small_scores(route, scale):
    check(route, build(), graphs.features() * scale, floor=1e-6)


@pytest.mark.parametrize("shift", [1, -1])
def test_types_out_of_range(route, shift):
    layer, (x, ei, et) = build().to(route.device), inputs(route)
    with route.on(), pytest.raises(GraphError, match="edge types"):
        layer(x, ei, et + shift)


# ---- dtypes ----

HALVES = [{}, dict(mod="additive"), dict(mod="scaled"), WITHIN,
          dict(mod="f-additive", dim=3, **PRODUCT)]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", HALVES, ids=str)
def test_half_precision(route, options, dtype):
    layer, (x, ei, et) = build(edge_dim=EDGE, **options).to(route.device, dtype), inputs(route)
    x, attr = x.to(dtype).requires_grad_(), graphs.edge_features().to(route.device, dtype)
    native = layer(x, ei, et, attr)
    with route.on():
        got = layer(x, ei, et, attr)
        got.float().sum().backward()
    exact = copy.deepcopy(layer).double()(x.double(), ei, et, attr.double())
    assert got.dtype == native.dtype and x.grad.isfinite().all()
    assert relative(got, exact) < 2 * relative(native, exact) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [dict(o, bias=b) for o in HALVES for b in (True, False)],
                         ids=str)
def test_autocast(route, options, given):
    within_on_gpu = route.device.type == "cuda" and "attention_mechanism" in options
    if within_on_gpu:
        pytest.skip("the host's own layer fails there")
    layer, (x, ei, et) = build(edge_dim=EDGE, **options).to(route.device), inputs(route)
    x, attr, found = x.to(given), graphs.edge_features().to(route.device, given), []
    for block in (contextlib.nullcontext(), route.on()):
        with block, torch.autocast(route.device.type, torch.bfloat16):
            found.append(_results(layer, x, ei, et, attr))
    exact = _results(copy.deepcopy(layer).double(), x.double(), ei, et, attr.double())
    for name, truth in exact.items():
        native, got = (results[name] for results in found)
        assert (got is None) == (native is None) == (truth is None), name
        if got is not None:
            assert got.dtype == native.dtype and relative(got,
                                                          truth) < 2 * relative(native,
                                                                                truth) + 0.05, name


def _results(layer, *args) -> dict[str, torch.Tensor | None]:
    """The output and the gradients of the parameters."""
    layer.zero_grad()
    out = layer(*args)
    with torch.autocast(out.device.type, enabled=False):
        out.to(torch.promote_types(out.dtype, torch.float32)).pow(2).sum().backward()
    return {"out": out.detach(), **{name: p.grad for name, p in layer.named_parameters()}}
