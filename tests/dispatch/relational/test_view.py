"""`RelationView`: index arrays and virtual graphs, what is checked, what is kept, and for how
long."""
from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnaccel.dispatch.ir.program import DST, EDGE, PAIR_DST, PAIR_SRC, RELATION, SRC
from gnnaccel.dispatch.relational import pairs
from gnnaccel.dispatch.relational.gather import Gather, RelationStatistics
from gnnaccel.dispatch.relational.edges import Edges
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.errors import GraphError
from tests.relational_cases import SETTINGS, graphs, typed

DOMAINS = (SRC, DST, PAIR_SRC, PAIR_DST)


def ends(view) -> list:
    """The edges of a virtual graph as (source row, target row), in the order of their ids."""
    edges = view.edges()
    eid = range(edges.src.shape[0]) if edges.eid is None else edges.eid.tolist()
    return [pair for _, pair in sorted(zip(eid, zip(edges.src.tolist(), edges.dst.tolist())))]


# ---- arrays ----

@SETTINGS
@given(graph=graphs(), compact=st.booleans())
def test_index_arrays(graph, compact):
    view = graph.view(compact=compact)
    given_ends = {SRC: graph.src, DST: graph.dst, RELATION: graph.relation}
    for coarse, ids in given_ends.items():
        index = view.index(coarse, EDGE)
        assert index.dtype is torch.int32 and index.tolist() == ids.tolist()
    for pair, end in ((PAIR_SRC, SRC), (PAIR_DST, DST)):
        of_edge = view.index(pair, EDGE).long()
        # from the edge to its pair to the pair's node is from the edge to its node
        for coarse in (end, RELATION):
            assert view.index(coarse, pair)[of_edge].tolist() == given_ends[coarse].tolist()
    stats = view.statistics()
    assert stats == RelationStatistics(graph.num_src, graph.num_dst, len(graph.src),
                                       graph.num_relations, view.pairs(PAIR_SRC).count,
                                       view.pairs(PAIR_DST).count)
    distinct = len(set(zip(graph.src.tolist(), graph.relation.tolist())))
    assert stats.pairs_src == (distinct if compact else len(graph.src))
    assert stats.pairs_dst == len(set(zip(graph.dst.tolist(), graph.relation.tolist()))), "destination pairs are always compact"


@SETTINGS
@given(graph=graphs())
def test_virtual_graphs_are_the_edges_between_rows(graph):
    view = graph.view()
    for source in DOMAINS:
        for target in DOMAINS:
            found = view.graph(source, target)
            assert ends(found) == list(zip(view.index(source, EDGE).tolist(),
                                           view.index(target, EDGE).tolist()))
            rows = view.statistics().rows
            assert (found.num_src, found.num_dst) == (rows(source),
                                                      rows(target)) and view.graph(source,
                                                                                   target) is found
    for coarse, fine in ((DST, PAIR_DST), (SRC, PAIR_SRC), (RELATION, PAIR_SRC), (PAIR_DST, EDGE)):
        assert ends(view.members(coarse,
                                 fine)) == list(enumerate(view.index(coarse, fine).tolist()))


def test_rows_of_each_domain():
    stats = RelationStatistics(2, 3, 5, 7, 11, 13)
    assert [stats.rows(d)
            for d in (SRC, DST, EDGE, RELATION, PAIR_SRC, PAIR_DST,
                      "PARAM")] == [2, 3, 5, 7, 11, 13, 1]


