"""Structures that belong to several tensors: any of them edited, replaced or freed."""
from __future__ import annotations

import gc

import pytest
import torch

from gnnaccel.dispatch.graph import cache
from tests import probes
from tests.attention_cases import skewed_edges


@pytest.fixture(autouse=True)
def empty():
    cache.clear()
    yield
    cache.clear()


class View:
    """What the cache asks of a view."""

    def __init__(self, tensors: tuple, own: bool):
        self.bound, self.own, self.touched = tensors, own, False

    def bind(self, *tensors) -> None:
        self.bound = tensors

    def nbytes(self) -> int:
        return 8


SIZES = "relational", 40, 30, 5


def many(count: int = 3) -> list[torch.Tensor]:
    return [skewed_edges(40, 30, 100), *(torch.randint(0, 5, (100,)) for _ in range(count - 1))]


def look_many(tensors, sizes=SIZES) -> tuple[View, str]:
    """Looks up and checks that a hit is bound to these very tensors."""
    view, outcome = cache.lookup_many(tuple(tensors), sizes, lambda own: View(tuple(tensors), own))
    assert all(a is b for a, b in zip(view.bound, tensors, strict=True))
    view.bound = ()
    return view, outcome


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_tensors_found_again(count):
    tensors = many(count)
    assert not cache.peek_many(tuple(tensors), SIZES)
    first, outcome = look_many(tensors)
    assert outcome == "miss" and not first.own and not first.touched and cache.peek_many(
        tuple(tensors), SIZES)
    again, outcome = look_many(tensors)
    assert outcome == "hit" and again is first and first.touched
    info = cache.info()
    assert (info["hits"], info["misses"], info["entries"], info["bytes"]) == (1, 1, 1, 8)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_any_of_several_tensors_edited(at):
    tensors = many()
    first, _ = look_many(tensors)
    tensors[at].view(-1)[7] += 1
    assert not cache.peek_many(tuple(tensors), SIZES)
    second, outcome = look_many(tensors)
    assert outcome == "miss" and second is not first and look_many(tensors) == (second, "hit")
    assert cache.info()["entries"] == 1, "the entry of the old version is replaced"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_any_of_several_tensors_replaced(at):
    tensors = many()
    first, _ = look_many(tensors)
    other = [t.clone() if i == at else t for i, t in enumerate(tensors)]
    second, outcome = look_many(other)
    assert outcome == "miss" and second is not first
    assert look_many(tensors) == (first, "hit") and look_many(other) == (second, "hit")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_any_of_several_tensors_freed(at):
    tensors = many()
    look_many(tensors)
    assert cache.info()["entries"] == 1
    del tensors[at]
    assert cache.info()["entries"] == 0


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_memory_of_one_of_several_that_is_used_again(at, told, monkeypatch):
    if not told:
        probes.drop_late(monkeypatch)
    kept, addresses = torch.randint(0, 5, (64,)), set()
    for step in range(200):
        fresh = torch.full((64,), step % 5)
        addresses.add(fresh.data_ptr())
        assert look_many((fresh, kept) if at == 0 else (kept, fresh))[1] == "miss"
        del fresh
    assert len(addresses) < 200, "this test needs addresses to come back"


def test_order_number_and_sizes_belong_to_the_key():
    a, b = torch.randint(0, 5, (64,)), torch.randint(0, 5, (64,))
    keys = [((a, b), SIZES), ((b, a), SIZES), ((a,), SIZES), ((a, b, a), SIZES), ((a, a), SIZES),
            ((a, b), (*SIZES[:3], 6)), ((a, b), ("other", *SIZES[1:]))]
    views = [look_many(*key)[0] for key in keys]
    assert len(set(map(id, views))) == len(keys) and [look_many(*key)
                                                      for key in keys] == [(view, "hit")
                                                                           for view in views]


def test_one_tensor_as_two_views_of_one_memory():
    base = torch.randint(0, 5, (3, 64))
    view, outcome = look_many((base[:2], base[2]))
    assert outcome == "miss" and look_many((base[:2], base[2])) == (view, "hit")
    base[2, 0] += 1
    assert look_many((base[:2], base[2]))[1] == "miss"
    del base
    gc.collect()
    assert cache.info()["entries"] == 0


@pytest.mark.parametrize("at", [0, 1])
def test_an_inference_tensor_among_several(at):
    tensors = many(2)
    with torch.inference_mode():
        tensors[at] = tensors[at].clone()
    for _ in range(2):
        view, outcome = look_many(tensors)
        assert outcome == "none" and view.own and not cache.peek_many(tuple(tensors), SIZES)
    assert cache.info()["entries"] == 0 and cache.info()["uncached"] == 2


def test_a_graph_and_its_relations_do_not_mix():
    """The same edge_index for an attention layer and a relational one."""
    edge_index, edge_type = many(2)
    view, _ = cache.lookup(edge_index, 40, 30)
    other, outcome = look_many((edge_index, edge_type))
    assert outcome == "miss" and cache.lookup(edge_index, 40, 30) == (view, "hit")
    assert look_many((edge_index, edge_type)) == (other, "hit")
    edge_type[0] += 1
    assert cache.peek(edge_index, 40, 30) and not cache.peek_many((edge_index, edge_type), SIZES)
