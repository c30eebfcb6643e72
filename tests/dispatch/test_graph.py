"""`GraphView`: its index arrays, its counts, and what it says about wrong ids."""
from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.errors import GraphError
from tests.attention_cases import skewed_edges
from tests.helpers import at_each_line


def settle(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def triples(edges) -> list:
    """Sorted (destination, source, edge id)."""
    ids = edges.eid if edges.eid is not None else torch.arange(edges.src.shape[0])
    return sorted(zip(edges.dst.tolist(), edges.src.tolist(), ids.tolist()))


def expected_triples(edge_index, loops: int) -> list:
    pairs = [(d, s, e) for e, (s, d) in enumerate(edge_index.t().tolist())
             if not (loops and s == d)]
    return sorted(pairs + [(node, node, edge_index.shape[1] + node) for node in range(loops)])


@pytest.mark.parametrize("loops", [0, 5, 30])
@pytest.mark.parametrize("first", ["edges", "csc", "csr"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_edges_in_any_order_of_asking(device, loops, first, deterministic):
    edge_index = skewed_edges(40, 30, 200, device)
    torch.use_deterministic_algorithms(deterministic)
    try:
        view = GraphView(edge_index, 40, 30, loops)
        getattr(view, first)()
        edges = view.edges()
    finally:
        torch.use_deterministic_algorithms(False)
    assert edges.src.dtype == edges.dst.dtype == torch.int64 and edges.num_dst == 30
    assert torch.equal(edges.dst, edges.dst.sort().values)
    assert triples(edges) == expected_triples(edge_index, loops)
    rows = view.csc()
    assert torch.equal(rows.other[:edges.src.shape[0]].long(),
                       edges.src), "the torch backend's order is the CSC's"
    assert view.csc() is rows and view.edges() is edges and view.csr() is view.csr()


def test_edges_on_the_cpu_need_no_driver():
    assert not driver.placed()
    edge_index = skewed_edges(40, 30, 200)
    assert triples(GraphView(edge_index, 40, 30, 3).edges()) == expected_triples(edge_index, 3)
    assert not driver.runs_on(torch.device("cpu")) and driver.runs_on(torch.device("cuda"))


@pytest.mark.parametrize("strided", ["transposed", "narrowed", "int32"])
def test_edge_index_of_any_stride_and_type(device, strided):
    edge_index = skewed_edges(40, 30, 200, device)
    same = {"transposed": lambda: edge_index.t().contiguous().t(),
            "int32": lambda: edge_index.int(),
            "narrowed": lambda: torch.cat([edge_index, edge_index], 1)[:, 200:]}[strided]()
    view = GraphView(same, 40, 30)
    view.csc(), view.csr()
    assert triples(view.edges()) == expected_triples(edge_index, 0)


@pytest.mark.parametrize("where", [(0, 40), (0, -1), (1, 30), (1, -7), (1, 2**40)])
def test_wrong_ids_on_the_cpu(where):
    edge_index = skewed_edges(40, 30, 200)
    edge_index[where[0], 100] = where[1]
    with pytest.raises(GraphError,
                       match=f"{'source' if where[0] == 0 else 'destination'} ids "
                       f".*{where[1]}") as caught:
        GraphView(edge_index, 40, 30).edges()
    assert isinstance(caught.value, IndexError)
    assert f"[0, {(40, 30)[where[0]]})" in str(caught.value)


@pytest.mark.parametrize("first", ["csc", "csr"])
def test_wrong_ids_on_a_device_are_told_once_known(device, first):
    edge_index = skewed_edges(40, 30, 200, device)
    edge_index[0, 100] = 40
    view = GraphView(edge_index, 40, 30)
    with pytest.raises(GraphError, match=r"sources must lie in \[0, 40\)"):
        for _ in range(2):  # a GPU may not have reported at the first call
            getattr(view, first)()
            settle(device)
    with pytest.raises(GraphError):
        view.csc()


def test_empty_and_wrong(device):
    for num_src, num_dst in ((0, 0), (3, 0), (0, 3), (2, 2)):
        view = GraphView(torch.empty(2, 0, dtype=torch.long, device=device), num_src, num_dst,
                         own=True)
        assert view.csc().rows == num_dst and view.csr().rows == num_src and view.edges().src.numel() == 0
        settle(device)
        counts = view.statistics()
        assert (counts.num_edges, counts.max_degree, counts.mean_degree,
                counts.density) == (0, 0, 0, 0)
    with pytest.raises(GraphError):
        GraphView(torch.zeros(2, 1, dtype=torch.long), 0, 0, own=True).edges()


@pytest.mark.parametrize("loops", [0, 30])
def test_statistics(device, chunk_edges, loops):
    chunk_edges(16)
    edge_index = skewed_edges(40, 30, 200, device)
    view = GraphView(edge_index, 40, 30, loops)
    assert view.statistics() is None, "nothing is built to count"
    found = view.statistics(wait=True)
    degrees = np.bincount([d for d, _, _ in expected_triples(edge_index, loops)], minlength=30)
    assert (found.num_src, found.num_dst, found.chunk_edges) == (40, 30, 16)
    assert found.num_edges == degrees.sum() and found.max_degree == degrees.max()
    assert found.mean_degree == degrees.sum() / 30 and found.density == degrees.sum() / 1200
    assert found.super_nodes == (degrees > 16).sum() > 0
    assert found.super_share == degrees[degrees > 16].sum() / degrees.sum()
    bins = np.bincount([int(n).bit_length() for n in degrees])
    assert found.histogram == tuple(bins)
    assert view.statistics() == found


def test_bytes_count_what_is_built(device):
    view = GraphView(skewed_edges(40, 30, 200, device), 40, 30, own=True)
    sizes = [view.nbytes()]
    for build in (view.csc, view.csr, view.edges):
        build()
        sizes.append(view.nbytes())
    assert sizes[0] == 0 and sizes == sorted(set(sizes))
    assert sizes[1] >= 4 * (31 + 200 + 200) and sizes[3] - sizes[2] == 3 * 8 * 200


def test_the_edge_index_is_not_kept_alive_unless_owned(device):
    edge_index = skewed_edges(40, 30, 200, device)
    view, owner = GraphView(edge_index, 40, 30), GraphView(edge_index.clone(), 40, 30, own=True)
    late = GraphView(edge_index, 40, 30)
    rows = view.csc()
    copy = edge_index.clone()
    del edge_index
    gc.collect()
    assert view.csc() is rows and view.csr().rows == 40
    assert owner.csc().rows == 30
    with pytest.raises(RuntimeError, match="bind"):
        late.csc()
    late.bind(copy)
    assert triples(late.edges()) == triples(view.edges())


def test_another_callers_alias_may_go_first(device):
    """A call in another thread may end while this one has yet to build."""
    edge_index = skewed_edges(40, 30, 200, device)
    view, alone = GraphView(edge_index, 40, 30), GraphView(edge_index, 40, 30)
    for _ in range(40):
        view.bind(edge_index.detach())
    assert triples(view.edges()) == triples(alone.edges())
    kept = [edge_index.detach() for _ in range(40)]
    for alias in kept:
        view.bind(alias)
    assert len(view._sources) == 16


def test_threads_that_ask_for_covered_nodes_in_different_types(device):
    view = GraphView(skewed_edges(40, 30, 200, device), 40, 30, own=True)
    with at_each_line(GraphView.covered, lambda: view.covered(torch.float64)):
        assert view.covered(torch.float32).dtype == torch.float32


def test_threads_get_one_structure(device):
    view = GraphView(skewed_edges(40, 30, 200, device), 40, 30, own=True)
    found, problems = [], []

    def work():
        try:
            found.append((view.csc(), view.csr(), view.edges()))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for csc, csr, edges in found:
        assert torch.equal(csc.indptr,
                           found[0][0].indptr) and torch.equal(csr.indptr, found[0][1].indptr)
        assert triples(edges) == triples(found[0][2])
    settled = view.csc().other[view.csr().place.long()]
    assert torch.equal(settled,
                       torch.repeat_interleave(torch.arange(40, device=device),
                                               view.csr().indptr.diff()).int())


def test_covered(device):
    a = GraphView(skewed_edges(40, 30, 200, device), 40, 30, own=True)
    some = a.covered(torch.float32)
    assert some.shape == (30, 1) and torch.equal(some[:, 0] > 0, a.csc().indptr.diff() > 0)
    assert a.covered(torch.float64).dtype == torch.float64 and torch.equal(
        a.covered(torch.float64).float(), some)
