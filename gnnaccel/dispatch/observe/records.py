"""One record per decision, built only when somebody listens.

A caller asks `listening` first, builds the record with `new`, and hands it to `emit`. A record is a
dictionary with these fields, all always present:

- ``schema``: `SCHEMA`; a field never changes its meaning within one schema
- ``call``: int, increasing
- ``time``: unix time in seconds
- ``direction``: "forward" or "backward"
- ``forward_call``: on a backward, ``call`` of its forward; on a forward, None
- ``host``: "pyg" or "dgl"
- ``layer``: class name of the layer
- ``name``: its qualified name: given by ``name_layers``, else as the running model has it
  (`policy.names`); or None
- ``graph``: None, or num_src, num_dst, num_edges (ints), and what else is known, as self_loops
- ``route``: "cuda", "torch" or "native": what ran
- ``kernel``: name of the kernel or of the torch plan that ran; None on the native route
- ``rejected``: candidates that were not taken, each {candidate, code, text, hint}
- ``passes``: of a relational layer: pairs_src, pairs_dst, relations, compaction_src,
  compaction_dst (pairs per edge), ordering (the one taken) and orderings, each {name, bytes,
  flops, launches, backward, estimated_us}, with backward {bytes, flops, launches} or None; of
  other layers None
- ``cost_us``: estimated cost of what ran, in microseconds, or None
- ``native_us``: likewise of the host's own code
- ``cache``: structure cache: "hit", "miss" or "none" (not asked)
- ``dtype``: of the input features, such as "float32", or None; likewise ``out_dtype``;
  ``autocast`` is None when it is off
- ``capturing``: is a CUDA graph being captured?
- ``deterministic``: are deterministic algorithms demanded?
- ``training``: of the layer; ``grad``: is a gradient wanted?
- ``storage``: format of the rows gathered in forward, or forward/backward, such as "int8", where
  it is not their dtype; or None
- ``kernels``: in a file: what this process compiled or loaded since the line before, each {family,
  entry, defines}; else empty
- ``overhead_us``: time spent deciding, in microseconds, or None
"""
from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

SCHEMA = 1
Record = dict[str, Any]
Sink = Callable[[Record], None]

DIRECTIONS = ("forward", "backward")
HOSTS = ("pyg", "dgl")
ROUTES = ("cuda", "torch", "native")
CACHE = ("hit", "miss", "none")
_REJECTED = ("candidate", "code", "text", "hint")
_KERNEL = ("family", "entry", "defines")
_DEFAULTS: Record = {
    "schema": SCHEMA, "call": None, "time": None, "direction": "forward", "forward_call": None,
    "host": None,
    "layer": None, "name": None, "graph": None, "route": None, "kernel": None, "rejected": (),
    "passes": None, "cost_us": None, "native_us": None,
    "cache": "none", "dtype": None, "out_dtype": None, "autocast": None, "capturing": False,
    "deterministic": False,
    "training": False, "grad": False, "storage": None, "kernels": (), "overhead_us": None,
}
#: fields that came later: lines of a file without them are records, too
ADDED: Record = {"kernels": [], "native_us": None}

_lock = threading.Lock()
#: receivers of records; replaced, never changed in place: `emit` takes no lock. Public for code
#: that cannot afford to call `listening`.
sinks: tuple[Sink, ...] = ()
_calls = itertools.count(1)


def listening() -> bool:
    """Whether anybody wants records. Costs some tens of nanoseconds."""
    return bool(sinks)


def next_call() -> int:
    """A call's number, larger than every earlier one."""
    return next(_calls)


def new(**fields: Any) -> Record:
    """A record with ``fields``, a number, the time, and defaults for what is missing. TypeError for
    unknown fields."""
    unknown = fields.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(
            f"records have no field {', '.join(sorted(unknown))}; they have {', '.join(_DEFAULTS)}")
    record = {**_DEFAULTS, **fields}
    record["rejected"], record["kernels"] = list(record["rejected"]), list(record["kernels"])
    if record["call"] is None:
        record["call"] = next_call()
    if record["time"] is None:
        record["time"] = time.time()
    return record


