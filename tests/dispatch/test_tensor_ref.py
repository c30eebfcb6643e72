"""What "the same tensor" means: whatever makes a tensor another one has to be seen."""
from __future__ import annotations

import gc

import pytest
import torch

from gnnaccel.dispatch.graph.edge_arrays import CSC, EdgeArrays
from gnnaccel.dispatch.graph.tensor_ref import MemoryRef, Places, TensorMap, TensorRef, unversioned
from gnnaccel.dispatch.memory.layer_memory import all_unmoved


def _write(t):
    t[0] = 5
    return t


def _write_through_a_view(t):
    t.view(2, 2).add_(1)
    return t


def _move(t):
    t.data = t.data.clone()
    return t


#: what happens -> whether `MemoryRef.unwritten`, `TensorMap` and `TensorRef.unmoved` hold
CASES = {
    "nothing": (lambda t: t, (True, True, True)),
    "an alias": (lambda t: t.detach(), (True, False, False)),
    "a copy": (lambda t: t.clone(), (False, False, False)),
    "written into": (_write, (False, False, False)),
    "written through a view": (_write_through_a_view, (False, False, False)),
    "other memory": (_move, (False, True, False)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tensor(case):
    change, expected = CASES[case]
    t, kept = torch.arange(4), torch.arange(3)
    values: TensorMap[str] = TensorMap()
    values.set(t, "value")
    memory, ref, refs = MemoryRef(t), TensorRef(t), (TensorRef(kept), TensorRef(t))
    now = change(t)
    assert (memory.unwritten(now), values.get(now) is not None, ref.unmoved(now)) == expected
    assert all_unmoved(refs, (kept, now)) is expected[2]


def test_others_in_place_of_a_dead_tensor():
    values: TensorMap[int] = TensorMap()
    gone = []
    t = torch.arange(4)
    values.set(t, 1)
    ref, memory = TensorRef(t, gone.append), MemoryRef(t, gone.append)
    del t
    gc.collect()
    assert set(map(id, gone)) == {id(ref), id(memory)} and ref() is None and memory() is None
    others = [torch.arange(4) for _ in range(8)]  # one may have the old one's id and memory
    assert not any(ref.unmoved(t) or memory.unwritten(t) for t in others)
    assert [values.get(t) for t in others] == [None] * 8 and not values.entries


def test_a_new_value_outlives_the_old_reference():
    values: TensorMap[int] = TensorMap()
    t = torch.arange(4)
    values.set(t, 1)
    t.add_(1)
    assert values.get(t) is None
    values.set(t, 2)
    gc.collect()
    assert values.get(t) == 2


def test_numbers_of_references_differ():
    t = torch.arange(4)
    assert all_unmoved((TensorRef(t),), (t, None)) and all_unmoved((TensorRef(t),), ())


def test_tensors_that_count_no_writes():
    with torch.inference_mode():
        t = torch.arange(4)
    assert unversioned((torch.arange(4), t)) and not unversioned((torch.arange(4),))


def test_no_look_at_memory():
    """A stand-in, as `torch.vmap` passes, has none."""
    seen = []

    def look(t):
        seen.append(TensorRef(t, pointer=False)() is t)
        with pytest.raises(RuntimeError):
            TensorRef(t)
        return t

    torch.vmap(look)(torch.arange(4))
    assert seen == [True]


def test_arrays_that_a_host_keeps():
    indptr, other = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    arrays = EdgeArrays(None, CSC(indptr, other, torch.tensor([])))
    memory = MemoryRef(arrays)
    assert memory() is arrays and memory.unwritten(arrays)
    other.add_(1)
    assert not memory.unwritten(arrays)


def test_places_are_of_these_objects_where_they_lie():
    first, second = torch.zeros(3), torch.zeros(4)
    places = Places([first, second])
    first.add_(1)  # whatever is written to them
    assert places.kept([first, second]) and places.pointers == [first.data_ptr(), second.data_ptr()]
    assert not places.kept([second, first])
    assert not places.kept([first]) and not places.kept([first, second, first])
    assert not places.kept([first.view(3), second])  # another object in the same place
    first.data = torch.ones(3)
    assert not places.kept([first, second])
    places = Places([first])
    del first
    assert not places.kept([second])
