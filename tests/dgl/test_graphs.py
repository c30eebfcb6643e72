"""Edges read off DGL's graphs: in every format, in the order of edge ids, kept with the graph, and
made anew when it changes."""
from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import dgl
import pytest
import torch
from dgl.nn import EGATConv, GATConv

import gnnaccel
from gnnaccel.adapters.dgl import graphs as adapter
from gnnaccel.dispatch.graph import cache, structure
from gnnaccel.dispatch.graph.edge_arrays import CSC, EdgeArrays
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.errors import GraphError
from tests.dgl import graphs
from tests.dgl.graphs import F, N
from tests.dgl.judge import close

FORMATS = [f for n in (1, 2, 3) for f in itertools.combinations(("coo", "csr", "csc"), n)]


def expected(g, etype=None):
    """What the documented interface says, from a graph that may use all formats."""
    g = g.formats(["coo", "csr", "csc"])
    return torch.stack(g.edges(order="eid", etype=etype))


def coo(edges):
    return torch.stack(edges.edge_index.unbind(0))


def shuffled():
    """A graph made of a CSC whose edges do not lie in the order of their ids."""
    g = graphs.square()
    indptr, src, _ = g.adj_tensors("csc")
    return dgl.graph(("csc", (indptr, src, torch.randperm(g.num_edges()))), num_nodes=N)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("make", [graphs.square, graphs.bipartite, graphs.block, shuffled],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("ids", ["int", "long"])
def test_every_format_gives_the_edges_by_id(formats, make, ids):
    g = getattr(make(), ids)()
    truth = expected(g)
    g = g.formats(list(formats))
    found = adapter.homogeneous(g)
    assert torch.equal(coo(found), truth) and found.edge_index.dtype == truth.dtype
    assert (found.num_src, found.num_dst) == (g.num_src_nodes(), g.num_dst_nodes())


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_no_edge_ids_mean_the_identity(layout):
    g = dgl.graph((layout, ([0, 1, 3, 4], [1, 0, 2, 1], [])))
    for form in (g, g.formats([layout])):
        assert torch.equal(coo(adapter.homogeneous(form)), expected(g))


def test_reading_leaves_the_formats_as_they_were():
    g = shuffled()
    before = g.formats()
    adapter.homogeneous(g)
    assert g.formats() == before and before["created"] == ["csc"]


def shares(ours, theirs) -> bool:
    return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype for a, b in zip(ours, theirs))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_the_arrays_are_dgls_own(ids):
    src, dst = torch.tensor([0, 2, 1, 1], dtype=ids), torch.tensor([1, 0, 1, 2], dtype=ids)
    g = dgl.graph((src, dst))
    found = adapter.homogeneous(g).edge_index
    assert shares(found.unbind(),
                  (src, dst)) and found.csc is None and g.formats()["created"] == ["coo"]
    g.create_formats_()
    assert adapter.homogeneous(g).edge_index is found  # read once
    both = g.formats(["coo", "csc"])
    assert shares(adapter.homogeneous(both).edge_index.csc, both.adj_tensors("csc"))


def test_a_csc_alone_is_read_where_it_lies():
    given = torch.tensor([0, 1, 3, 4]), torch.tensor([1, 0, 2,
                                                      1]), torch.tensor([], dtype=torch.int64)
    g = dgl.graph(("csc", given))
    found = adapter.homogeneous(g)
    assert shares(found.edge_index.csc,
                  given[:2]) and found.edge_index[0].data_ptr() == given[1].data_ptr()
    assert found.degrees(1, torch.int64).tolist() == [1, 2, 1] and not found.has_bare()
    assert g.formats()["created"] == ["csc"]


@pytest.mark.parametrize("ids", ["int", "long"])
@pytest.mark.parametrize("make", [graphs.square, graphs.bipartite, shuffled],
                         ids=lambda f: f.__name__)
def test_a_csc_that_dgl_has_is_not_built_again(ids, make, route, monkeypatch):
    """int32 ids are what kernels read, int64 ones what torch operations read: they share DGL's
    memory, others are converted."""
    g = getattr(make(), ids)()
    g.create_formats_()
    indptr, src, eids = g.adj_tensors("csc")
    edges = adapter.homogeneous(g)
    for name in ("csc", "sorted_edges"):
        monkeypatch.setattr(structure, name, None)
    view, _ = cache.lookup(edges.edge_index, edges.num_src, edges.num_dst)
    plain = view.edges()
    assert shares((plain.src, plain.eid), (src, eids)) == (ids == "long")
    assert torch.equal(torch.stack((plain.src, plain.dst)), coo(edges).long()[:, plain.eid])
    if route.name == "emulated":
        rows = view.csc()
        assert shares((rows.indptr, rows.other, rows.place), (indptr, src, eids)) == (ids == "int")
        assert rows.place.tolist() == eids.tolist() and not rows.split.invalid and rows.split.edges == len(src)


