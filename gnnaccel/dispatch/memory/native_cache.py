"""Records of a layer's native calls, for `native_learning`: which calls are like an earlier one,
and which graphs were met."""
from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.run.autograd import saved_tensor_hooks

MISSED = object()  # in the place of a result: this call is like no earlier one
WATCHED = 4  # calls of which one has to show that nothing inside gains
_MORE = 1.25  # limit, in sizes of the call that was decided: estimates know powers of two only
# calls one after the other like an earlier one, and how many are then not looked at
STREAK, UNLOOKED = 8, 7


class HostGraph(NamedTuple):
    """Functions of a host's own graphs of one type. ``stand_in(g)``: the tensors that stand for
    a graph, None where nothing does; ``size(g)``: how many numbers those have, which costs less;
    ``structure(g)``: the arrays of its edges that were read, as dispatch works on them;
    ``names(g)``: of its types of nodes and edges."""

    stand_in: Callable[[Any], tuple[Tensor, ...] | None]
    size: Callable[[Any], float]
    structure: Callable[[Any], list]
    names: Callable[[Any], tuple]


#: the functions by type of a host's own graphs
GRAPHS: dict[type, HostGraph] = {}
_numel = Tensor.numel
_drivers = driver.in_place
autocast = getattr(torch._C, "_is_any_autocast_enabled",
                   functools.partial(torch.is_autocast_enabled, "cpu"))


def tensors_of(given: tuple) -> list | None:
    """The tensors among the arguments, unchecked; None where there is something else.

    Dictionaries and pairs are opened, and flags left out. A graph counts as its stand-ins in
    `GRAPHS`, an object with a method ``tensors`` as the tensors that it returns.
    """
    tensors: list[Any] = []
    for a in given:
        kind = type(a)
        if kind is dict:
            tensors += a.values()
        elif kind is Tensor or kind is Parameter:
            tensors.append(a)
        elif kind is tuple:
            tensors += a
        elif a is not None and kind is not bool:
            held = held_by(a, kind)
            if held is None:
                return None
            tensors += held
    return tensors


def plain_tensors(given: tuple) -> list[Tensor] | None:
    """`tensors_of` a call on nothing but tensors, of torch's own classes; None of others."""
    tensors = tensors_of(given)
    return (tensors if tensors
            and all(type(t) is Tensor or type(t) is Parameter for t in tensors) else None)


def held_by(a: Any, kind: type) -> Any:
    """The tensors of an argument of another type; None where they are not known."""
    graph = GRAPHS.get(kind)
    if graph is not None:
        return graph.stand_in(a)
    return a.tensors() if hasattr(kind, "tensors") else None


def _flags(given: tuple) -> list[tuple[int, bool | None]]:
    """Place and value of the arguments that are no tensors and hold none."""
    return [(at, a) for at, a in enumerate(given) if a is None or type(a) is bool]


def _graphs_at(given: tuple) -> list[int]:
    return [at for at, a in enumerate(given) if type(a) in GRAPHS]


def size_of(edges: Any) -> float:
    """How many numbers the tensors of a dictionary or a host's graph hold; more than any limit if
    there is something else in it."""
    kind, total = type(edges), 0
    if kind is not dict:
        return GRAPHS[kind].size(edges) if kind in GRAPHS else math.inf
    for t in edges.values():
        if type(t) is not Tensor:
            return math.inf
        total += t.numel()
    return total


class InnerCalls:
    """Routes of the calls inside a native call. ``tally``: counts them, the call itself among
    them, once it is known that all are native, and ``silent`` then says whether there are any;
    ``lasting``: only where nothing was decided anew, so that over the same tensors nothing will be;
    ``left``: calls that may yet show this; ``waiting``: some of those counted are native until
    their kernels are compiled."""

    __slots__ = ("tally", "silent", "lasting", "left", "waiting")

    def __init__(self, lasting: bool):
        self.tally: counters.Tally | None = None
        self.silent, self.lasting, self.left = False, lasting, WATCHED
        self.waiting = False


