"""HGTConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex

import gnnaccel
from gnnaccel.errors import GraphError
from tests.helpers import relative
from tests.pyg.judge import compare, on_routes, took
from tests.pyg.hgt_graphs import NODES, RELATIONS, WIDTHS, edges, features, layer, on

SHAPES = [(16, 2), (1, 1), (15, 3)]
MORE_SHAPES = [(64, 4), (7, 1), (12, 12), (100, 2)]


@pytest.mark.long
@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    out, heads = shape
    compare(route, layer(out=out, heads=heads), features(), edges())


def test_channels_as_one_number(route):
    compare(route, layer(16), features(16), edges())


def test_skip_connections_where_the_width_is_that_of_the_output(route):
    widths = {**WIDTHS, "paper": 16}
    got = compare(route, layer(widths), features(widths), edges())
    assert got["skip.paper"] is not None and got["skip.author"] is None


@pytest.mark.long
def test_lazy_channels(route):
    lazy = layer(-1).to(route.device)
    inputs = on(route.device, features(), edges())
    with route.on(on_fallback="native"):
        lazy(*inputs)
    # the host fills them in at kqv_lin's call, so the first call still finds them empty
    assert gnnaccel.stats()["HGTConv"]["reasons"] == {"GA209": 1}
    compare(route, lazy, features(), edges())


def test_lazy_channels_of_a_type_that_never_came(route):
    lazy = layer(-1).to(route.device)
    x, ei = on(route.device, features(), edges())
    del x["lonely"]
    lazy(x, ei)
    expected = lazy(x, ei)
    with route.on():
        got = lazy(x, ei)
    assert all(relative(got[k], expected[k]) < 1e-5 for k in expected)


def test_eval_mode_without_gradients(route):
    compare(route, layer().requires_grad_(False), features(), edges(), train=False, require=False)


# ---- the dictionaries ----

def test_edge_types_that_are_not_given(route):
    got = compare(route, layer(), features(), edges(RELATIONS[1:4]))
    assert got["p_rel.author__writes__paper"] is None and got[
        "p_rel.paper__cites__paper"] is not None


@pytest.mark.parametrize("empty", [RELATIONS[:1], RELATIONS[1:4]], ids=len)
def test_edge_types_without_edges(route, empty):
    got = compare(route, layer(), features(), edges(empty=empty))
    assert not got["p_rel." + "__".join(empty[0])].any()


def test_a_destination_type_that_receives_nothing(route):
    got = compare(route, layer(), features(), edges(RELATIONS[:2]))
    assert "out[field]" in got and "out[lonely]" not in got


def test_node_types_without_nodes(route):
    relations = [r for r in RELATIONS if "field" not in r]
    compare(route, layer(), features(field=0), edges(relations))
    compare(route, layer(), features(field=0), edges(empty=[("paper", "about", "field")]))


def test_node_types_that_are_not_given(route):
    relations = [r for r in RELATIONS if "field" not in r]
    x = features()
    del x["field"], x["lonely"]
    got = compare(route, layer(), x, edges(relations))
    assert "out[field]" not in got and got["kqv_lin.lins.lonely.weight"] is None


def test_node_types_that_the_layer_does_not_know(route):
    compare(route, layer(), {**features(), "alien": torch.randn(3, 3)}, edges(), require=False)


@pytest.mark.long
@pytest.mark.parametrize("order", [[3, 1, 0, 2], [1, 0, 3, 2]], ids=str)
def test_any_order_of_node_types(route, order):
    x = list(features().items())
    compare(route, layer(), dict(x[i] for i in order), edges())


def test_one_tensor_for_several_edge_types(route):
    found = edges(count=30, author=6, paper=6, field=6)
    one = found[RELATIONS[0]]
    compare(route, layer(), features(), dict.fromkeys(found, one))


@pytest.mark.parametrize("order", [None, "row", "col"])
def test_edge_index_class(route, order):
    found = {}
    for name, ids in edges().items():
        index = EdgeIndex(ids, sparse_size=(NODES[name[0]], NODES[name[2]]))
        found[name] = index.sort_by(order).values if order else index
    plain = {name: index.as_tensor() for name, index in found.items()}
    made, x = layer().to(route.device), on(route.device, features())[0]
    expected = made(x, *on(route.device, plain))
    with route.on():
        got = made(x, {name: index.to(route.device) for name, index in found.items()})
    assert all(relative(got[k], expected[k]) < 1e-5 for k in expected)


def test_odd_strides_and_int32_ids(route):
    x = {name: t.t().contiguous().t() for name, t in features().items()}
    found = edges()
    found[RELATIONS[0]] = found[RELATIONS[0]].t().contiguous().t()
    found[RELATIONS[1]] = found[RELATIONS[1]][:, ::2]
    found[RELATIONS[2]] = found[RELATIONS[2]].int()
    compare(route, layer(), x, found)


def test_ids_of_another_type(route):
    """An id beyond its type would be a node of the next."""
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    ei[RELATIONS[0]][0, 3] = NODES["author"]
    with route.on(), pytest.raises(GraphError,
                                   match="source ids from 0 to 13; there are 13 nodes of type "
                                   "'author'"):
        made(x, ei)
    ei[RELATIONS[0]][0, 3], ei[RELATIONS[3]][1, 0] = 0, -1
    with route.on(), pytest.raises(GraphError, match="'about'.*destination ids from -1"):
        made(x, ei)


# ---- dtypes ----

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(route, dtype):
    made, (x, ei) = layer(16).to(route.device), on(route.device, features(16), edges())
    exact = made.double()({k: t.to(dtype).double() for k, t in x.items()}, ei)
    made, x = made.to(dtype), {k: t.to(dtype).requires_grad_() for k, t in x.items()}
    native = made(x, ei)
    with route.on():
        got = made(x, ei)
        sum(t.float().sum() for t in got.values()).backward()
    for name, t in got.items():
        assert t.dtype == native[name].dtype and relative(t, exact[name]) < 2 * relative(native[name], exact[name]) + 1e-2
    assert all(p.grad is None or (p.grad.dtype == dtype and p.grad.isfinite().all())
               for p in made.parameters())


@pytest.mark.long
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(route, given):
    made, (x, ei) = layer(16).to(route.device), on(route.device, features(16), edges())
    exact = made.double()({k: t.double() for k, t in x.items()}, ei)
    made.float()
    x = {k: t.to(given).requires_grad_() for k, t in x.items()}
    found = []
    for block in (torch.enable_grad(), route.on()):
        made.zero_grad()
        with block, torch.autocast(route.device.type, torch.bfloat16):
            out = made(x, ei)
        sum(t.float().pow(2).sum() for t in out.values()).backward()
        found.append((out, {k: p.grad for k, p in made.named_parameters()}))
    (native, theirs), (got, mine) = found
    for name, t in got.items():
        assert t.dtype == native[name].dtype and relative(t, exact[name]) < 2 * relative(native[name], exact[name]) + 1e-3
    for name, grad in theirs.items():
        assert (grad is None) == (mine[name] is None) and (grad is None
                                                           or relative(mine[name],
                                                                       grad) < 0.05), name


def test_float64(route):
    made, (x, ei) = layer().double().to(route.device), on(route.device, features(), edges())
    x = {k: t.double() for k, t in x.items()}
    expected = made(x, ei)
    with route.on(on_fallback="native"):
        got = made(x, ei)
    entry = gnnaccel.stats()["HGTConv"]
    assert all(relative(got[k], expected[k]) < 1e-12 for k in got)
    assert entry["routes"] == ({"torch": 1} if route.backend == "torch" else {"native": 1})


@pytest.mark.long
def test_derivatives():
    made, x, ei = layer({"paper": 3, "author": 2, "field": 2, "lonely": 3}, 4,
                        2).double(), {}, edges(count=12)
    for name, width in made.in_channels.items():
        x[name] = torch.randn(NODES[name], width, dtype=torch.float64, requires_grad=True)
    weights = [made.k_rel.weight, made.v_rel.weight, made.p_rel["paper__cites__paper"]]

    def call(*tensors):
        return tuple(made(dict(zip(x, tensors)), ei).values())

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert torch.autograd.gradcheck(call, (*x.values(), *weights))
        assert torch.autograd.gradgradcheck(call, (*x.values(), *weights))


def test_second_derivatives_are_the_hosts(route):
    made, (x, ei) = layer(16).to(route.device), on(route.device, features(16), edges())
    x["paper"].requires_grad_()

    def second():
        total = sum(t.pow(2).sum() for t in made(x, ei).values())
        first = torch.autograd.grad(total, [x["paper"], made.k_rel.weight], create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first),
                                   [x["paper"], made.v_rel.weight])

    expected = second()
    with route.on():
        got = second()
    assert all(relative(a, b) < 1e-3 for a, b in zip(got, expected))


@pytest.mark.parametrize("passes", [("compaction",), ("reordering",), ()], ids=str)
def test_without_passes(route, passes):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    with route.on(passes=passes):
        got = made(x, ei)
    assert all(relative(got[k], expected[k]) < 1e-5 for k in got)


# ---- the structure ----

def test_the_structure_belongs_to_the_tensors(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with route.on(records=10):
        for _ in range(2):
            made(x, dict(ei))
        ei[RELATIONS[2]][1, 5] = 4
        changed = made(x, ei)
        other = {**ei, RELATIONS[2]: ei[RELATIONS[2]].clone()}
        made(x, other)
        made({**x, "paper": torch.cat([x["paper"], x["paper"]])}, ei)
        found = [r["cache"] for r in gnnaccel.records()]
    assert found == ["miss", "hit", "miss", "miss", "miss"]
    expected = made(x, ei)
    assert all(relative(changed[k], expected[k]) < 1e-5 for k in expected)


@pytest.mark.long
def test_the_same_tensors_in_another_place(route):
    """Equal tensors and sizes, but the edge types have changed places."""
    made = layer(16, metadata=(["a", "b"], [("a", "r", "a"), ("a", "s", "a")])).to(route.device)
    x = {"a": torch.randn(8, 16, device=route.device), "b": torch.randn(8, 16, device=route.device)}
    one, two = (torch.randint(0, 8, (2, 30), device=route.device) for _ in range(2))
    for first, second in ((one, two), (two, one)):
        ei = {("a", "r", "a"): first, ("a", "s", "a"): second}
        for given in (ei, dict(reversed(ei.items()))):
            expected = made(x, given)["a"]
            with route.on(on_fallback="native"):  # where the order is not the metadata's
                assert relative(made(x, given)["a"], expected) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_first_seen_without_gradients(route, mode):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    with route.on():
        with mode():
            first = made(x, ei)
        got = made(x, ei)
        sum(t.sum() for t in got.values()).backward()
        with torch.inference_mode():  # tensors without a version are not cached
            third = made({k: t.clone() for k, t in x.items()},
                         {k: t.clone() for k, t in ei.items()})
    took(route, 3)
    assert all(relative(t[k], expected[k]) < 1e-5 for t in (first, got, third) for k in expected)


def test_a_model_of_two_layers_trains(route):
    first, second = layer().to(route.device), layer(16).to(route.device)
    x, ei = on(route.device, features(), edges())
    optimiser = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    losses = []
    with route.on():
        for _ in range(4):
            optimiser.zero_grad()
            hidden = first(x, ei)
            loss = second({**hidden, "lonely": hidden["paper"][:4]}, ei)["paper"].pow(2).mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    took(route, 8)
    assert losses[-1] < losses[0]
