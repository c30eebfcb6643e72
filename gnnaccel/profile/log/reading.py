"""Records out of JSONL files, and which of them are asked for."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.observe.records import Record


@dataclass
class Log:
    """``records`` in the order of the file; ``problems``: lines that are no records, each with its
    number."""

    path: str
    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(path: str | os.PathLike) -> Log:
    """The records of a file that ``log="file.jsonl"`` wrote.

    A line that is no record is noted and left out: a killed process may leave half of its last one.
    OSError when there is no such file; ValueError, naming the first problem, when not one line is a
    record though there are some.
    """
    log = Log(str(path))
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line)
                    record = {**records.ADDED, **record} if isinstance(record, dict) else {}
                    records.validate(record)
                except ValueError as problem:
                    log.problems.append(f"line {number}: {problem}")
                else:
                    log.records.append(record)
    if log.problems and not log.records:
        raise ValueError(f"{Path(path).name} holds no records; {log.problems[0]}")
    return log


def chosen(found: Iterable[Record], layers: list[str] | None = None, route: str | None = None,
           code: str | None = None) -> Iterator[Record]:
    """Records of these layers (class names, qualified names or ``re:`` patterns), on this route,
    with this reason code."""
    for record in found:
        if layers and not any(_is(record, layer) for layer in layers):
            continue
        if route and record["route"] != route:
            continue
        if code and not any(item["code"] == code for item in record["rejected"]):
            continue
        yield record


def _is(record: Record, layer: str) -> bool:
    names = [name for name in (record["layer"], record["name"]) if name is not None]
    if layer.startswith("re:"):
        return any(re.fullmatch(layer[3:], name) for name in names)
    return layer in names


def sizes(record: Record) -> str:
    """The graph in short."""
    graph = record["graph"]
    if graph is None:
        return "-"
    return f"{graph['num_src']}->{graph['num_dst']}, {graph['num_edges']} edges"


def took(record: Record) -> str:
    """Route and kernel, or the reason of a native call."""
    if record["route"] == "native":
        return f"native {record['rejected'][0]['code']}" if record["rejected"] else "native"
    return f"{record['route']}: {record['kernel']}"
