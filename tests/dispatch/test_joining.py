"""`Layout`: the edges of several types as one graph, by the kernel and by torch operations, and
where which of them serves."""
from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gnnaccel
from gnnaccel.adapters.layout import Layout, Part
from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.structures import join as cuda_join
from gnnaccel.dispatch.graph import joining
from gnnaccel.dispatch.graph.edge_arrays import CSC, EdgeArrays
from gnnaccel.dispatch.graph.joining import JoinedView, Range
from gnnaccel.dispatch.ir.program import DST, EDGE, PAIR_DST, RELATION, SRC
from gnnaccel.dispatch.ops.graph import JoinedGraph
from gnnaccel.dispatch.relational import edges as edges_module
from gnnaccel.dispatch.relational.edges import Edges
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.errors import GraphError

LOOPS = (Range(9, 2, 5, 1, 5), Range(1, 0, 0, 0, 0))


def problem(device, counts=(30, 0, 7), dtype=torch.int64, loops=()):
    """(layout, edges) of some edge types between types of so many nodes."""
    parts, src, dst, edges = [], 0, 0, []
    for at, count in enumerate(counts):
        num_src, num_dst = 4 + at % 3, 2 + at % 5
        parts.append(Part((f"s{at}", "to", f"d{at}"), at, src, num_src, dst, num_dst))
        edges.append(torch.stack([torch.randint(0, num_src, (count,)),
                                  torch.randint(0, num_dst, (count,))]).to(device, dtype))
        src, dst = src + num_src, dst + num_dst
    return Layout(tuple(parts), loops), edges


def nodes(layout) -> tuple[int, int]:
    """Sources and destinations."""
    return layout.parts[-1].src + layout.parts[-1].num_src, layout.parts[-1].dst + layout.parts[
        -1].num_dst


def by_torch(layout, edges, call=Layout.checked):
    """The same by torch operations."""
    with gnnaccel.enabled(backend="torch"):
        found = call(layout, *edges)
    assert all(t.dtype is torch.int64 for t in found)
    return found


def same(layout, edges, call=Layout.checked):
    found, expected = call(layout, *edges), by_torch(layout, edges, call)
    assert all(t.dtype is torch.int32 for t in found), "the kernel was to serve"
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    return found


def test_a_part_is_a_name_and_a_range():
    assert Part._fields[1:] == Range._fields


