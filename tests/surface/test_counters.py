"""stats()."""
from __future__ import annotations

import sys
import threading

import gnnaccel
from gnnaccel.dispatch.counters import count


def test_stats():
    gnnaccel.reset_stats()
    assert gnnaccel.stats() == {}
    count("GATConv", "cuda")
    count("GATConv", "cuda", None)
    count("GATConv", "native", "GA301")
    count("GATConv", "torch", "GA301")
    count("GCNConv", "native", "GA208")
    assert gnnaccel.stats() == {
        "GATConv": {"calls": 4, "routes": {"cuda": 2, "native": 1, "torch": 1}, "reasons": {"GA301": 2}},
        "GCNConv": {"calls": 1, "routes": {"native": 1}, "reasons": {"GA208": 1}},
    }
    gnnaccel.reset_stats()
    assert gnnaccel.stats() == {}


def test_no_count_is_lost_between_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [count("L", "cuda") for _ in range(20_000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert gnnaccel.stats()["L"]["calls"] == 160_000
