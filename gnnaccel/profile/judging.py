"""The rule by which results are right: at most twice as far from the host's own fp64 result as the
host is, plus a floor.

Errors are in the L2 norm, relative. The host's error in one draw of the inputs is luck, more so in
small tensors; so where one draw is beyond its limit, errors are averaged over more.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gnnaccel.profile.sides import Results

FACTOR = 2.0
SECOND_LOOK = 8  # draws over which errors are averaged where the first is beyond its limit
# a gradient below this share of the largest one is zero but for the rounding of larger terms
NOTHING = 1e-9
_FLOORS = {torch.float64: 1e-13, torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# times the floor, of gradients: sums over edges and over all nodes, in free order
_OF_INPUTS, _OF_PARAMETERS = 5.0, 15.0


@dataclass(frozen=True)
class Error:
    """Of one output or gradient: our error, the host's, and what is allowed, all relative to the
    fp64 result. ``text``: what else is wrong with it."""

    name: str
    ours: float
    host: float
    allowed: float
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"error {self.ours:.1e}, allowed {self.allowed:.1e}"

    @property
    def right(self) -> bool:
        return not self.text and self.ours <= self.allowed  # so that NaN is wrong


Draw = tuple[Results, Results, Results]


def errors(draws: Iterable[Draw]) -> list[Error]:
    """The errors in draws of (ours, the host's, fp64), averaged over them."""
    sums: dict[str, list[float]] = {}
    odd: dict[str, str] = {}
    dtypes: dict[str, torch.dtype] = {}
    for ours, host, exact in draws:
        largest = max((t.norm().item() for k, t in exact.items() if t is not None
                       and k.startswith("grad")), default=0.0)
        for name in dict.fromkeys([*host, *ours]):
            text = _odd(name, ours, host)
            if text:
                odd[name] = text
            elif (like := host[name]) is not None:
                found = _measured(name, ours, host, exact, largest)
                dtypes[name] = like.dtype
                sums[name] = [a + b * b for a, b in zip(sums.get(name, (0.0, 0.0, 0.0)), found)]
    made = [Error(name, math.inf, 0.0, 0.0, text) for name, text in odd.items()]
    for name, (mine, theirs, scale) in sums.items():
        scale = math.sqrt(scale) or 1.0
        native = math.sqrt(theirs) / scale
        made.append(Error(name, math.sqrt(mine) / scale, native,
                          FACTOR * native + _floor(name, dtypes[name])))
    return made


def _floor(name: str, dtype: torch.dtype) -> float:
    kind = (1.0 if not name.startswith("grad")
            else _OF_INPUTS if name.startswith("grad input") else _OF_PARAMETERS)
    return _FLOORS.get(dtype, _FLOORS[torch.bfloat16]) * kind


def _odd(name: str, ours: Results, host: Results) -> str:
    """What is wrong that is no matter of rounding."""
    if name not in ours or name not in host:
        return "only the host makes it" if name in host else "the host does not make it"
    mine, theirs = ours[name], host[name]
    if (mine is None) != (theirs is None):
        return (f"{'no' if mine is None else 'a'} gradient where the host gives "
                f"{'none' if theirs is None else 'one'}")
    if (mine is not None and theirs is not None
        and (mine.shape != theirs.shape or mine.dtype != theirs.dtype)):
        return (f"{mine.dtype} {list(mine.shape)} where the host gives {theirs.dtype} "
                f"{list(theirs.shape)}")
    return ""


def _measured(name: str, ours: Results, host: Results, exact: Results,
              largest: float) -> tuple[float, float, float]:
    own, given, ideal = ours[name], host[name], exact[name]
    assert own is not None and given is not None and ideal is not None
    # where the host has no number, neither need we
    truth, same = ideal.double(), torch.isfinite(given)
    mine, theirs = (torch.where(same, t.double() - truth, 0.0).norm().item() for t in (own, given))
    scale = torch.where(same, truth, 0.0).norm().item()
    if name.startswith("grad") and scale <= NOTHING * largest:
        scale = max(scale, largest)
    return mine, theirs, scale
