"""The command line from end to end on a tiny graph on the CPU, and the loop's promises."""
from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main
from gnnaccel.profile.bench import result, suite_attention
from gnnaccel.profile.bench.guard import DeviceLost
from gnnaccel.profile.bench.result import Record

QUICK = ["bench", "--quick", "--device", "cpu", "--layers", "gat8x8"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "bench.json"


@pytest.mark.long
def test_quick_run_measures_compares_and_reports(out, capsys):
    assert main([*QUICK, "--out", str(out), "--table", "markdown"]) == 0
    made = result.load(out)
    assert made.provenance["command"].startswith("python -m gnnaccel bench --quick")
    for mode in ("forward", "training"):
        native, ours = (made.one(kind="layer", shape="tiny", layer="GAT 8x8", mode=mode, impl=impl)
                        for impl in ("native", "gnnaccel"))
        assert (native.error, ours.error) == (None, None) and native.ms > 0 and ours.ms > 0
        check = made.one(kind="check", shape="tiny", mode=mode)
        assert all(value < 1e-4 for name, value in check.values.items() if name.endswith("rel_l2"))
    assert check.values.keys() == {"output max_abs", "output rel_l2", "x.grad max_abs",
                                   "x.grad rel_l2"}
    assert {record.impl: record.error
            for record in made.find(kind="fresh")} == {"native": None, "gnnaccel": None}
    said = capsys.readouterr().out
    assert "| tiny (cpu) | GAT 8x8 | forward |" in said and "fresh: vs_native >= 1" in said


@pytest.mark.long
def test_kernel_suite_runs(out):
    assert main([*QUICK, "--suite", "attention-kernel", "--out", str(out)]) == 0
    assert len(result.load(out).find(kind="kernel")) == 12


@pytest.mark.long
def test_parts_can_be_chosen(out):
    assert main([*QUICK, "--parts", "layers", "--no-native", "--out", str(out)]) == 0
    records = result.load(out).records
    assert {(record.kind, record.impl)
            for record in records} == {("shape", ""), ("layer", "gnnaccel")}


@pytest.mark.parametrize("options",
                         [["--shapes", "nosuch"], ["--layers", "nosuch"], ["--parts", "nosuch"]])
def test_unknown_names_are_an_error_not_a_trace(options, capsys):
    assert main([*QUICK[:4], *options]) == 2
    assert "nosuch" in capsys.readouterr().err


def _replace_suite(monkeypatch, run):
    """The attention suite's plan with another body."""
    monkeypatch.setattr(suite_attention, "attention", run)


def test_spent_budget_stops_and_keeps_what_there_is(out, monkeypatch):
    records = [Record("note", layer=str(number)) for number in range(5)]
    _replace_suite(monkeypatch, lambda plan, budget: iter(records))
    assert main([*QUICK, "--budget", "0", "--out", str(out)]) == 0
    kept = result.load(out).records
    assert [record.layer for record in kept] == ["0", "budget"]


def test_lost_device_is_recorded_and_the_status(out, monkeypatch):
    def suite(plan, budget):
        yield Record("note", layer="before")
        raise DeviceLost("RuntimeError: illegal access")

    _replace_suite(monkeypatch, suite)
    assert main([*QUICK, "--out", str(out)]) == 1
    assert [record.error
            for record in result.load(out).records] == [None,
                                                        "device lost: RuntimeError: illegal access"]


def test_compiled_worker_that_exceeds_its_time_is_recorded_and_ended():
    from gnnaccel.profile.bench import compiled, shapes, timing

    settings = {"seed": 0, "order": "random", "effort": dataclasses.asdict(timing.QUICK)}
    records = list(compiled.compiled_records([(shapes.SHAPES["tiny"], "GAT 8x8")], "cpu", settings,
                                             limit_s=0.05))
    assert [record.mode for record in records] == ["forward", "training"]
    assert all("time limit" in record.error for record in records)


def test_waves_keep_large_graphs_apart():
    from gnnaccel.profile.bench import compiled, shapes

    jobs = [(shapes.SHAPES[name], "GAT 8x8") for name in ("cora", "proteins", "arxiv", "reddit")]
    assert [[shape.name for shape, _ in wave] for wave in compiled.waves(jobs)] == \
        [["cora", "arxiv"], ["proteins"], ["reddit"]]
