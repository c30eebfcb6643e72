"""What is measured of a call in reduced precision: its time against fp32, once on a GPU without
waiting, to check the estimates; and the error of quantized rows in sums over a few destinations'
edges, without asking the device for a size."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.int8.quantize import Int8Rows
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.quantized.rows import Stored
from gnnaccel.dispatch.quantized.settings import Entry

_AT = 10  # the call at which it is measured: kernels are compiled and structures built by then


class Stopwatch:
    """Runs both ways once more at one call, forward, and keeps the ratio in ``entry.measured`` when
    the device has told. Once for a layer, however often it is decided anew."""

    __slots__ = ("entry", "calls", "events")
    events: tuple[torch.cuda.Event, ...] | None

    def __init__(self, entry: Entry):
        self.entry, self.calls, self.events = entry, 0, None

    def compare(self, stored: Callable[[], Any], plain: Callable[[], Any]) -> None:
        self.calls += 1
        if self.events is not None:
            if self.events[2].query():
                first, second, third = self.events
                self.judge(second.elapsed_time(third) / max(first.elapsed_time(second), 1e-6))
                self.events, self.calls = None, _AT + 1
        elif self.calls == _AT and self.entry.measured is None and torch.cuda.is_available():
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            with torch.no_grad():
                events[0].record()
                stored()
                events[1].record()
                plain()
                events[2].record()
            self.events = events

    def judge(self, gain: float) -> None:
        """Keep the ratio. Where it is a loss, decisions from estimates no longer hold
        (`settings.wanted`)."""
        previous, self.entry.measured = self.entry.measured, gain
        if gain < 1 and previous is None:
            config.bump()


# --- errors of rows -------------------------------------------------------------------------------

_EDGES = 128  # sampled edges of a destination, at most
# relative to a row's largest number: values that fp32 would not see beside it, such as channels
# that weight decay put to sleep
_NOTHING = 1e-7
_LOST = 0.8  # share of a row's numbers that became zero from which it counts as made by outliers


def error(view: GraphView, ids: bool, x: Tensor, stored: Stored,
          weights: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None, rows: int,
          turn: int) -> Tensor:
    """[3] on the device: the median relative L2 error of sums over ``rows`` destinations, the share
    of their neighbours that are rows of zeros, and the share that are made by outliers.

    ``x`` [num_src, ...] and ``stored``, its rows; ``ids``: edge ids are needed;
    ``weights(src, dst, edge, real)``: of a table [destinations, edges] the weights, which broadcast
    to [destinations, edges, *x.shape[1:]]. ``turn``: each samples others. Draws no random numbers:
    a user's run has the same with a guard as without.
    """
    src, dst, edge, real = _table(view, ids, min(rows, max(view.num_dst, 1)), turn)
    exact, rounded = x[src].float(), _gathered(stored, src).view(*src.shape, *x.shape[1:])
    lost = _lost(exact, rounded, real)
    weight = real.view(*real.shape, *(1,) * (x.dim() - 1)).float()
    if weights is not None:
        weight = weight * weights(src, dst, edge, real)
    return torch.cat([_error(((rounded - exact) * weight).sum(1).flatten(1),
                             (exact * weight).sum(1).flatten(1)), lost])


def error_of_map(x: Tensor, weight: Tensor, near: Callable[[Tensor], Tensor], rows: int,
                 turn: int) -> Tensor:
    """[3]: `error` of ``rows`` rows of ``x`` @ ``weight``.T, x [any, K], weight [N, K]. ``near``:
    rounds rows."""
    rows = min(rows, x.shape[0])
    exact = x[(torch.arange(rows, device=x.device) * (x.shape[0] // rows) + 7919
               * turn) % x.shape[0]]
    rounded, expected = near(exact), exact @ weight.t()
    lost = _lost(exact.unsqueeze(1), rounded.unsqueeze(1),
                 torch.ones(rows, 1, dtype=torch.bool, device=x.device))
    return torch.cat([_error(rounded @ near(weight).t() - expected, expected), lost])


def _error(off: Tensor, exact: Tensor) -> Tensor:
    """[1]: the median over rows of how far they are off, relative to their size."""
    off, size = off.norm(dim=1), exact.norm(dim=1)
    return _median(torch.where(size > 0, off / size, torch.where(off > 0, torch.inf, torch.nan)))


def _median(values: Tensor) -> Tensor:
    """[1]: of the numbers that are not NaN; 0 without any. (`torch.nanmedian` waits for the
    device.)"""
    ordered = values.sort().values  # NaN comes last
    at = (ordered.isnan().logical_not().sum() - 1).clamp(min=0) // 2
    return torch.nan_to_num(ordered.index_select(0, at.view(1)), nan=0.0, posinf=torch.inf)


def _gathered(stored: Stored, index: Tensor) -> Tensor:
    if type(stored) is Int8Rows:
        return stored.data[index][..., :stored.width].float() * stored.scale[index].unsqueeze(-1)
    return stored[index].float()  # type: ignore[index]


def _lost(exact: Tensor, near: Tensor, real: Tensor) -> Tensor:
    """[2]: shares, among the rows that are ``real``, of zeros and of those made by outliers."""
    exact, near = exact.flatten(2).abs(), near.flatten(2)
    present = exact > _NOTHING * exact.amax(2, keepdim=True)
    count = present.sum(2)
    zeroed = (present & (near == 0)).sum(2)
    total = real.sum().clamp(min=1)
    zero, outlier = (count == 0) & real, (zeroed > _LOST * count) & real
    return torch.stack([zero.sum() / total, outlier.sum() / total])


def _table(view: GraphView, ids: bool, rows: int,
           turn: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample of ``rows`` destinations spread over the graph: sources, destinations and edge ids
    [rows, edges], and a mask of the entries that are real."""
    device = view.device
    dst = (torch.arange(rows, device=device) * max(1, view.num_dst // rows) + 7919
           * turn) % max(view.num_dst, 1)
    indptr, sources, place = _arrays(view, ids)
    position = indptr[dst].long().unsqueeze(1) + torch.arange(_EDGES, device=device)
    real = position < indptr[dst + 1].long().unsqueeze(1)
    position = position.clamp(max=sources.shape[0] - 1)
    return (torch.where(real, sources[position].long(), 0), dst.unsqueeze(1).expand_as(position),
            position if place is None else torch.where(real, place[position].long(), 0), real)


def _arrays(view: GraphView, ids: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Offsets, sources and edge ids (None: by position) of the graph by destination."""
    if driver.runs_on(view.device):
        rows = view.csc(places=ids)
        return rows.indptr, rows.other, rows.place if ids else None
    edges = view.edges(ids)
    segments = edges.segments(view.num_src)
    return segments.ptr, segments.src, edges.eid if ids else None