def state_of(layer: Any, config: Config) -> tuple:
    """State that must be equal besides the arguments. `looked_at` has a copy of this in place."""
    return config.epoch, layer.training, autocast(), len(_drivers)


class NativeExact:
    """A native call over known tensors, held weakly by ``refs``. ``plain``: place and id of the
    graph's that are arguments themselves; ids are unique as long as no tensor is ``gone``;
    ``held``: likewise for arguments that hold several; ``rows``: place, type, shape and dtype of
    the first argument of features, where the graph's are arguments themselves or a host's own;
    ``flags``: see `_flags`."""

    __slots__ = ("state", "names", "count", "plain", "held", "refs", "gone", "rows", "flags",
                 "edges_at", "code", "inner")

    def __init__(self, layer: Any, given: tuple, kwargs: dict, config: Config, code: str | None):
        """``given``: all arguments, those of ``kwargs`` last."""
        self.state, self.names, self.count = state_of(layer, config), tuple(kwargs), len(given)
        self.code, self.inner = code, InnerCalls(True)
        self.plain, self.held, self.rows = [], [], None
        self.flags = _flags(given)
        self.refs: list[weakref.ref] = []
        self.gone: list[weakref.ref] = []  # of the tensors, those that are no more
        for at, a in enumerate(given):
            tensors = tensors_of((a,))
            if not tensors:
                continue
            first = tensors[0]
            if first.is_floating_point():
                self.rows = self.rows or (at, type(a), first.shape, first.dtype)
                continue
            self.refs += [weakref.ref(t, self.gone.append) for t in tensors]
            if first is a:
                self.plain.append((at, id(a)))
            else:
                self.held.append((at, type(a), list(map(id, tensors))))
        own = _graphs_at(given)
        if any(at not in own for at, _, _ in self.held):
            self.rows = None
        self.edges_at = None
        if len(own) == len(self.held) == 1:
            self.edges_at = own[0], size_of(given[own[0]])
        elif self.plain and not self.held:
            self.edges_at = self.plain[0][0], _numel(given[self.plain[0][0]])
        elif len(self.held) == 1 and not self.plain and self.held[0][1] is dict:
            self.edges_at = self.held[0][0], size_of(given[self.held[0][0]])

    def fits(self, given: tuple, kwargs: dict) -> bool:
        """Whether a call is like this one. Native code is never wrong, so it is enough that nothing
        has changed that could make another route pay: the sizes of the graph, which its tensors
        keep whatever is written into them, and the form of plain features."""
        if self.gone or len(given) != self.count:
            return False
        for at, number in self.plain:
            if id(given[at]) != number:
                return False
        for at, kind, numbers in self.held:
            a = given[at]
            if type(a) is not kind:
                return False
            held = a.values() if kind is dict else a if kind is tuple else held_by(a, kind)
            if held is None or list(map(id, held)) != numbers:
                return False
        for at, flag in self.flags:
            if given[at] is not flag:
                return False
        if kwargs and tuple(kwargs) != self.names:
            return False
        if self.rows is None:
            return True
        at, kind, shape, dtype = self.rows
        a = given[at]
        if type(a) is not kind:
            return False
        if kind is not Tensor and kind is not Parameter:
            a = next(iter(a.values() if kind is dict else a), None)
            if not isinstance(a, Tensor):
                return False
        return a.shape == shape and a.dtype is dtype