@pytest.mark.parametrize("call", [Layout.checked, Layout.__call__])
@pytest.mark.parametrize("loops", [(), LOOPS], ids=["", "loops"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [(30, 0, 7), (1,), (0,), (0, 0), (3,) * 40], ids=len)
def test_kernel_and_torch_join_alike(device, counts, dtype, loops, call):
    layout, edges = problem(device, counts, dtype, loops)
    same(layout, edges, call)
    same(layout, [t.t().contiguous().t() for t in edges], call)


def test_edges_in_arrays_of_a_host(device):
    layout, edges = problem(device, (6, 20, 4))
    src, dst = edges[1]
    order = dst.sort(stable=True).indices
    csc = CSC(torch.searchsorted(dst[order],
                                 torch.arange(layout.parts[1].num_dst + 1, device=device)),
              src[order], order)
    given = [edges[0], EdgeArrays(None, csc),
             EdgeArrays((edges[2][0].clone(), edges[2][1].clone()))]
    assert [t.tolist() for t in same(layout, given)] == [t.tolist()
                                                         for t in by_torch(layout, edges)]


@pytest.mark.parametrize("wrong", [-1, "count", 2**32])
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("part", [0, 2])
def test_ids_of_other_types_are_told_alike(device, part, end, wrong):
    layout, edges = problem(device, loops=LOOPS)
    edges[part][end, 3] = layout.parts[part][3 + 2 * end] if wrong == "count" else wrong
    with pytest.raises(GraphError) as expected:
        by_torch(layout, edges)
    with pytest.raises(GraphError) as found:
        layout.checked(*edges)
    assert str(found.value) == str(expected.value)
    what, node = (("source", f"'s{part}'"), ("destination", f"'d{part}'"))[end]
    assert f"{what} ids from" in str(found.value) and f"nodes of type {node}." in str(found.value)
    num_src, num_dst = nodes(layout)
    for look in (lambda: RelationView(tuple(edges), num_src, num_dst, len(edges),
                                      layout).pairs(PAIR_DST),
                 lambda: JoinedView(tuple(edges), num_src, num_dst, layout).csc(),
                 lambda: JoinedGraph(tuple(edges), num_src, num_dst, layout).index("v")):
        with pytest.raises(GraphError) as found:
            look()
        assert str(found.value) == str(expected.value)


class Counted(Layout):
    """Counts how often it is asked with and without a check."""

    def __init__(self, layout):
        super().__init__(layout.parts, layout.loops)
        object.__setattr__(self, "asked", [])

    def __call__(self, *edge_indices):
        self.asked.append("joined")
        return super().__call__(*edge_indices)

    def checked(self, *edge_indices):
        self.asked.append("checked")
        return super().checked(*edge_indices)


@pytest.mark.parametrize("backend, limit, asked",
                         [("auto", 38, []), ("auto", 37, ["joined"] * 2),
                          ("torch", 38, ["joined"] * 2)])
def test_a_view_checks_once(device, monkeypatch, backend, limit, asked):
    """And keeps what the kernel made of small graphs."""
    layout, edges = problem(device)
    expected, join = by_torch(layout, edges), Counted(layout)
    monkeypatch.setattr(Edges, "check", None)  # nothing is left for it
    monkeypatch.setattr(edges_module, "_KEEP_BELOW", limit)
    view = RelationView(tuple(edges), *nodes(layout), len(edges), join)
    with gnnaccel.enabled(backend=backend):
        for coarse, ids in zip((SRC, DST, RELATION), expected):
            assert view.index(coarse, EDGE).tolist() == ids.tolist()
    assert join.asked == ["checked", *asked]
    assert view.nbytes() == 3 * 4 * 37 + (0 if asked else 3 * 4 * 37)


def test_a_view_of_what_has_no_check_of_its_own_checks(device):
    layout, edges = problem(device)
    edges[2][0, 0] = 99
    view = RelationView(tuple(edges), *nodes(layout), len(edges),
                        lambda *given: by_torch(layout, given, Layout.__call__))
    with pytest.raises(GraphError, match="the graph holds source ids from"):
        view.index(SRC, EDGE)


def test_traversals_of_a_joined_graph(device):
    layout, edges = problem(device, (30, 0, 7, 90))
    src, dst, _ = by_torch(layout, edges)
    rows = JoinedView(tuple(edges), *nodes(layout), layout).csc()
    indptr, other = rows.indptr.tolist(), rows.other.tolist()
    for node in range(nodes(layout)[1]):
        assert sorted(other[indptr[node]:indptr[node + 1]]) == sorted(src[dst == node].tolist())


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_as_many_operations_for_any_number_of_types(device):
    made = []
    for count in (2, 40):
        layout, edges = problem(device, (5,) * count)
        layout.checked(*edges)
        with Operations() as seen:
            layout.checked(*edges)
        made.append(seen.names)
    assert made[0] == made[1] and len(made[0]) <= 10, made


@contextlib.contextmanager
def broken(monkeypatch):
    def fail():
        raise driver.CompileError("no")

    monkeypatch.setattr(cuda_join, "prepare", fail)
    joining._compiles.cache_clear()
    yield
    joining._compiles.cache_clear()


def test_a_kernel_that_does_not_compile_is_not_asked(device, monkeypatch):
    layout, edges = problem(device)
    with broken(monkeypatch):
        assert layout.checked(*edges)[0].dtype is torch.int64
    monkeypatch.undo()
    assert layout.checked(*edges)[0].dtype is torch.int32


@pytest.mark.parametrize("src, loops",
                         [(2**31 - 4, ()), (2**40, ()), (0, (Range(1, 2**31 - 5, 5, 0, 5),))],
                         ids=str)
def test_ids_beyond_32_bits(device, src, loops):
    parts = (Part(("a", "to", "b"), 0, src, 4, 0, 2),)
    edges = torch.tensor([[3, 0], [1, 1]], device=device)
    found = Layout(parts, loops).checked(edges)
    assert found[0].dtype is torch.int64 and found[0][:2].tolist() == [src + 3, src]
    assert Layout((parts[0]._replace(src=2**31 - 5),
                   )).checked(edges)[0].tolist() == [2**31 - 2, 2**31 - 5]
    assert not joining.serves([edges], 2**31) and joining.serves([edges], 2**31 - 1)


def test_more_edges_than_32_bits_count(device):
    many = torch.zeros(2, 1, dtype=torch.int64, device=device).expand(2, 2**30)
    assert joining.serves([many], 4) and not joining.serves([many, many],
                                                            4) and not joining.serves([many], 4,
                                                                                      2**30)


def test_tensors_on_a_cpu_go_by_torch():
    layout, edges = problem(torch.device("cpu"))
    assert not driver.placed() and layout.checked(*edges)[0].dtype is torch.int64


@pytest.mark.gpu
def test_a_capture_goes_by_torch():
    possible, why = driver.available()
    if not possible:
        pytest.skip(why)
    device = torch.device("cuda", torch.cuda.current_device())
    layout, edges = problem(device)
    layout(*edges)
    by_torch(layout, edges, Layout.__call__)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = layout(*edges)
    edges[0].zero_()
    captured.replay()
    assert [t.tolist() for t in found] == [t.tolist() for t in by_torch(layout, edges)]
