"""RGCNConv and FastRGCNConv: every constructor and call option against the host's own layer."""
from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric import EdgeIndex
from torch_geometric.nn import FastRGCNConv, RGCNConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import close, compare, on_routes

R = 6
CLASSES = {"RGCNConv": RGCNConv, "FastRGCNConv": FastRGCNConv}
each_class = pytest.mark.parametrize("name", CLASSES)
WEIGHTS = [{}, dict(num_bases=3), dict(num_blocks=4), dict(num_bases=1), dict(num_blocks=1)]
LAYER = [{}, dict(aggr="add"), dict(aggr="sum"), dict(root_weight=False), dict(bias=False),
         dict(root_weight=False, bias=False, aggr="add")]
ORDERINGS = {"as stated": (), "chosen": ("compaction", "reordering"),
             "uncompacted": ("reordering",), "unordered": ("compaction",)}


def types(edges: int = E, relations: int = R) -> torch.Tensor:
    """Relation 1 is empty, and not all are as frequent."""
    found = torch.randint(0, relations, (edges,))
    found[found == 1] = 0
    return found


def embedding(name: str, nodes: int = N, **options):
    return CLASSES[name](nodes, 8, R, **options)


# ---- options ----

@on_routes("options", LAYER)
@pytest.mark.parametrize("weights", WEIGHTS[:3], ids=str)
@each_class
def test_layer_options(route, name, weights, options):
    compare(route, CLASSES[name](F, 8, R, **weights, **options), graphs.features(), graphs.square(),
            edge_type=types())


@on_routes("weights", WEIGHTS)
@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (64, 4)], ids=str)
@each_class
def test_shapes(route, name, weights, shape):
    compare(route, CLASSES[name](*shape, R, **weights), graphs.features(N, shape[0]),
            graphs.square(), edge_type=types())


@each_class
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (3, 1), (1, 9), (33, 31)], ids=str)
@pytest.mark.parametrize("weights", [{}, dict(num_bases=2)], ids=str)
def test_odd_and_narrow_widths(route, name, shape, weights):
    compare(route, CLASSES[name](*shape, R, **weights), graphs.features(N, shape[0]),
            graphs.square(), edge_type=types())


@each_class
def test_the_type_as_third_argument(route, name):
    compare(route, CLASSES[name](F, 8, R), graphs.features(), graphs.square(), types())


@each_class
@pytest.mark.parametrize("weights", WEIGHTS[:3], ids=str)
def test_in_eval_mode_without_gradients(route, name, weights):
    compare(route, CLASSES[name](F, 8, R, **weights).requires_grad_(False), graphs.features(),
            graphs.square(), edge_type=types(), train=False, require=False)


@pytest.mark.parametrize("is_sorted", [True, False])
@each_class
def test_sorted_types(route, name, is_sorted):
    compare(route, CLASSES[name](F, 8, R, is_sorted=is_sorted), graphs.features(), graphs.square(),
            edge_type=types().sort().values)


# ---- what x can be ----

@on_routes("options",
           [{}, dict(num_bases=3), dict(aggr="add"), dict(num_bases=3, aggr="add", bias=False),
            dict(root_weight=False)])
@each_class
def test_nodes_without_features(route, name, options):
    compare(route, embedding(name, **options), None, graphs.square(), edge_type=types())


@pytest.mark.parametrize("options", [{}, dict(num_bases=3)], ids=str)
@each_class
def test_ids(route, name, options):
    """RGCNConv takes the rows of these ids, FastRGCNConv those of the nodes' places, and both the
    root's rows of the ids."""
    ids = torch.randperm(N)
    got = compare(route, embedding(name, **options), ids, graphs.square(), edge_type=types())
    from_the_end = ids - N
    again = compare(route, embedding(name, **options), from_the_end, graphs.square(),
                    edge_type=types())
    assert got["weight"].shape == again["weight"].shape and got["weight"].any()