class NativeSized:
    """A native call over a new graph, with the most numbers that calls like it hold. ``flat``: its
    arguments are tensors; ``graph``: picks from all its tensors those that hold no features;
    ``known``: place of the tensor by which a graph is recognised, its edges where they are one
    argument, None for the largest; ``flags``: see `_flags`; ``count``: how many arguments."""

    __slots__ = ("state", "names", "flat", "types", "cpu", "graph", "known", "edges", "largest",
                 "all", "flags", "count", "edges_at", "code", "inner")

    def __init__(self, layer: Any, given: tuple, kwargs: dict, config: Config, code: str | None):
        """``given``: all arguments, those of ``kwargs`` last."""
        held: list[Any] = tensors_of(given)  # type: ignore[assignment]
        self.state, self.names, self.code = state_of(layer, config), tuple(kwargs), code
        self.flat, self.types = list(map(id, held)) == list(map(id, given)), list(map(type, held))
        self.cpu = held[0].is_cpu
        at = [i for i, t in enumerate(held) if not t.is_floating_point()]
        apart = bool(at) and at[-1] - at[0] >= len(at) > 1
        self.graph = (itemgetter(*at)
                      if apart else itemgetter(slice(at[0], at[-1] + 1) if at else slice(0, 0)))
        self.flags, self.count = _flags(given), len(given)
        pairs = [i for i in at if held[i].dim() == 2]
        self.known = pairs[0] if self.flat and len(pairs) == 1 else None
        sizes = list(map(_numel, held))
        graph = self.graph(sizes)
        largest = max(graph, default=0) if self.known is None else sizes[self.known]
        self.edges, self.largest, self.all = (int(_MORE * n)
                                              for n in (sum(graph), largest, sum(sizes)))
        self.inner = InnerCalls(False)
        own = _graphs_at(given)
        dicts = [i for i, a in enumerate(given) if type(a) is dict and a
                 and not next(iter(a.values())).is_floating_point()]
        self.edges_at: tuple[int, float] | None = None
        if len(own) == 1:
            self.edges_at = own[0], _MORE * size_of(given[own[0]])
        elif self.flat and graph:
            self.edges_at = self.known if self.known is not None else at[0], self.largest
        elif len(dicts) == 1:
            self.edges_at = dicts[0], self.edges

    def fits(self, given: tuple, kwargs: dict) -> Any:
        """(tensors of a call's graph, the one by which it is recognised), () if it has no graph;
        `MISSED` where the call is of another kind or larger."""
        values: Any = given
        if not self.flat:
            if given[self.count:] or not given[self.count - 1:]:  # more, or fewer, arguments
                return MISSED
            for at, flag in self.flags:
                if given[at] is not flag:
                    return MISSED
            values = tensors_of(given)
        if (not values or list(map(type, values)) != self.types
            or (kwargs and tuple(kwargs) != self.names)):
            return MISSED
        sizes = list(map(_numel, values))
        if sum(sizes) > self.all or values[0].is_cpu is not self.cpu:
            return MISSED
        graph, tensors = self.graph(sizes), self.graph(values)
        if not graph:
            return ()
        largest = max(graph) if self.known is None else sizes[self.known]
        if largest > self.largest or sum(graph) > self.edges:
            return MISSED
        return (tensors,
                values[self.known] if self.known is not None else tensors[graph.index(largest)])


class NativeStreak:
    """Calls of ``count`` arguments that are taken to be like ``like``, as those before were, if the
    one ``at`` its place, a tensor or a dictionary, has no more than ``most`` numbers; ``left``: how
    many until one is looked at again."""

    __slots__ = ("like", "count", "at", "most", "epoch", "left")

    def __init__(self, like: NativeExact | NativeSized, count: int, epoch: int):
        self.like, self.count, self.epoch, self.left = like, count, epoch, UNLOOKED
        self.at, self.most = like.edges_at  # type: ignore[misc]

    def goes_on(self, args: tuple, config: Config, grad: bool) -> bool:
        """Whether a call, without keywords, is one of them; it is taken then. ``grad``: whether
        gradients are on."""
        if self.epoch != config.epoch or self.count != len(args):
            return False
        edges = args[self.at]
        size = edges.numel() if type(edges) is Tensor else size_of(edges)
        if size > self.most or (grad and saved_tensor_hooks(True) is not None):  # `checkpointed`
            return False
        self.left -= 1
        return True
