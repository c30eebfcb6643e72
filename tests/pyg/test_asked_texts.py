"""Messages that go another way by texts of what stands for something else while they are read: they
stay native."""
from __future__ import annotations

import pytest
from torch import nn

from tests.pyg.test_named_attributes import Asks, stays_native, thrice


class OfAShapesText(Asks):
    def asks(self, x_j):
        return f"{x_j.shape[1:]}".startswith("torch.Size")


class OfASumOfShapesText(Asks):
    def asks(self, x_j):
        return "{}".format(x_j.shape[1:] + (3,)).startswith("torch")  # noqa: UP032 - as users do


class OfADictionarysText(Asks):
    def __init__(self):
        super().__init__()
        self.options = {"kind": "dot"}

    def asks(self, x_j):
        return f"{self.options!r}" == "{'kind': 'dot'}"


class OfAFunctionsText(Asks):
    way = staticmethod(thrice)

    def asks(self, x_j):
        return "thrice" in f"{self.way}"


class OfModulesTexts(Asks):
    def __init__(self):
        super().__init__()
        self.maps, self.named = nn.ModuleList(), nn.ModuleDict()

    def asks(self, x_j):
        return f"{self.maps} {self.named}" == "ModuleList() ModuleDict()"


@pytest.mark.parametrize("cls", [OfAShapesText, OfASumOfShapesText, OfADictionarysText,
                                 OfAFunctionsText, OfModulesTexts])
def test_texts_of_what_stands_for_others_stay_native(emulated, cls):
    stays_native(emulated, cls)