@pytest.mark.parametrize("first", ["ids", "none"])
@pytest.mark.parametrize("options", [{}, dict(num_bases=3, aggr="add")], ids=str)
@each_class
def test_a_pair_of_ids(route, name, first, options):
    pair = (None if first == "none" else torch.randperm(N), torch.randperm(N)[:M])
    compare(route, embedding(name, **options), pair, graphs.bipartite(), edge_type=types())


@pytest.mark.parametrize("weights", WEIGHTS[:3], ids=str)
@pytest.mark.parametrize("channels", [F, (F, F), (F, 7)], ids=str)
@each_class
def test_bipartite(route, name, channels, weights):
    width = channels[1] if isinstance(channels, tuple) else F
    compare(route, CLASSES[name](channels, 8, R, **weights),
            (graphs.features(), graphs.features(M, width)), graphs.bipartite(), edge_type=types())


@each_class
def test_fewer_sources_than_destinations(route, name):
    compare(route, CLASSES[name]((F, 7), 8, R), (graphs.features(M), graphs.features(N, 7)),
            graphs.bipartite(M, N), edge_type=types())


@each_class
@pytest.mark.parametrize("form", ["transposed", "columns", "offset", "expanded"])
def test_any_memory_layout(route, name, form):
    x = {"transposed": lambda: torch.randn(F, N).t(),
         "columns": lambda: torch.randn(N, 2 * F)[:, ::2],
         "offset": lambda: torch.randn(N, F + 1)[:, 1:],
         "expanded": lambda: torch.randn(1, F).expand(N, F)}[form]()
    edge_index = graphs.square().t().contiguous().t()
    edge_type = torch.stack([types(), types()], 1)[:, 0]
    for weights in WEIGHTS[:3]:
        compare(route, CLASSES[name](F, 8, R, **weights), x, edge_index, edge_type=edge_type)


@each_class
def test_narrow_ids(route, name):
    """Against the host with int64 ids: gathering by expanded int32 ids gives torch 2.13's CPU wrong
    gradients."""
    layer = CLASSES[name](F, 8, R).to(route.device)
    x = graphs.features().to(route.device).requires_grad_()
    ei, et = graphs.square().to(route.device), types().to(route.device)
    native = layer(x, ei, et)
    with route.on():
        outs = [layer(x, ei.to(one), et.to(two)) for one in (torch.int32, torch.int64)
                for two in (torch.int32, torch.int64)]
    expected = torch.autograd.grad(native.pow(2).sum(), [x, *layer.parameters()])
    for out in outs:
        found = torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()])
        assert close(out, native) and all(close(a, b) for a, b in zip(found, expected))


@each_class
def test_edge_index_class(route, name):
    index = EdgeIndex(graphs.square(), sparse_size=(N, N))
    compare(route, CLASSES[name](F, 8, R), graphs.features(), index, edge_type=types())


# ---- graphs ----

@each_class
@pytest.mark.parametrize("weights", [{}, dict(num_bases=3), dict(num_blocks=4)], ids=str)
def test_renaming_the_relations_changes_nothing(route, name, weights):
    layer, order = CLASSES[name](F, 8, R,
                                 **weights).to(route.device), torch.randperm(R, device=route.device)
    x, ei, et = (t.to(route.device) for t in (graphs.features(), graphs.square(), types()))
    with route.on():
        expected = layer(x, ei, et)
        parameter = layer.comp if "num_bases" in weights else layer.weight
        with torch.no_grad():
            parameter.copy_(parameter[order.argsort()])
        assert close(layer(x, ei, order[et]), expected)


@each_class
@pytest.mark.parametrize("relations, kept", [(1, 1), (R, 1), (2 * R, 3)])
def test_empty_relations(route, name, relations, kept):
    compare(route, CLASSES[name](F, 8, relations), graphs.features(), graphs.square(),
            edge_type=torch.randint(0, kept, (E,)) + relations - kept)