def test_deterministic_algorithms_order_rows_by_edge_id():
    edges = adapter.homogeneous(shuffled())

    def rises():
        plain = cache.lookup(edges.edge_index, N, N)[0].edges()
        return bool((plain.eid.diff() > 0)[plain.dst.diff() == 0].all())

    assert not rises()
    torch.use_deterministic_algorithms(True)
    try:
        assert rises()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_csc_goes_with_the_last_graph():
    """Although what is made of it lies in the same memory."""
    g = dgl.graph(("csc", graphs.square().adj_tensors("csc")))
    edges = adapter.homogeneous(g)
    cache.lookup(edges.edge_index, edges.num_src, edges.num_dst)[0].edges()
    gone = weakref.ref(edges.edge_index)
    del g, edges
    assert gone() is None and cache.info()["entries"] == 0


@pytest.mark.parametrize("make", [graphs.square, shuffled], ids=lambda f: f.__name__)
def test_layers_over_a_csc(make, route):
    """With places in another order than edge ids: gradients, weights of edges, and what is by edge
    id."""
    g = make()
    g.create_formats_()
    g = g.to(route.device)
    layer, x = EGATConv(F, 4, 8, 3, 2).to(route.device), graphs.features().to(route.device)
    edges = torch.randn(g.num_edges(), 4, device=route.device)

    def outcome():
        leaves = [x.clone().requires_grad_(), edges.clone().requires_grad_()]
        return *(out := layer(g,
                              *leaves)), *torch.autograd.grad(sum(o.pow(2).sum() for o in out),
                                                              leaves)

    native = outcome()
    with route.on():
        assert all(close(a, b) for a, b in zip(outcome(), native))
        conv = GATConv(F, 8, 2, allow_zero_in_degree=True).to(route.device)
        got = conv(g, x)
    assert close(got, conv(g, x))


def test_a_csc_read_in_inference_mode():
    g = dgl.graph(("csc", ([0, 1, 3, 4], [1, 0, 2, 1], [])))
    with torch.inference_mode():
        ends = adapter.homogeneous(g).edge_index.unbind()
        plain = cache.lookup(adapter.homogeneous(g).edge_index, 3, 3)[0].edges()
    assert not any(t.is_inference() for t in (*ends, plain.src, plain.dst, plain.eid))


def test_ids_out_of_range_in_a_csc():
    edges = EdgeArrays(None,
                       CSC(torch.tensor([0, 2]), torch.tensor([0, -1]),
                           torch.tensor([], dtype=torch.int64)))
    view = GraphView(edges, 3, 1)
    with pytest.raises(GraphError, match="source ids from -1 to 0"):
        view.edges()


def test_formats_are_asked_of_the_relation():
    g = dgl.heterograph({("a", "r", "b"): ([0, 1], [1, 0]), ("b", "s", "a"): ([0, 1], [1, 1])})
    g.in_edges([0], etype="s")  # makes the CSC of this one
    assert adapter.relation(g, "r").edge_index.csc is None and adapter.relation(g, "s").edge_index.csc is not None
    assert g["r"].formats()["created"] == ["coo"]


def test_one_tensor_for_a_graph_and_its_scopes():
    g = graphs.square()
    first = adapter.homogeneous(g).edge_index
    with g.local_scope():
        assert adapter.homogeneous(g).edge_index is first
    assert adapter.homogeneous(g.local_var()).edge_index is first and adapter.homogeneous(
        copy.copy(g)).edge_index is first


def test_copies_and_pickles_read_their_own():
    g = graphs.square()
    first = adapter.homogeneous(g)
    for other in (g.clone(), copy.deepcopy(g), pickle.loads(pickle.dumps(g)), g.formats("csc")):
        found = adapter.homogeneous(other)
        assert found is not first and torch.equal(coo(found), coo(first))


@pytest.mark.parametrize("change,args",
                         [("add_edges", ([1, 2], [3, 4])), ("remove_edges", ([0, 5],)),
                          ("add_nodes", (2,)), ("remove_nodes", ([3],))],
                         ids=lambda v: v if isinstance(v, str) else "")
def test_a_changed_graph_is_read_anew(change, args):
    g = graphs.square()
    adapter.homogeneous(g)
    getattr(g, change)(*args)
    found = adapter.homogeneous(g)
    assert torch.equal(coo(found), expected(g)) and found.num_src == g.num_nodes()


