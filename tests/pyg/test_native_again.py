"""Layers over edge types whose calls stay native are not read again; what may change that has to be
seen."""
from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (GATConv, GCNConv, HEATConv, HeteroConv, HGTConv, MessagePassing,
                                RGATConv, SAGEConv, to_hetero)

import gnnaccel
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.dispatch.graph import cache, ledger
from gnnaccel.dispatch.memory import layer_memory, native_cache
from gnnaccel.dispatch.memory.layer_memory import memories
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.policy import config
from tests import probes
from tests.pyg.hetero_graphs import (CITES, KNOWS, METADATA, RELATIONS, WIDTH, edges, features,
                                     hetero, same)

NO_GRAD = 2  # `layer_memory.mode_of` a layer in training, with gradients off


@pytest.fixture
def read(monkeypatch):
    """The layers that were read, by class."""
    return probes.decided(monkeypatch)


def settled(layer, x, ei, times: int = 6) -> dict:
    """The result of a call that has been made so often."""
    for _ in range(times):
        out = layer(x, ei)
    return out


def is_read(read: list, layer, x, ei) -> bool:
    read.clear()
    layer(x, ei)
    return type(layer).__name__ in read


@pytest.fixture
def enabled():
    with torch.no_grad(), gnnaccel.enabled():
        yield


# ---- calls that repeat ----

@pytest.mark.parametrize("made",
                         [lambda: hetero(SAGEConv), lambda: hetero(GATConv, add_self_loops=False),
                          lambda: to_hetero(_Net(), METADATA)],
                         ids=["SAGEConv", "GATConv", "to_hetero"])
def test_repeated_calls_are_not_read_and_give_the_hosts_results(made, read):
    layer, x, ei = made(), features(), edges()
    expected = layer(x, ei)
    with gnnaccel.enabled():
        settled(layer, x, ei)
        read.clear()
        other = features()
        same(layer(x, ei), expected, 0.0)
        got = layer(other, ei)
        assert not read
    same(got, layer(other, ei), 0.0)


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, 8), SAGEConv(8, 4)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