@pytest.mark.long
@each_class
def test_five_thousand_relations(route, name):
    compare(route, CLASSES[name](F, 8, 5000), graphs.features(), graphs.square(),
            edge_type=torch.randint(0, 5000, (E,)))


@each_class
def test_one_edge_and_one_node(route, name):
    compare(route, CLASSES[name](F, 8, R), graphs.features(1), torch.zeros(2, 1, dtype=torch.long),
            edge_type=torch.tensor([2]))


# ---- dtypes ----

@each_class
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind, weights",
                         [("features", {}), ("features", WEIGHTS[1]), ("features", WEIGHTS[2]),
                          ("none", {}), ("none", WEIGHTS[1])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_the_hosts(route, name, dtype, kind, weights, autocast):
    layer = CLASSES[name](F if kind == "features" else N, 8, R, root_weight=False, bias=False,
                          **weights).to(route.device, dtype)
    x = graphs.features().to(route.device, dtype) if kind == "features" else None
    ei, et = graphs.square().to(route.device), types().to(route.device)
    with torch.autocast(route.device.type, torch.bfloat16, enabled=autocast):
        native = layer(x, ei, et)
        with route.on(on_fallback="native"):
            got = layer(x, ei, et)
    routes = gnnaccel.stats()[name]["routes"]
    assert routes == {"native" if dtype is torch.float64
                      and route.backend == "cuda" else route.backend: 1}
    exact = layer.double()(None if x is None else x.double(), ei, et)
    assert got.dtype is native.dtype
    coarsest = torch.bfloat16 if autocast and dtype is not torch.float64 else dtype
    limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 4e-3,
             torch.bfloat16: 3e-2}[coarsest]
    assert (got.double() - exact).norm() <= limit * exact.norm()


# ---- the passes ----

@on_routes("passes", list(ORDERINGS))
@pytest.mark.parametrize("weights", WEIGHTS[:3], ids=str)
@each_class
def test_passes(route, name, weights, passes, monkeypatch):
    native = route.on
    monkeypatch.setattr(type(route), "on", lambda self,
                        **options: native(passes=ORDERINGS[passes], **options))
    compare(route, CLASSES[name](F, 8, R, **weights), graphs.features(), graphs.square(),
            edge_type=types())
    if "num_blocks" not in weights:
        compare(route, embedding(name, **weights), None, graphs.square(), edge_type=types())


@each_class
def test_passes_show_in_the_record(route, name):
    """A graph with many source and few destination pairs: the sums come first where that is
    allowed."""
    # else launches are all that counts
    nodes, edges = (200_000, 1_000_000) if route.device.type == "cuda" else (1000, 5000)
    layer, x = route.put(CLASSES[name](64, 64, 2), graphs.features(nodes, 64))
    ei = torch.stack([torch.randint(0, nodes, (edges,)),
                      torch.randint(0, 5, (edges,))]).to(route.device)
    et = torch.randint(0, 2, (edges,)).to(route.device)
    found = {}
    for passes in ORDERINGS.values():
        with route.on(passes=passes, records=1), torch.no_grad():
            layer(x, ei, et)
            found[passes] = gnnaccel.records()[-1]["passes"]
    both, neither = found["compaction", "reordering"], found[()]
    assert both["ordering"] == "aggregate_first" and both["relations"] == 2
    assert both["pairs_dst"] == 10 and both["pairs_src"] <= 2 * nodes
    assert {o["name"] for o in both["orderings"]} == {"as stated", "aggregate_first"}
    assert neither["ordering"] == "as stated" and [o["name"]
                                                   for o in neither["orderings"]] == ["as stated"]
    assert neither["pairs_src"] == edges and neither["compaction_src"] == 1.0 and found[
        "reordering",]["pairs_src"] == edges
    assert found["compaction",
                 ]["pairs_src"] == both["pairs_src"] and found["compaction",
                                                               ]["ordering"] == "as stated"


