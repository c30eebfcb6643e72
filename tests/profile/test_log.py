"""``python -m gnnaccel log``: reading, summaries, differences; decisions exported, pinned and
kept."""
from __future__ import annotations

import json

import pytest

import gnnaccel
from gnnaccel.__main__ import main
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.policy import pins
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.profile import warmup
from gnnaccel.profile.log import decisions, summary

GRAPH = dict(num_src=100, num_dst=100, num_edges=900, self_loops=100)
NATIVE = dict(route="native", kernel=None,
              rejected=[dict(candidate="GATConv", code="GA201", text="mean", hint="use add")])


def record(**fields):
    return records.new(**{**dict(host="pyg", layer="GATConv", graph=dict(GRAPH), route="torch",
                                 kernel="torch backend", dtype="float32",
                                 out_dtype="float32", grad=True, cache="hit", overhead_us=10.0,
                                 cost_us=200.0), **fields})


def back(forward, **fields):
    return record(direction="backward", forward_call=forward["call"], cache="none",
                  overhead_us=None, cost_us=None, graph=None, **fields)


def write(path, found, tail=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in found) + tail)
    return str(path)


@pytest.fixture
def file(tmp_path):
    first, second = record(time=100.0, overhead_us=30.0, cache="miss"), record(time=101.0)
    found = [first, second, back(first, time=102.0), record(time=103.5, name="convs.0", **NATIVE),
             record(time=103.0, host="dgl", layer="SAGEConv", route="cuda", kernel="aggregate",
                    graph=None, dtype=None)]
    return write(tmp_path / "run.jsonl", found)


def said(capsys, *arguments, status=0):
    assert main(["log", *map(str, arguments)]) == status
    return capsys.readouterr()


# --- reading --------------------------------------------------------------------------------------

def test_what_the_sink_writes_is_what_is_read(tmp_path, monkeypatch):
    from gnnaccel.profile.sinks import JsonlSink

    monkeypatch.setattr(driver, "_noted", [])
    sink = JsonlSink(tmp_path / "run.jsonl")
    made = [record(), record(**NATIVE)]
    sink(made[0])
    key = "additive", "forward", (("HEADS", "8"), ("ROW_T", "float"))
    driver.note(key)
    sink(made[1])
    sink.close()
    log = summary.read(tmp_path / "run.jsonl")
    told = [r.pop("kernels") for r in log.records]
    assert not log.problems and log.records == [{k: v for k, v in r.items() if k != "kernels"}
                                                for r in made]
    assert told[1] == [{"family": "additive", "entry": "forward",
                        "defines": {"HEADS": "8", "ROW_T": "float"}}]
    assert made[1]["kernels"] == [] and warmup.kernels_of(log.records[:0]) == []


def test_lines_from_before_a_field_was_added_are_records(tmp_path):
    old = {k: v for k, v in record().items() if k not in records.ADDED}
    assert summary.read(write(tmp_path / "run.jsonl", [old])).records == [{**records.ADDED, **old}]


