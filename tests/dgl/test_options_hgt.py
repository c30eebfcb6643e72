"""HGTConv: every constructor and call option against DGL's own layer, and what is left to it."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import HGTConv, TypedLinear
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel
from gnnaccel.errors import GraphError
from tests.dgl import graphs
from tests.dgl.graphs import E, F, N
from tests.dgl.judge import close, compare, native_because, on_routes
from tests.dgl.typed_graphs import ORDERINGS, R, ends, homogeneous, types
from tests.helpers import relative

T = 3  # node types
LAYER = [{}, dict(use_norm=True), dict(in_size=8), dict(in_size=8, use_norm=True)]
SHAPES = [(4, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(8, 8), (1, 4), (64, 1), (33, 2)]


def layer(width: int = 4, heads: int = 2, relations: int = R, in_size: int = F,
          dropout: float = 0.0, **options) -> HGTConv:
    return HGTConv(in_size, width, heads, T, relations, dropout, **options)


def calls(route) -> int:
    """The layer, and its four maps by node type where they are called."""
    return 1 if route.backend == "cuda" else 5


def kinds(nodes: int = N) -> torch.Tensor:
    """Node types, of which the second does not occur."""
    return torch.randint(0, 2, (nodes,)) * 2


# ---- options ----

@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    compare(route, layer(*shape), homogeneous(), graphs.features(), kinds(), types(),
            calls=calls(route))


@on_routes("options", LAYER)
def test_layer_options(route, options):
    compare(route, layer(**options), homogeneous(), graphs.features(N, options.get("in_size", F)),
            kinds(), types(), calls=calls(route))


@on_routes("passes", list(ORDERINGS))
def test_passes(route, passes, monkeypatch):
    native = route.on
    monkeypatch.setattr(type(route), "on", lambda self,
                        **options: native(passes=ORDERINGS[passes], **options))
    compare(route, layer(), homogeneous(), graphs.features(), kinds(), types(), calls=calls(route))


@pytest.mark.parametrize("options", LAYER, ids=str)
@pytest.mark.parametrize("presorted", [False, True])
def test_sorted_types(route, presorted, options):
    compare(route, layer(**options), homogeneous(), graphs.features(N, options.get("in_size", F)),
            kinds().sort().values, types().sort().values, presorted=presorted, calls=calls(route))


def test_types_that_change(route):
    """A tensor of types that is written to, and one that is another each time."""
    made = layer().to(route.device)
    g, x, nt, et = (t.to(route.device)
                    for t in (homogeneous(), graphs.features(), kinds(), types()))
    for _ in range(3):
        expected = made(g, x, nt, et)
        with route.on():
            assert close(made(g, x, nt, et),
                         expected) and close(made(g, x, nt.clone(), et), expected)
        nt[torch.randperm(N, device=route.device)[:10]] = 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_types_first_seen_without_gradients(route, mode):
    made = layer().to(route.device)
    given = [t.to(route.device) for t in (homogeneous(), graphs.features(), kinds(), types())]
    given[1].requires_grad_()
    expected = made(*given)
    with route.on():
        with mode():
            first = made(*given)
        got = made(*given)
        got.sum().backward()
    assert close(first, expected) and close(got, expected)


def test_second_derivatives_of_kernels(route):
    made = layer().to(route.device)
    given = [t.to(route.device) for t in (homogeneous(), graphs.features(), kinds(), types())]
    given[1].requires_grad_()

    def second():
        first = torch.autograd.grad(made(*given).pow(2).sum(), [given[1], *made.parameters()],
                                    create_graph=True)
        return torch.autograd.grad(sum(t.pow(2).sum() for t in first),
                                   [given[1], made.linear_a.W, made.linear_k.W, made.skip])

    with gnnaccel.enabled(backend="torch", when="supported"):  # DGL has none of its own
        expected = second()
    with route.on():
        got = second()
    assert all(relative(a, b) < 1e-4 for a, b in zip(got, expected))


def test_in_eval_mode_without_gradients(route):
    compare(route, layer(dropout=0.5).requires_grad_(False), homogeneous(), graphs.features(),
            kinds(), types(), train=False, require=False, calls=calls(route))


@pytest.mark.parametrize("options",
                         [dict(dropout=1.0), dict(dropout=1.0, use_norm=True),
                          dict(dropout=1.0, in_size=8)], ids=str)
def test_dropout(route, options):
    """Of everything: what is left is the gated input."""
    compare(route, layer(**options), homogeneous(), graphs.features(N, options.get("in_size", F)),
            kinds(), types(), calls=calls(route))


def test_dropout_draws_what_dgl_draws(route):
    given = [t.to(route.device) for t in (homogeneous(), graphs.features(), kinds(), types())]
    made = layer(dropout=0.5).to(route.device)
    torch.manual_seed(1)
    expected = made(*given)
    torch.manual_seed(1)
    with route.on():
        assert close(made(*given), expected)


def test_priors(route):
    made = layer()
    for prior in made.relation_pri:
        torch.nn.init.normal_(prior, std=3.0)
    compare(route, made, homogeneous(), graphs.features(), kinds(), types(), calls=calls(route))


# ---- graphs ----

@pytest.mark.parametrize("kind", ["csc ids", "csr ids"])
def test_types_belong_to_edge_ids(route, kind):
    compare(route, layer(), homogeneous(kind), graphs.features(), kinds(), types(),
            calls=calls(route))


def test_blocks(route):
    block = graphs.block()
    rows = block.num_src_nodes()
    compare(route, layer(), block, graphs.features(rows), kinds(rows), types(block.num_edges()),
            calls=calls(route))


def test_two_types_of_nodes_of_one_size(route):
    """DGL takes x at both ends, unless the graph is a block."""
    g = dgl.heterograph({("user", "likes", "item"): ends()}, num_nodes_dict={"user": N, "item": N})
    compare(route, layer(), g, graphs.features(), kinds(), types(), calls=calls(route))


@pytest.mark.parametrize("relations, kept", [(1, 1), (2 * R, 3), (200, 200)])
def test_relations_that_are_empty_or_many(route, relations, kept):
    compare(route, layer(relations=relations), homogeneous(), graphs.features(), kinds(),
            torch.randint(0, kept, (E,)) + relations - kept, calls=calls(route))


@pytest.mark.long
def test_narrow_ids(route):
    compare(route, layer(), homogeneous().int(), graphs.features(), kinds().int(), types().int(),
            calls=calls(route))


def test_one_edge_and_one_node(route):
    compare(route, layer(), dgl.graph(([0], [0])), graphs.features(1), torch.tensor([2]),
            torch.tensor([3]), calls=calls(route))


# ---- dtypes ----

@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, dict(in_size=8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16],
                         ids=str)
def test_dtypes_are_the_hosts(route, dtype, options, autocast):
    made = layer(**options).to(route.device, dtype)
    g, nt, et = (t.to(route.device) for t in (homogeneous(), kinds(), types()))
    x = graphs.features(N, made.in_size).to(route.device, dtype)
    exact = made.double()(g, x.double(), nt, et)
    made = made.to(dtype)
    native = dtype is torch.float64 and route.backend == "cuda"
    with torch.autocast(route.device.type, torch.bfloat16, enabled=autocast):
        try:
            expected = made(g, x, nt, et).dtype
        except dgl.DGLError:  # on a CPU, DGL has no softmax in float16
            expected = None
        with route.on(on_fallback="native"):
            got = made(g, x, nt, et)
    assert gnnaccel.stats()["HGTConv"]["routes"] == {"native" if native else route.backend: 1}
    assert expected in (None, got.dtype)
    coarsest = torch.bfloat16 if autocast and dtype is not torch.float64 else dtype
    limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 4e-3,
             torch.bfloat16: 3e-2}[coarsest]
    assert (got.double() - exact).norm() <= limit * exact.norm()


# ---- what is left to DGL ----

@pytest.fixture
def inputs(route):
    return tuple(t.to(route.device) for t in (homogeneous(), graphs.features(), kinds(), types()))


@pytest.mark.long
def test_inputs_of_other_kinds(route, inputs):
    made, (g, x, nt, et) = layer().to(route.device), inputs
    native_because(route, "GA206", lambda: made(g, x[1:], nt[1:], et), made)
    native_because(route, "GA206", lambda: made(g, x, nt[1:], et), made)
    native_because(route, "GA206", lambda: made(g, x, nt, et[1:]), made)
    native_because(route, "GA203", lambda: made(g, x.double(), nt, et), made)
    native_because(route, "GA204", lambda: made(g, x, nt, et.tolist()), made)
    native_because(route, "GA204", lambda: made(g, x, nt, et.short()), made)
    narrow = dgl.heterograph({("user", "likes", "item"): ends(N, 20)},
                             num_nodes_dict={"user": N, "item": 20}).to(route.device)
    native_because(route, "GA206", lambda: made(narrow, x, nt, et), made)


def test_types_beyond_the_layers(route, inputs):
    with route.on(), pytest.raises(GraphError, match="edge types from 0 to 5"):
        layer(relations=3).to(route.device)(*inputs)


@pytest.mark.long
def test_layers_that_were_changed(route, inputs):
    class Loud(HGTConv):
        def message(self, edges):
            return {"a": edges.src["k"].sum(-1), "m": edges.src["v"]}

    loud, hooked, other = route.put(Loud(F, 4, 2, T, R, 0.0), layer(), layer())
    native_because(route, "GA205", lambda: loud(*inputs), loud)
    hooked.relation_att[1].register_forward_hook(lambda module, args, out: 2 * out)
    native_because(route, "GA208", lambda: hooked(*inputs), hooked)
    other.relation_msg[0] = TypedLinear(4, 4, R, "basis", 2).to(route.device)
    native_because(route, "GA208", lambda: other(*inputs), other)


def test_maps_of_other_kinds(route, inputs):
    made = layer().to(route.device)
    made.linear_k = TypedLinear(F, 8, T, "basis", 2).to(route.device)
    made.drop = torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Tanh())
    expected = made(*inputs)
    with route.on():
        assert close(made(*inputs), expected)
    watched, seen = layer().to(route.device), []
    watched.drop.register_forward_hook(lambda module, args, out: seen.append(1) or 2 * out)
    expected = watched(*inputs)
    with route.on():
        assert close(watched(*inputs), expected) and len(seen) == 2


@pytest.mark.parametrize("columns", [1, 8])
def test_a_map_beside_the_messages_that_is_broadcast(route, columns):
    """It has a column for all channels, or an axis more than a matrix."""
    made, given = layer().to(route.device), (homogeneous(), graphs.features(), kinds(), types())
    given = [t.to(route.device) for t in given]
    with route.on():
        made(*given)
    made.residual_w.data = made.residual_w.data[:, :columns].clone()[(None,) * (columns > 1)]
    expected = made(*given)
    with route.on():
        assert close(made(*given), expected)


def test_types_of_nodes_beyond_the_layers(route, inputs):
    g, x, nt, et = inputs
    with route.on(), pytest.raises(GraphError, match="types (are )?from 0 to 7"):
        layer().to(route.device)(g, x, nt.clamp(max=0).index_fill(0, nt.new_tensor([4]), 7), et)


def test_maps_by_node_type_may_be_watched(route, inputs):
    made, seen = layer().to(route.device), []
    for name in ("linear_k", "linear_q", "linear_v", "linear_a"):
        getattr(made, name).register_forward_hook(lambda module, args,
                                                  out: seen.append(1) or 2 * out)
    expected = made(*inputs)
    with route.on():
        assert close(made(*inputs), expected) and len(seen) == 8


# ---- derivatives ----

@pytest.mark.long
@pytest.mark.parametrize("passes", ["as stated", "chosen"])
def test_first_and_second_derivatives(passes):
    made, nt, et = HGTConv(2, 1, 2, 2, 3,
                           0.0).double(), torch.tensor([0, 1, 0]), torch.tensor([0, 2, 2, 0, 2])
    g = dgl.graph(([0, 1, 2, 0, 0], [1, 1, 0, 1, 0]))
    inputs = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), *made.parameters()
    names = [n for n, _ in made.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(made, dict(zip(names, parameters)), (g, x, nt, et))

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise",
                          passes=ORDERINGS[passes]):
        assert gradcheck(call, inputs) and gradgradcheck(call, inputs)