# ---- structures ----

@pytest.mark.long
@each_class
def test_the_structure_is_found_again(route, name):
    layer, x = CLASSES[name](F, 8, R).to(route.device), graphs.features().to(route.device)
    ei, et = graphs.square().to(route.device), types().to(route.device)

    def call(*tensors):
        with route.on(records=1):
            got = layer(x, *tensors)
            found = gnnaccel.records()[-1]["cache"]
        assert close(got, layer(x, *tensors))
        return found

    assert [call(ei, et), call(ei, et)] == ["miss", "hit"]
    et[3] = (et[3] + 1) % R
    assert [call(ei, et), call(ei, et)] == ["miss", "hit"]
    ei[0, 3] = (ei[0, 3] + 1) % N
    assert [call(ei, et), call(ei, et)] == ["miss", "hit"]
    assert call(ei, et.clone()) == "miss" and call(ei.clone(), et) == "miss"
    entries = cache.info()["entries"]
    del ei
    assert cache.info()["entries"] < entries


def test_a_layer_with_other_relations_has_its_own_structure(route):
    x, ei, et = (t.to(route.device) for t in (graphs.features(), graphs.square(), types()))
    for relations in (R, R + 3):
        layer = RGCNConv(F, 8, relations).to(route.device)
        with route.on(records=1):
            got = layer(x, ei, et)
            assert gnnaccel.records()[-1]["cache"] == "miss"
        assert close(got, layer(x, ei, et))


@each_class
def test_backward_after_an_edit_of_the_types(route, name):
    layer = CLASSES[name](F, 8, R).to(route.device)
    x = graphs.features().to(route.device).requires_grad_()
    ei, et = graphs.square().to(route.device), types().to(route.device)
    expected, = torch.autograd.grad(layer(x, ei, et).pow(2).sum(), x)
    ei, et = ei.int(), et.int()  # so that index arrays could be the caller's own
    with route.on():
        out = layer(x, ei, et)
    et.zero_(), ei.zero_()
    assert close(torch.autograd.grad(out.pow(2).sum(), x)[0], expected)


# ---- derivatives ----

@each_class
@pytest.mark.parametrize("passes", ORDERINGS)
@pytest.mark.parametrize("weights", [{}, dict(num_bases=2), dict(num_blocks=2)], ids=str)
def test_first_and_second_derivatives(name, weights, passes):
    layer, edge_type = CLASSES[name](2, 2, 3, **weights).double(), torch.tensor([0, 2, 2, 0, 2])
    edge_index = torch.tensor([[0, 1, 2, 0, 0], [1, 1, 0, 1, 0]])
    inputs = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), *layer.parameters()
    names = [n for n, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters)),
                                          (x, edge_index, edge_type))

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise",
                          passes=ORDERINGS[passes]):
        assert gradcheck(call, inputs) and gradgradcheck(call, inputs)


@pytest.mark.parametrize("cls", [RGCNConv, FastRGCNConv])
def test_root_rows_of_nodes_without_features_are_not_looked_up(route, cls):
    """They are the nodes' own, whose gradient is then in memory of its own, without sums by id."""
    layer = cls(N, 4, 3, num_bases=2).to(route.device)
    edge_index = torch.randint(N, (2, E), device=route.device)
    edge_type = torch.randint(3, (E,), device=route.device)
    with route.on():
        out = layer(None, edge_index, edge_type)
    todo, nodes = [out.grad_fn], []
    for node in todo:
        nodes.append(node.name())
        todo += [one for one, _ in node.next_functions if one is not None]
    assert not any(name.startswith("IndexBackward") for name in nodes)
    cotangent = torch.randn_like(out)
    by_root, = torch.autograd.grad(out, layer.root, cotangent)
    assert torch.equal(by_root, cotangent) and by_root.data_ptr() != cotangent.data_ptr()
