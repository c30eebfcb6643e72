"""Decisions pinned by a file that ``python -m gnnaccel log --export`` wrote, in place of the
planner's.

A decision belongs to a kind of calls: class of the layer, sizes of the graph (by their number of
bits, as plans know them), dtype of the rows, whether gradients are wanted. A pinned route that
cannot be taken (another machine, say) is left aside: then the planner decides, as it does for kinds
of calls that the file does not name.
"""
from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

SCHEMA = 1
ROUTES = ("cuda", "torch", "native")
#: names of kernels in files of earlier versions -> names now
FORMER = {
    "additive: smmf + split rows": "fused attention, long rows split",
    "additive: smmf + pmf": "fused attention, long rows scored first",
    "pairwise: fused rows + split rows": "fused pairwise attention, long rows split",
    "relational: segment GEMM + fused traversals": "grouped matrix products, fused sums over edges",
    "plain: scaled sums, maxima or gated sums": "fused aggregation",
}


class Kind(NamedTuple):
    """A kind of calls. ``layer``: the host class, with "dgl." in front for DGL; bits: of the
    numbers of nodes and edges, self loops included."""

    layer: str
    src_bits: int
    dst_bits: int
    edge_bits: int
    dtype: str
    grad: bool


class Pinned(NamedTuple):
    """A pinned way. ``kernel``: name of the candidate, None on the native route."""

    route: str
    kernel: str | None


class Decisions:
    """The pinned decisions of one file; equal when they say the same."""

    def __init__(self, path: str, pinned: dict[Kind, Pinned]):
        self.path, self.pinned = path, pinned
        self._key = frozenset(pinned.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decisions) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Decisions({self.path!r}, {len(self.pinned)} kinds of calls)"

    def __deepcopy__(self, memo: dict) -> Decisions:
        return self

    def of(self, request: Any) -> Pinned | None:
        """The decision for a `Request`, `RelationalRequest` or `PlainRequest`, if there is one."""
        return self.pinned.get(kind_of(request))


def kind_of(request: Any) -> Kind:
    """The kind of a `Request`, `RelationalRequest` or `PlainRequest`."""
    return Kind(request.native.partition(" ")[0], request.src_bits, request.dst_bits,
                request.edge_bits, str(request.row).removeprefix("torch."), request.grad)


def read(path: str | os.PathLike) -> Decisions:
    """The decisions in a file. ValueError, naming file and entry, when it is no such file; OSError
    when there is none."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    where = f"decisions={os.fspath(path)!r}"
    try:
        held = json.loads(text)
    except ValueError as problem:
        raise ValueError(f"{where} is no JSON: {problem}") from None
    if (not isinstance(held, dict) or held.get("schema") != SCHEMA
        or not isinstance(held.get("decisions"), list)):
        raise ValueError(f"{where} holds no decisions of schema {SCHEMA}; python -m "
                         "gnnaccel log FILE.jsonl --export FILE.json "
                         "writes some")
    return Decisions(os.fspath(path), entries(where, held["decisions"]))


def entries(where: str, found: list) -> dict[Kind, Pinned]:
    """The decisions of entries in JSON. ValueError, beginning with ``where``, for other entries."""
    return dict(_entry(f"{where}: entry {at}", entry) for at, entry in enumerate(found))


def _entry(where: str, entry: Any) -> tuple[Kind, Pinned]:
    try:
        kind = Kind(str(entry["layer"]),
                    *(int(entry[name]).bit_length()
                      for name in ("num_src", "num_dst",
                                   "num_edges")),  # type: ignore[call-arg, arg-type]
                    str(entry["dtype"]),
                    bool(entry["grad"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{where} is no decision: {type(problem).__name__}: {problem}") from None
    return kind, pinned(where, entry)


def pinned(where: str, entry: Any) -> Pinned:
    """The way of an entry in JSON, with a former name of a kernel (`FORMER`) as the name now.
    ValueError, beginning with ``where``, for other entries."""
    try:
        way = Pinned(entry["route"], FORMER.get(entry["kernel"], entry["kernel"]))
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{where} is no decision: {type(problem).__name__}: {problem}") from None
    if way.route not in ROUTES or (way.route == "native") != (way.kernel is None):
        raise ValueError(
            f"{where} has route={way.route!r} with kernel={way.kernel!r}; a route is one of "
                         f"{', '.join(ROUTES)}, and all but native name a kernel")
    return way
