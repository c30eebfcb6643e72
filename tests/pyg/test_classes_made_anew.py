"""Classes of the user's that are defined in a loop: what is known of them does not pile up."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch_geometric.nn import MessagePassing

import gnnaccel
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.dispatch.policy.names import IdentityMap


def defined() -> type:
    class MadeAnewInALoop(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

    return MadeAnewInALoop


@pytest.mark.long
def test_native_classes_are_let_go_of():
    x, ei = torch.randn(4, 3), torch.randint(0, 4, (2, 9))
    seen = []
    with gnnaccel.enabled():
        for _ in range(20):
            cls = defined()
            cls()(x, ei)
            seen.append(weakref.ref(cls))
            del cls
        gc.collect()
        assert sum(ref() is not None for ref in seen) <= 1


def test_as_many_classes_are_known_as_are_bounded(emulated):
    most = reading._classes._most
    assert most is not None
    classes = [type(f"Known{i}", (MessagePassing,), {}) for i in range(most + 40)]
    for cls in classes:
        known = reading.known_class(cls)
        assert reading.known_class(cls) is known
    assert len(reading._classes) == most and reading._classes.get(classes[-1]) is known


def test_the_oldest_entry_goes_first():
    class Owner:
        pass

    entries, owners = IdentityMap(3), [Owner() for _ in range(5)]
    for i, owner in enumerate(owners):
        entries.set(owner, i)
        entries.set(owner, i)
    assert [entries.get(owner) for owner in owners] == [None, None, 2, 3, 4]
