"""The computations of pairs of message and reduce functions, kept for as long as an object lives
that they read from, and checked again in each call."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.udf import features, mailboxes, messages
from gnnaccel.adapters.dgl.udf.features import Sent
from gnnaccel.adapters.dgl.udf.functions import ENDS, Guard, Opened, Run, opened
from gnnaccel.adapters.dgl.udf.mailboxes import Nodes, Steps
from gnnaccel.adapters.dgl.udf.messages import Edges, Fields
from gnnaccel.adapters.tracing import kept_values
from gnnaccel.adapters.tracing.expressed import Effect
from gnnaccel.adapters.tracing.nodes.straight import combined
from gnnaccel.adapters.tracing.noted import followed, notes
from gnnaccel.adapters.tracing.rows.pointwise import Deferred, Rows
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.run.autograd import Keeping

_MOST = 32  # kept for each object and key, as of a function that asks for its relation
_KEYS = 256  # of an object; more means variables that never repeat
Frames = dict[str, Any]  # features by place (`messages.Fields`); "n" of nodes in a mailbox


class Pair(NamedTuple):
    """The functions of a call: each a user's, one of DGL's, or None where a call has none."""

    message: Any
    reduce: Any


class Reduced(NamedTuple):
    """One reduction of messages: "sum", "mean", "max" or "min"."""

    sent: Sent
    how: str


class Found(NamedTuple):
    """The computation of a pair. ``sent``: the messages, of a call without a reduction, one object
    where two names have one message; ``reductions``; ``steps``: the steps of a user's reduce
    function, and ``combine``, its results of theirs; ``fields``: the names of the results;
    ``written``: features of edges that the message function writes, by name; ``removed``: those
    that it takes away; ``effects``: from `tracing.Trace`; ``apart``: of
    `Keeping.place`."""

    sent: tuple[Sent, ...]
    reductions: tuple[Reduced, ...]
    steps: Steps | None
    combine: Callable[[list[Tensor], dict], list[Tensor]] | None
    fields: tuple[str, ...]
    written: tuple[tuple[str, Sent], ...] = ()
    effects: tuple[Effect, ...] = ()
    removed: tuple[str, ...] = ()
    apart: int = 0


class _Kept(NamedTuple):
    """A kept result. ``looks``: a `Guard` for each user's function, a description for others;
    ``seen``: the forms of the features that were read; ``found``: None where the pair is not
    followed."""

    looks: tuple[Any, Any]
    seen: dict[str, Any]
    found: Found | None

    def holds(self, pair: list[Any], frames: Frames) -> bool:
        for key, form in self.seen.items():  # in less time than a guard takes
            if _form(frames, key) != form:
                return False
        for look, function in zip(self.looks, pair):
            if type(look) is not Guard:
                if look != function:
                    return False
            elif type(function) is not Opened or not look.holds(function):
                return False
        return True


def _form(frames: Frames, key: str) -> Any:
    place, _, name = key.partition(".")
    frame = frames[place]
    return messages.form(frame[name]) if name in frame else None


#: by `Opened.key`; of code: a guard knows its code
_kept: IdentityMap[dict[tuple, list[_Kept]]] = IdentityMap(1024)


def understood(pair: Pair, frames: Frames) -> tuple[Found, dict[str, Any]] | None:
    """(the computation of the pair for such features, the tensors of its call); None where it is
    not followed."""
    parts = [_given(one) for one in pair]
    functions = [one for one in parts if type(one) is Opened]
    if not functions or any(one is None for one in parts):
        return None
    owner = functions[0].owner
    by_key = _kept.get(owner)
    if by_key is None or len(by_key) >= _KEYS:
        by_key = {}
        _kept.set(owner, by_key)
    entries = by_key.setdefault(tuple([one.key for one in functions]), [])
    entry = next((one for one in entries if one.holds(parts, frames)), None)
    if entry is None:
        entry = _traced(parts, pair, frames)
        entries[:] = [entry, *entries][:_MOST]
    if entry.found is None:
        return None
    tensors = {key: _field(frames, key) for key in entry.seen if key != messages.ETYPE}
    for prefix, one in zip("cd", parts):
        if type(one) is Opened:
            tensors.update({f"{prefix}.{name}": value for name, value in one.cells.items()
                            if isinstance(value, Tensor)})
    return entry.found, tensors


def _field(frames: Frames, key: str) -> Tensor:
    place, _, name = key.partition(".")
    return frames[place][name]


def _given(function: Any) -> Any:
    """A user's function opened, None for kinds that are not followed; for one of DGL's its
    description."""
    if function is None:
        return ()
    name = getattr(function, "name", None)
    if type(function).__module__.startswith("dgl.function."):
        return (name, *sorted((k, v) for k, v in vars(function).items() if type(v) is str))
    return opened(function)


class _Given:
    """Features at one place, which are read as the call reads them: gradients are on while a
    function is followed, and DGL keeps rows of another graph's that are read."""

    def __init__(self, frame: Any, grad: bool):
        self.frame, self.grad = frame, grad

    def __contains__(self, name: object) -> bool:
        return name in self.frame

    def __getitem__(self, name: Any) -> Any:
        with torch.set_grad_enabled(self.grad):
            return self.frame[name]


