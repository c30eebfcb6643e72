"""Calls of ``propagate`` over graphs that have not been seen before, by a layer that stayed native
over one no smaller: reading each of them would take as long as some run natively."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.adapters.pyg.propagate.adjacency import (edges_of, is_matrix,
                                                       read_matrices)
from gnnaccel.adapters.pyg.propagate.described import described, rows_like, width
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.native_cache import STREAK, UNLOOKED
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.run.autograd import checkpointed, saved_tensor_hooks

_drivers = driver.in_place
MORE = 1.25  # times as many edges as the call that was decided: where others might gain
_READ_AT = 16  # looks at calls of a layer whose message has no form
READ_SMALL_AT = 8  # the call of a layer over few edges that is read all the same
_entries, _maps = settings.kept()
_watching, _ledgers, _strided = counters.watching, ledger.ledgers, torch.strided


class Streak:
    """Native calls of a layer in a row; after some, most are not looked at, as a gain can wait for
    a few calls. ``row``: number of calls looked at; ``left``: number of calls to come without a
    look, over graphs of this ``layout`` of no more than ``most`` ids that were not asked about
    before, or over whatever graph, if ``layout`` is None; ``small``: whether a look at such a call
    need only note its graph; ``kinds``: types of their arguments, by name; ``tally``: where they
    are counted, as native because of ``code``."""

    __slots__ = ("epoch", "row", "left", "most", "bounded", "layout", "small", "kinds", "code",
                 "tally")
    most: float
    layout: torch.layout | None
    bounded: bool  # whether ``most`` is finite
    small: bool
    code: str | None

    def __init__(self, epoch: int, kwargs: dict):
        self.epoch, self.row, self.left = epoch, 0, 0
        self.kinds = {name: type(value) for name, value in kwargs.items()}
        self.tally: counters.Tally | None = None

    def goes_on(self, memory: layer_memory.LayerMemory, edge_index: Any, kwargs: dict,
                config: Config, mode: int) -> bool:
        """Whether a call goes native without a look, where some are ``left``, or with one that is
        short; counts it then. ``memory``: the layer's; ``mode``: as `layer_memory.mode_of` it."""
        # Calls of built-in functions are few here: each takes half a microsecond after the layers'
        # own code.
        kinds, tally = self.kinds, self.tally
        if (self.epoch != config.epoch or tally is None or len(kwargs) != len(kinds)
            or _entries or _maps):
            return False
        for name in kwargs:
            if name not in kinds or type(kwargs[name]) is not kinds[name]:
                return False
        if self.layout is not None:
            if type(edge_index) is not Tensor or edge_index.layout is not self.layout:
                return False
            number, over = id(edge_index), memory.over[mode]
            # new edges may lie where old did
            if number in over and over[number].edges() is edge_index:
                return False
            if self.bounded:
                record = _ledgers.get(number)
                if (record is not None and record() is edge_index
                    and (record.sightings or record.seconds)):
                    return False
                if (edge_index.numel() > self.most if self.layout is _strided
                    else _matrix_exceeds(edge_index, self.most)):
                    return False
            if mode & 1 and saved_tensor_hooks(True) is not None:  # gradients are on
                return False
        if self.left > 0:
            self.left -= 1
        elif self.small and _noted(memory, edge_index, self.layout, mode & 1):
            self.left = UNLOOKED
        else:
            return False
        tally.calls += 1
        if _watching:
            counters.note(tally.counts, False, decided=True)
        return True


def _matrix_exceeds(adjacency: Tensor, most: float) -> bool:
    """Whether a sparse matrix has more than ``most`` ids, or was read before."""
    return 2 * adjacency._nnz() > most or id(adjacency) in read_matrices


def _noted(memory: layer_memory.LayerMemory, edge_index: Any, layout: torch.layout | None,
           grad: int) -> bool:
    """Whether the graph of a call that goes native was noted, as far as there is anything to
    note."""
    if layout is not None:
        # one call on a GPU is yet to be read, see `calls.too_small`
        if memory.unread[grad] < READ_SMALL_AT and not (edge_index.is_cpu and not _drivers):
            return False
        if edge_index.is_inference():
            return False
        ledger.of(edge_index).sightings += 1
    return True


def looked_at(memory: layer_memory.LayerMemory, kwargs: dict, most: float, name: str,
              code: str | None, config: Config, layout: torch.layout | None = torch.strided,
              small: bool = False) -> None:
    """Note a native call in its `Streak`. ``most``: the number of edges up to which calls of this
    ``layout`` are native; infinite where the call is native whatever its graph, and ``layout`` is
    None where that is so by the user's rules; ``small``: as of `Streak`."""
    grad = torch.is_grad_enabled()
    streaks, types = memory.in_turn[grad], tuple(map(type, kwargs.values()))
    streak = streaks.get(types)
    if streak is None or streak.epoch != config.epoch:
        streak = streaks[types] = Streak(config.epoch, kwargs)
    streak.row += 1
    if streak.row >= STREAK and config.on_fallback == "native":
        if streak.tally is None or streak.code != code:
            streak.code, streak.tally = code, counters.tally({(name, "native", code): 1})
        streak.layout, streak.most, streak.small = layout, 2 * most, small
        streak.bounded = most < math.inf
        streak.left = UNLOOKED  # last: other threads go on from here
        memory.going[grad] = streak if memory.taken_once[grad] is None else None