def emit(record: Record) -> None:
    """Hand ``record`` to every sink. A sink that raises is taken out with one warning; the user's
    run goes on."""
    for sink in sinks:
        try:
            sink(record)
        except Exception as error:  # noqa: BLE001 - a sink is the user's code
            if unsubscribe(sink):
                warnings.warn(f"gnnaccel: {type(sink).__name__} failed and gets no more records: "
                              f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


def subscribe(sink: Sink) -> Sink:
    """Let ``sink`` be called with every record, in the thread that made it. Once, however often
    subscribed."""
    global sinks
    with _lock:
        if not any(each is sink for each in sinks):
            sinks = (*sinks, sink)
    return sink


def unsubscribe(sink: Sink) -> bool:
    """Take ``sink`` out; False when it was not in."""
    global sinks
    with _lock:
        rest = tuple(each for each in sinks if each is not sink)
        removed = len(rest) < len(sinks)
        sinks = rest
    return removed


@contextlib.contextmanager
def told() -> Iterator[None]:
    """A block in which each call is decided as if somebody listened: none is run as one before."""
    nobody = subscribe(lambda record: None)
    try:
        yield
    finally:
        unsubscribe(nobody)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """A block in which nobody listens, in any thread: for timing calls as they are while nobody
    does."""
    global sinks
    with _lock:
        held, sinks = sinks, ()
    try:
        yield
    finally:
        with _lock:
            # mypy takes `sinks` to be empty still
            sinks = (*held, *(sink for sink in sinks  # type: ignore[var-annotated]
                               if not any(sink is each for each in held)))


def validate(record: Record) -> None:
    """ValueError that lists everything in which ``record`` departs from the layout above."""
    wrong = [f"{key} is missing" for key in _DEFAULTS.keys() - record.keys()]
    wrong += [f"{key} is not a field" for key in record.keys() - _DEFAULTS.keys()]
    wrong += [f"{key}={record[key]!r} should be {need}" for key, (fits, need) in _FIELDS.items()
              if key in record and not fits(record[key])]
    if not wrong:
        wrong = _contradictions(record)
    if wrong:
        raise ValueError("record does not fit the schema: " + "; ".join(sorted(wrong)))


def _contradictions(record: Record) -> list[str]:
    wrong = []
    if record["direction"] == "forward" and record["forward_call"] is not None:
        wrong.append("forward_call is set on a forward record")
    if record["direction"] == "backward" and record["forward_call"] is None:
        wrong.append("forward_call is missing on a backward record")
    if record["route"] != "native" and record["kernel"] is None:
        wrong.append(f"kernel is None on route {record['route']}")
    return wrong


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_graph(value: Any) -> bool:
    return (value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value)
                             and all(_is_int(value.get(key))
                                     for key in ("num_src", "num_dst", "num_edges"))))


def _is_passes(value: Any) -> bool:
    if value is None:
        return True
    return (isinstance(value, dict)
            and all(_is_int(value.get(key)) for key in ("pairs_src", "pairs_dst", "relations"))
            and all(_is_number(value.get(key)) for key in ("compaction_src", "compaction_dst"))
            and isinstance(value.get("ordering"), str) and isinstance(value.get("orderings"), list)
            and all(isinstance(item, dict) and isinstance(item.get("name"), str)
                    and all(_is_number(item.get(key)) for key in ("bytes", "flops", "estimated_us"))
                    for item in value["orderings"]))


def _is_rejected(value: Any) -> bool:
    return (isinstance(value, list) and all(
        isinstance(item, dict) and set(item) == set(_REJECTED)
        and all(isinstance(v, str) for v in item.values())
        for item in value))


def _is_kernels(value: Any) -> bool:
    return (isinstance(value, list) and all(
        isinstance(item, dict) and set(item) == set(_KERNEL) and isinstance(item["defines"], dict)
        and all(isinstance(v, str)
                for v in (item["family"], item["entry"], *item["defines"].values()))
        for item in value))


def _one_of(words: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in words), " or ".join(map(repr, words))


_INT = (_is_int, "an int")
_STR = (lambda value: isinstance(value, str), "a string")
_BOOL = (lambda value: isinstance(value, bool), "a bool")
_STR_OR_NONE = (lambda value: value is None or isinstance(value, str), "a string or None")
_NUMBER_OR_NONE = (lambda value: value is None or _is_number(value), "a number or None")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (lambda value: _is_int(value) and value == SCHEMA, f"{SCHEMA}"),
    "call": _INT,
    "time": (_is_number, "unix time in seconds"),
    "direction": _one_of(DIRECTIONS),
    "forward_call": (lambda value: value is None or _is_int(value), "an int or None"),
    "host": _one_of(HOSTS),
    "layer": _STR,
    "name": _STR_OR_NONE,
    "graph": (_is_graph, "None or a dict with ints num_src, num_dst and num_edges"),
    "route": _one_of(ROUTES),
    "kernel": _STR_OR_NONE,
    "rejected": (_is_rejected, f"a list of dicts of strings with keys {', '.join(_REJECTED)}"),
    "passes": (_is_passes, "None or a dict of what the passes counted"),
    "cost_us": _NUMBER_OR_NONE,
    "native_us": _NUMBER_OR_NONE,
    "cache": _one_of(CACHE),
    "dtype": _STR_OR_NONE,
    "out_dtype": _STR_OR_NONE,
    "autocast": _STR_OR_NONE,
    "capturing": _BOOL,
    "deterministic": _BOOL,
    "training": _BOOL,
    "grad": _BOOL,
    "storage": _STR_OR_NONE,
    "kernels": (_is_kernels,
                f"a list of dicts with keys {', '.join(_KERNEL)}, of which the last is a "
                "dict of strings"),
    "overhead_us": _NUMBER_OR_NONE,
}
