"""Stand-ins for arguments that message passing passes by itself, such as ``index``.

They may be handed to functions that stand in, and taken apart.
"""
from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch

from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.rows.row_count import Elements, RowCount
from gnnaccel.adapters.tracing.rows.standins import Refuses, Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence

#: names of the ends that edges go to and come from, by the end
_INDEX = {"index": "i", "edge_index_i": "i", "edge_index_j": "j"}
#: numbers of nodes, by the end at which these are
COUNTS = {"dim_size": "i", "size_i": "i", "size_j": "j"}
#: first part of a name, before the end whose nodes are counted up to the last that has an edge
UP_TO_LAST = "up to the last "
#: what turns the list of edges
_TURNS = ("t", "T", "mT", "permute", "transpose", "swapaxes")
#: methods of ids as numbers
_OF_IDS = ("float", "to", "abs", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "sub", "add", "mul")
#: methods that may give ids as they are
_STILL = ("to", "cpu", "cuda", "long", "contiguous", "clone", "detach")
#: arguments that are never None
NEVER_NONE = frozenset((*_INDEX, "edge_index", "size"))
#: of these, those that are ids: numbers to calculate with
IDS = NEVER_NONE - {"size"}


class Special(Refuses):
    """One such argument, ``name``. ``end``: of an index the end "i" or "j" whose nodes it names,
    else ""; ``counts``: of a number the end whose nodes it counts; ``parts``: what it may be taken
    apart into, in order; ``steps``: of an ``aggregate``'s index what reduces by it; ``functions``:
    of a message's what stands for functions of PyG, which know how many nodes there may be."""

    __slots__ = ("counts", "end", "functions", "name", "parts", "steps")

    def __init__(self, name: str, parts: tuple = (), functions: Any = None):
        for key, value in (("name", name), ("end", _INDEX.get(name, "")),
                           ("counts", COUNTS.get(name, "")), ("parts", parts),
                           ("functions", functions), ("steps", None)):
            object.__setattr__(self, key, value)

    def __getattribute__(self, name: str) -> Any:
        if name in ("name", "end", "counts", "parts", "steps", "functions", "__class__",
                    "__torch_function__"):
            return object.__getattribute__(self, name)
        if name in ("unsqueeze", "view", "reshape") and self.end:
            return partial(_column, self, name)
        if name == "max" and self.end:
            return partial(Largest, self.end)
        if name == "max" and self.name == "edge_index" and getattr(self.functions, "square", False):
            # of both ends: sums with fewer rows than there are nodes make a call native
            return partial(Largest, "i")
        if name == "numel" and _is_index(self):
            return RowCount if self.end else Elements
        if name == "unbind" and self.parts:
            return partial(_apart, self)
        if name in _TURNS and self.name == "edge_index" and self.parts:
            return _turning(name, Turned(self))
        if name == "size" and _is_index(self):
            return lambda *args: _sizes(self)[args[0]] if args else _sizes(self)
        if name == "dim" and _is_index(self):
            return lambda: len(_sizes(self))
        if name == "shape" and _is_index(self):
            return _sizes(self)
        if name == "device" and _is_index(self):
            return DEVICE
        if name in _STILL and _is_index(self):
            return partial(_still, self, name)
        if name in _OF_IDS and self.end:
            return getattr(other("rows.tables").ids_of(self), name)
        raise Unseen

    def __getitem__(self, place: Any) -> Any:
        if place == (slice(None), None) and self.end:
            return Spread(self, (1,))
        if type(place) is tuple and place[1:] in ((slice(None),), (Ellipsis,)):
            place = place[0]
        if type(place) is not int or not self.parts or not -2 <= place < 2:
            raise Unseen
        return _given(self.parts[place])

    def __iter__(self) -> Any:
        if not self.parts:
            raise Unseen
        return iter([_given(part) for part in self.parts])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is torch.stack:
            return _stacked(*args, **(kwargs or {}))
        raise Unseen  # what another argument stands for decides

    def __mod__(self, number: Any) -> Any:
        if type(number) is not int:
            raise Unseen
        return other("rows.tables").ids_of(self, lambda ids: ids % number)

    def __abs__(self) -> Any:
        return abs(other("rows.tables").ids_of(self))

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    def __gt__(self, other: Any) -> Any:
        """Whether there are nodes: no call over none is traced as far as its ``aggregate``. Of ids
        which are larger."""
        if self.end:
            return _of_ids(operator.gt, self, other)
        if isinstance(other, RowCount):
            return not other > self
        return (type(other) is int and other == 0 and self.counts == "i"
                and self.functions is not None and self.functions.counts_results
                ) or self._refuses()

    __str__ = __format__ = __repr__ = _refuses
    __len__ = __contains__ = __index__ = __int__ = __float__ = _refuses
    __hash__ = object.__hash__


