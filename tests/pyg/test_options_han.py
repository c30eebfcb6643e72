"""HANConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import HANConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.observe import records
from gnnaccel.errors import FallbackError, GraphError
from tests.helpers import relative
from tests.pyg.hetero_graphs import (ABOUT, CITES, KNOWS, METADATA, NODES, RELATIONS, WIDTH, WRITES,
                                     WRITTEN, edges, edited_in_place, features, many, near,
                                     of_other_sizes, on, same)
from tests.pyg.judge import compare, on_routes, took

SHAPES = [(16, 2), (1, 1), (15, 3)]
MORE_SHAPES = [(64, 8), (64, 4), (7, 1), (12, 12), (100, 2), (512, 1)]
WIDTHS = {"paper": 12, "author": 7, "field": 5}


def layer(channels=WIDTH, out=16, heads=2, metadata=METADATA, **options):
    return HANConv(channels, out, metadata, heads, **options)


# ---- options ----

@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    out, heads = shape
    compare(route, layer(out=out, heads=heads), features(), edges())


@pytest.mark.long
@pytest.mark.parametrize("slope", [0.0, 0.7, 1.5])
def test_slopes(route, slope):
    compare(route, layer(negative_slope=slope), features(), edges())


def test_channels_by_node_type(route):
    compare(route, layer(WIDTHS), features(WIDTHS), edges())


def test_eval_mode_without_gradients(route):
    compare(route, layer(dropout=0.5).requires_grad_(False), features(), edges(), train=False,
            require=False)


@pytest.mark.long
@pytest.mark.parametrize("value", [True, False])
def test_semantic_attention_weights(route, value):
    got = compare(route, layer(), features(), edges(), return_semantic_attention_weights=value)
    assert ("out[1][paper]" in got) == value


def test_lazy_channels(route):
    lazy, (x, ei) = layer(-1).to(route.device), on(route.device, features(), edges())
    with route.on(on_fallback="native"):
        lazy(x, ei)
    assert gnnaccel.stats()["HANConv"]["reasons"] == {"GA209": 1}
    compare(route, lazy, features(), edges())


@pytest.mark.long
def test_dropout(route):
    """Means over masks: each edge's weight is kept with probability 1 - p and divided by it."""
    made = layer(dropout=0.3).to(route.device)
    x, ei = on(route.device, features(), {CITES: edges()[CITES]})

    def mean(draws: int = 300):
        return sum(made(x, ei)["paper"].detach() for _ in range(draws)) / draws

    with route.on():
        ours = mean()
        torch.manual_seed(5)
        first = made(x, ei)["paper"]
        torch.manual_seed(5)
        assert torch.equal(first,
                           made(x, ei)["paper"]) and not torch.equal(first, made(x, ei)["paper"])
    assert relative(ours, mean()) < 0.1


# ---- the dictionaries ----

def test_by_keyword(route):
    compare(route, layer(), x_dict=features(), edge_index_dict=edges())


def test_any_order_of_the_dictionaries(route):
    made = layer().to(route.device)
    x, ei = on(route.device, features(), edges())
    for _ in range(3):
        x, ei = ({k: d[k] for k in (list(d)[i] for i in torch.randperm(len(d)))} for d in (x, ei))
        expected = made(x, ei)
        with route.on():
            same(made(x, ei), expected)


def test_edge_types_that_are_not_given(route):
    got = compare(route, layer(), features(), edges([WRITTEN, CITES]))
    assert got["out[field]"] is None and got["lin_src.author__writes__paper"] is None and got[
        "proj.field.weight"] is None


def test_node_types_that_are_not_given(route):
    x, ei = features(), edges([WRITTEN, CITES])
    del x["field"]
    got = compare(route, layer(), x, ei)
    assert "out[field]" not in got