def test_gather():
    graph = typed()
    view = graph.view()
    gather = Gather(view, SRC, PAIR_SRC)
    assert gather.index is view.index(SRC,
                                      PAIR_SRC) and gather.members is view.members(SRC, PAIR_SRC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares(dtype):
    graph = typed(edges=200)
    view = graph.view()
    group = graph.dst * graph.num_relations + graph.relation
    expected = 1 / torch.bincount(group)[group].to(dtype)
    assert torch.equal(view.share(dtype), expected) and view.share(dtype) is view.share(dtype)
    sums = torch.zeros(view.pairs(PAIR_DST).count,
                       dtype=dtype).index_add(0, view.index(PAIR_DST, EDGE), view.share(dtype))
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_index_arrays_are_never_the_callers_own():
    src, dst, relation = (torch.randint(0, 4, (30,), dtype=torch.int32) for _ in range(3))
    structure = torch.stack([src, dst]), relation
    view = RelationView(structure, 4, 4, 4)
    kept = [view.index(coarse, EDGE) for coarse in (SRC, DST, RELATION)]
    before = relation.tolist()
    structure[0].zero_(), structure[1].zero_()
    assert [k.tolist() for k in kept] == [src.tolist(), dst.tolist(), before]


# ---- what is checked ----

@pytest.mark.parametrize("at, value, text", [
    ("src", 12, r"source ids from 0 to 12; they must lie in \[0, 12\)"),
    ("src", -1, "source ids from -1 to"),
    ("dst", 12, r"destination ids from 0 to 12; they must lie in \[0, 12\)"),
    ("dst", -3, "destination ids from -3 to"),
    ("relation", 5, r"edge types from 0 to 5; they must lie in \[0, 5\)"),
    ("relation", -1, "edge types from -1 to 4"),
])
def test_ids_out_of_range(at, value, text):
    graph = typed(edges=400)
    getattr(graph, at)[0] = value
    for build in (lambda view: view.pairs(PAIR_SRC), lambda view: view.index(DST, EDGE),
                  lambda view: view.graph(SRC, DST), lambda view: view.statistics()):
        with pytest.raises(GraphError, match=text):
            build(graph.view())
    if at != "relation":
        with pytest.raises(GraphError, match=text):
            graph.view(ignore=True).pairs(PAIR_DST)


def test_edges_of_unknown_relations_are_ignored_on_demand():
    graph = typed(edges=100)
    plain = graph.relation.clone()
    graph.relation[3], graph.relation[50], graph.relation[99] = -1, 5, 1 << 40
    view = graph.view(ignore=True)
    known = (graph.relation == plain).nonzero().view(-1)
    assert len(known) == 97 and view.statistics().num_edges == 97
    for coarse, ids in ((SRC, graph.src), (DST, graph.dst), (RELATION, graph.relation)):
        assert view.index(coarse, EDGE).tolist() == ids[known].tolist()
    assert ends(view.graph(SRC, DST)) == list(zip(graph.src[known].tolist(),
                                                  graph.dst[known].tolist()))
    everything = graph.view(ignore=True)
    graph.relation.fill_(-7)
    assert everything.statistics() == RelationStatistics(12, 12, 0, 5, 0, 0)


def test_no_edges():
    graph = typed(edges=0)
    view = graph.view()
    assert view.statistics() == RelationStatistics(12, 12, 0, 5, 0, 0)
    assert view.share(torch.float64).shape == (0,) and ends(view.graph(PAIR_SRC, DST)) == []


# ---- what is kept ----

def test_everything_is_made_once():
    graph = typed()
    calls = []

    def assemble(edge_index, edge_type):
        calls.append(1)
        return *edge_index.unbind(0), edge_type

    view = graph.view(assemble=assemble)
    first = [view.pairs(PAIR_SRC), view.index(SRC, EDGE), view.graph(SRC, DST),
             view.members(DST, PAIR_DST), view.share(torch.float64)]
    count = len(calls)
    again = [view.pairs(PAIR_SRC), view.index(SRC, EDGE), view.graph(SRC, DST),
             view.members(DST, PAIR_DST), view.share(torch.float64)]
    assert all(a is b for a, b in zip(first, again)) and len(calls) == count


def test_bytes():
    graph = typed(edges=64)
    view = graph.view()
    assert view.nbytes() == 0
    pairs = view.pairs(PAIR_SRC)
    assert view.nbytes() == pairs.nbytes() > 0
    before = view.nbytes()
    view.index(SRC, EDGE)
    assert view.nbytes() == before + 64 * 4
    view.share(torch.float64)
    assert view.nbytes() == before + 64 * 4 + 64 * 8 + view.pairs(PAIR_DST).nbytes()
    graph_view, before = view.graph(SRC, DST), view.nbytes()
    graph_view.edges()
    assert view.nbytes() == before + graph_view.nbytes() and graph_view.nbytes() >= 64 * 8 * 2


def test_the_tensors_are_not_kept_alive():
    structure = tuple(t.clone() for t in typed().structure)
    alive = [weakref.ref(t) for t in structure]
    view = RelationView(structure, 12, 12, 5)
    pairs = view.pairs(PAIR_SRC)
    other = tuple(t.clone() for t in structure)
    del structure
    gc.collect()
    assert [found() for found in alive] == [None, None]
    assert view.pairs(PAIR_SRC) is pairs, "what was built stays"
    with pytest.raises(RuntimeError, match=r"are gone; call bind\(\) with live ones first"):
        view.pairs(PAIR_DST)
    view.bind(*other)
    assert torch.equal(view.pairs(PAIR_DST).of_edge, typed().view().pairs(PAIR_DST).of_edge)


def test_another_callers_tensors_may_go_first():
    structure = tuple(t.clone() for t in typed().structure)
    view = RelationView(structure, 12, 12, 5)
    view.bind(structure[0], structure[1].detach())  # which are gone
    assert torch.equal(view.pairs(PAIR_DST).of_edge, typed().view().pairs(PAIR_DST).of_edge)


def test_one_of_them_gone_is_enough():
    edge_index, edge_type = (t.clone() for t in typed().structure)
    view = RelationView((edge_index, edge_type), 12, 12, 5)
    del edge_type
    with pytest.raises(RuntimeError, match="are gone"):
        view.pairs(PAIR_SRC)


def test_unless_told_to_own_them():
    view = RelationView(tuple(t.clone() for t in typed().structure), 12, 12, 5, own=True)
    gc.collect()
    assert view.statistics() == typed().view().statistics()


def test_built_in_inference_mode_it_takes_part_in_training():
    graph = typed()
    view = graph.view()
    with torch.inference_mode():
        arrays = [view.pairs(PAIR_SRC).of_edge, view.index(SRC, EDGE), view.share(torch.float64),
                  view.graph(SRC, DST).edges().src]
    assert not any(t.is_inference() for t in arrays)


# ---- built by kernels ----

def by_kernels(device, graph, **options):
    """A view that kernels build."""
    view = RelationView(tuple(t.to(device) for t in graph.structure), graph.num_src, graph.num_dst,
                        graph.num_relations, own=True, **options)
    view.kernels = True
    return view


def same(got, expected):
    """Whether two views, one of them on the CPU, hold equal arrays."""
    assert got.statistics() == expected.statistics()
    for domain in (PAIR_SRC, PAIR_DST):
        for name in ("node", "relation", "ptr", "of_edge"):
            assert getattr(got.pairs(domain),
                           name).tolist() == getattr(expected.pairs(domain),
                                                     name).tolist(), (domain, name)
    for coarse in (SRC, DST, RELATION, PAIR_SRC, PAIR_DST):
        assert got.index(coarse, EDGE).dtype is torch.int32
        assert got.index(coarse, EDGE).tolist() == expected.index(coarse, EDGE).tolist()
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(got.share(dtype).cpu(), expected.share(dtype))


KINDS = {"any": {}, "no edges": dict(edges=0), "bipartite": dict(num_src=7),
         "one relation": dict(num_relations=1), "many relations": dict(num_relations=5000)}
#: both ends at once; one after the other, without copies of ids; with them; by sorting, with them;
#: without
LIMITS = {"at once": {}, "long": dict(AT_ONCE=-1), "many keys": dict(_KEYS_AT_ONCE=-1),
          "too many keys": dict(_MARK_AT_LEAST=-1, MARK_UP_TO=-1),
          "all of it": dict(AT_ONCE=-1, _MARK_AT_LEAST=-1, MARK_UP_TO=-1)}


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_build_the_same(device, monkeypatch, kind, limits, compact):
    graph = typed(**KINDS[kind])
    expected = graph.view(compact=compact)
    expected.statistics()
    for name, value in LIMITS[limits].items():
        monkeypatch.setattr(pairs, name, value)
    view = by_kernels(device, graph, compact=compact)
    same(view, expected)
    assert view.pairs(PAIR_SRC) is not view.pairs(PAIR_DST)


def test_kernels_build_both_ends_and_short_arrays_in_one_go(device, monkeypatch):
    calls = []
    number = pairs.cuda_pairs.number
    monkeypatch.setattr(pairs.cuda_pairs, "number", lambda *args: calls.append(1) or number(*args))
    monkeypatch.setattr(Edges, "check", None)  # nobody else looks at the ids
    for first in (lambda v: v.pairs(PAIR_DST), lambda v: v.index(RELATION, EDGE),
                  lambda v: v.graph(SRC, PAIR_DST)):
        view = by_kernels(device, typed())
        first(view)
        kept = [view.pairs(PAIR_SRC), view.pairs(PAIR_DST),
                *(view.index(end, EDGE) for end in (SRC, DST, RELATION))]
        assert len(calls) == 1 and kept[0] is view.pairs(PAIR_SRC) and kept[2] is view.index(SRC,
                                                                                             EDGE)
        calls.clear()


def test_kernels_keep_no_copies_of_long_arrays(device, monkeypatch):
    monkeypatch.setattr(pairs, "AT_ONCE", -1)
    view = by_kernels(device, typed())
    found = view.pairs(PAIR_SRC), view.pairs(PAIR_DST)
    assert view.nbytes() == sum(one.nbytes() for one in found)
    arrays = [getattr(one, name) for one in found for name in ("node", "relation", "of_edge")]
    assert all(t.untyped_storage().nbytes() < 64 * 4 + 400 for t in arrays), "each by itself"


@pytest.mark.parametrize("limits",
                         [{}, dict(AT_ONCE=-1), dict(AT_ONCE=-1, _MARK_AT_LEAST=-1, MARK_UP_TO=-1)])
@pytest.mark.parametrize("at, value, text", [
    ("src", 12, r"source ids from 0 to 12; they must lie in \[0, 12\)"),
    ("dst", -3, "destination ids from -3 to"),
    ("relation", 5, r"edge types from 0 to 5; they must lie in \[0, 5\)"),
    ("relation", -1, "edge types from -1 to 4"),
])
def test_kernels_refuse_ids_out_of_range(device, monkeypatch, at, value, text, limits):
    for name, limit in limits.items():
        monkeypatch.setattr(pairs, name, limit)
    graph = typed(edges=400)
    getattr(graph, at)[0] = value
    for build in (lambda view: view.pairs(PAIR_SRC), lambda view: view.index(DST, EDGE),
                  lambda view: view.statistics()):
        with pytest.raises(GraphError, match=text):
            build(by_kernels(device, graph))
    if at != "relation":
        with pytest.raises(GraphError, match=text):
            by_kernels(device, graph, ignore=True).pairs(PAIR_DST)
    else:
        same(by_kernels(device, graph, ignore=True), graph.view(ignore=True))


def test_kernels_share_pairs_of_sources_that_are_destinations(device):
    def rows(types):
        row = torch.arange(types.shape[0], device=types.device)
        return row, row, types

    types = torch.randint(0, 3, (50,), device=device)
    view, expected = (RelationView((t,), 50, 50, 3, rows, own=True) for t in (types, types.cpu()))
    view.kernels = True
    same(view, expected)
    assert view.pairs(PAIR_SRC) is view.pairs(PAIR_DST)
    loose = RelationView((types,), 50, 50, 3, rows, own=True, compact=False)
    loose.kernels = True
    assert loose.pairs(PAIR_SRC) is not loose.pairs(PAIR_DST)


def test_kernels_and_narrow_ids(device):
    graph = typed(num_relations=90)
    edge_index, edge_type = graph.structure
    view = RelationView((edge_index.to(device, torch.int16), edge_type.to(device, torch.uint8)), 12,
                        12, 90, own=True)
    view.kernels = True
    same(view, graph.view())


def test_shares_along_a_graph_by_kernels(device):
    view, expected = by_kernels(device, typed(edges=300)), typed(edges=300).view()
    for back in (False, True):
        graph = view.graph(SRC, DST)
        place = (graph.csr_by_id() if back else graph.csc()).place.long().cpu()
        assert torch.equal(view.share_along(SRC, DST, back).cpu(),
                           expected.share(torch.float32)[place])


def test_kernels_build_once_for_several_threads(device, monkeypatch):
    calls = []
    number = pairs.cuda_pairs.number
    monkeypatch.setattr(pairs.cuda_pairs, "number", lambda *args: calls.append(1) or number(*args))
    view = by_kernels(device, typed())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: view.pairs(PAIR_DST) if i % 2 else view.index(DST, EDGE),
                              range(8)))
    assert len(calls) == 1 and all(one is found[i % 2] for i, one in enumerate(found))


def test_built_by_kernels_in_inference_mode_it_takes_part_in_training(device):
    view = by_kernels(device, typed())
    with torch.inference_mode():
        arrays = [view.pairs(PAIR_SRC).of_edge, view.pairs(PAIR_DST).node, view.index(SRC, EDGE),
                  view.share(torch.float32), view.blocks((5, 7)).relation]
    assert not any(t.is_inference() for t in arrays)


def test_edges_that_were_put_together_are_kept_once(device):
    class Assemble:
        def checked(self, edge_index, edge_type):
            return *edge_index.int().unbind(0), edge_type.int()

    graph = typed()
    view = by_kernels(device, graph, assemble=Assemble())
    same(view, graph.view())
    arrays = [view.index(end, EDGE) for end in (SRC, DST, RELATION)]
    assert all(a is b for a, b in zip(view._edges.ends(), arrays))
    counts = 4 * view.pairs(PAIR_DST).count
    assert view.nbytes() == 60 * 4 * 3 + view.pairs(PAIR_SRC).nbytes() + view.pairs(
        PAIR_DST).nbytes() + counts + 60 * (4 + 8)
