"""Ledgers of graphs: what came before over the same edges, unwritten since."""
from __future__ import annotations

import gc
import itertools

import pytest
import torch

from gnnaccel.dispatch.graph import cache, ledger
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.layer_memory import LayerMemory
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.helpers import at_each_line


@pytest.fixture(autouse=True)
def empty():
    ledger.forget()
    yield
    ledger.forget()


def edges() -> torch.Tensor:
    return torch.randint(0, 9, (2, 20))


OTHERS = {"a copy": lambda ei: ei.clone(), "an alias": lambda ei: ei.detach(),
          "written into": lambda ei: ei.add_(0)}


@pytest.mark.parametrize("other", OTHERS)
def test_another_graph_has_a_ledger_of_its_own(other):
    ei = edges()
    found = ledger.of(ei)
    found.seconds, found.sightings = 5.0, 9
    assert ledger.of(ei) is found
    now = ledger.of(OTHERS[other](ei))
    assert now is not found and now.seconds == now.sightings == 0 and now.functions == () and now.layers == {}


def test_what_was_missed_over_a_graph_is_not_missed_over_another():
    ei, estimate = edges(), Estimate(gain=1.0, structure=4.0)
    assert [aggregation_cost.pays(ei, estimate) for _ in range(10)].index(True) == 8
    ei[0, 0] = 1
    assert not aggregation_cost.pays(ei, estimate) and not aggregation_cost.pays(edges(), estimate)


def test_what_is_built_anyway_is_missed_by_nobody():
    """A checkpoint's structure serves calls outside of it."""
    ei, estimate = edges(), Estimate(gain=1.0, structure=4.0)
    assert aggregation_cost.pays(ei, estimate, True) and aggregation_cost.pays(ei, estimate)
    assert not aggregation_cost.pays(edges(), estimate)
    with torch.inference_mode():
        assert aggregation_cost.pays(edges(), estimate, True)


def test_a_graph_at_a_dead_ones_place():
    for _ in range(20):  # ids come again
        ei = edges()
        assert aggregation_cost.hardly_seen(ei) and ledger.of(ei).sightings == 1
        del ei


def test_two_threads_that_forget_graphs_at_once():
    other = edges()
    for at in range(12):
        for _ in range(3):
            ledger.of(edges())
        line = itertools.count()
        with at_each_line(ledger.of, lambda: next(line) == at and ledger.of(other.add_(0))):
            ledger.of(edges())
    assert ledger.of(other).calls == 0 and len(ledger.ledgers) < 4


def test_layers_know_graphs_apart():
    one, other, ei, types = LayerMemory(), LayerMemory(), edges(), torch.arange(20)
    assert not one.meets((ei, types), ei) and not other.meets((ei, types), ei)
    assert one.meets((ei, types), ei,
                     "state") and one.of((types,)) is None and one.of((ei,)) is not None
    one.of((ei,))[1] = "state"
    assert not one.meets((ei, types), ei, "state") and one.meets((ei, types), ei, "state", True)
    assert other.meets((ei, types), ei, "state"), "decided of one layer says nothing of another"
    assert not one.meets((ei, types.clone()), ei), "other types make another graph"
    ei.add_(0)
    assert one.of((ei,)) is None and not one.meets((ei, types), ei)
    with torch.inference_mode():
        kept = edges()
        assert not one.meets((kept,), kept) and not one.meets((kept,), kept)


def test_a_layer_that_is_forgotten_while_it_asks():
    layer, ei = LayerMemory(), edges()
    for at in range(8):
        layer.meets((ei,), ei)
        line = itertools.count()
        with at_each_line(LayerMemory.of, lambda: next(line) == at and ledger.keep([])):
            assert layer.of((ei,)) in (None, [(id(ei),), *[None] * 4])


def test_they_keep_no_graph_alive_and_go_with_it():
    alive = [edges() for _ in range(20)]
    kept = [ledger.of(ei) for ei in alive]
    for _ in range(100):
        ledger.of(edges())
    gc.collect()
    assert all(ledger.of(ei) is found for ei, found in zip(alive, kept))
    assert len(ledger.ledgers) <= len(alive) + 1
    cache.clear()
    assert not ledger.ledgers


def test_layers_that_are_gone_are_forgotten():
    """Models come and go over one graph, as in a search for options."""
    ei, kept = edges(), torch.nn.Linear(1, 1)
    layer_memory.of(kept).meets((ei,), ei)
    bound = len(layer_memory.memories) + layer_memory._MADE
    for _ in range(3 * layer_memory._MADE):
        layer = torch.nn.Linear(1, 1)
        memory = layer_memory.of(layer)
        assert not memory.meets((ei,), ei) and memory.number in ledger.of(ei).layers
        del layer
    assert len(ledger.of(ei).layers) <= bound and layer_memory.of(kept).number in ledger.of(ei).layers
