"""CSC and CSR by counting and by sorting, against a plain Python model, and the report on them."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.cuda.runtime import reports
from gnnaccel.cuda.structures import structure as counting
from gnnaccel.dispatch.graph import structure as sorting
from tests.attention_cases import skewed_edges
from tests.helpers import forget_report

pytestmark = pytest.mark.usefixtures("poison")


def model(src: list, dst: list, num_src: int, num_dst: int, loops: int) -> tuple[list, bool]:
    """For each destination its [(source, edge id)] in the order of the list, and whether ids were
    out of range."""
    rows: list = [[] for _ in range(num_dst)]
    invalid = False
    for edge, (s, d) in enumerate(zip(src, dst)):
        if not (0 <= s < num_src and 0 <= d < num_dst):
            invalid = True
        elif not (loops and s == d):
            rows[d].append((s, edge))
    for node in range(loops):
        rows[node].append((node, len(src) + node))
    return rows, invalid


def csc(how: str, src, dst, num_src, num_dst, loops=0, wide=False) -> counting.Rows:
    if how != "sort":
        return counting.csc(src, dst, num_src, num_dst, loops, wide)
    return sorting.csc(src, dst, num_src, num_dst, loops, wide, places=True)


def transpose(how: str, rows: counting.Rows, num_src: int) -> counting.Rows:
    return (counting.transpose(rows, num_src)
            if how != "sort" else sorting.transpose(rows, num_src, places=True))


def entries(rows: counting.Rows) -> list:
    """For each row its [(other, place)] in stored order."""
    indptr = rows.indptr.tolist()
    assert indptr[0] == 0 and all(a <= b for a, b in zip(indptr, indptr[1:]))
    pairs = list(zip(rows.other.tolist(), rows.place.tolist()))
    assert indptr[-1] <= len(pairs)
    return [pairs[a:b] for a, b in zip(indptr, indptr[1:])]


def verify(how: str, src, dst, num_src, num_dst, loops=0, wide=False) -> counting.Rows:
    """Builds both directions and compares them with the model. Returns the CSC."""
    expected, invalid = model(src.tolist(), dst.tolist(), num_src, num_dst, loops)
    by_dst = csc(how, src, dst, num_src, num_dst, loops, wide)
    by_src = transpose(how, by_dst, num_src)
    assert entries(by_dst) == expected
    back: list = [[] for _ in range(num_src)]
    place = 0
    for row, members in enumerate(entries(by_dst)):
        for source, _ in members:
            back[source].append((row, place))
            place += 1
    assert entries(by_src) == back
    offset = torch.int64 if wide else torch.int32
    for rows in (by_dst, by_src):
        assert rows.indptr.dtype == rows.place.dtype == offset and rows.other.dtype == torch.int32
    verify_split(by_dst, [len(row) for row in expected], invalid)
    verify_split(by_src, [len(row) for row in back], False)
    return by_dst


def verify_split(rows: counting.Rows, lengths: list, invalid: bool) -> None:
    """The report's numbers, and chunks that cover just the long rows."""
    if rows.indptr.is_cuda:
        torch.cuda.synchronize()
    split, limit = rows.split, rows.split.chunk_edges
    long = {row: -(-n // limit) for row, n in enumerate(lengths) if n > limit}
    assert split.known and split.invalid == invalid
    assert split.sizes() == (sum(long.values()), len(long))
    assert split.edges == sum(lengths) and split.longest == max(lengths, default=0)
    assert split.split_edges == sum(lengths[row] for row in long)
    bins = np.bincount([n.bit_length() for n in lengths], minlength=1) if lengths else []
    assert split.histogram() == list(np.trim_zeros(bins, "b"))
    chunks = split.chunks[:split.sizes()[0]].tolist()
    heavy = split.heavy[:split.sizes()[1]].tolist()
    assert sorted(map(tuple, chunks)) == sorted((row, c) for row, n in long.items()
                                                for c in range(n))
    assert sorted((row, n) for row, _, n, _ in heavy) == sorted(long.items())
    for row, first, count, _ in heavy:
        assert chunks[first:first + count] == [[row, c] for c in range(count)]


@pytest.fixture(params=["one launch", "count", "sort"])
def how(request, monkeypatch):
    if request.param == "count":  # as graphs that are not small
        monkeypatch.setattr(counting, "_SMALL_ROWS", -1)
    return request.param


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("loops", [0, 7, 30])
def test_skewed_graph(device, chunk_edges, how, ids, wide, loops):
    chunk_edges(16)
    src, dst = skewed_edges(40, 30, 300, device).to(ids).unbind(0)
    assert int((src == dst).sum()) > 3
    verify(how, src, dst, 40, 30, loops, wide)


@pytest.mark.parametrize("loops", [0, 25])
def test_large_graph(device, how, loops):
    nodes, edges = (300, 3000) if device.type == "cpu" else (20_000, 300_000)
    src, dst = skewed_edges(nodes, nodes, edges, device).unbind(0)
    assert csc(how, src, dst, nodes, nodes,
               loops).split.chunk_edges == counting.chunk_edges(edges + loops)
    verify(how, src, dst, nodes, nodes, loops)


@pytest.mark.long
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("loops", [0, 5000])
def test_offsets_of_many_rows(device, loops, wide):
    """More blocks than a look back sees at once, the last of them half empty."""
    nodes = 40 * counting._SCANNED - 700
    src, dst = skewed_edges(nodes, nodes, 20_000, device).unbind(0)
    verify("count", src, dst, nodes, nodes, loops, wide)


@pytest.mark.parametrize("num_src, num_dst, loops",
                         [(3, 3, 0), (3, 3, 3), (1, 1, 0), (1, 1, 1), (4, 2, 2), (0, 5, 0),
                          (5, 0, 0), (0, 0, 0)])
def test_no_edges(device, how, num_src, num_dst, loops):
    none = torch.empty(0, dtype=torch.int64, device=device)
    verify(how, none, none, num_src, num_dst, loops)


def test_one_node_with_many_self_loops(device, how):
    ids = torch.zeros(50, dtype=torch.int64, device=device)
    verify(how, ids, ids, 1, 1)
    verify(how, ids, ids, 1, 1, loops=1)


@pytest.mark.parametrize("wrong",
                         [(-1, 0), (0, -1), (40, 0), (0, 30), (2**31, 0), (0, 2**31 + 3),
                          (-2**40, 5)])
def test_ids_out_of_range_are_left_out_and_reported(device, how, wrong):
    edges = skewed_edges(40, 30, 100)
    edges[:, 17] = torch.tensor(wrong)
    src, dst = edges.to(device).unbind(0)
    for loops in (0, 30):
        assert verify(how, src, dst, 40, 30, loops).split.invalid


def test_ids_out_of_range_in_a_sorted_list(device, how):
    src, dst = torch.tensor([0, 9, 1, 2, 0],
                            device=device), torch.tensor([0, 0, 1, 1, 2], device=device)
    assert verify(how, src, dst, 3, 3).split.invalid


def test_a_sorted_list_keeps_its_order(device, how):
    edges = skewed_edges(40, 30, 300)
    src, dst = edges[:, edges[1].sort(stable=True).indices].to(device).unbind(0)
    rows = verify(how, src, dst, 40, 30)
    assert rows.place.tolist() == list(range(300)) and rows.other.tolist() == src.tolist()


def test_sorting_is_stable(device):
    src, dst = skewed_edges(40, 30, 300, device).unbind(0)
    rows = sorting.csc(src, dst, 40, 30, 0, False, True)
    assert all(row == sorted(row, key=lambda pair: pair[1]) for row in entries(rows))
    by_src = sorting.transpose(rows, 40, True)
    assert all(row == sorted(row, key=lambda pair: pair[1]) for row in entries(by_src))


def test_sorting_without_places(device):
    src, dst = skewed_edges(40, 30, 300, device).unbind(0)
    full, bare = (sorting.csc(src, dst, 40, 30, 9, False, places) for places in (True, False))
    assert torch.equal(full.indptr,
                       bare.indptr) and torch.equal(full.other,
                                                    bare.other) and bare.place.numel() == 0
    back = sorting.transpose(bare, 40, False, inverse=True)
    assert torch.equal(back.inverse[sorting.transpose(full, 40, True).place.long()],
                       torch.arange(309, device=device).int())
    assert torch.equal(back.other,
                       sorting.transpose(full, 40, True).other) and back.place.numel() == 0


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("lengths", [
    [0, 1, 2, 31, 32, 33, 0], [255, 256, 257, 64, 0, 3], [1, 300, 2048, 5, 2049, 40],
    [140_000, 7, 0, 3000, 300],
    [20, 20, 20, 4, 20, 20, 20, 5, 64, 0, 0, 0, 65, 1, 1, 1, 128, 129]])
def test_entries_of_a_row_are_put_in_order(device, lengths, wide):
    """Rows for a warp, for a block, and for several blocks with a bitmap each, whose entries come
    in any order."""
    total = sum(lengths)
    indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64 if wide else torch.int32,
                          device=device)
    rng = np.random.default_rng(3)
    expected = [np.sort(part) for part in np.split(rng.permutation(total), np.cumsum(lengths)[:-1])]
    place = torch.from_numpy(np.concatenate([rng.permutation(part) for part in expected])).to(
        device, indptr.dtype)
    entries = torch.stack([place, place * 7 % 1000], 1)
    rows = counting._ordered(indptr, entries, counting.split_rows(indptr, total),
                             torch.empty_like(place))
    assert rows.place.tolist() == np.concatenate(expected).tolist()
    assert torch.equal(rows.other, (rows.place * 7 % 1000).to(torch.int32))


def test_rows_that_are_not_cut_are_put_in_order(device, chunk_edges, how):
    """A row longer than a warp puts in order, where chunks are longer still."""
    chunk_edges(1024)
    dst = torch.zeros(700, dtype=torch.int64, device=device)
    src = torch.arange(700, device=device) * 7 % 300
    verify(how, src, dst, 300, 1)
    verify(how, dst, src, 1, 300)


@pytest.mark.long
@pytest.mark.parametrize("edges, loops, nodes, few", [
    (8192, 0, 50, True), (8193, 0, 50, False), (8190, 3, 50, False), (5000, 3192, 4000, True),
    (900, 0, 16384, True), (900, 0, 16385, False), (256, 0, 16384, True), (2, 0, 1, True)])
def test_a_small_graph_is_one_launch_for_each_direction(device, monkeypatch, edges, loops, nodes,
                                                        few):
    launched, kernels = [], counting._kernels
    monkeypatch.setattr(counting, "_kernels", lambda family, wide: lambda entry: (
        launched.append(entry), kernels(family, wide)(entry))[1])
    src, dst = torch.randint(nodes, (2, edges), device=device).unbind(0)
    dst[edges // 2:] = nodes - 1
    verify("count", src, dst, nodes, nodes, loops)
    assert (launched == ["small_i64", "small_src"]) is few and (few or len(launched) >= 8)
    launched.clear()
    verify("count", src, dst.sort().values, nodes, nodes, loops)
    assert (launched == ["small_i64", "small_src"]) is few


@pytest.mark.parametrize("num_src, num_dst", [(16385, 3), (3, 16385)])
def test_many_nodes_on_one_side_alone(device, how, num_src, num_dst):
    src, dst = torch.tensor([[num_src - 1, 0, 2, num_src - 1], [1, num_dst - 1, 0, 1]],
                            device=device).unbind(0)
    verify(how, src, dst, num_src, num_dst)


@pytest.mark.parametrize("limit", [1, 5, 16])
def test_sizes_before_the_report_are_bounds(device, limit):
    src, dst = skewed_edges(40, 30, 300, device).unbind(0)
    rows = counting.csc(src, dst, 40, 30, 0, False)
    rows.split = split = counting.split_rows(rows.indptr, 300, limit=limit)
    exact = forget_report(rows)
    bounds = split.sizes()
    assert bounds == (split.chunks.shape[0], split.heavy.shape[0])
    assert bounds[0] >= exact[0] > 0 and bounds[1] >= exact[1] > 0
    assert bounds[0] <= 2 * (300 // limit)


def test_launches_before_the_report(device):
    """They are told the same until the device has reported; other arrays are told of themselves."""
    src, dst = skewed_edges(40, 30, 900, device).unbind(0)
    rows = counting.csc(src, dst, 40, 30, 0, False)
    rows.split = split = counting.split_rows(rows.indptr, 900, limit=16)
    report = split.report
    exact = forget_report(rows)
    early = rows.launch()
    assert rows.launch() is early and (early.chunks, early.heavy) == split.sizes() != exact
    other = dataclasses.replace(rows, place=rows.place.clone(), launched=None, made={})
    assert other.launch().graph[2] == other.place.data_ptr() != early.graph[2]
    split.report = report
    late = rows.launch()
    assert rows.launch() is late is rows.launched and (late.chunks, late.heavy) == exact


@pytest.mark.parametrize("lengths", [[16] * 5, [17] * 5, [0, 85, 0], [1] * 85, [33, 0, 52]])
def test_bounds_hold_for_any_distribution(device, lengths):
    indptr = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    split = counting.split_rows(indptr, sum(lengths), limit=16)
    if device.type == "cuda":
        torch.cuda.synchronize()
    chunks, heavy = split.sizes()
    assert chunks == sum(-(-n // 16) for n in lengths if n > 16) <= split.chunks.shape[0]
    assert heavy == sum(n > 16 for n in lengths) <= split.heavy.shape[0]


def test_a_report_is_not_overtaken(device, monkeypatch):
    """A graph that lives long keeps its numbers, however many are built after it; its sizes may be
    read late."""
    monkeypatch.setattr(reports, "_SLOTS", 8)
    monkeypatch.setattr(reports, "_reports", {})
    src, dst = skewed_edges(40, 30, 300, device).unbind(0)
    rows = counting.csc(src, dst, 40, 30, 0, False)
    early = counting.split_rows(rows.indptr, 300, limit=16)
    late = counting.split_rows(rows.indptr, 300, limit=16)
    for _ in range(20):
        counting.split_rows(torch.zeros(3, dtype=torch.int32, device=device), 0)
    kept = [counting.split_rows(torch.zeros(n + 2, dtype=torch.int32, device=device), 0)
            for n in range(20)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    lengths = rows.indptr.diff().tolist()
    for split in (early, late):
        assert split.known and split.edges == 300 and split.longest == max(lengths)
        assert split.sizes() == (sum(-(-n // 16) for n in lengths if n > 16),
                                 sum(n > 16 for n in lengths))
    assert [split.histogram() for split in kept] == [[n + 1] for n in range(20)]


@pytest.mark.parametrize("edges", [0, 1, 10**4, 10**5, 10**6, 10**7, 10**8, 10**10])
def test_chunk_sizes(edges):
    size = counting.chunk_edges(edges)
    assert size & (size - 1) == 0 and 32 <= size <= 1024
    assert size >= 1024 or edges // size <= 1 << 16, "no more chunks than a GPU can want"


@st.composite
def multigraphs(draw):
    num_src, num_dst = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    pairs = draw(st.lists(st.tuples(st.integers(-1, num_src), st.integers(-1, num_dst)),
                          max_size=60))
    return pairs, num_src, num_dst, draw(st.integers(0, min(num_src, num_dst)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=multigraphs(), sort=st.booleans(), wide=st.booleans(),
       limit=st.sampled_from([1, 3, 128]))
def test_any_multigraph(device, how, chunk_edges, case, sort, wide, limit):
    pairs, num_src, num_dst, loops = case
    chunk_edges(limit)
    pairs = sorted(pairs, key=lambda pair: pair[1]) if sort else pairs
    src, dst = torch.tensor(pairs, dtype=torch.int64,
                            device=device).view(-1, 2).t().contiguous().unbind(0)
    verify(how, src, dst, num_src, num_dst, loops, wide)
