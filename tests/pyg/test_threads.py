"""Several threads at once: what one finds in the middle of another's call."""
from __future__ import annotations

import threading

import torch
from torch_geometric.nn import MessagePassing, SimpleConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import kept_results, new_graphs_native, replaced
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.native_cache import STREAK
from gnnaccel.dispatch.policy.config import current
from tests.helpers import at_each_line
from tests.pyg import graphs


def test_two_make_the_first_layers_of_a_class(monkeypatch):
    class Passing(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    problems: list[Exception] = []

    def other() -> None:
        try:
            Passing()
        except Exception as problem:
            problems.append(problem)

    second, routed = threading.Thread(target=other), replaced.routed

    def slowly(native):
        if native.__module__.endswith("Passing_propagate") and second.ident is None:
            second.start()
            second.join(0.5)
        return routed(native)

    monkeypatch.setattr(replaced, "routed", slowly)
    with gnnaccel.enabled():
        Passing()
        second.join()
        assert not problems and Passing.propagate.routed
        assert not getattr(Passing.propagate.__wrapped__, "routed", False)
    assert not getattr(Passing.propagate, "routed", False)


def test_one_keeps_a_result_anew_while_another_asks_for_it():
    edge_index, weight = graphs.square(), torch.rand(graphs.E)
    kept, found = kept_results._Kept((edge_index,), (edge_index, weight)), []
    weight.add_(1)
    assert kept.get((edge_index,)) is None
    other = torch.rand(graphs.E)
    with at_each_line(kept_results._Kept.keep, lambda: found.append(kept.get((edge_index,)))):
        kept.keep((edge_index,), (edge_index, other))
    found.append(kept.get((edge_index,)))
    assert set(found[:-1]) == {None} and found[-1] == (edge_index, other)


def test_one_begins_a_row_of_native_calls_while_another_calls():
    layer, ei = SimpleConv(), graphs.square()
    memory = layer_memory.of(layer)
    kwargs = {"x": graphs.features()}
    streaks = memory.in_turn[True]

    def look() -> None:
        new_graphs_native.looked_at(memory, kwargs, 1000, "SimpleConv", "GA301", config)

    def other() -> None:
        for streak in streaks.values():
            if getattr(streak, "left", 0):
                streak.goes_on(memory, ei, kwargs, config, 3)

    with gnnaccel.enabled():
        config = current()
        for _ in range(STREAK - 1):
            look()
        with at_each_line(new_graphs_native.looked_at, other):
            look()
