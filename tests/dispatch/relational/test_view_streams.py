"""`RelationView`: what is built once by kernels, and who waits for it."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir.program import DST, PAIR_DST, PAIR_SRC, SRC
from gnnaccel.dispatch.relational import pairs
from gnnaccel.dispatch.relational import view as relation_view
from tests.dispatch.relational.test_view import by_kernels, ends
from tests.relational_cases import typed


def test_edges_of_pairs_are_counted_once(device, monkeypatch):
    counted, calls = pairs.cuda_pairs.counted, []
    monkeypatch.setattr(pairs.cuda_pairs, "counted",
                        lambda *args: (calls.append(1), counted(*args))[1])
    view = by_kernels(device, typed(edges=300))
    view.share_along(SRC, DST), view.share_along(SRC, DST, True), view.share(torch.float64)
    assert len(calls) == 1


def test_destinations_are_grouped_by_type_already(device):
    view = by_kernels(device, typed())
    graph, node = view.of_blocks((5, 0, 7)), torch.arange(12)
    type_ = torch.tensor([0] * 5 + [2] * 7)
    assert ends(graph) == list(zip(node.tolist(), type_.tolist()))
    expected = GraphView(torch.stack([node, type_]).to(device), 12, 3, own=True)
    for got, rows in ((graph.csc(), expected.csc()), (graph.csr(), expected.csr()),
                      (graph.csr_by_id(), expected.csr_by_id())):
        assert torch.equal(got.indptr, rows.indptr)
        assert torch.equal(got.other, rows.other) and torch.equal(got.place, rows.place)


@pytest.fixture
def streams(monkeypatch):
    """``streams(n)``: the current stream is n from now on. ``streams.waits``: how often the host
    waited for one."""
    def enter(number):
        monkeypatch.setattr(relation_view.capture, "stream", lambda device: number)

    enter.waits = []
    monkeypatch.setattr(relation_view.capture, "finish", enter.waits.append)
    return enter


def built(view):
    return view.pairs(PAIR_DST), view.share_along(SRC, DST), view.blocks((5, 7))


def test_on_one_stream_nobody_waits_for_what_is_built(device, streams):
    view = by_kernels(device, typed())
    for _ in range(3):
        streams(7)
        view.enter()
        built(view)
    assert not streams.waits


def test_on_another_stream_what_is_built_is_waited_for(device, streams):
    view = by_kernels(device, typed())
    streams(7), view.enter(), built(view)
    view._built = Built()
    streams(8), view.enter()
    assert view._built.waits == 1
    view.share_along(SRC, DST, True)
    assert len(streams.waits) == 1
    streams(7), view.enter(), view.members(SRC, PAIR_SRC)
    assert len(streams.waits) == 2 and view._built.waits == 1


def test_without_a_call_what_is_built_is_waited_for(device, streams):
    streams(7), built(by_kernels(device, typed()))
    assert len(streams.waits) == 3


def test_what_is_built_on_a_stream_without_a_call_there_is_waited_for(device, streams):
    view = by_kernels(device, typed())
    streams(7), view.enter(), streams(8), built(view)
    assert len(streams.waits) == 3


class Built:
    """An event."""

    waits = 0

    def synchronize(self):
        self.waits += 1

    def record(self, stream):
        raise AssertionError("built while several streams are in use")
