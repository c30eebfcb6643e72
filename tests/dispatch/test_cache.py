"""The structure cache: what is found again, what must not be, and that nothing piles up."""
from __future__ import annotations

import gc
import threading

import pytest
import torch

from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.ops.graph import OpGraph
from tests import probes
from tests.attention_cases import skewed_edges


@pytest.fixture(autouse=True)
def empty():
    cache.clear()
    yield
    cache.set_limit(None)
    cache.clear()


def pairs_of(view) -> list:
    edges = view.edges()
    return sorted(zip(edges.src.tolist(), edges.dst.tolist()))


def look(edge_index, num_src=40, num_dst=30, loops=0) -> str:
    """Looks up and checks that the answer is about these very edges."""
    view, outcome = cache.lookup(edge_index, num_src, num_dst, loops)
    expected = [(s, d) for s, d in edge_index.t().tolist()
                if not (loops and s == d)] + [(i, i) for i in range(loops)]
    assert pairs_of(view) == sorted(expected)
    return outcome


@pytest.mark.parametrize("flipped", [False, True])
def test_what_is_there_is_taken(flipped):
    """Once: no second look. Of edges that were changed nothing is there."""
    edge_index = skewed_edges(30, 30, 100)
    assert not OpGraph(edge_index, 30, 30, flipped).found() and not cache.info()["hits"]
    view = OpGraph(edge_index, 30, 30, flipped).view()
    graph = OpGraph(edge_index, 30, 30, flipped)
    assert graph.found() and graph.built is view and graph.cached == "hit"
    assert graph.view() is view and cache.info()["hits"] == 1
    assert not OpGraph(edge_index, 30, 31, flipped).found()
    edge_index[0, 0] = 1
    assert not OpGraph(edge_index, 30, 30, flipped).found()


def test_a_look_without_traces():
    edge_index = skewed_edges(40, 30, 100)
    assert not cache.peek(edge_index, 40, 30)
    look(edge_index)
    before = cache.info()
    assert cache.peek(edge_index, 40,
                      30) and not cache.peek(edge_index, 40, 31) and cache.info() == before
    edge_index[0, 0] = 1
    assert not cache.peek(edge_index, 40, 30)


def test_found_again():
    edge_index = skewed_edges(40, 30, 100)
    first, outcome = cache.lookup(edge_index, 40, 30)
    again, second = cache.lookup(edge_index, 40, 30)
    assert (outcome, second) == ("miss", "hit") and again is first
    assert cache.lookup(edge_index.clone(), 40, 30)[0] is not first
    info = cache.info()
    assert (info["hits"], info["misses"], info["evictions"], info["uncached"]) == (1, 2, 0, 0)


@pytest.mark.parametrize("other", [(41, 30, 0), (40, 31, 0), (40, 30, 2)])
def test_sizes_and_loops_belong_to_the_key(other):
    edge_index = skewed_edges(40, 30, 100)
    assert [look(edge_index), look(edge_index, *other), look(edge_index),
            look(edge_index, *other)] == ["miss", "miss", "hit", "hit"]


@pytest.mark.parametrize("edit",
                         ["item", "row", "sort", "copy", "through_view", "through_detached",
                          "in_inference_mode"])
def test_edits_in_place_are_seen(edit):
    edge_index = skewed_edges(40, 30, 100)
    assert look(edge_index) == "miss"
    if edit == "item":
        edge_index[0, 3] = (edge_index[0, 3] + 1) % 40
    elif edit == "row":
        edge_index[0].fill_(3)
    elif edit == "sort":
        edge_index[1] = edge_index[1].flip(0)
    elif edit == "copy":
        edge_index.copy_(skewed_edges(40, 30, 100))
    elif edit == "through_view":
        edge_index.view(-1)[5:9] = 1
    elif edit == "through_detached":
        edge_index.detach()[1, :7] = 2
    else:
        with torch.inference_mode():
            edge_index[0, :5] = 7
    assert look(edge_index) == "miss" and look(edge_index) == "hit"


def test_an_edit_of_the_base_is_seen_in_its_views():
    base = skewed_edges(40, 30, 100)
    view = base[:, 10:60]
    assert [look(view), look(view)] == ["miss", "hit"]
    base[0, 20] = (base[0, 20] + 1) % 40
    assert [look(view), look(view)] == ["miss", "hit"]


def test_one_entry_per_version():
    edge_index = skewed_edges(40, 30, 100)
    for step in range(50):
        edge_index[0, 0] = step % 40
        assert look(edge_index) == "miss"
    assert cache.info()["entries"] == 1


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_memory_that_is_freed_and_used_again(told, monkeypatch):
    """Object ids come back too; an entry must know its tensor even where the callback that drops it
    has yet to run."""
    if not told:
        probes.drop_late(monkeypatch)
    addresses = set()
    for step in range(300):
        edge_index = torch.full((2, 64), step % 30)
        addresses.add(edge_index.data_ptr())
        assert look(edge_index) == "miss"
        del edge_index
    assert len(addresses) < 300, "this test needs addresses to come back"
    assert not told or cache.info()["entries"] == 0