def test_half_a_line_is_left_out_and_said(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", [record()], tail='{"schema": 1, "ca')
    shown = said(capsys, path)
    assert "1 records" in shown.out and "line 2: " in shown.err and "left out" in shown.err


@pytest.mark.parametrize("text, message",
                         [('{"a": 1}\n',
                           "holds no records; line 1: record does not fit the schema: "),
                          ("[1]\n", "no records"),
                          ("words\n", "line 1")])
def test_a_file_of_something_else(tmp_path, capsys, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    assert message in said(capsys, tmp_path / "x.jsonl", status=2).err
    assert "No such file" in said(capsys, tmp_path / "none.jsonl", status=2).err


def test_a_later_schema_is_refused(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", [{**record(), "schema": 2}])
    assert "schema=2 should be 1" in said(capsys, path, status=2).err


def test_an_empty_file_is_an_empty_run(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("")
    assert said(capsys,
                tmp_path / "x.jsonl").out.startswith("0 records over 0.0 s; forward calls: none")


# --- summaries ------------------------------------------------------------------------------------

def test_a_summary(file, capsys):
    found = json.loads(said(capsys, file, "--json").out)
    assert (found["records"], found["forward"], found["seconds"]) == (5, 4, 3.5)
    assert found["routes"] == {"torch": 2, "native": 1, "cuda": 1}
    first = found["layers"][0]
    assert first == dict(host="pyg", layer="GATConv", took="torch: torch backend", forward=2,
                         backward=1, graphs=1, cache_hits=1, cache_misses=1, overhead_us=20.0,
                         cost_us=200.0)
    assert found["reasons"] == [dict(code="GA201", layer="convs.0 (GATConv)", calls=1, text="mean",
                                     hint="use add")]
    text = said(capsys, file).out
    assert "5 records over 3.5 s; forward calls: torch 2, native 1, cuda 1" in text
    assert "1 x convs.0 (GATConv): GA201 mean -> use add" in text and "torch: torch backend" in text


@pytest.mark.parametrize("options, count",
                         [(["--layer", "GATConv"], 4), (["--layer", "convs.0"], 1),
                          (["--layer", "re:convs.*"], 1),
                          (["--layer", "SAGEConv", "--layer", "convs.0"], 2),
                          (["--route", "torch"], 3), (["--code", "GA201"], 1),
                          (["--layer", "GAT"], 0), (["--route", "cuda", "--layer", "GATConv"], 0)])
def test_filters(file, capsys, options, count):
    lines = said(capsys, file, "--records", *options).out.splitlines()
    assert len(lines) == count
    for line in lines:
        records.validate(json.loads(line))


def test_differences(tmp_path, capsys):
    one = write(tmp_path / "a.jsonl", [record(), record(), record(layer="AGNNConv"),
                                       record(layer="HANConv", grad=False, **NATIVE)])
    two = write(tmp_path / "b.jsonl",
                [record(), record(layer="HANConv", grad=False, route="cuda", kernel="k"),
                 record(layer="RGCNConv")])
    assert said(capsys, one, "--diff", one).out == "no call was decided otherwise\n"
    shown = said(capsys, one, "--diff", two, status=1).out
    assert shown.splitlines() == [
        "3 kinds of calls were decided otherwise:",
        "pyg AGNNConv, 100->100, 900 edges, float32, training", "  - torch: torch backend (x1)",
        "  + not called",
        "pyg HANConv, 100->100, 900 edges, float32, inference", "  - native GA201 (x1)",
        "  + cuda: k (x1)",
        "pyg RGCNConv, 100->100, 900 edges, float32, training", "  - not called",
        "  + torch: torch backend (x1)"]
    assert len(json.loads(said(capsys, one, "--diff", two, "--json", status=1).out)) == 3
    assert said(capsys, one, "--diff", two, "--layer",
                "GATConv").out == "no call was decided otherwise\n"


def test_long_cells_are_cut():
    lines = summary._columns(("a", "b"), [("x" * 100, 1)])
    assert max(map(len, lines)) < 60 and "…" in lines[1]


# --- decisions ------------------------------------------------------------------------------------

def test_exported_decisions_are_those_taken_most(tmp_path, capsys):
    slow = dict(route="native", kernel=None,
                rejected=[dict(candidate="torch backend", code="GA301", text="t", hint="h")])
    path = write(tmp_path / "run.jsonl",
                 [record(**slow), record(), record(), record(grad=False, **slow),
                  record(host="dgl", **slow), record(host="dgl"), record(dtype=None),
                  record(graph=None), back(record())])
    out = tmp_path / "d.json"
    assert said(capsys, path, "--export", out).out == f"wrote 3 decisions to {out}\n"
    held = json.loads(out.read_text())
    assert held["schema"] == 1 and held["decisions"][0] == dict(
        layer="GATConv", num_src=100, num_dst=100, num_edges=1000, dtype="float32", grad=True,
        route="torch",
        kernel="torch backend")
    assert [(d["layer"], d["grad"], d["route"]) for d in held["decisions"]] == [
        ("GATConv", True, "torch"), ("GATConv", False, "native"), ("dgl.GATConv", True, "torch")]
    assert len(pins.read(out).pinned) == 3
    assert "nothing to export" in said(capsys, path, "--export", out, "--layer", "none",
                                       status=2).err


@pytest.mark.parametrize("text, message", [
    ("{", "is no JSON"), ("{}", "no decisions of schema 1"),
    ('{"schema": 2, "decisions": []}', "no decisions of schema 1"),
    ('{"schema": 1, "decisions": [{"layer": "GATConv"}]}', "entry 0 is no decision: KeyError"),
    (json.dumps({"schema": 1,
                 "decisions": [dict(layer="G", num_src=1, num_dst=1, num_edges=1, dtype="float32",
                                    grad=True, route="fast",
                                    kernel="k")]}), "entry 0 has route='fast'"),
    (json.dumps({"schema": 1,
                 "decisions": [dict(layer="G", num_src=1, num_dst=1, num_edges=1, dtype="float32",
                                    grad=True, route="cuda",
                                    kernel=None)]}), "kernel=None")])
def test_files_that_hold_no_decisions(tmp_path, text, message):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Config(decisions=tmp_path / "d.json")
    with pytest.raises(FileNotFoundError):
        Config(decisions=tmp_path / "none.json")
    with pytest.raises(ValueError, match="decisions=3 is not known"):
        Config(decisions=3)


@pytest.fixture
def gat():
    pytest.importorskip("torch_geometric")
    import torch
    from torch_geometric.nn import GATConv

    torch.manual_seed(0)
    layer, x, edges = GATConv(8, 4, heads=2), torch.randn(50, 8), torch.randint(0, 50, (2, 300))
    yield lambda: layer(x, edges)
    gnnaccel.disable()
    gnnaccel.clear_records()


def pin(path, route, kernel, layer="GATConv", num_edges=350):
    path.write_text(json.dumps({"schema": 1,
                                "decisions": [dict(layer=layer, num_src=50, num_dst=50,
                                                   num_edges=num_edges, dtype="float32",
                                                   grad=True, route=route, kernel=kernel)]}))
    return path


def test_a_run_can_be_replayed(tmp_path, gat, capsys):
    gnnaccel.enable(when="supported", log=tmp_path / "run.jsonl")
    gat()
    gnnaccel.disable()
    assert main(["log", str(tmp_path / "run.jsonl"), "--export", str(tmp_path / "d.json")]) == 0
    gnnaccel.clear_records()  # of tests before
    gnnaccel.enable(when="profitable", decisions=tmp_path / "d.json", records=10)
    gat()
    assert [r["kernel"] for r in gnnaccel.records()] == ["torch backend"]


def test_pinned_native_is_native_and_no_fallback(tmp_path, gat):
    gnnaccel.enable(when="supported", on_fallback="raise",
                    decisions=pin(tmp_path / "d.json", "native", None), records=10)
    gat()
    (found,) = gnnaccel.records()
    assert found["route"] == "native" and [item["code"] for item in found["rejected"]] == ["GA105"]
    assert gnnaccel.status()["config"]["decisions"] == pins.read(tmp_path / "d.json")


@pytest.mark.parametrize("given", [dict(route="cuda", kernel="fused attention, long rows split"),
                                   dict(route="native", kernel=None, layer="RGCNConv"),
                                   dict(route="native", kernel=None, num_edges=5000),
                                   dict(route="torch", kernel="of old")])
def test_pins_that_do_not_hold_here_leave_the_decision_to_the_planner(tmp_path, gat, given):
    import torch

    if torch.cuda.is_available() and given["route"] == "cuda":
        given["kernel"] = "no such kernel"
    gnnaccel.enable(when="supported", decisions=pin(tmp_path / "d.json", **given), records=10)
    gat()
    assert gnnaccel.records()[-1]["route"] == "torch" and gnnaccel.records()[-1][
        "kernel"] == "torch backend"


def test_pins_keep_to_former_names_of_kernels(tmp_path):
    from gnnaccel.dispatch.plan import planner

    specs = (*planner.ATTENTION, *planner.RELATIONAL, *planner.PLAIN)
    assert set(pins.FORMER.values()) == {spec.name for spec in specs if spec.route == "cuda"}
    for former, now in pins.FORMER.items():
        path = pin(tmp_path / "d.json", "cuda", former)
        assert set(pins.read(path).pinned.values()) == {pins.Pinned("cuda", now)}


def test_pins_come_and_go(tmp_path, gat, monkeypatch):
    path = pin(tmp_path / "d.json", "native", None)
    monkeypatch.setenv("GNNACCEL_DECISIONS", str(path))
    gnnaccel.enable(when="supported", records=10)
    gat()
    gnnaccel.enable(decisions=False)
    gat()
    with gnnaccel.enabled(decisions=path):
        gat()
    gat()
    assert [r["route"] for r in gnnaccel.records()] == ["native", "torch", "native", "torch"]


def test_relational_layers_are_pinned_alike(tmp_path):
    pytest.importorskip("torch_geometric")
    import torch
    from torch_geometric.nn import RGCNConv

    layer, x, edges = RGCNConv(8, 4, 3), torch.randn(50, 8), torch.randint(0, 50, (2, 300))
    kinds = torch.randint(0, 3, (300,))
    try:
        gnnaccel.enable(when="supported", records=10,
                        decisions=pin(tmp_path / "d.json", "native", None, "RGCNConv", 300))
        layer(x, edges, kinds)
        gnnaccel.enable(decisions=False)
        layer(x, edges, kinds)
        first, second = gnnaccel.records()
        assert (first["route"], second["route"]) == ("native", "torch")
        assert [item["code"] for item in first["rejected"]] == ["GA105"]
        again = decisions.of([second])[0]
        assert (again["layer"], again["kernel"]) == ("RGCNConv", second["kernel"])
    finally:
        gnnaccel.disable()
        gnnaccel.clear_records()