CHANGES = {
    "edges of one type": lambda layer, x, ei: (x, {**ei, RELATIONS[1]: ei[RELATIONS[1]].clone()}),
    "one edge type less": lambda layer, x,
    ei: (x, {k: t for k, t in ei.items() if k != RELATIONS[0]}),
    "evaluation": lambda layer, x, ei: (x, ei) if layer.eval() else None,
}
#: what makes no other way pay: natively again, with the host's results
NO_MATTER = {
    "edges changed in place": lambda layer, x,
    ei: (x, ei) if ei[RELATIONS[2]].zero_() is not None else None,
    "more nodes": lambda layer, x, ei: ({k: torch.cat([t, t, t]) for k, t in x.items()}, ei),
    "a dtype": lambda layer, x,
    ei: ({k: t.double() for k, t in x.items()}, ei) if layer.double() else None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(enabled, read, change):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    assert not is_read(read, layer, x, ei)
    memory = memories.get(layer)
    memory.native_sized = [None] * 4  # which others may be like
    assert is_read(read, layer, *CHANGES[change](layer, x, ei))


@pytest.mark.parametrize("change", NO_MATTER)
def test_other_changes_give_the_hosts_results(enabled, read, change):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    args = NO_MATTER[change](layer, x, ei)
    assert not is_read(read, layer, *args)
    got = layer(*args)
    with gnnaccel.disabled():
        same(got, layer(*args), 0.0)


def test_modes_and_options_are_seen(enabled, read):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    assert not is_read(read, layer, x, ei)
    with torch.enable_grad():
        assert is_read(read, layer, x, ei)
        settled(layer, x, ei)
        assert not is_read(read, layer, x, ei)
    assert not is_read(read, layer, x, ei), "each mode has its own"
    with gnnaccel.enabled(when="supported"):
        assert is_read(read, layer, x, ei)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_read(read, layer, x, ei)
    settled(layer, x, ei)
    assert not is_read(read, layer, x, ei)
    gnnaccel.exclude(layer)
    assert is_read(read, layer, x, ei)
    gnnaccel.reset_rules()
    with gnnaccel.enabled(on_fallback="raise"), pytest.raises(gnnaccel.errors.FallbackError):
        layer(x, ei)
    with gnnaccel.disabled():
        assert not is_read(read, layer, x, ei)


# ---- new graphs ----

def test_new_graphs_of_no_more_edges_are_not_read(enabled, read):
    layer, x = hetero(SAGEConv), features()
    settled(layer, x, edges(), 1)
    for _ in range(6):
        ei = edges()
        assert not is_read(read, layer, x, ei)
    assert is_read(read, layer, x, ei), "it comes again"
    assert not is_read(read, layer, x, ei)


def test_larger_graphs_are_accelerated(enabled):
    layer, x = hetero(SAGEConv), features()
    for _ in range(6):
        settled(layer, x, edges(), 1)
    large = {k: t.repeat(1, 2000) for k, t in edges().items()}
    gnnaccel.reset_stats()
    settled(layer, x, large, 3)
    assert gnnaccel.stats()["HeteroConv"]["routes"]["torch"] >= 1


def test_a_large_relation_inside_a_native_layer_is_accelerated(enabled):
    """Although the calls before, over small ones, showed that nothing inside gains."""
    layer, x = hetero(GATConv, add_self_loops=False), features()
    for _ in range(8):
        settled(layer, x, edges(), 1)
    ei = edges()
    settled(layer, x, ei)
    large = {**ei, RELATIONS[1]: ei[RELATIONS[1]].repeat(1, 4000)}
    gnnaccel.reset_stats()
    settled(layer, x, large, 4)
    stats = gnnaccel.stats()
    assert stats["HeteroConv"]["routes"] == {"native": 4} and stats["GATConv"]["routes"][
        "torch"] >= 2
    settled(layer, x, large, 4)
    assert gnnaccel.stats()["GATConv"]["routes"]["torch"] >= 6, "and stays so"


def test_models_of_to_hetero_as_a_whole(enabled, read):
    made, x, ei = to_hetero(_Net(), METADATA), features(), edges()
    settled(made, x, ei)
    kept = memories.get(made).native_exact[NO_GRAD]
    assert kept is not None and kept.inner.silent
    gnnaccel.reset_stats()
    read.clear()
    settled(made, x, ei, 3)
    assert not read and {name: one["calls"]
                         for name, one in gnnaccel.stats().items()} == {"HeteroConv": 6,
                                                                        "SAGEConv": 30}
    large = {k: t.repeat(1, 2000) for k, t in ei.items()}
    settled(made, x, large, 3)
    assert gnnaccel.stats()["HeteroConv"]["routes"]["torch"] >= 2
    with gnnaccel.enabled(records=40):
        settled(made, x, ei, 1)
        assert len(gnnaccel.records()) == 12


# ---- what is told ----

def test_calls_inside_are_counted_as_if_asked(enabled):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    gnnaccel.reset_stats()
    settled(layer, x, ei, 3)
    stats = gnnaccel.stats()
    assert stats["HeteroConv"] == {"calls": 3, "routes": {"native": 3}, "reasons": {"GA401": 3}}
    assert stats["SAGEConv"] == {"calls": 15, "routes": {"native": 15}, "reasons": {"GA301": 15}}


def test_calls_inside_over_what_is_made_of_the_graph_are_counted(enabled):
    """HGTConv hands its HeteroLinear types of edges that it puts together in each call."""
    layer, x, ei = HGTConv(WIDTH, 8, METADATA, heads=2), features(), edges()
    settled(layer, x, ei, 2)
    gnnaccel.reset_stats()
    settled(layer, x, ei, 8)
    routes = {name: one["routes"] for name, one in gnnaccel.stats().items()}
    assert routes == {"HGTConv": {"native": 8}, "HeteroDictLinear": {"native": 16},
                      "HeteroLinear": {"native": 16}}
    assert memories.get(layer).native_exact[NO_GRAD].inner.silent


def test_counts_that_nobody_is_to_see(enabled):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    before = gnnaccel.stats()
    with counters.uncounted():
        settled(layer, x, ei)
        assert gnnaccel.stats() != before
    assert gnnaccel.stats() == before
    gnnaccel.reset_stats()
    assert gnnaccel.stats() == {}
    settled(layer, x, ei, 1)
    assert gnnaccel.stats()["SAGEConv"]["calls"] == 5


def test_records_are_made(enabled):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    with gnnaccel.enabled(records=20):
        settled(layer, x, ei, 2)
        found = [(one["layer"], one["route"]) for one in gnnaccel.records()]
    assert found == [("HeteroConv", "native"), *[("SAGEConv", "native")] * 5] * 2


def test_the_users_own_code_inside_is_asked_each_time(enabled):
    class Own(SAGEConv):
        def forward(self, x, edge_index):
            seen.append(gnnaccel.status()["enabled"])
            return super().forward(x, edge_index)

    seen: list[bool] = []
    layer, x, ei = HeteroConv({name: Own(WIDTH, 4) for name in RELATIONS}), features(), edges()
    settled(layer, x, ei, 8)
    assert len(seen) == 40 and all(seen)


def test_other_threads_are_not_silenced():
    """While a call runs as if gnnaccel were off."""
    layer, x, ei = hetero(SAGEConv), features(), edges()
    conv, found = layer.convs[RELATIONS[0]], []

    def message(x_j):
        thread = threading.Thread(target=lambda: found.append(config.current()))
        thread.start()
        thread.join()
        found.append(config.current())
        return x_j

    gnnaccel.enable()
    try:
        settled(layer, x, ei)
        conv.message = message
        settled(layer, x, ei, 1)
        assert found == [config.active(), None]
    finally:
        gnnaccel.disable()


def test_what_is_derived_of_a_graph_is_still_kept(enabled):
    names = [CITES, KNOWS]
    layer, x, ei = HeteroConv({name: GCNConv(WIDTH, 4) for name in names}), features(), edges(names)
    settled(layer, x, ei)
    assert memories.get(layer).native_exact[NO_GRAD].inner.silent
    hits = cache.info()["hits"]
    settled(layer, x, ei, 3)
    assert cache.info()["hits"] == hits + 6


# ---- tensors ----

def test_a_dropped_graph_is_not_kept_and_its_place_is_not_mistaken(enabled, read):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    kept = memories.get(layer).native_exact[NO_GRAD]
    refs = [weakref.ref(t) for t in ei.values()]
    memory = [weakref.ref(t.untyped_storage()) for t in ei.values()]
    others = {k: t.clone() for k, t in ei.items()}
    assert kept.fits((x, ei), {}) and not kept.fits((x, others), {})
    del ei
    gc.collect()
    assert not any(ref() is not None for ref in (*refs, *memory))
    assert not kept.fits((x, others), {}) and not kept.fits((x, dict.fromkeys(others)), {})


def test_a_dropped_layer_is_forgotten(enabled):
    layer, x, ei = hetero(SAGEConv), features(), edges()
    settled(layer, x, ei)
    number = id(layer)
    assert number in memories.entries
    del layer
    gc.collect()
    assert number not in memories.entries


def test_typed_edges(enabled, read):
    layer = RGATConv(WIDTH, 4, 3)
    x, ei, types = torch.randn(20, WIDTH), torch.randint(0, 20, (2, 30)), torch.randint(0, 3, (30,))
    for _ in range(3):
        layer(x, ei, types)
    again = types.clone()
    for given, expected in (((x, ei, types), False), ((x, ei, again), False),
                            ((x, ei, again), True), ((x, ei, again), False)):
        read.clear()
        layer(*given)
        assert bool(read) is expected, "types that are new make a new graph"


def test_batches_that_come_again(enabled, read):
    """Each is decided once more, as one that may come often; where it stays native, that is the
    last time."""
    layer, x, batches = hetero(SAGEConv), features(), [edges() for _ in range(5)]
    settled(layer, x, edges(), 1)
    assert [is_read(read, layer, x, ei) for _ in range(3)
            for ei in batches] == [False] * 5 + [True] * 5 + [False] * 5
    batches[2][RELATIONS[0]].add_(0)  # a new version: what was one of the batches is a new graph
    assert [is_read(read, layer, x, ei) for ei in batches] == [False] * 5


def test_batches_that_are_gone_are_forgotten(enabled):
    layer, x = hetero(SAGEConv), features()
    batches = [edges() for _ in range(40)]
    for batch in batches:
        layer(x, batch)
    assert len(ledger.ledgers) > 3
    del batch, batches
    ledger.of(torch.zeros(2, 3))
    assert len(ledger.ledgers) == 1


@pytest.mark.parametrize("count", [0, 6])
def test_new_edges_between_the_same_nodes(enabled, read, count):
    """What stays the same, here more numbers than there are of edges, makes no graph known."""
    layer = HEATConv(WIDTH, 4, 3, 2, 4, 3, 4)
    x, nodes = torch.randn(40, WIDTH), torch.randint(0, 3, (40,))
    types, attr = torch.randint(0, 2, (count,)), torch.randn(count, 3)
    ei = torch.randint(0, 40, (2, count))
    for new in range(6):
        read.clear()
        layer(x, ei.clone(), nodes, types, attr)
        assert new < 2 or "HEATConv" not in read
    for expected in (False, True, False):  # new as well; it comes again; that is known by now
        read.clear()
        layer(x, ei, nodes, types, attr)
        assert ("HEATConv" in read) is expected


def test_features_of_another_dtype_are_seen(emulated):
    """What no kernel takes says nothing of what kernels take, over the same graph."""
    layer, x, ei = GATConv(WIDTH, 8,
                           2).double(), torch.randn(20, WIDTH), torch.randint(0, 20, (2, 30))
    with torch.no_grad(), gnnaccel.enabled(backend="cuda", when="supported"):
        for _ in range(4):
            layer(x.double(), ei)
        layer.float()
        layer(x, ei)
    assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 4, "cuda": 1}


