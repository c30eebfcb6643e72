"""A function's call over rows of the host, band by band.

Bands run up to the place where a layer gathers rows that all bands have to compute first, such as
rows after a linear map, and these are collected in the host's memory; then they run again, up to
the next such place or the end. Backward runs each of these stages again, the last one first.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed.draws import Draws
from gnnaccel.dispatch.distributed.session import OF_THE_GRAPH
from gnnaccel.dispatch.graph.tensor_ref import version_of
from gnnaccel.dispatch.offload import gradients, pipeline
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.near import Near
from gnnaccel.dispatch.offload.plan import Band, Bands
from gnnaccel.dispatch.offload.session import BandSession, Key, Reached
from gnnaccel.errors import OffloadError

#: rows that layers asked for, by key: the number of an input, or rows collected on the host
Answers: TypeAlias = "dict[Key, int | Tensor]"


class Function(Protocol):
    """A function to run over each band: from the band's rows of each input and from all else it is
    differentiated by, both on the device, to a row for each own destination. ``session``: None
    where bands have no edges."""

    def __call__(self, session: BandSession | None, inputs: list[Tensor],
                 whole: list[Tensor]) -> Tensor: ...


class Held(NamedTuple):
    """Tensors loaded for a band. ``extended``: rows [own + halo, ...] by key; ``share``: rows of
    the gradient, in backward; ``in_place``: the halo are all rows, in memory that is the same for
    all bands."""

    inputs: list[Tensor]
    edges: Tensor | None
    extended: dict[Key, Tensor]
    share: Tensor | None
    in_place: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Those whose memory is this band's alone."""
        for t in (*self.inputs, *self.extended.values(), self.edges, self.share):
            if t is not None and not self.common(t):
                yield t

    def common(self, t: Tensor) -> bool:
        """Whether a tensor is in memory that is the same for all bands."""
        return self.in_place and t.untyped_storage().data_ptr() in {
            rows.untyped_storage().data_ptr() for rows in self.extended.values()}


class Result(NamedTuple):
    """Result of a band: rows for ``key``, or for the call (None)."""

    key: Key | None
    rows: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.rows]


