"""Pairs of a node and a relation, shares of edges and nodes by type: against torch's way, number
for number."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.cuda.structures import pairs
from gnnaccel.dispatch.relational.pairs import pairs_of

pytestmark = pytest.mark.usefixtures("poison")

FIELDS = pairs.Numbered._fields
BITS = [torch.int32, torch.int64]
ONE = torch.ones(1, dtype=torch.int32)


def edges(count=300, num_src=40, num_dst=30, num_relations=7):
    """(src, dst, relation, sizes) on the CPU, with a hub and duplicates; relation 1 and the last
    destination have no edges."""
    src, dst, relation = (torch.randint(0, max(1, below), (count,))
                          for below in (num_src, num_dst - 1, num_relations))
    relation[relation == 1] = 0
    src[:count // 3], dst[:count // 4], dst[count // 4:count // 3] = (min(2, num_src - 1),
                                                                      min(3, num_dst - 1), 0)
    return src, dst, relation, (num_src, num_dst, num_relations)


def verify(device, src, dst, relation, sizes, ends=(0, 1), small=True):
    """Against torch's way on the CPU. Returns what was found."""
    found = pairs.number(src.to(device), dst.to(device), relation.to(device), *sizes, ends, small)
    given_ends = (src, dst)
    assert len(found.pairs) == len(ends)
    for end, got in zip(ends, found.pairs):
        expected = pairs_of(given_ends[end], relation, sizes[end], sizes[2])
        for name in FIELDS:
            t = getattr(got, name)
            assert t.dtype is torch.int32 and t.is_contiguous() and t.tolist() == getattr(expected, name).tolist(), (end, name)
    assert (found.copies is not None) == small
    for copy, ids in zip(found.copies or (), (src, dst, relation)):
        assert copy.dtype is torch.int32 and copy.tolist() == ids.tolist()
    return found


GRAPHS = {"any": {}, "no edges": dict(count=0),
          "nothing": dict(count=0, num_src=0, num_dst=0, num_relations=0),
          "no nodes": dict(count=0, num_src=0), "one edge": dict(count=1),
          "one node": dict(count=50, num_src=1, num_dst=1), "one relation": dict(num_relations=1),
          "relations mostly empty": dict(num_relations=5000),
          "several blocks": dict(count=1500, num_src=300, num_dst=500)}


@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs(device, kind):
    verify(device, *edges(**GRAPHS[kind]))


def test_equal_edges(device):
    found = verify(device, *(torch.full((700,), n) for n in (3, 4, 2)), (5, 5, 3))
    assert [one.node.shape[0] for one in found.pairs] == [1, 1]


@settings(max_examples=20, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)), max_size=40))
def test_any_edges(device, given_edges):
    verify(device, *torch.tensor(given_edges, dtype=torch.int64).view(-1, 3).unbind(1), (4, 5, 3))


@pytest.mark.parametrize("of_nodes", BITS)
@pytest.mark.parametrize("of_relations", BITS)
def test_dtypes(device, of_nodes, of_relations):
    src, dst, relation, sizes = edges()
    verify(device, src.to(of_nodes), dst.to(of_nodes), relation.to(of_relations), sizes)


def test_ids_with_strides(device):
    src, dst, relation, sizes = edges()
    columns = torch.stack([src, dst, relation], 1).to(device)
    every_other = torch.stack([relation, relation + 1], 1).to(device, torch.int32)[:, 0]
    assert columns[:, 1].stride() == (3,) and every_other.stride() == (2,)
    expected = verify(device, src, dst, relation, sizes)
    one = torch.tensor(3, device=device).expand(300)
    for ids, same in (((columns[:, 0], columns[:, 1], columns[:, 2]), 2), ((columns[:, 0], columns[:, 1], every_other), 2),
                      ((columns[:, 0], one, columns[:, 2]), 1)):  # the last one with other destinations
        got = pairs.number(*ids, *sizes)
        for a, b in list(zip(got.pairs, expected.pairs))[:same]:
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)
        assert [t.tolist() for t in got.copies] == [t.tolist() for t in ids]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("ends", [(0,), (1,), (), (0, 1)])
def test_some_ends(device, ends, small):
    verify(device, *edges(), ends, small)


def test_sources_that_are_destinations(device):
    ids, relation = torch.randint(0, 9, (80,)).to(device), torch.randint(0, 4, (80,)).to(device)
    (found,), (src, dst, types) = pairs.number(ids, ids, relation, 9, 9, 4, (0,))
    assert src is dst and src.tolist() == ids.tolist() and types.tolist() == relation.tolist()
    assert found.of_edge.tolist() == pairs_of(ids, relation, 9, 4).of_edge.tolist()


def test_copies_are_not_the_callers_own_and_arrays_are_aligned(device):
    src, dst, relation = (torch.randint(0, 5, (77,), dtype=torch.int32, device=device)
                          for _ in range(3))
    found = pairs.number(src, dst, relation, 5, 5, 5)
    before = src.tolist()
    src.zero_()
    assert found.copies[0].tolist() == before
    arrays = [*found.copies,
              *(getattr(one, name) for one in found.pairs
                for name in ("node", "relation", "of_edge"))]
    assert all(t.data_ptr() % 16 == 0 for t in arrays)


@pytest.mark.parametrize("ends", [(0, 1), ()])
@pytest.mark.parametrize("value", ["limit", -1, 2**31, 2**32, -2**40])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_ids_out_of_range(device, place, value, ends):
    *ids, sizes = edges(count=280)
    assert pairs.number(*(t.to(device) for t in ids), *sizes, ends) is not None
    for at in (0, 279):
        wrong = [t.clone() for t in ids]
        wrong[place][at] = sizes[place] if value == "limit" else value
        assert pairs.number(*(t.to(device) for t in wrong), *sizes, ends) is None


