"""stats()."""
from __future__ import annotations

import sys
import threading

import gnnaccel
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.observe.counters import count


def test_stats():
    gnnaccel.reset_stats()
    assert gnnaccel.stats() == {}
    count("GATConv", "cuda")
    count("GATConv", "cuda", None)
    count("GATConv", "native", "GA301")
    count("GATConv", "torch", "GA301")
    count("GCNConv", "native", "GA208")
    assert gnnaccel.stats() == {
        "GATConv": {"calls": 4, "routes": {"cuda": 2, "native": 1, "torch": 1},
                    "reasons": {"GA301": 2}},
        "GCNConv": {"calls": 1, "routes": {"native": 1}, "reasons": {"GA208": 1}},
    }
    gnnaccel.reset_stats()
    assert gnnaccel.stats() == {}


COUNTS = {("HeteroConv", "native", "GA401"): 1, ("SAGEConv", "native", "GA301"): 5}


def test_calls_that_count_alike():
    gnnaccel.reset_stats()
    tally = counters.tally(COUNTS)
    assert counters.tally(dict(COUNTS)) is tally and gnnaccel.stats() == {}
    tally.calls += 3
    count("SAGEConv", "native", "GA301")
    for _ in range(2):  # what was added up is not added again
        assert {name: one["calls"]
                for name, one in gnnaccel.stats().items()} == {"HeteroConv": 3, "SAGEConv": 16}
    tally.calls += 1
    with counters.uncounted():
        tally.calls += 5
    assert gnnaccel.stats()["HeteroConv"]["calls"] == 4
    tally.calls += 1
    gnnaccel.reset_stats()
    assert gnnaccel.stats() == {}


def test_who_watches_is_told():
    with counters.watched() as seen:
        counters.again("GCNConv", "GA301")
        assert seen.native and seen.lasting and not seen.decided
        counters.note(counters.tally(COUNTS).counts, True)
        assert seen.counts == {**COUNTS,
                               ("GCNConv", "native", "GA301"): 1} and seen.native and seen.lasting
        counters.note(counters.tally(COUNTS).counts, False)
        assert not seen.lasting and not seen.decided
        thread = threading.Thread(target=count, args=("GATConv", "cuda"))
        thread.start()
        thread.join()
        assert seen.native and not seen.decided, "of this thread alone"
        count("GATConv", "cuda")
        assert seen.decided and not seen.native
        with counters.watched() as inner:
            assert inner is None
    count("GATConv", "cuda")
    assert seen.counts["GATConv", "cuda", None] == 1 and not counters.watching


def test_no_count_is_lost_between_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [count("L", "cuda") for _ in range(20_000)])
                   for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert gnnaccel.stats()["L"]["calls"] == 160_000