def test_native_calls_in_a_row_hide_no_faster_one(emulated):
    """A graph whose structure is there is found, however many new ones came between."""
    layer, x, ei = GATConv(WIDTH, 8, 2), torch.randn(20, WIDTH), torch.randint(0, 20, (2, 30))
    with torch.no_grad(), gnnaccel.enabled(backend="cuda", when="supported"):
        for _ in range(3):
            layer(x, ei)
        like = native_cache.NativeSized(layer, (x, ei), {}, config.current(), "GA301")
        like.inner.tally = counters.tally({("GATConv", "native", "GA301"): 1})
        memories.get(layer).streak = native_cache.NativeStreak(like, 2, config.current().epoch)
        layer(x, ei.clone())
        layer(x, ei)
    assert gnnaccel.stats()["GATConv"]["routes"] == {"cuda": 4, "native": 1}


# ---- calls that are not looked at ----

@pytest.mark.parametrize("new", [False, True])
def test_most_calls_in_a_row_are_only_counted(enabled, monkeypatch, new):
    looked, look = [], layer_memory.looked_at
    monkeypatch.setattr(layer_memory, "looked_at", lambda *args: (looked.append(1), look(*args))[1])
    layer = RGATConv(WIDTH, 4, 3)
    x, ei, types = torch.randn(20, WIDTH), torch.randint(0, 20, (2, 30)), torch.randint(0, 3, (30,))
    gnnaccel.reset_stats()
    for _ in range(100):
        got = layer(x, ei.clone() if new else ei, types)
    assert len(looked) < 30 and gnnaccel.stats()["RGATConv"]["routes"] == {"native": 100}
    with gnnaccel.disabled():
        assert torch.equal(got, layer(x, ei, types))