@pytest.mark.parametrize("empty", [[WRITES], [WRITES, CITES], [ABOUT], RELATIONS[:4]], ids=len)
def test_edge_types_without_edges(route, empty):
    got = compare(route, layer(), features(), edges(empty=empty))
    for end in ("src", "dst"):
        assert not got[f"lin_{end}.{'__'.join(empty[0])}"].any()


def test_a_type_without_nodes(route):
    relations = [WRITTEN, CITES, ABOUT]
    got = compare(route, layer(), features(field=0), edges(relations, empty=[ABOUT]),
                  return_semantic_attention_weights=True)
    assert got["out[0][field]"].shape == (0, 16) and got["out[1][field]"] is None


@pytest.mark.long
def test_many_edge_types(route):
    x, ei = many(relations=64, count=45)
    # 128 gradients of 16 numbers each, sums that cancel: among so many the rounding of some is
    # unlucky
    compare(route, layer(metadata=(list(x), list(ei))), x, ei, floor=2e-6)


def test_edge_types_between_the_same_nodes(route):
    """Metapaths of one node type, as the paper has them. All four then share the bias of the
    semantic attention, whose gradient is what a softmax's leaves of sums that cancel: now and then
    the host is off by 1e-4 there, and so are we."""
    x, ei = many(types=1, relations=4, nodes=25, count=60)
    compare(route, layer(metadata=(list(x), list(ei))), x, ei, floor=2e-5)


def test_int32_edges_strided_edges_and_the_edge_index_class(route):
    made = layer().to(route.device)
    x, ei = on(route.device, features(), edges([WRITES, CITES, ABOUT]))
    expected = made(x, ei)
    other = {WRITES: ei[WRITES].int(), CITES: ei[CITES].t().contiguous().t(),
             ABOUT: EdgeIndex(ei[ABOUT], sparse_size=(NODES["paper"], NODES["field"]))}
    with route.on():
        same(made(x, other), expected)


# ---- numbers ----