def test_edges_go_with_the_last_graph(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    with route.on():
        layer(g, x)
        assert cache.info()["entries"] == 1
        other = g.local_var()
        gone = weakref.ref(adapter.homogeneous(g).edge_index)
        del g
        gc.collect()
        assert gone() is not None and cache.info()["entries"] == 1
        del other
        gc.collect()
        assert gone() is None and cache.info()["entries"] == 0


def test_without_the_garbage_collector():
    """Nothing that is kept makes a cycle."""
    g = dgl.heterograph({("a", "r", "b"): ([0, 1], [1, 0]), ("b", "s", "a"): ([0], [1])})
    gc.collect()
    gc.disable()
    try:
        gnnaccel.enable()
        gone = [weakref.ref(adapter.homogeneous(g[etype]).edge_index)
                for etype in g.canonical_etypes]
        gone.append(weakref.ref(adapter.relation(g, "r").edge_index))
        del g
        assert all(ref() is None for ref in gone)
    finally:
        gc.enable()


def test_backward_after_the_graph_is_gone(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    x.requires_grad_()
    (truth,) = torch.autograd.grad(layer(g, x).pow(2).sum(), x)
    with route.on():
        out = layer(g, x).pow(2).sum()
    del g
    gc.collect()
    assert close(torch.autograd.grad(out, x)[0], truth)


def test_read_in_inference_mode_and_trained_with_later(route):
    layer, g, x = route.put(GATConv(F, 8, 2), graphs.square(), graphs.features())
    with route.on():
        with torch.inference_mode():
            first = layer(g, x)
        got = layer(g, x)
        got.sum().backward()
    assert close(got, first) and layer.attn_l.grad is not None


# ---- single relations ----

def several():
    return dgl.heterograph({("a", "r", "b"): ([0, 1, 1], [1, 0, 2]),
                            ("b", "s", "a"): ([0, 2], [1, 1]), ("a", "t", "a"): ([1, 0], [0, 1])})


def test_relations_of_a_heterograph():
    g = several()
    for stype, etype, dtype in g.canonical_etypes:
        found = adapter.relation(g, etype)
        assert torch.equal(coo(found), expected(g, etype))
        assert (found.num_src, found.num_dst) == (g.num_nodes(stype), g.num_nodes(dtype))
        alone = adapter.homogeneous(g[etype])
        assert torch.equal(coo(alone), coo(found))
        assert (alone.num_src, alone.num_dst) == (found.num_src, found.num_dst)


def test_a_relation_taken_again_is_the_same_object_while_enabled():
    g = several()
    assert g["r"]._graph is not g["r"]._graph
    native = type(g._graph).get_relation_graph
    gnnaccel.enable()
    relation = g["r"]._graph
    assert g["r"]._graph is relation and adapter.homogeneous(g["r"]) is adapter.relation(g, "r")
    assert g["s"]._graph is not relation and g["r"].local_var()._graph is relation
    gnnaccel.disable()
    assert type(g._graph).get_relation_graph is native and g["r"]._graph is not relation


def test_message_passing_over_remembered_relations():
    g = several()
    g.nodes["a"].data["h"], g.nodes["b"].data["h"] = torch.randn(2, 3), torch.randn(3, 3)

    def both():
        for etype in ("r", "s"):
            g.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "o" + etype),
                         etype=etype)
        return g.nodes["b"].data["or"], g.nodes["a"].data["os"]

    native = both()
    gnnaccel.enable()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(both(), native))
    g.add_edges([0, 0], [2, 2], etype="r")
    with gnnaccel.disabled():
        assert g["r"].num_edges() == 5
    assert adapter.relation(g, "r").edge_index.shape[1] == 5


def test_a_relation_routed_like_any_graph(route):
    g = several().to(route.device)
    layer = GATConv((F, F), 4, 2, allow_zero_in_degree=True).to(route.device)
    x = graphs.features(2).to(route.device), graphs.features(3).to(route.device)
    native = layer(g["r"], x)
    with route.on():
        assert close(layer(g["r"], x), native)
        GATConv.forward(layer, g["r"], x)
        other = copy.deepcopy(layer)  # of which nothing is remembered
        assert close(other(g["r"], x), native)
    assert cache.info()["misses"] == 1 and cache.info()["hits"] == 1


# ---- what is no such graph ----

class Own(dgl.DGLGraph):
    pass


def reason_of(found, code: str) -> None:
    assert type(found) is Reason and found.code == code, found


def test_what_is_not_taken():
    g = graphs.square()
    own = g.clone()
    own.__class__ = Own
    for wrong in (own, None, torch.eye(3), several()):
        reason_of(adapter.homogeneous(wrong), "GA204")
    reason_of(adapter.homogeneous(dgl.heterograph({("a", "r", "a"): ([0], [0])}, {"a": 2, "b": 1})),
              "GA204")
    reason_of(adapter.relation(None, "r"), "GA204")


def test_types_given_by_the_caller():
    g = graphs.square()
    types = torch.randint(0, 3, (g.num_edges(),))
    edges, found = adapter.typed(g, types, torch.device("cpu"))
    assert found is types and edges is adapter.homogeneous(g)
    for wrong, code in ((list(types), "GA204"), (types[1:], "GA206"), (types.float(), "GA204"),
                        (types.bool(), "GA204")):
        reason_of(adapter.typed(g, wrong, torch.device("cpu")), code)
    reason_of(adapter.typed(g, types, torch.device("meta")), "GA204")
    reason_of(adapter.typed(dgl.graph(([], []), num_nodes=3), types[:0], torch.device("cpu")),
              "GA303")