def test_a_new_tensor_over_the_same_numpy_memory():
    memory = skewed_edges(40, 30, 64).numpy()
    for step in range(30):
        memory[0] = step
        edge_index = torch.from_numpy(memory)
        assert look(edge_index) == "miss"


def test_views_share_and_do_not_mix():
    base = skewed_edges(40, 30, 120)
    assert look(base[:, :60]) == "miss"
    assert look(base[:, :60]) == "hit", "a new view object of the same edges"
    assert look(base[:, :61]) == "miss" and look(base[:, 1:61]) == "miss" and look(base[:, :120:2]) == "miss"
    assert look(base.narrow(1, 0, 60)) == "hit" and look(base) == "miss"
    pairs = torch.stack([torch.arange(30), torch.arange(30).flip(0)], 1)
    assert look(pairs.t()) == "miss" and look(pairs.t()) == "hit"
    assert look(pairs.flatten().view(30, 2).t()) in ("hit", "miss")
    square = torch.tensor([[0, 1], [2, 3]])
    assert look(square) == "miss" and look(
        square.t()) == "miss", "same memory and shape, other edges"


def test_the_same_bytes_with_another_type():
    edge_index = torch.randint(0, 30, (2, 64), dtype=torch.int64)
    narrow = edge_index.view(torch.int32)[:, :64]
    assert look(edge_index) == "miss" and look(narrow) == "miss" and look(edge_index) == "hit"
    words = torch.randint(0, 30, (256,), dtype=torch.int32)
    words[1::2] = 0
    as_ints, as_longs = words[:128].view(2, 64), words.view(torch.int64).view(2, 64)
    assert as_ints.stride() == as_longs.stride() and as_ints.data_ptr() == as_longs.data_ptr()
    assert look(as_ints) == "miss" and look(as_longs) == "miss" and look(as_ints) == "hit"


def test_a_view_outlives_its_tensor_object():
    base = skewed_edges(40, 30, 100)
    view, _ = cache.lookup(base[:, :50], 40, 30)
    gc.collect()
    again, outcome = cache.lookup(base[:, :50], 40, 30)
    assert outcome == "hit" and again is view
    temporary = base[:, :50]
    cache.lookup(temporary, 40, 30)
    assert pairs_of(view) == sorted(map(tuple, base[:, :50].t().tolist()))


def test_inference_tensors_are_not_cached():
    with torch.inference_mode():
        edge_index = skewed_edges(40, 30, 100)
        assert [look(edge_index), look(edge_index)] == ["none", "none"]
        edge_index[0, 0] = 5
        assert look(edge_index) == "none"
    assert look(edge_index) == "none"
    info = cache.info()
    assert info["entries"] == 0 and info["uncached"] == 4


def test_an_ordinary_tensor_in_inference_mode_is_cached():
    edge_index = skewed_edges(40, 30, 100)
    with torch.inference_mode():
        assert [look(edge_index), look(edge_index)] == ["miss", "hit"]
    assert look(edge_index) == "hit"


def test_deterministic_mode_has_its_own_entries():
    edge_index = skewed_edges(40, 30, 100)
    plain, _ = cache.lookup(edge_index, 40, 30)
    torch.use_deterministic_algorithms(True)
    try:
        view, outcome = cache.lookup(edge_index, 40, 30)
    finally:
        torch.use_deterministic_algorithms(False)
    assert outcome == "miss" and view is not plain and view.deterministic and not plain.deterministic
    assert look(edge_index) == "hit"


@pytest.mark.parametrize("hold", ["tensor", "view"])
def test_entries_go_with_their_tensor(hold):
    edge_index = skewed_edges(40, 30, 100)
    held = edge_index if hold == "tensor" else edge_index[:, :50]
    look(held)
    assert cache.info()["entries"] == 1
    cycle = [held]
    cycle.append(cycle)
    del edge_index, held, cycle
    gc.collect()
    assert cache.info()["entries"] == 0 and cache.info()["bytes"] == 0


def test_a_new_version_survives_the_old_entrys_end():
    """The old entry's weak reference must not take away the entry that replaced it."""
    edge_index = skewed_edges(40, 30, 100)
    look(edge_index)
    edge_index[0, 0] = 1
    look(edge_index)
    gc.collect()
    assert look(edge_index) == "hit"
    key, entry = next(iter(cache._entries.items()))
    cache._drop(key, object(), None)  # a callback that comes late, for a view before this one
    assert look(edge_index) == "hit"
    cache._drop(key, entry.view, None)
    assert look(edge_index) == "miss"


