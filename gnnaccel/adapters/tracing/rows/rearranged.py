"""Stand-in for einops' ``rearrange``: where it does no more than view rows in another shape."""
from __future__ import annotations

import math
import re
import sys
from typing import Any

from gnnaccel.adapters import own
from gnnaccel.adapters.tracing.attention.traced import Value
from gnnaccel.adapters.tracing.rows.standins import Unseen

_AXIS = re.compile(r"\(([^()]*)\)|(\S+)")


def instead(value: Any) -> Any:
    """Stand-in for a global value, if it is that function."""
    if getattr(value, "__name__", "") == "rearrange" and own.home(value) == "einops":
        return rearrange
    return None


def package() -> Any:
    """The package, where it is imported."""
    return sys.modules.get("einops")


def rearrange(tensor: Any, pattern: Any, **sizes: Any) -> Any:
    """einops' ``rearrange``, of a pattern that leaves the order of the axes as it is. Axes of
    length 1 may come and go."""
    if not isinstance(tensor, Value) or type(pattern) is not str or "..." in pattern or any(
        type(one) is not int for one in sizes.values()):
        raise Unseen
    sides = [_axes(side) for side in pattern.split("->")]
    if len(sides) != 2:
        raise Unseen
    left, right = sides
    flat = [[axis for group in side for axis in group if axis != "1"] for side in sides]
    if flat[0] != flat[1] or len(set(flat[0])) < len(flat[0]) or len(left) != tensor.meta.dim():
        raise Unseen
    if not left or len(left[0]) != 1 or left[0] != right[0] or left[0] == ["1"]:
        raise Unseen  # rows stay as they are
    lengths = dict(sizes)
    for group, length in zip(left[1:], tensor.meta.shape[1:]):
        _complete(group, length, lengths)
    return tensor.reshape(-1, *(math.prod(lengths[axis] for axis in group if axis != "1")
                                for group in right[1:]))


def _axes(side: str) -> list[list[str]]:
    """The axes of one side of a pattern, in groups."""
    groups = []
    for group, single in _AXIS.findall(side):
        groups.append([single] if single else group.split())
        if any(not (axis.isidentifier() or axis == "1") for axis in groups[-1]):
            raise Unseen
    return groups


def _complete(group: list[str], length: int, lengths: dict[str, int]) -> None:
    """Add the length of the one axis of a group that is not known yet."""
    unknown = [axis for axis in group if axis != "1" and axis not in lengths]
    product = math.prod(lengths[axis] for axis in group if axis in lengths)
    if len(unknown) > 1 or product == 0 or length % product or (not unknown and product != length):
        raise Unseen
    if unknown:
        lengths[unknown[0]] = length // product
