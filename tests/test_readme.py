"""The numbers of README's table are those of the records that it names."""
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: the columns of times, by the implementation that a benchmark's record names
COLUMNS = {1: "native", 2: "compiled", 4: "gnnaccel"}
#: beginning of a row -> what it is in a benchmark's record
LAYERS = {"GATConv 8x8, cora": ("cora", "GAT 8x8"), "GATConv 8x8, arxiv": ("arxiv", "GAT 8x8"),
          "GATv2Conv 4x16, proteins": ("proteins", "GATv2 4x16"),
          "GCNConv 64, arxiv": ("arxiv", "GCN 64"),
          "RGCNConv 64, FB15k-237": ("fb15k_237", "RGCN 64"),
          "HGTConv 4x16, mag size": ("mag-inverse-size", "HGT 4x16")}
SCRIPTS = {"script: GAT, epoch": lambda record: {
               side: record["processes"]["1"][side]["ms"] for side in ("native", "gnnaccel")},
           "script: RGCN on AIFB": lambda record: {
               side: 1000 * record["results"][0][side]["epoch_s"]
               for side in ("native", "gnnaccel")}}
ROWS = [[cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")][1:]


def measured(start: str, record: dict) -> dict[str, float]:
    """Milliseconds by implementation."""
    if start in SCRIPTS:
        return SCRIPTS[start](record)
    shape, layer = LAYERS[start]
    return {entry["impl"]: entry["timing"]["ms"] for entry in record["records"]
            if (entry["shape"], entry["layer"], entry["mode"]) == (shape, layer, "training")
            and entry["kind"] != "check" and entry["timing"]}


def test_every_row_is_known():
    assert len(ROWS) == 8
    for row in ROWS:
        assert sum(row[0].startswith(start) for start in (*LAYERS, *SCRIPTS)) == 1, row[0]


@pytest.mark.parametrize("start", [*LAYERS, *SCRIPTS])
def test_a_row_shows_its_record(start):
    row = next(row for row in ROWS if row[0].startswith(start))
    record = json.loads((ROOT / re.search(r"\((docs/results/[\w-]+\.json)\)", row[6])[1])
                        .read_text(encoding="utf-8"))
    found = measured(start, record)
    for column, side in COLUMNS.items():
        if side in found:
            assert float(row[column]) == pytest.approx(found[side], rel=0.03), (start, side)
        else:
            assert row[column] == "not measured", (start, side)
    gain = float(re.match(r"[\d.]+(?=x)", row[5])[0])
    assert gain == pytest.approx(found["native"] / found["gnnaccel"], rel=0.03)