def test_eviction_by_bytes():
    tensors = [skewed_edges(40, 30, 100) for _ in range(6)]
    look(tensors[0])
    one = cache.info()["bytes"]
    assert one > 0
    cache.set_limit(3 * one + one // 2)
    for tensor in tensors[1:4]:
        look(tensor)
    # a look-up evicts for what was built before it; what it builds itself counts at the next miss
    assert cache.info()["evictions"] == 0
    look(tensors[0])
    assert look(tensors[4]) == "miss" and cache.info()["evictions"] == 1
    assert look(tensors[0]) == "hit", "used since it came, so it stayed"
    assert look(tensors[1]) == "miss", "the oldest of the others went"
    assert cache.info()["bytes"] <= 4.5 * one


def test_many_graphs_are_not_counted_at_each_miss(monkeypatch):
    """Or a loop over a list of batches would take longer, the longer the list is."""
    counted = []
    nbytes = cache.GraphView.nbytes
    monkeypatch.setattr(cache.GraphView, "nbytes",
                        lambda view: (counted.append(1), nbytes(view))[1])
    tensors = [skewed_edges(10, 8, 20) for _ in range(300)]
    for at, tensor in enumerate(tensors):
        look(tensor, 10, 8)
        assert len(counted) < 200 + 10 * at
    cache.set_limit(cache.info()["bytes"] // 3)
    for tensor in [skewed_edges(10, 8, 20) for _ in range(50)]:
        look(tensor, 10, 8)
    assert cache.info()["evictions"] > 150 and cache.info()["bytes"] <= 2 * cache.limit()


def test_the_newest_entry_stays_however_large():
    cache.set_limit(1)
    edge_index = skewed_edges(40, 30, 100)
    assert [look(edge_index), look(edge_index)] == ["miss", "hit"]
    other = skewed_edges(40, 30, 100)
    assert [look(other), look(other)] == ["miss", "hit"] and cache.info()["entries"] == 1


def test_the_environment_sets_the_limit(monkeypatch):
    monkeypatch.setenv("GNNACCEL_CACHE_BYTES", "3MiB")
    cache.set_limit(None)
    assert cache.limit() == cache.info()["limit"] == 3 << 20
    cache.set_limit(17)
    assert cache.limit() == 17
    monkeypatch.delenv("GNNACCEL_CACHE_BYTES")
    cache.set_limit(None)
    assert cache.limit() == 4 << 30


def test_tensors_that_die_while_the_cache_counts(monkeypatch):
    """A garbage collection may drop entries at any time, also in the middle of a sum over them."""
    doomed = [skewed_edges(40, 30, 50) for _ in range(4)]
    for tensor in doomed:
        look(tensor)
    del tensor
    nbytes = cache.GraphView.nbytes

    def dying(view):
        doomed.clear()
        return nbytes(view)

    monkeypatch.setattr(cache.GraphView, "nbytes", dying)
    cache.info()
    doomed += [skewed_edges(40, 30, 50) for _ in range(4)]
    kept = [look(tensor) for tensor in [*doomed]]
    assert kept.count("miss") == 4


def test_clear_and_info():
    edge_index = skewed_edges(40, 30, 100)
    look(edge_index), look(edge_index)
    assert set(cache.info()) == {"entries", "bytes", "limit", "hits", "misses", "evictions",
                                 "uncached"}
    cache.clear()
    info = cache.info()
    assert {name: info[name] for name in info if name != "limit"} == dict.fromkeys(
        ["entries", "bytes", "hits", "misses", "evictions", "uncached"], 0)
    assert look(edge_index) == "miss"


@pytest.mark.long
def test_threads():
    shared = [skewed_edges(40, 30, 50) for _ in range(4)]
    problems = []

    def work(seed):
        try:
            for step in range(60):
                look(shared[(seed + step) % 4])
                look(torch.full((2, 8), (seed + step) % 30))
                if step % 20 == 19:
                    cache.info(), gc.collect()
                if seed == 0 and step % 25 == 24:
                    cache.clear()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    gc.collect()
    assert cache.info()["entries"] <= 4


def test_a_thousand_steps_with_fresh_graphs(device):
    """As with a neighbour loader: nothing is left of a batch once it is gone."""
    sizes = []
    steps = 1000
    for step in range(steps):
        edge_index = torch.randint(0, 12, (2, 30 + step % 7), device=device)
        view, outcome = cache.lookup(edge_index, 12, 12)
        assert outcome == "miss"
        if step % 10 == 0:
            view.csc(), view.csr()
        sizes.append((cache.info()["entries"], cache.info()["bytes"]))
        del view
    assert max(entries for entries, _ in sizes) <= 2
    assert max(size
               for _, size in sizes[steps // 2:]) <= max(size for _, size in sizes[:steps // 2])
