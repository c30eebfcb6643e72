"""From relational records to tables, targets and pictures, on a small made-up result."""
from __future__ import annotations

import pytest

from gnnaccel.profile.bench import metrics, result, table, targets
from gnnaccel.profile.bench.result import Record, Result
from tests.profile.test_bench_reports import timed


def cell(kind, impl, ms=None, layer="RGCN 64", shape="fb15k-size", mode="forward", device="cuda",
         error=None, **values):
    return Record(kind, shape, layer, mode, impl, device, timed(ms) if ms else None, values, error)


@pytest.fixture
def made_up() -> Result:
    once = cell("relation", "native", 30_000, shape="mag-size", mode="training")
    once.timing["batches"] = 1
    return Result({"gpu": "Made-up GPU"}, {"suite": "relational"}, [
        Record("shape", "fb15k-size", device="cuda",
               values={"num_nodes": 14541, "num_relations": 474, "pairs_src": 0.26}),
        cell("relation", "native", 124.0, peak_mib=900.0),
        cell("relation", "gnnaccel", 2.0, routes={"cuda": 3}, peak_mib=90.0),
        Record("check", "fb15k-size", "RGCN 64", "forward", device="cuda",
               values={"output rel_l2": 2e-4}),
        cell("relation", "native", error="out of memory", layer="RGAT 64", shape="wikikg2-size",
             mode="training"),
        cell("relation", "gnnaccel", 20.0, layer="RGAT 64", shape="wikikg2-size", mode="training"),
        cell("memory", "native", error="out of memory", layer="RGAT 64", shape="wikikg2-size",
             mode="training"),
        cell("memory", "gnnaccel", layer="RGAT 64", shape="wikikg2-size", mode="training",
             peak_mib=11_000.0), once,
        cell("relation", "native", 9.0, layer="RGAT 64", shape="aifb-size", device="cpu"),
        cell("relation", "gnnaccel", 10.0, layer="RGAT 64", shape="aifb-size", device="cpu"),
        cell("compaction", "none", 8.0), cell("compaction", "compaction", 4.0),
        cell("compaction", "reordering", 5.0), cell("compaction", "all", 2.0, routes={"torch": 4}),
        cell("segment-gemm", "loop", 14.0, layer="tf32", shape="fb15k 64", floor_ms=0.08),
        cell("segment-gemm", "gnnaccel", 0.2, layer="tf32", shape="fb15k 64", floor_ms=0.08,
             rel_l2=3e-4),
        Record("note", "am-size", "graph", error="out of memory"),
    ])


def test_targets_are_judged(made_up):
    met = {verdict.target.text(): verdict.met
           for verdict in targets.judge(made_up, targets.RELATIONAL)}
    assert met["relation fb15k-size RGCN 64 forward: vs_native >= 50"] is True
    assert met["relation fb15k-size RGCN 64 training: vs_native >= 40"] is None
    assert met["relation fb15k-size RGCN 64 forward: ms <= 1.88 (5x DGL on an H200)"] is False
    assert met["memory wikikg2-size RGAT 64 training: peak_mib <= 12288"] is True
    assert met["relation: rel_l2 <= 0.0001"] is False
    assert met["relation-cpu aifb-size RGAT 64: vs_native >= 5"] is False
    assert met["relation-cpu: vs_native >= 0.95"] is False


def test_targets_name_what_the_suite_measures():
    pyg = pytest.importorskip("gnnaccel.adapters.pyg.bench.relational")
    from gnnaccel.profile.bench import relation_graph

    for target in targets.RELATIONAL:
        assert target.shape in ("*", *relation_graph.SHAPES, *relation_graph.FILES), target
        assert target.layer in ("*", *pyg.LAYERS), target
        if target.shape != "*" and target.layer != "*":
            shape = relation_graph.SHAPES.get(target.shape)
            assert target.layer in (shape.layers
                                    if shape else relation_graph.FILES[target.shape]), target


def test_only_suites_with_measurements_show_their_targets(made_up):
    shown = {section.title: section.rows for section in table.sections(made_up)}["Targets"]
    assert not any("GAT 8x8" in row[0] for row in shown)
    made_up.records.append(cell("layer", "gnnaccel", 1.0, layer="GAT 8x8", shape="cora"))
    made_up.records.append(cell("layer", "native", 5.0, layer="GAT 8x8", shape="cora"))
    shown = {section.title: section.rows for section in table.sections(made_up)}["Targets"]
    assert ("layer cora GAT 8x8 forward: vs_native >= 2.5", "5", "met") in shown


def test_sections_hold_the_figures(made_up):
    shown = {section.title: section for section in table.sections(made_up)}
    layers = {row[:3]: row
              for row in shown["Relational layers: PyG natively and through gnnaccel"].rows}
    assert layers["fb15k-size", "RGCN 64", "forward"][3:8] == ("124", "2", "62x", "900", "90")
    assert layers["wikikg2-size", "RGAT 64", "training"][3:6] == ("out of memory", "20", "-")
    assert layers["wikikg2-size", "RGAT 64", "training"][9:11] == ("out of memory", "11000")
    assert layers["mag-size", "RGCN 64", "training"][3] == "30000 (1 call)"
    assert ("aifb-size (cpu)", "RGAT 64", "forward") in layers
    assert shown["gnnaccel with and without compaction and reordering"].rows[0][3:10] == (
        "8", "4", "5", "2", "2x", "1.6x", "4x")
    assert shown["gnnaccel with and without compaction and reordering"].rows[0][-1] == "torch"
    row = dict(zip(shown["One matrix per segment"].columns,
                   shown["One matrix per segment"].rows[0]))
    assert (row["x loop"], row["floor ms"], row["x floor"],
            row["dense ms"]) == ("70x", "0.08", "2.5x", "-")
    assert shown["Graphs with typed edges"].rows[0][:3] == ("fb15k-size", "cuda", "14541")
    assert shown["What was left out"].rows == [("am-size", "graph", "out of memory")]
    for section in shown.values():
        assert all(len(row) == len(section.columns) for row in section.rows), section.title


@pytest.mark.parametrize("style", ["rich", "markdown"])
def test_tables_are_shown(made_up, style, capsys):
    table.show(made_up, style)
    assert "62x" in capsys.readouterr().out


def test_files_and_merging_keep_all_kinds(made_up, tmp_path):
    made_up.save(tmp_path / "a.json")
    read = result.load(tmp_path / "a.json")
    assert read == made_up
    assert {record.kind for record in read.records} <= set(result.KINDS)
    newer = Result({}, {}, [cell("compaction", "all", 1.0)])
    assert result.merge([read, newer]).one(kind="compaction", impl="all").ms == 1.0
    assert len(result.merge([read, newer]).records) == len(read.records)


@pytest.mark.long
def test_plot_draws_relational_layers(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    from gnnaccel.profile.bench import plot

    cells = plot._drawn(metrics.cells(made_up))
    assert {cell.kind
            for cell in cells} == {"relation"} and {cell.layer
                                                    for cell in cells} == {"RGCN 64", "RGAT 64"}
    made_up.records = [record for record in made_up.records if record.device == "cpu"]
    assert {cell.kind for cell in plot._drawn(metrics.cells(made_up))} == {"relation-cpu"}
    plot.draw(made_up, str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