def test_what_ends_a_row(enabled, monkeypatch):
    looked, look = [], layer_memory.looked_at
    monkeypatch.setattr(layer_memory, "looked_at", lambda *args: (looked.append(1), look(*args))[1])
    layer = RGATConv(WIDTH, 4, 3)
    x, ei, types = torch.randn(20, WIDTH), torch.randint(0, 20, (2, 30)), torch.randint(0, 3, (30,))

    def is_looked_at(*args, **kwargs) -> bool:
        for _ in range(20):
            layer(x, ei.clone(), types)
        while memories.get(layer).streak.left < 3:
            layer(x, ei.clone(), types)
        looked.clear()
        layer(*args, **kwargs)
        return bool(looked)

    assert not is_looked_at(x, ei.clone(), types)
    assert is_looked_at(x, ei.repeat(1, 2), types.repeat(2)), "more edges"
    assert is_looked_at(x, ei.clone(), edge_type=types)
    with gnnaccel.enabled(when="supported"):
        looked.clear()
        layer(x, ei.clone(), types)
        assert looked
    with torch.enable_grad():
        x.requires_grad_()
        for _ in range(20):
            layer(x, ei.clone(), types)
        out = checkpoint(layer, x, ei.clone(), types, use_reentrant=False)
        out.sum().backward()