def _of_ids(function: Any, left: Any, right: Any) -> Any:
    """An operation on the ids at an end of the edges, as whole numbers of these."""
    if not all(type(one) in (int, float) or isinstance(one, Special) and one.end
               or hasattr(one, "tree") for one in (left, right)):
        raise Unseen
    return function(*[other("rows.tables").ids_of(one) if isinstance(one, Special) else one
                      for one in (left, right)])


def _operating(name: str, reflected: bool) -> None:
    function = getattr(operator, name)
    setattr(Special, f"__{name}__", lambda self, other: _of_ids(function, self, other))
    if reflected:
        setattr(Special, f"__r{name}__", lambda self, other: _of_ids(function, other, self))


for _name in ("add", "sub", "mul", "truediv", "floordiv"):
    _operating(_name, True)
for _name in ("eq", "ne", "lt", "le", "ge"):
    _operating(_name, False)


class Turned(Special):
    """The list of edges with a row for each edge, ``of`` which the ends are columns."""

    __slots__ = ("of",)

    def __init__(self, of: Special):
        super().__init__("")
        object.__setattr__(self, "of", of)

    def __getattribute__(self, name: str) -> Any:
        if name == "of":
            return object.__getattribute__(self, name)
        if name in _TURNS:
            return _turning(name, self.of)
        if name in _STILL:
            return partial(_still, self, name)
        if name == "unbind":
            return lambda dim=0: self.of.unbind(_other_of_two(dim))
        if name in _SIZES:
            return _SIZES[name]()
        return super().__getattribute__(name)

    def __getitem__(self, place: Any) -> Any:
        if type(place) is not tuple or len(place) != 2 or place[0] not in (slice(None), Ellipsis):
            raise Unseen
        if type(place[1]) is list and len(place[1]) == 1:
            return Spread(self.of[place[1][0]], (1,))
        return self.of[place[1]]


class Largest(Special):
    """The largest number in an index of nodes at this end; with one more, how many there are up to
    the last that has an edge."""

    __slots__ = ("of",)

    def __init__(self, end: str):
        super().__init__("")
        object.__setattr__(self, "of", end)

    def __getattribute__(self, name: str) -> Any:
        if name == "item":
            return lambda: self
        return object.__getattribute__(self, name) if name == "of" else super().__getattribute__(
            name)

    def __add__(self, other: Any) -> Special:
        if type(other) is not int or other != 1:
            raise Unseen
        return Special(UP_TO_LAST + self.of)

    __radd__ = __add__


class Spread(Special):
    """The index ``of`` edges as rows, which repeat it in dimensions of these sizes, ``tail``."""

    __slots__ = ("of", "tail")

    def __init__(self, of: Special, tail: tuple[int, ...]):
        super().__init__("")
        for key, value in (("of", of), ("tail", tail)):
            object.__setattr__(self, key, value)

    def __getattribute__(self, name: str) -> Any:
        if name in ("of", "tail", "__class__", "__torch_function__"):
            return object.__getattribute__(self, name)
        if name == "unsqueeze":
            return lambda dim: _column(self.of, name, dim, before=self.tail)
        if name == "dim":
            return lambda: 1 + len(self.tail)
        if name == "expand":
            return lambda *sizes: _expanded(self, _one(sizes))
        if name == "expand_as":
            return lambda other: _expanded(self, other.shape)
        if name == "repeat":
            return lambda *sizes: _repeated(self, _one(sizes))
        raise Unseen


class Along:
    """The index ``of`` edges in the shape of rows, along the dimension ``dim``."""

    def __init__(self, of: Special, dim: int):
        self.of, self.dim, self.max, self.numel = of, dim, of.max, of.numel


def _still(ids: Special, name: str, *args: Any, **kwargs: Any) -> Any:
    """Ids that stay as they are, on the device where they are already; in another dtype numbers of
    the edges."""
    of: Any = ids.of if type(ids) is Turned else ids
    if name in ("to", "cpu", "cuda"):
        _, _, (_, *rest), kwargs = other("layer.devices").still(name, (ids, *args), kwargs)
        args = (*rest, *kwargs.values())
        if not args:
            return ids
        if args != (torch.int64,) and ids.end:
            return other("rows.tables").ids_of(ids).to(*rest, **kwargs)
    whole = name in ("to", "long")
    if args != ((torch.int64,) if name == "to" else ()) or whole and not (
        of.functions is not None and of.functions.wholes):  # ids of others may be int32
        raise Unseen
    return ids


