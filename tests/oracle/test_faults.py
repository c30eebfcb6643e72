"""The faults of `faults` can be planted: the text that each replaces is there."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from .faults import FAULTS, InKernels, InModule


def test_the_text_to_replace_is_there():
    planted = [fault.plant for fault in FAULTS.values()]
    for plant in planted:
        if isinstance(plant, (InKernels, InModule)):
            plant.check()
    assert sum(isinstance(plant, (InKernels, InModule)) for plant in planted) == 15


def test_a_text_that_is_not_there_is_told():
    with pytest.raises(LookupError, match="no kernel"):
        InKernels("there is no such text", "").check()
    with pytest.raises(LookupError, match="0 times"):
        InModule("gnnaccel.errors", "there is no such text", "").check()