@pytest.mark.parametrize("new", [False, True])
def test_most_calls_on_dictionaries_in_a_row_are_only_counted(enabled, monkeypatch, new):
    looked, look = [], layer_memory.looked_at
    monkeypatch.setattr(layer_memory, "looked_at", lambda *args: (looked.append(1), look(*args))[1])
    layer, x, ei = hetero(GATConv, add_self_loops=False), features(), edges()
    gnnaccel.reset_stats()
    for _ in range(60):
        got = layer(x, {name: t.clone() for name, t in ei.items()} if new else ei)
    assert len(looked) < 30 and gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 60}
    assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 60 * len(ei)}
    with gnnaccel.disabled():
        same(got, layer(x, ei), 0.0)
    while memories.get(layer).streak.left < 3:
        layer(x, {name: t.clone() for name, t in ei.items()})
    looked.clear()
    layer(x, {**ei, RELATIONS[1]: ei[RELATIONS[1]].repeat(1, 50)})
    assert looked, "one relation has more edges"


def test_numbers_of_what_is_no_tensor():
    ei = edges()
    assert native_cache.size_of(ei) == sum(t.numel() for t in ei.values())
    assert native_cache.size_of({**ei, "more": None}) == float("inf")


class WithoutForm(MessagePassing):
    """Whose messages have a form without ``w``, and on a CPU none with it."""

    def __init__(self):
        super().__init__(aggr="sum")

    def forward(self, x, edge_index, w=None):
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j, w):
        return x_j if w is None else torch.tanh(x_j - w)


def test_a_message_without_a_form_on_a_cpu_is_not_read_again(monkeypatch):
    layer, x, edges = WithoutForm(), torch.randn(30, 4), torch.randint(0, 30, (2, 1500))
    reads, read = [], reading.read
    monkeypatch.setattr(reading, "read", lambda *args: reads.append(1) or read(*args))
    w = torch.randn(1500, 1)
    expected = layer(x, edges, w)
    with gnnaccel.enabled():
        for _ in range(12):
            assert torch.equal(layer(x, edges, w), expected)
        assert len(reads) == 1
        assert gnnaccel.stats()["WithoutForm"]["routes"] == {"native": 12}
        before = len(reads)
        layer(x, edges)  # whose arguments are of other kinds
        assert len(reads) == before + 1