def _traced(given: list[Any], pair: Pair, frames: Frames) -> _Kept:
    grad = torch.is_grad_enabled()
    frames = {place: _Given(frame, grad) for place, frame in frames.items()}
    (runs, forms, result), notes = followed(lambda: _run(given, pair, frames))
    if result is not None:
        result = result._replace(effects=tuple(notes.effects), apart=Keeping.place())
    looks = [one if run is None else run.guard() for one, run in zip(given, runs)]
    return _Kept((looks[0], looks[1]), forms, result)


def _run(given: list[Any], pair: Pair,
         frames: Frames) -> tuple[list[Run | None], dict[str, Any], Found | None]:
    """One run on stand-ins: of the functions, the forms that they read, and what was found; None
    where it is not followed."""
    forms: dict[str, Any] = {}
    runs = [Run(one, prefix) if type(one) is Opened else None for one, prefix in zip(given, "cd")]
    try:
        return runs, forms, _found(runs, pair, frames, forms)
    except ENDS:
        return runs, forms, None


def _found(runs: list[Any], pair: Pair, frames: Frames, seen: dict[str, Any]) -> Found:
    message, reduce = runs
    if pair.message is None:  # they are there
        return _reduced(Fields("m", frames["m"], seen), reduce, pair, frames, seen)
    edges = Edges(frames, seen)
    sent = (messages.built_in(pair.message, edges) if message is None
            else messages.sent(message.result(edges)))
    result = (_given_back(sent, edges) if pair.reduce is None
              else _reduced(sent, reduce, pair, frames, seen))
    data = edges.data
    return result._replace(written=tuple((name, _ready(rows, edges)._replace(
        written=data.written_as(data.given[name]))) for name, rows in data.written.items()),
        removed=tuple(data.removed))


def _given_back(sent: dict[str, Rows], edges: Edges) -> Found:
    """The computation of messages that are not reduced. Of each of several others may be made."""
    alone = {id(rows): rows for rows in sent.values()}
    ready = {key: _ready(rows, edges)._replace(written=edges.data.written_as(rows))
             for key, rows in alone.items()}
    for key, rows in alone.items() if len(alone) > 1 else ():
        kept_values.get(rows)
        if rows.own is not None and not any([one.made_of(rows.own) for other, one in ready.items()
                                             if other != key]):
            notes().alone.add(rows.number)
    return Found(tuple([ready[id(rows)] for rows in sent.values()]), (), None, None, tuple(sent))


def _ready(rows: Rows, edges: Edges) -> Sent:
    return features.ready(rows)._replace(apart=edges.data.lie_apart(rows))


def _reduced(sent: Any, reduce: Run | None, pair: Pair, frames: Frames,
             seen: dict[str, Any]) -> Found:
    """The computation of a pair on messages ``sent``."""
    if reduce is None:
        one = Reduced(features.ready(sent[pair.reduce.msg_field]), pair.reduce.name)
        if one.how not in ("sum", "mean", "max", "min"):
            raise LookupError(one.how)
        return Found((), (one,), None, None, (pair.reduce.out_field,))
    nodes = Nodes(sent, frames["n"], seen)
    out = mailboxes.reduced(reduce.result(nodes))
    return Found((), tuple(Reduced(features.ready(_at_edges(rows)), how)
                           for rows, how in nodes.steps.reductions),
                 nodes.steps, combined(nodes.steps, [*out.values()],
                                       range(len(nodes.steps.reductions))), tuple(out))


def _at_edges(rows: Rows) -> Rows:
    """``rows``; linear maps from which others are made become rows too: terms that cancel out do so
    to the last bit, as in deviations."""
    return rows.alone() if isinstance(rows, Deferred) and rows.is_made else rows
