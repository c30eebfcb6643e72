"""PatchSet restores exactly."""
from __future__ import annotations

import gc
import threading
import types
import warnings

import pytest

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.errors import PatchError


def classes():
    class Base:
        def forward(self):
            return "base"

        @staticmethod
        def helper():
            return "helper"

    class Child(Base):
        pass

    return Base, Child


def ours(self=None):
    return "ours"


def test_own_attribute_comes_back_identical():
    base, _ = classes()
    before = dict(vars(base))
    patches = PatchSet()
    patches.set(base, "forward", ours)
    patches.set(base, "helper", staticmethod(ours))
    assert base().forward() == "ours" and base.helper() == "ours" and len(patches) == 2
    assert patches.restore() == []
    assert dict(vars(base)) == before and vars(base)["helper"] is before["helper"] and len(
        patches) == 0


def test_inherited_attribute_is_removed_again():
    base, child = classes()
    patches = PatchSet()
    patches.set(child, "forward", ours)
    assert child().forward() == "ours" and base().forward() == "base"
    patches.restore()
    assert "forward" not in vars(child) and child().forward() == "base"


def test_module_attribute_and_names():
    module = types.ModuleType("somemodule")
    module.f = original = lambda: 1
    patches = PatchSet()
    patches.set(module, "f", ours)
    base, _ = classes()
    patches.set(base, "forward", ours)
    assert patches.names() == ["somemodule.f", f"{__name__}.classes.<locals>.Base.forward"]
    patches.restore()
    assert module.f is original and patches.names() == []


def test_none_is_a_value_to_restore():
    module = types.ModuleType("somemodule")
    module.f = None
    patches = PatchSet()
    patches.set(module, "f", ours)
    patches.restore()
    assert vars(module)["f"] is None


def test_twice_is_refused_also_across_sets():
    base, _ = classes()
    first = PatchSet()
    first.set(base, "forward", ours)
    for patches in (first, PatchSet()):
        with pytest.raises(PatchError, match="Base.forward is replaced already"):
            patches.set(base, "forward", ours)
    first.restore()
    second = PatchSet()
    second.set(base, "forward", ours)
    second.restore()
    assert base().forward() == "base"


def test_missing_attribute_is_named_with_near_matches():
    base, _ = classes()
    with pytest.raises(PatchError, match="Base.foward does not exist.*Did you mean 'forward'"):
        PatchSet().set(base, "foward", ours)
    assert not hasattr(base, "foward")


def test_somebody_elses_wrapper_is_left_and_reported():
    base, child = classes()
    patches = PatchSet()
    patches.set(base, "forward", ours)
    patches.set(child, "forward", ours)
    theirs = lambda self: "theirs"  # noqa: E731
    base.forward = theirs
    with pytest.warns(RuntimeWarning, match=r"Base\.forward alone") as caught:
        assert len(patches.restore()) == 1
    assert len(caught) == 1 and vars(base)["forward"] is theirs and "forward" not in vars(child)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert patches.restore() == []


def test_a_deleted_wrapper_is_drift_too():
    base, _ = classes()
    patches = PatchSet()
    patches.set(base, "forward", ours)
    del base.forward
    with pytest.warns(RuntimeWarning, match="replaced by somebody else"):
        patches.restore()
    assert "forward" not in vars(base)


def test_added_attributes_go_again():
    base, _ = classes()
    before = dict(vars(base))
    patches = PatchSet()
    patches.add(base, "extra", ours)
    assert base.extra is ours and len(patches.names()) == 1
    with pytest.raises(PatchError, match="Base.forward exists"):
        patches.add(base, "forward", ours)
    assert patches.restore() == [] and dict(vars(base)) == before


def test_one_is_undone_alone():
    base, child = classes()
    before = vars(base)["forward"]
    patches = PatchSet()
    patches.set(base, "forward", ours)
    patches.set(child, "forward", ours)
    assert patches.holds(base, "forward") and not patches.holds(base, "helper")
    patches.undo(base, "forward")
    assert vars(base)["forward"] is before and child().forward() == "ours" and not patches.holds(
        base, "forward")
    patches.undo(base, "forward")
    patches.set(base, "forward", ours)
    assert patches.holds(base,
                         "forward") and patches.restore() == [] and vars(base)["forward"] is before


def test_what_somebody_else_replaced_is_not_undone():
    base, _ = classes()
    patches = PatchSet()
    patches.set(base, "forward", ours)
    theirs = lambda self: "theirs"  # noqa: E731
    base.forward = theirs
    patches.undo(base, "forward")
    assert vars(base)["forward"] is theirs and patches.holds(base, "forward")
    with pytest.warns(RuntimeWarning, match="replaced by somebody else"):
        patches.restore()


def test_what_somebody_else_put_there_is_replaced_anew():
    base, _ = classes()
    patches = PatchSet()
    patches.set(base, "forward", ours)
    theirs = lambda self: "theirs"  # noqa: E731
    base.forward = theirs
    PatchSet().set(base, "helper", staticmethod(ours))
    patches.set(base, "forward", ours)
    assert base().forward() == "ours" and len(patches) == 1
    assert patches.restore() == [] and vars(base)["forward"] is theirs


def test_somebody_elses_is_replaced_anew_by_another_set():
    base, _ = classes()
    first, second = PatchSet(), PatchSet()
    first.set(base, "forward", ours)
    base.forward = theirs = lambda self: "theirs"
    second.set(base, "forward", ours)
    assert first.restore() == [] and base().forward() == "ours"
    assert second.restore() == [] and vars(base)["forward"] is theirs


def test_aside():
    base, child = classes()
    before = vars(base)["forward"]
    patches = PatchSet()
    patches.set(base, "forward", ours)
    patches.set(child, "forward", ours)
    with patches.aside():
        assert vars(base)["forward"] is before and "forward" not in vars(child)
        patches.set(base, "forward", ours)  # comes back by itself
        child.forward = theirs = lambda self: "theirs"
    assert vars(base)["forward"] is ours and vars(child)["forward"] is theirs and len(patches) == 2


def test_what_another_thread_restores_while_it_is_aside_stays_restored():
    base, child = classes()
    before = vars(base)["forward"]
    patches = PatchSet()
    patches.set(base, "forward", ours)
    patches.set(child, "forward", ours)
    with patches.aside():
        thread = threading.Thread(target=lambda: restored.append(patches.restore()))
        restored = []
        thread.start()
        thread.join()
        assert restored == [[]]
        later = PatchSet()  # of the next session
        later.set(child, "forward", ours)
    assert vars(base)["forward"] is before and vars(child)["forward"] is ours
    later.restore()
    assert "forward" not in vars(child)


def test_classes_that_are_gone_are_let_go_of():
    patches, most = PatchSet(), 0
    for _ in range(1500):
        _, child = classes()
        patches.set(child, "forward", ours)
        most = max(most, len(patches._patches))
        del child
    gc.collect()
    assert len(patches) == 0 and most < 1500
    patches.restore()
    assert not patches._patches


@pytest.mark.long
def test_a_class_at_a_dead_ones_place_is_replaced():
    patches = PatchSet()
    for _ in range(50):  # ids come again
        _, child = classes()
        patches.set(child, "forward", ours)
        assert vars(child)["forward"] is ours and patches.holds(child, "forward")
        del child
        gc.collect()
    assert patches.restore() == []
