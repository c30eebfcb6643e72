"""The numbers of README's table are those of the records that it names."""
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: the columns of times, by the implementation that a benchmark's record names
COLUMNS = {1: "native", 2: "compiled", 4: "gnnaccel"}
#: beginning of a row -> what it is in a benchmark's record, and its peer's name
LAYERS = {"GATConv 8x8": ("arxiv", "GAT 8x8", None),
          "GATv2Conv 1x64": ("arxiv", "GATv2 1x64", "Turbo-GNN"),
          "TransformerConv 1x64": ("arxiv", "Transformer 1x64", "Turbo-GNN"),
          "GCNConv 64": ("arxiv", "GCN 64", "cuSPARSE"),
          "SAGEConv 64 (max)": ("arxiv", "SAGE max 64", "Turbo-GNN"),
          "RGCNConv 64": ("fb15k-size", "RGCN 64", "FastRGCNConv")}
SCRIPTS = ("script: `quickstart.py`", "script: the same")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")][1:]


def number(cell: str) -> float:
    return float(re.match(r"[\d.]+", cell)[0])


def layer_times(start: str, record: dict) -> dict[str, float]:
    """Milliseconds by implementation, "peer" among them."""
    shape, layer, peer = LAYERS[start]
    found = {(r["layer"], r["impl"]): r["timing"]["ms"] for r in record["records"]
             if (r["shape"], r["mode"]) == (shape, "training") and r["timing"]}
    if peer == "FastRGCNConv":  # PyG's own, and what is compiled
        found[layer, "peer"] = found["FastRGCN 64", "native"]
        if ("FastRGCN 64", "compiled") in found:
            found[layer, "compiled"] = found["FastRGCN 64", "compiled"]
    elif peer:
        found[layer, "peer"] = found[layer, peer]
    return {impl: ms for (of, impl), ms in found.items() if of == layer}


def errors(start: str, record: dict, side: str) -> list[str]:
    """Why the layer, or its peer, has no time."""
    shape, layer, _ = LAYERS[start]
    return [r["error"] for r in record["records"] if r["error"] and r["impl"] == side
            and r["shape"] == shape and r["layer"] in (layer, f"Fast{layer}")]


def script_times(record: dict) -> dict[str, float]:
    sides = {"native": "native", "compiled": "torch.compile", "gnnaccel": "gnnaccel",
             "captured": "capture"}
    return {side: 1000 / record[name]["epochs_per_s"] for side, name in sides.items()}


def test_every_row_is_known():
    assert len(ROWS) == 8
    for row in ROWS:
        assert sum(row[0].startswith(start) for start in (*LAYERS, *SCRIPTS)) == 1, row[0]


@pytest.mark.parametrize("start", [*LAYERS, *SCRIPTS])
def test_a_row_shows_its_record(start):
    row = next(row for row in ROWS if row[0].startswith(start))
    record = json.loads((ROOT / re.search(r"\((docs/results/[\w-]+\.json)\)", row[6])[1])
                        .read_text(encoding="utf-8"))
    found = script_times(record) if start in SCRIPTS else layer_times(start, record)
    for column, side in COLUMNS.items():
        if side in found:
            assert number(row[column]) == pytest.approx(found[side], rel=0.03), (start, side)
        else:
            assert row[column] == "does not compile" and errors(start, record, side)
    assert number(row[5]) == pytest.approx(found["native"] / found["gnnaccel"], rel=0.03)
    if "captured" in found:
        captured = re.match(r".*; ([\d.]+) captured", row[4])[1]
        assert float(captured) == pytest.approx(found["captured"], rel=0.03)
    if "peer" in found:
        ms, name = row[3].split(", ")
        assert number(ms) == pytest.approx(found["peer"], rel=0.03) and name == LAYERS[start][2]
    else:
        assert row[3].startswith("none")


def test_the_rows_are_of_one_machine_and_peers_compute_the_same():
    record = json.loads((ROOT / "docs/results/h200-peers.json").read_text(encoding="utf-8"))
    for name in ("cora", "amazon-computers"):
        script = json.loads((ROOT / f"docs/results/h200-quickstart-{name}.json").read_text())
        assert script["device"] == record["provenance"]["gpu"]
        assert script["versions"]["torch"] == record["provenance"]["torch"]
    checked = [r["values"] for r in record["records"] if r["impl"] in ("cuSPARSE", "Turbo-GNN")]
    assert checked and all(values["output rel_l2"] < 1e-5 for values in checked)
