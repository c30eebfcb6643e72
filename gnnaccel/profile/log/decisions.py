"""Exporting what a run decided, so that later runs can be held to it: `dispatch.policy.pins`."""
from __future__ import annotations

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.policy import pins


def of(found: Iterable[Record]) -> list[dict[str, Any]]:
    """One decision per kind of calls that the planner decided: of several ways the one taken most,
    of equals the last.

    Calls that it never saw (rules, forms that are not supported) have no dtype, and are left out.
    """
    ways: dict[pins.Kind, Counter] = defaultdict(Counter)
    example: dict[pins.Kind, dict[str, Any]] = {}
    for record in found:
        if record["direction"] != "forward" or record["graph"] is None or record["dtype"] is None:
            continue
        graph = record["graph"]
        edges = graph["num_edges"] + graph.get("self_loops", 0)
        layer = f"dgl.{record['layer']}" if record["host"] == "dgl" else record["layer"]
        kind = pins.Kind(layer, graph["num_src"].bit_length(), graph["num_dst"].bit_length(),
                         edges.bit_length(), record["dtype"], record["grad"])
        way = ways[kind]
        # the last comes last
        way[record["route"], record["kernel"]] = way.pop((record["route"], record["kernel"]), 0) + 1
        example[kind] = dict(num_src=graph["num_src"], num_dst=graph["num_dst"], num_edges=edges)
    return [_decision(kind, way, example[kind]) for kind, way in ways.items()]


def _decision(kind: pins.Kind, way: Counter, example: dict[str, Any]) -> dict[str, Any]:
    most = max(way.values())
    route, kernel = [taken for taken, n in way.items() if n == most][-1]
    return dict(layer=kind.layer, **example, dtype=kind.dtype, grad=kind.grad, route=route,
                kernel=kernel)


def export(found: Iterable[Record], path: str | os.PathLike) -> int:
    """Write the decisions of these records, whole or not at all; how many. ValueError when there is
    none."""
    decided = of(found)
    if not decided:
        raise ValueError("no record tells of a decision by the planner, so there is nothing to "
                         "export")
    path = Path(path)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False,
                                     encoding="utf-8") as file:
        json.dump({"schema": pins.SCHEMA, "decisions": decided}, file, indent=1)
        file.write("\n")
    os.replace(file.name, path)
    return len(decided)