@pytest.mark.long
def test_gradients_in_double(route):
    if route.name != "torch":
        pytest.skip("the kernels compute in fp32")
    relations = [WRITES, CITES]
    made, (x, ei) = layer(4, 4, 2).double(), (features(4), edges(relations, count=9))
    inputs = [t.double().requires_grad_() for t in x.values()]

    def call(*values):
        return tuple(t for t in made(dict(zip(x, values)), ei).values() if t is not None)

    with route.on():
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(route, dtype):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    half, rows = copy.deepcopy(made).to(dtype), {k: t.to(dtype) for k, t in x.items()}
    native = half(rows, ei)
    with route.on():
        near(half(rows, ei), native, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(route, dtype):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    with torch.autocast(route.device.type, dtype):
        native = made(x, ei)
        with route.on():
            near(made(x, ei), native, exact, dtype)


# ---- the structure ----

def test_the_second_call_finds_the_structure(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
        layer().to(route.device)({k: t + 1 for k, t in x.items()}, ei)
        layer(heads=4).to(route.device)(x, ei)
    assert (cache.info()["hits"], cache.info()["misses"]) == (2, 1)


def test_edges_edited_in_place(route):
    edited_in_place(route, layer())


def test_the_structure_goes_with_any_of_its_tensors(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with route.on():
        out = made({k: t.requires_grad_() for k, t in x.items()}, ei)
        assert cache.info()["entries"] == 1
        del ei[CITES]
        gc.collect()
        assert cache.info()["entries"] == 0
        sum(t.sum() for t in out.values()).backward()  # what the backward needs lives on
    assert all(t.grad.any() for t in x.values())


def test_the_same_edges_between_types_of_other_sizes(route):
    of_other_sizes(route, layer())


def test_in_inference_mode(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    with route.on(), torch.inference_mode():
        same(made(x, ei), expected)
        same(made(x, {k: t.clone() for k, t in ei.items()}), expected)
    assert cache.info()["uncached"] == 1
    took(route, 2)


def test_ids_of_the_next_type(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    ei[WRITES][0, 3] = NODES["author"]
    with route.on(), pytest.raises(GraphError, match="author"):
        made(x, ei)


def test_records(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with route.on(records=4):
        made({k: t.requires_grad_() for k, t in x.items()}, ei)["paper"].sum().backward()
        forward, backward = gnnaccel.records()
    records.validate(forward)
    assert forward["layer"] == "HANConv" and forward["graph"]["num_edges"] == sum(t.shape[1] for t in ei.values())
    assert forward["cache"] == "miss" and backward["forward_call"] == forward["call"]


# ---- what stays native ----

def native_because(route, made, x: dict, ei: dict, code: str) -> None:
    made, (x, ei) = made.to(route.device), on(route.device, x, ei)
    expected = made(x, ei)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        got = made(x, ei)
    assert gnnaccel.stats()[type(made).__name__]["reasons"] == {code: 1}
    same(got, expected, 1e-5 if route.device.type == "cuda" else 0.0)
    with route.on(), pytest.raises(FallbackError, match=code):
        made(x, ei)


def test_no_edges(route):
    native_because(route, layer(), features(), edges(empty=RELATIONS), "GA303")
    native_because(route, layer(), features(), {}, "GA303")


def test_message_hooks_and_explaining(route):
    made, log = layer(), []
    made.register_message_forward_hook(lambda *args: log.append(1))
    native_because(route, made, features(), edges(), "GA501")
    assert log
    made = layer()
    made.explain, made._edge_mask = True, torch.ones(40, device=route.device)
    native_because(route, made, features(), edges(), "GA502")


def test_overridden_messages(route):
    class Own(HANConv):
        def message(self, x_j, alpha_i, alpha_j, index, ptr, size_i):
            return x_j.flatten(1)

    made = Own(WIDTH, 16, METADATA, 2).to(route.device)
    x, ei = on(route.device, features(), edges())
    expected = made(x, ei)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):  # within the layer's own code messages may be read
        got = made(x, ei)
    assert gnnaccel.stats()["Own"]["reasons"]["GA205"] == 1
    assert all(relative(got[k], expected[k]) < 1e-5 for k in expected)


def test_flow(route):
    relations = [CITES, KNOWS]
    native_because(route, layer(flow="target_to_source"), features(), edges(relations), "GA202")


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 8), (1,), ()], ids=str)
@pytest.mark.parametrize("table", ["lin_src", "lin_dst"])
def test_vectors_that_are_broadcast(route, table, shape):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
    getattr(made, table)["__".join(WRITES)].data = torch.randn(shape, device=route.device)
    native_because(route, made, x, ei, "GA206")


def test_two_vectors_for_an_edge_type_fail_as_with_the_host(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    made.lin_src["__".join(WRITES)].data = torch.randn(2, 2, 8, device=route.device)
    with pytest.raises(RuntimeError):
        made(x, ei)
    with route.on(on_fallback="native"), pytest.raises(RuntimeError):
        made(x, ei)


@pytest.mark.parametrize("wrong", ["node type", "edge type", "features"])
def test_what_the_host_refuses(route, wrong):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    if wrong == "node type":
        x["alien"] = x["field"]
    elif wrong == "edge type":
        ei["paper", "unheard", "field"] = ei[ABOUT]
    else:
        del x["field"]
    with pytest.raises((KeyError, AttributeError)):
        made(x, ei)
    with route.on(on_fallback="native"), pytest.raises((KeyError, AttributeError)):
        made(x, ei)
    assert gnnaccel.stats()["HANConv"]["reasons"] == {"GA206": 1}


def test_hooks_of_the_submodules_are_called(route):
    made, (x, ei), log = layer().to(route.device), on(route.device, features(), edges()), []
    for module in (made.k_lin, *made.proj.values()):
        module.register_forward_hook(lambda *args: log.append(1))
    made(x, ei)
    calls = len(log)
    with route.on():
        made(x, ei)
    took(route, 1)
    assert len(log) == 2 * calls
