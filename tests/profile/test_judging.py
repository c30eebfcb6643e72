"""The rule by which results are right or wrong."""
from __future__ import annotations

import torch

from gnnaccel.profile.judging import errors


def test_twice_the_hosts_error_is_right_and_more_is_not():
    exact = torch.tensor([1.0], dtype=torch.float64)
    for ours, right in ((1.0 + 2e-3, True), (1.0 + 2.1e-3, False)):
        found = errors([({"out": torch.tensor([ours])}, {"out": torch.tensor([1.001])},
                         {"out": exact})])
        assert found[0].right is right, found


def test_a_missing_gradient_is_wrong():
    assert not errors([({"grad w": None}, {"grad w": torch.ones(2)},
                        {"grad w": torch.ones(2)})])[0].right
    assert not errors([({}, {"grad w": torch.ones(2)}, {"grad w": torch.ones(2)})])[0].right
    assert errors([({"grad w": None}, {"grad w": None}, {"grad w": None})]) == []