def test_edges_where_there_are_no_relations(device):
    none = torch.zeros(3, dtype=torch.int64, device=device)
    assert pairs.number(none, none, none, 4, 4, 0) is None


def test_repeats(device):
    *ids, sizes = edges(count=900)
    torch.use_deterministic_algorithms(True)
    try:
        verify(device, *ids, sizes)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inputs_keep_their_bounds(device, poison):
    *ids, sizes = edges(count=99)
    found = pairs.number(*(poison.guard(t.to(device)) for t in ids), *sizes, small=False)
    order = poison.guard(torch.randperm(99).to(device))
    of_edge = poison.guard(found.pairs[1].of_edge)
    pairs.shares(of_edge, pairs.counted(of_edge, found.pairs[1].node.shape[0]), torch.float32,
                 order)
    pairs.sort_types(poison.guard(ids[2].to(device)), sizes[2])


# ---- shares ----

@pytest.mark.parametrize("dtype", pairs.SHARES)
@pytest.mark.parametrize("count", [0, 1, 600])
def test_shares(device, count, dtype):
    of_edge = (torch.rand(count).pow(3) * 50).int()  # the first pairs have many edges
    expected = torch.bincount(of_edge, minlength=60).to(dtype).reciprocal()[of_edge.long()]
    counts = pairs.counted(of_edge.to(device), 60)
    assert torch.equal(counts.cpu(), torch.bincount(of_edge, minlength=60).int())
    assert torch.equal(pairs.shares(of_edge.to(device), counts, dtype).cpu(), expected)
    for index in BITS:
        order = torch.randperm(count)
        got = pairs.shares(of_edge.to(device), counts, dtype, order.to(device, index))
        assert got.dtype is dtype and torch.equal(got.cpu(), expected[order])


# ---- nodes by type ----

@pytest.mark.parametrize("index", BITS)
@pytest.mark.parametrize("nodes, types",
                         [(0, 0), (0, 3), (1, 1), (15, 2), (16, 2), (17, 2), (700, 5), (700, 90),
                          (9000, 3), (5, 400)])
def test_nodes_by_type(device, nodes, types, index):
    given_types = torch.randint(0, max(types, 1), (nodes,), dtype=index)
    found = pairs.sort_types(given_types.to(device), types)
    counts = (torch.bincount(given_types, minlength=types)
              if types else torch.empty(0, dtype=torch.int64))
    assert found.ends == (0, *counts.cumsum(0).tolist()) == tuple(found.ptr.tolist())
    assert found.types.dtype is torch.int32 and found.types.tolist() == given_types.tolist()
    ordered, order = torch.sort(given_types, stable=True)
    if torch.equal(ordered, given_types):
        assert found.order is None
    else:
        assert found.order.dtype is torch.int32 and found.order.tolist() == order.tolist()
    found = pairs.sort_types(ordered.to(device), types)
    assert found.order is None and found.types.tolist() == ordered.tolist() and found.ptr.dtype is torch.int32


@pytest.mark.parametrize("at", [15, 16, 17])
def test_one_place_out_of_order(device, at):
    """Where one thread's nodes end and the next one's begin."""
    types = torch.zeros(40, dtype=torch.int64)
    types[:at] = 1
    assert pairs.sort_types(types.to(device),
                            2).order.tolist() == torch.sort(types, stable=True).indices.tolist()


@pytest.mark.parametrize("wrong", [-1, 3, 2**31, -2**40])
def test_types_out_of_range(device, wrong):
    types = torch.zeros(50, dtype=torch.int64)
    types[33] = wrong
    assert pairs.sort_types(types.to(device),
                            3) is None and pairs.sort_types(types[34:].to(device), 3) is not None


def test_a_column_of_types(device):
    types = torch.randint(0, 4, (60, 2)).to(device)
    assert pairs.sort_types(types[:, 1], 4).types.tolist() == types[:, 1].tolist()


# ---- what does not fit ----

@pytest.mark.parametrize("change,message", [
    (dict(src=torch.zeros(9)), "src is"), (dict(dst=torch.zeros(8, dtype=torch.int64)), "dst is"),
    (dict(relation=torch.zeros(9, 1, dtype=torch.int64)), "relation is"),
    (dict(relation=torch.zeros(9, dtype=torch.int16)), "relation is"),
])
def test_edges_that_do_not_fit_are_refused(change, message):
    fits = {name: torch.zeros(9, dtype=torch.int64) for name in ("src", "dst", "relation")}
    with pytest.raises(ValueError, match=message):
        pairs.number(*(fits | change).values(), 4, 4, 4)


@pytest.mark.parametrize("args,message", [
    ((torch.zeros(9), ONE, torch.float32), "of_edge is"),
    ((torch.zeros(18, dtype=torch.int32)[::2], ONE, torch.float32), "of_edge is"),
    ((torch.zeros(9, dtype=torch.int32), ONE, torch.float16), "shares torch.float16"),
    ((torch.zeros(9, dtype=torch.int32), ONE.long(), torch.float32), "counts torch.int64"),
    ((torch.zeros(9, dtype=torch.int32), ONE, torch.float32, torch.zeros(8, dtype=torch.int32)),
     "order is"),
    ((torch.zeros(9, dtype=torch.int32), ONE, torch.float32, torch.zeros(9)), "order is"),
])
def test_shares_that_do_not_fit_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        pairs.shares(*args)


def test_pairs_of_edges_that_are_not_counted():
    for of_edge in (torch.zeros(9), torch.zeros(18, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError, match="of_edge is"):
            pairs.counted(of_edge, 1)


def test_types_that_do_not_fit_are_refused():
    for types in (torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="types is"):
            pairs.sort_types(types, 2)