class Call:
    """One call of ``function``. ``kinds``: of which type of nodes each input has rows, or "edges";
    ``name``: for messages; ``around``: the block that it runs in, forward and backward; ``draws``:
    where it may draw random numbers; ``known``: which input the rows of a key are, as an earlier
    call found out; brought up to date; ``spare``: bytes of the device for rows that many bands
    need: where all rows of a tensor fit, they are fetched once; ``result``: type of its rows, by
    default that of destinations; ``beside``: more bytes of the device, for the last call's result
    and for this one's, which stays there for the next (`Kept`), if it has ``most`` bytes at most;
    ``gathers``: whether it does nothing with rows of sources but gather them by edges. Then bands
    gather from all rows, where these are on the device, and copy none to a place of their own.
    """

    def __init__(self, function: Function, bands: Bands, kinds: list[str], memory: Memory,
                 name: str, around: Callable[[], contextlib.AbstractContextManager[Any]],
                 draws: Draws | None = None, known: dict[Key, int] | None = None, spare: int = 0,
                 result: str | None = None, beside: int = 0, most: int | None = None,
                 gathers: bool = False):
        self._function, self.bands, self.kinds = function, bands, kinds
        self.memory, self._draws, self.name, self.around = memory, draws, name, around
        self._known = {} if known is None else known
        self.answers: Answers = {**self._known, **bands.derived}
        self._result = bands.target if result is None else result
        self.near = Near(memory, bands, spare, beside, most)
        self._recomputed = False
        self._gathers = gathers and bands.again()
        if self._gathers:
            memory.ahead = max(memory.ahead, bands.most())
        self._left: Tensor | None = None  # the result on the device, where it stays there

    def __call__(self, inputs: list[Tensor], whole: list[Tensor]) -> Tensor:
        """The results, in the host's memory; differentiable, once. ``inputs``: contiguous, on the
        host."""
        if is_recorded(inputs, whole):
            self._recomputed = True
            return gradients.in_bands(self, inputs, whole)
        return self.forward(inputs, whole)

    def forward(self, inputs: list[Tensor], whole: list[Tensor]) -> Tensor:
        earlier = self.memory.kept.take(inputs)
        if earlier is not None:
            self.near.adopt(*earlier)
            del earlier
        with self.around(), torch.no_grad():
            whole = [t.to(self.memory.device) for t in whole]
            while True:
                key, rows = self._stage(inputs, whole)
                if key is None:
                    break
                self.answers[key] = rows
                if key[0].startswith(OF_THE_GRAPH):
                    self.bands.derived[key] = rows
        self.near.forget()
        if self._left is not None:
            self.memory.kept.put(rows, self._left)
            self._left = None
        self._known.clear()
        self._known.update({key: at for key, at in self.answers.items() if isinstance(at, int)})
        if self._draws is not None:
            self._draws.end()
        return rows

    def _stage(self, inputs: list[Tensor], whole: list[Tensor]) -> tuple[Key | None, Tensor]:
        """Run all bands up to the first rows that are missing, or to the end. Returns the key of
        these rows, and all of them."""
        collected: list[Result] = []

        def store(band: Band, result: Result) -> None:
            key, rows = result
            kind = self.kind(key)
            if not collected:
                shape = self.bands.rows(kind), *rows.shape[1:]
                # rows that are needed after the call stay with the host
                lasting = key is None or self._recomputed or key[0].startswith(OF_THE_GRAPH)
                where = self.memory if lasting else self.near
                collected.append(Result(key, where.empty(shape, rows.dtype)))
                if key is None and not self._recomputed and not collected[0].rows.is_inference():
                    self._left = self.near.leaves(shape, rows.dtype)
            if key != collected[0].key or rows.shape[1:] != collected[0].rows.shape[1:]:
                raise OffloadError(f"{self.name} took another way over one band of the graph than "
                                   "over another, so that it cannot run in bands")
            self.memory.put(rows, band.rows(kind), collected[0].rows, self._left)

        pipeline.run(self.memory.device, self.bands.bands,
                     lambda band: self.load(band, inputs, self.answers),
                     lambda band, held: self.run(band, held, inputs, held.inputs, whole)[0],
                     store, lambda held: held.tensors())
        return collected[0]

    def load(self, band: Band, inputs: list[Tensor], answers: Answers,
             gradient: Tensor | None = None, kind: str = "") -> Held:
        """The band's rows of the inputs, of ``answers``, and of the gradient of rows of a kind."""
        memory, rows = self.memory, []
        extended = self._in_place(band, inputs, answers)
        in_place = bool(extended)
        for at, (far, own) in enumerate(zip(inputs, self.kinds)):
            keys = [key for key, answer in answers.items() if answer is at]
            far = self.near.of(far) if keys else self.near.known(far)
            if keys and in_place:
                rows.append(far[band.rows(own)])
                continue
            close = memory.fetch(far, band.rows(own), *([band.halo] if keys else ()))
            extended.update(dict.fromkeys(keys, close))
            rows.append(close[:band.count(own)] if keys else close)
        for key, answer in answers.items():
            if isinstance(answer, Tensor) and not in_place:
                extended[key] = self._extended(band, answer)
        share = None if gradient is None else memory.fetch(gradient, band.rows(kind))
        return Held(rows, self.bands.edges(band, memory, in_place), extended, share, in_place)

    def _in_place(self, band: Band, inputs: list[Tensor], answers: Answers) -> dict[Key, Tensor]:
        """[own + all rows, ...] by key, the own free, where that is possible for all of
        ``answers``; else nothing."""
        rows: dict[Key, Tensor] = {}
        if not self._gathers or self._recomputed:
            return rows
        for key, answer in answers.items():
            close = self.near.behind(inputs[answer] if isinstance(answer, int) else answer,
                                     band.count(self.bands.source))
            if close is None:
                return {}
            rows[key] = close.data  # counts its writes by itself
        return rows

    def run(self, band: Band, held: Held, far: list[Tensor], inputs: list[Tensor],
            whole: list[Tensor], goal: Key | None = None) -> tuple[Result, BandSession | None]:
        """The band's result: of the call, or of the rows that are missing, or of ``goal``. ``far``:
        the inputs on the host; ``inputs``: the band's."""
        versions = [(t, version_of(t)) for t in inputs]

        def halo(key: Key, x: Tensor) -> Tensor | None:
            if key == goal or not self._answered(key, x, versions):
                return None
            if key in held.extended:
                return held.extended[key]
            answer = self.answers[key]
            return self._extended(band, far[answer] if isinstance(answer, int) else answer,
                                  held.in_place)

        session = (None if held.edges is None
                   else BandSession(self.bands, band, held.edges, halo, held.in_place))
        with (self._draws.within(band.number) if self._draws is not None
              else contextlib.nullcontext()):
            try:
                result = Result(None, self._function(session, inputs, whole))
            except Reached as reached:
                result = Result(reached.key, reached.rows)
            finally:
                if session is not None:
                    session.close()
        self._check(band, result)
        if held.common(result.rows):  # the next band writes to it
            result = result._replace(rows=result.rows.clone())
        return result, session

    def kind(self, key: Key | None) -> str:
        """Type of the nodes, or "edges", whose rows a band's result for ``key`` has."""
        return self._result if key is None else self.bands.source

    def _answered(self, key: Key, x: Tensor, given: list[tuple[Tensor, int]]) -> bool:
        """Whether rows that are asked for are there: collected, or of an unwritten input."""
        if isinstance(self.answers.get(key), Tensor):
            return True
        place = next((at for at, ((t, version), kind) in enumerate(zip(given, self.kinds))
                      if t is x and version == version_of(x) and kind == self.bands.source), None)
        if place is None:
            self.answers.pop(key, None)
            return False
        self.answers[key] = place
        return True

    def _extended(self, band: Band, far: Tensor, in_place: bool = False) -> Tensor:
        """[own + halo, ...]: the halo's rows, behind room for the own. ``in_place``: all rows."""
        own = band.count(self.bands.source)
        close = self.near.behind(far, own) if in_place else None
        if close is not None:
            return close.data
        return self.memory.fetch(self.near.of(far), slice(0, len(far)) if in_place else band.halo,
                                 free=own)

    def _check(self, band: Band, result: Result) -> None:
        rows = result.rows
        own = band.count(self.kind(result.key))
        if not isinstance(rows, Tensor) or not rows.dim() or len(rows) != own:
            what = (f"a tensor {list(rows.shape)}" if isinstance(rows, Tensor)
                    else f"a {type(rows).__name__}")
            raise OffloadError(f"{self.name} gave {what} over a band of {own} rows; to run in "
                               "bands it has to give a tensor with as many")


def is_recorded(*tensors: list[Tensor]) -> bool:
    """Whether a call with these tensors is to be differentiated."""
    return torch.is_grad_enabled() and any(t.requires_grad for of in tensors for t in of)