class Native:
    """A layer's last call over a new graph that stayed native for what it costs. Native code is
    never wrong, so it is enough to know of another call that it is no more likely to gain.
    ``rows``: of the features; ``strided``: edges are a list, no sparse matrix; ``gain``,
    ``patience``: per edge, as `aggregation_cost` has them, None where there is nothing to gain
    whatever comes again; ``code``: why it was native."""

    __slots__ = ("epoch", "source", "rows", "strided", "most", "gain", "patience", "name",
                 "code")

    def __init__(self, layer: Any, edges: int, x: Tensor, source: str, strided: bool,
                 decision: Decision, config: Config):
        estimate = decision.estimate
        self.epoch = config.epoch
        self.source, self.rows, self.strided = source, _described(x), strided
        self.most, self.name, self.code = edges * MORE, type(layer).__name__, decision.plan.code
        self.gain, self.patience = None, None
        if estimate is not None:
            self.gain = estimate.gain / edges
            self.patience = aggregation_cost.patience(estimate) / edges

    def holds(self, edge_index: Any, kwargs: dict, config: Config) -> bool:
        """Whether a call over a graph that its layer has not seen stays native too; adds the gain
        that is missed to the graph's ledger."""
        if self.epoch != config.epoch or type(edge_index) is not Tensor or edge_index.dim() != 2:
            return False
        x: Any
        strided = edge_index.layout is torch.strided
        if strided is not self.strided:
            return False
        if not strided and not is_matrix(edge_index):
            return False
        edges = edge_index.shape[1] if strided else edge_index._nnz()
        x = kwargs.get(self.source)
        x = x[0] if type(x) is tuple else x
        if edges > self.most or type(x) not in reading.TENSORS or _described(x) != self.rows:
            return False
        if self.gain is None:
            return True
        if checkpointed() or edge_index.is_inference():
            return False
        record = ledger.of(edge_index if strided else edges_of(edge_index))
        if record.seconds > self.patience * edges:  # type: ignore[operator]  # as the gain
            return False
        record.seconds += self.gain * edges
        return True


class Formless:
    """A layer's last call whose message or aggregation has no form that anything but the host's own
    code could compute. Calls like it, whatever their values, stay native; of those that are looked
    at one in `_READ_AT` is read again, since what the message reads of its layer may have changed.
    ``like``: what is compared; ``code``: why it was native."""

    __slots__ = ("epoch", "like", "placed", "left", "name", "code")
    most = math.inf

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, why: Reason, config: Config):
        self.epoch, self.like = config.epoch, _kinds(edge_index, kwargs)
        self.placed, self.left = bool(_drivers), _READ_AT
        self.name, self.code = type(layer).__name__, why.code

    def holds(self, edge_index: Any, kwargs: dict, config: Config) -> bool:
        """Whether a call is like it and stays native, too; not where it is to be read again."""
        self.left -= 1
        return (self.epoch == config.epoch and self.left > 0 and type(edge_index) is Tensor
                and bool(_drivers) is self.placed and self.like == _kinds(edge_index, kwargs))


def _kinds(edge_index: Tensor, kwargs: dict) -> tuple:
    arguments = described(kwargs)
    return (edge_index.is_cpu, edge_index.layout, arguments[0], list(map(width, arguments[1])),
            rows_like(arguments, edge_index.shape[-1]))


def remember_formless(layer: Any, edge_index: Any, kwargs: dict, why: Reason,
                      config: Config) -> None:
    """Remember a call that is native because of its message or its aggregation."""
    if (why.code in ("GA201", "GA208", "GA211") and type(edge_index) is Tensor
            and edge_index.layout is torch.strided and config.on_fallback == "native"
            and settings.asked(layer, config) is None):
        layer_memory.of(layer).native_once[torch.is_grad_enabled()] = Formless(
            layer, edge_index, kwargs, why, config)


def remember(layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read, decision: Decision,
             config: Config) -> None:
    """Remember how large a native call was, for others over new graphs."""
    # on a CPU the kernels' reason is the device; that of torch operations comes last
    plan = decision.plan
    costs = plan.code == "GA301" or (plan.code == "GA401"
                                     and plan.rejected[-1][1].code == "GA301")
    if costs and decision.fell_back is None and call.graph.num_edges:
        x = reading.source(kwargs, call.form.source)
        if type(x) in reading.TENSORS:
            layer_memory.of(layer).native_once[torch.is_grad_enabled()] = Native(
                layer, call.graph.num_edges, x, call.form.source, call.matrix is None, decision,
                config)


def _described(x: Tensor) -> tuple:
    # where nothing is recorded, one hop of a layer wants a gradient no more than the next
    return x.shape[1:], x.dtype, x.is_cuda, x.requires_grad and torch.is_grad_enabled()