def _turning(name: str, turned: Special) -> Any:
    """The attribute ``name`` of a list of edges that gives it with its dimensions ``turned``."""
    def method(*dims: Any) -> Special:
        others = [*map(_other_of_two, _one(dims))]
        if others != [0, 1] if name == "permute" else (
            bool(others) if name == "t" else sorted(others) != [0, 1]):
            raise Unseen
        return turned

    return turned if name in ("T", "mT") else method


def _other_of_two(dim: Any) -> int:
    """The other of two dimensions."""
    if type(dim) is not int or not -2 <= dim < 2:
        raise Unseen
    return 1 - dim % 2


def _apart(special: Special, dim: Any = 0) -> tuple:
    """All parts."""
    if type(dim) is not int or dim:
        raise Unseen
    return tuple(iter(special))


def _stacked(ids: Any, dim: Any = 0) -> Special:
    """Two indices as rows of one tensor, which may be taken apart again."""
    if type(dim) is not int or dim or len(ids) != 2 or not all(
        [type(one) is Special and one.end for one in ids]):
        raise Unseen
    return Special("", tuple(ids))


def _column(index: Special, name: str, *sizes: Any, before: tuple[int, ...] = ()) -> Spread:
    """An index with more dimensions of one."""
    sizes = _one(sizes)
    if name == "unsqueeze":
        count = len(before) + 2
        if len(sizes) != 1 or type(sizes[0]) is not int or not -count <= sizes[0] < count or (
            not sizes[0] % count):
            raise Unseen
        at = sizes[0] % count - 1
        return Spread(index, (*before[:at], 1, *before[at:]))
    if len(sizes) < 2 or sizes[0] != -1 or any(one != 1 for one in sizes[1:]):
        raise Unseen
    return Spread(index, sizes[1:])


def _one(sizes: tuple) -> tuple:
    """Sizes that may have been given as one argument."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes


def _expanded(rows: Spread, sizes: tuple) -> Spread:
    if len(sizes) != 1 + len(rows.tail) or not (
        type(sizes[0]) is RowCount or type(sizes[0]) is int and sizes[0] == -1):
        raise Unseen
    for size, length in zip(sizes[1:], rows.tail):
        if type(size) is not int or (size not in (-1, length) and length != 1):
            raise Unseen
    return Spread(rows.of, tuple(length if size == -1 else size
                                 for size, length in zip(sizes[1:], rows.tail)))


def _repeated(rows: Spread, sizes: tuple) -> Spread:
    if len(sizes) != 1 + len(rows.tail) or any(type(one) is not int for one in sizes) or (
        sizes[0] != 1):
        raise Unseen
    return Spread(rows.of, tuple(size * length for size, length in zip(sizes[1:], rows.tail)))


def _is_index(special: Special) -> bool:
    return bool(special.end) or special.name == "edge_index"


def _sizes(special: Special) -> Sequence:
    return Sequence((2, RowCount()) if special.name == "edge_index" else (RowCount(),))


#: stand-in for the device of rows
DEVICE = Special("device")


def _sizes_turned(*dims: Any) -> Any:
    """How many edges there are, and two ends."""
    sizes = Sequence((RowCount(), 2))
    return sizes[dims[0]] if dims else sizes


#: what a list with a row for each edge is asked for
_SIZES: dict[str, Any] = {"size": lambda: _sizes_turned, "shape": _sizes_turned,
                          "dim": lambda: lambda: 2, "numel": lambda: Elements,
                          "device": lambda: DEVICE}


def _given(part: Any) -> Any:
    if part is None:
        raise Unseen
    return part


def special(name: str, kwargs: dict, flow: Any, edge_index: Any,
            functions: Any = None) -> Special:
    """Stand-in for the argument ``name`` of a call. ``flow()``: the layer's; ``functions``: as
    of `Special`."""
    if name == "edge_index":
        ends = ("edge_index_j", "edge_index_i")
    elif name == "size":
        ends = ("size_j", "size_i")
    else:
        return Special(name, (), functions)
    if name == "edge_index" and edge_index is None:  # not one that can be taken apart
        return Special(name)
    if flow() != "source_to_target":
        ends = ends[::-1]
    size = kwargs.get("size") if name == "size" else (0, 0)
    counts = size if isinstance(size, (tuple, list)) and len(size) == 2 else (None, None)
    return Special(name, tuple(None if one is None else Special(end, (), functions)
                               for one, end in zip(counts, ends)))
