"""RelGraphConv: every constructor and call option against DGL's own layer, and what is left to
it."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn import RelGraphConv, TypedLinear
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel
from gnnaccel.errors import GraphError
from tests.dgl import graphs
from tests.dgl.graphs import E, F, N
from tests.dgl.judge import close, compare, native_because, on_routes
from tests.dgl.typed_graphs import ORDERINGS, R, ends, homogeneous, types

WEIGHTS = [{}, dict(regularizer="basis", num_bases=3), dict(regularizer="bdd", num_bases=4)]
MORE = [dict(regularizer="basis"), dict(regularizer="basis", num_bases=1),
        dict(regularizer="bdd", num_bases=1)]
LAYER = [{}, dict(bias=False), dict(self_loop=False), dict(activation=torch.relu),
         dict(layer_norm=True), dict(bias=False, self_loop=False),
         dict(activation=torch.nn.ELU(), layer_norm=True, self_loop=False)]
KINDS = ["coo", "csc ids", "csr ids"]
weights = pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: w.get("regularizer", "plain"))


def layer(i: int = F, o: int = 8, relations: int = R, **options) -> RelGraphConv:
    return RelGraphConv(i, o, relations, **options)


def norms(shape: tuple = (E, 1)) -> torch.Tensor:
    return torch.rand(shape) + 0.5


# ---- options ----

@on_routes("options", LAYER)
@weights
def test_layer_options(route, weights, options):
    compare(route, layer(**weights, **options), homogeneous(), graphs.features(), types())


@on_routes("weights", MORE)
@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (64, 4)], ids=str)
def test_bases_and_blocks(route, weights, shape):
    num_bases = {} if weights.get("num_bases") or shape != (8, 8) else dict(num_bases=2)
    compare(route, layer(*shape, **{**weights, **num_bases}), homogeneous(),
            graphs.features(N, shape[0]), types())


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (3, 1), (1, 9), (33, 31)], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=["plain", "basis"])
def test_odd_and_narrow_widths(route, shape, weights):
    compare(route, layer(*shape, **weights), homogeneous(), graphs.features(N, shape[0]), types(),
            norms())


@on_routes("passes", list(ORDERINGS))
@weights
def test_weighted_edges(route, weights, passes, monkeypatch):
    """The norm gets its gradient, wherever the passes put it."""
    native = route.on
    monkeypatch.setattr(type(route), "on", lambda self,
                        **options: native(passes=ORDERINGS[passes], **options))
    got = compare(route, layer(**weights), homogeneous("csc ids"), graphs.features(), types(),
                  norms())
    assert got["fourth"].shape == (E, 1) and got["fourth"].any()


def test_a_norm_without_gradient(route):
    compare(route, layer(), homogeneous(), graphs.features(), types(),
            norm=torch.randint(0, 3, (E, 1)))
    compare(route, layer(), homogeneous(), graphs.features().requires_grad_(), types(), norms(),
            require=False)


def test_a_norm_among_the_edge_data(route):
    """DGL's messages take one that the caller left there; the call's own comes first."""
    g, made, x, et = homogeneous().to(route.device), layer().to(route.device), graphs.features().to(
        route.device), types()
    et, plain = et.to(route.device), made(g, x, et.to(route.device))
    g.edata["norm"] = norms().to(route.device)
    other = norms().to(route.device)
    natives = made(g, x, et), made(g, x, et, other)
    with route.on():
        found = made(g, x, et), made(g, x, et, other)
    assert all(close(a, b)
               for a, b in zip(found, natives)) and not close(found[0], plain) and not close(*found)
    assert set(g.edata) == {"norm"} and not g.ndata


@pytest.mark.parametrize("presorted", [False, True])
@weights
def test_sorted_types(route, weights, presorted):
    compare(route, layer(**weights), homogeneous(), graphs.features(), types().sort().values,
            presorted=presorted)


@weights
def test_in_eval_mode_without_gradients(route, weights):
    compare(route, layer(**weights, dropout=0.5).requires_grad_(False), homogeneous(),
            graphs.features(), types(), train=False, require=False)


def test_dropout_draws_what_dgl_draws(route):
    g, x, et = route.put(homogeneous(), graphs.features(), types())
    made = layer(dropout=0.5).to(route.device)
    torch.manual_seed(1)
    expected = made(g, x, et)
    torch.manual_seed(1)
    with route.on():
        assert close(made(g, x, et), expected)


def test_arguments_by_name(route):
    made, g, x, et = layer().to(route.device), homogeneous().to(route.device), graphs.features().to(
        route.device), types()
    et = et.to(route.device)
    expected = made(g, x, et)
    with route.on():
        assert close(made(etypes=et, feat=x, g=g),
                     expected) and close(made(g, x, etypes=et, norm=None), expected)


# ---- graphs ----

@pytest.mark.parametrize("kind", KINDS)
@weights
def test_types_belong_to_edge_ids(route, kind, weights):
    compare(route, layer(**weights), homogeneous(kind), graphs.features(), types(), norms())


def test_edges_that_lie_in_the_order_of_their_ids(route):
    """Against DGL on the same edges one by one: its own CPU sums fail on such graphs."""
    g, made, x, et = homogeneous("csc"), layer().to(route.device), graphs.features().to(
        route.device), types().to(route.device)
    assert not g.adj_tensors("csc")[2].shape[0]
    with route.on():
        got = made(g.to(route.device), x, et)
    assert close(made(dgl.graph(g.edges(order="eid"), num_nodes=N).to(route.device), x, et), got)


@pytest.mark.parametrize("options", [{}, dict(self_loop=False)], ids=str)
def test_blocks(route, options):
    block = graphs.block()
    edges = block.num_edges()
    compare(route, layer(**options), block, graphs.features(block.num_src_nodes()), types(edges),
            norms((edges, 1)))


def test_a_relation_of_a_heterograph(route):
    g = dgl.heterograph({("user", "likes", "item"): ends(N, 20),
                         ("item", "likes", "user"): ends(20, N)},
                        num_nodes_dict={"user": N, "item": 20})
    compare(route, layer(), g["user", "likes", "item"], graphs.features(), types(), norms())
    compare(route, layer(self_loop=False), graphs.bipartite(20, N), graphs.features(20), types())


@pytest.mark.parametrize("relations, kept", [(1, 1), (R, 1), (2 * R, 3), (2000, 2000)])
def test_relations_that_are_empty_or_many(route, relations, kept):
    compare(route, layer(relations=relations), homogeneous(), graphs.features(),
            torch.randint(0, kept, (E,)) + relations - kept)


@pytest.mark.parametrize("of_types", [torch.int32, torch.int64], ids=str)
def test_narrow_ids(route, of_types):
    compare(route, layer(), homogeneous().int(), graphs.features(), types().to(of_types))


def test_one_edge_and_one_node(route):
    compare(route, layer(), dgl.graph(([0], [0])), graphs.features(1), torch.tensor([2]))


def test_any_memory_layout(route):
    for x in (torch.randn(F, N).t(), torch.randn(N, 2 * F)[:, ::2], torch.randn(1, F).expand(N, F)):
        compare(route, layer(), homogeneous(), x, torch.stack([types(), types()], 1)[:, 0],
                norms((E, 2))[:, 1:])


@pytest.mark.long
def test_the_structure_is_found_again(route):
    g, et = homogeneous().to(route.device), types().to(route.device)
    made, x = layer().to(route.device), graphs.features().to(route.device)

    def call(g, et):
        with route.on(records=1):
            got = made(g, x, et)
            found = gnnaccel.records()[-1]["cache"]
        assert close(got, made(g, x, et))
        return found

    assert [call(g, et), call(g, et), call(g.local_var(), et)] == ["miss", "hit", "hit"]
    et[3] = (et[3] + 1) % R
    assert [call(g, et), call(g, et)] == ["miss", "hit"]
    g.add_edges(2, 5)
    assert call(g, torch.cat([et, et[:1]])) == "miss"


# ---- dtypes ----

@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("norm", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: w.get("regularizer", "plain"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16],
                         ids=str)
def test_dtypes_are_the_hosts(route, dtype, weights, norm, autocast):
    made = layer(self_loop=False, bias=False, **weights).to(route.device, dtype)
    g, x, et = homogeneous().to(route.device), graphs.features().to(route.device,
                                                                    dtype), types().to(route.device)
    factor = None if norm is None else norms().to(route.device, norm)
    exact = made.double()(g, x.double(), et, None if norm is None else factor.double())
    made = made.to(dtype)
    with torch.autocast(route.device.type, torch.bfloat16, enabled=autocast):
        try:
            expected = made(g, x, et, factor).dtype
        except dgl.DGLError:  # on a CPU, DGL has no sums in float16
            expected = dtype
        with route.on(on_fallback="native"):
            native = torch.float64 in (dtype, norm) and route.backend == "cuda"
            if native and torch.float16 in (dtype, norm):
                return
            got = made(g, x, et, factor)
    assert gnnaccel.stats()["RelGraphConv"]["routes"] == {"native" if native else route.backend: 1}
    assert got.dtype is expected
    coarsest = torch.bfloat16 if autocast and dtype is not torch.float64 else dtype
    limit = {torch.float64: 1e-6 if norm is torch.float32 else 1e-13, torch.float32: 1e-6,
             torch.float16: 4e-3, torch.bfloat16: 3e-2}[coarsest]
    assert (got.double() - exact).norm() <= limit * exact.norm()


# ---- what is left to DGL ----

@pytest.fixture
def inputs(route):
    return tuple(t.to(route.device) for t in (homogeneous(), graphs.features(), types()))


@pytest.mark.long
def test_shapes_of_the_norm(route, inputs):
    made, narrow = layer().to(route.device), layer(F, 1).to(route.device)
    wide = norms((E, 8)).to(route.device)  # one for each channel
    native_because(route, "GA206", lambda: made(*inputs, wide), made)
    native_because(route, "GA206", lambda: made(*inputs, norms((E,)).to(route.device)), made)
    native_because(route, "GA206", lambda: narrow(*inputs, [1.0] * E), narrow)


@pytest.mark.long
def test_types_and_features_of_other_kinds(route, inputs):
    made, (g, x, et) = layer().to(route.device), inputs
    native_because(route, "GA204", lambda: made(g, x, [E // 2, E - E // 2]), made)  # counts by type
    native_because(route, "GA206", lambda: made(g, x, et[1:]), made)
    native_because(route, "GA206", lambda: made(g, torch.arange(N), et), made)
    native_because(route, "GA206", lambda: made(g, x[1:], et), made)
    native_because(route, "GA206", lambda: made(g, x[:, 1:], et), made)
    native_because(route, "GA203", lambda: made(g, x.double(), et), made)


@pytest.mark.parametrize("name", ["loop_weight", "h_bias"])
def test_parameters_that_are_not_there(route, inputs, name):
    made = layer().to(route.device)
    with route.on():
        made(*inputs)
    setattr(made, name, None)
    native_because(route, "GA206", lambda: made(*inputs), made)


def test_graphs_of_other_kinds(route, inputs):
    made, (_, x, et) = layer().to(route.device), inputs
    empty = dgl.graph(([], []), num_nodes=N).to(route.device)
    native_because(route, "GA303", lambda: made(empty, x, et[:0]), made)
    several = dgl.heterograph({("a", "r", "a"): ends(), ("a", "s", "a"): ends()}).to(route.device)
    native_because(route, "GA204", lambda: made(several, x, et), made)


@pytest.mark.long
def test_self_loops_of_more_destinations_than_sources(route):
    """Of one source DGL adds the only row to all of them."""
    g = dgl.heterograph({("a", "r", "b"): ([0, 0], [1, 3])},
                        num_nodes_dict={"a": 1, "b": 5}).to(route.device)
    x, et = graphs.features(1).to(route.device), torch.tensor([0, 2], device=route.device)
    made = layer().to(route.device)
    native_because(route, "GA206", lambda: made(g, x, et), made)
    compare(route, layer(self_loop=False), g, x, et)


def test_types_beyond_the_layers(route, inputs):
    g, x, et = inputs
    with route.on(), pytest.raises(GraphError, match="edge types from 0 to 5"):
        layer(relations=3).to(route.device)(g, x, et)


@pytest.mark.long
def test_layers_that_were_changed(route, inputs):
    class Loud(RelGraphConv):
        def message(self, edges):
            return {"m": 2 * super().message(edges)["m"]}

    class Twice(TypedLinear):
        def forward(self, *args):
            return 2 * super().forward(*args)

    loud, hooked, other = route.put(Loud(F, 8, R), layer(), layer())
    native_because(route, "GA205", lambda: loud(*inputs), loud)
    hooked.linear_r.register_forward_hook(lambda module, args, out: 2 * out)
    native_because(route, "GA208", lambda: hooked(*inputs), hooked)
    other.linear_r = Twice(F, 8, R).to(route.device)
    native_because(route, "GA208", lambda: other(*inputs), other)


# ---- derivatives ----

@pytest.mark.parametrize("passes", ORDERINGS)
@pytest.mark.parametrize("weights",
                         [{}, dict(regularizer="basis", num_bases=2),
                          dict(regularizer="bdd", num_bases=2)], ids=["plain", "basis", "bdd"])
def test_first_and_second_derivatives(weights, passes):
    made, et = layer(2, 2, 3, **weights).double(), torch.tensor([0, 2, 2, 0, 2])
    g = dgl.graph(([0, 1, 2, 0, 0], [1, 1, 0, 1, 0]))
    x, norm = torch.randn(3, 2).double().requires_grad_(), norms((5, 1)).double().requires_grad_()
    inputs = x, norm, *made.parameters()
    names = [n for n, _ in made.named_parameters()]

    def call(x, norm, *parameters):
        return torch.func.functional_call(made, dict(zip(names, parameters)), (g, x, et, norm))

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise",
                          passes=ORDERINGS[passes]):
        assert gradcheck(call, inputs) and gradgradcheck(call, inputs)
