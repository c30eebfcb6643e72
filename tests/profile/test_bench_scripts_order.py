"""Benchmarks of whole scripts, without running any: which runs there are, and what they come to."""
from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from gnnaccel.profile.bench import (result, script_figures, script_forks,  # noqa: E402
                                    script_table, suite_scripts, table)
from gnnaccel.profile.bench.guard import Budget  # noqa: E402
from gnnaccel.profile.bench.result import Result  # noqa: E402


# --- figures --------------------------------------------------------------------------------------
def seen(ms=2.0, count=30, **fields):
    return {**dict(what="training step", ms=[9.0] * 10 + [ms] * (count - 10), trains=True,
                   loop_ms=[2 * ms] * (count - 1), losses={"1": 1.0, "10": 0.5, "20": 0.1},
                   count=count, ended="steps", wall_s=10.0, first_step_s=3.0, gpu=True,
                   memory_bytes=1 << 30, stats={}, compiled=[0.0, 0], layers_ms=None,
                   captured={"replays": {}, "refused": {}}), **fields}


def test_steps_that_warm_up_do_not_count():
    assert script_figures.record("x", "native", seen(), None).ms == 2.0


def test_evaluation_after_some_steps_counts_in_the_loop():
    found = seen() | {"loop_ms": [9.0] * 10 + [1.0, 1.0, 1.0, 9.0] * 5}
    assert script_figures.record("x", "native", found, None).values["loop_ms"] == 3.0


@pytest.mark.parametrize("native, ours, found", [
    ([2.0, 1.0], [2.0, 1.1], 0.1), ([1.0] * 6, [1.0] * 5 + [2.0], 0.0), ([], [1.0], None),
    ([math.nan], [math.nan], 0.0), ([1.0, 1.0], [1.0, math.nan], math.inf),
    ([math.inf], [-math.inf], math.inf), ([0.0], [0.0], 0.0)])
def test_differences_of_losses(native, ours, found):
    assert script_figures.difference(native, ours) == (
        None if found is None else pytest.approx(found))


def test_a_loss_that_is_no_number_can_be_saved(tmp_path):
    record = script_figures.record("x", "gnnaccel", seen(losses={"1": math.nan}), seen())
    assert record.values["losses"] == ["nan"] and record.values["loss_difference"] == "inf"
    path = tmp_path / "out.json"
    Result(records=[record, script_figures.record("x", "native", seen(), None)]).save(path)
    assert "NaN" not in path.read_text() and "| inf |" in table.markdown(result.load(path))


def test_a_bound_needs_native_steps_and_layers_that_were_timed():
    ways = (["native"] * 10 + ["gnnaccel"] * 10) * 2
    turns = seen(ways=ways) | {"ms": [8.0] * 20 + [4.0] * 10 + [1.0] * 10}
    layers = seen(layers_ms=1.5)
    cases = [(layers, None, turns, 1.0), (layers, seen(), turns, 0.5), (layers, seen(), None, 0.5),
             (layers, None, None, "needs native steps"),
             (layers, None, {**turns, "ms": turns["ms"][:20], "ways": ways[:20]},
              "needs native steps"),
             (seen(), None, turns, "needs gradients cleared"),
             (seen(what="call"), None, turns, "needs an optimizer")]
    for found, native, taken, want in cases:
        record = script_figures.record("x", "bound", {**found, "ms": [2.0] * 30}, native, taken)
        if isinstance(want, str):
            assert want in record.error
        else:
            assert record.ms == pytest.approx(want)


def test_nothing_to_measure():
    for ended, said in (("script", "nothing to measure"), ("limit", "within the limit")):
        found = seen(ended=ended) | {"ms": [], "loop_ms": []}
        assert said in script_figures.record("x", "native", found, None).error


# --- the order of runs ----------------------------------------------------------------------------
@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The suite with answers by part: what a run wrote, or (exit status, what was said)."""
    answers, calls = {}, []

    def pretended(self, part, out, folder, limit):
        calls.append((part, *self._until(part)))
        answer = answers.get(part, seen())
        if isinstance(answer, dict):
            out.write_text(json.dumps(answer))
            return 0, ""
        return answer

    monkeypatch.setattr(suite_scripts._Runs, "_run", pretended)
    script = tmp_path / "a.py"
    script.write_text("")
    plan = suite_scripts.ScriptsPlan(
        (suite_scripts.Script(str(script), (), "a.py"), suite_scripts.Script(str(script), (), "b.py")),
        None, True, False, 200, 10.0, 60.0, False, None, (), 0)
    return types.SimpleNamespace(plan=plan, answers=answers, calls=calls)


def parts_of(runs, budget=100.0, **changed):
    plan = dataclasses.replace(runs.plan, **changed)
    return list(suite_scripts.scripts(plan, Budget(budget)))


def test_on_a_gpu_there_are_a_cold_and_a_captured_run_with_the_native_ones_steps(runs):
    runs.answers["capture"] = seen(1.0, captured={"replays": {"Net": 5}, "refused": {}})
    runs.answers["cold"] = seen(wall_s=40.0)
    records = parts_of(runs)
    assert [record.impl for record in records] == ["native", "cold", "gnnaccel", "capture"] * 2
    assert runs.calls[:4] == [("native", 200, 10.0), ("cold", 30, math.inf),
                              ("gnnaccel", 30, math.inf), ("capture", 30, math.inf)]
    assert records[3].values["replays"] == {"Net": 5}
    section = script_table.section(Result(records=records))
    row = dict(zip(section.columns, section.rows[-1]))
    assert row["capture gain"] == "2x" and row["cold wall"] == "0.25x" and row["memory"] == "1x"


def test_of_several_runs_the_fastest_counts(runs, monkeypatch):
    times = iter([5.0, 1.0, 3.0, 2.0, 4.0, 1.5])
    monkeypatch.setattr(suite_scripts._Runs, "_run", lambda self, part, out, folder, limit: (
        out.write_text(json.dumps(seen(next(times)))), (0, ""))[1])
    records = parts_of(runs, scripts=runs.plan.scripts[:1], parts=("native", "gnnaccel"), repeat=3)
    assert [(one.impl, one.ms, one.values["runs_ms"]) for one in records] == [
        ("native", 3.0, [5.0, 3.0, 4.0]), ("gnnaccel", 1.0, [1.0, 2.0, 1.5])]


def test_runs_for_which_the_budget_does_not_suffice_are_left_out(runs):
    left = iter([50.0] * 5 + [1.0] * 9)  # two runs, and the limit of a third
    budget = type("Budget", (), {"left": property(lambda self: next(left))})()
    plan = dataclasses.replace(runs.plan, scripts=runs.plan.scripts[:1], repeat=2,
                               parts=("native", "gnnaccel"))
    records = list(suite_scripts.scripts(plan, budget))
    assert [(one.kind, len(one.values["runs_ms"])) for one in records] == [
        ("script", 2), ("script", 1)]


def test_a_cold_run_has_a_kernel_cache_of_its_own(monkeypatch, runs):
    monkeypatch.undo()
    places = []

    def note(command, environment, *_):
        places.append(environment.get("CUPY_CACHE_DIR"))
        return 1

    monkeypatch.setattr(suite_scripts, "limited", note)
    monkeypatch.setenv("CUPY_CACHE_DIR", "the user's")
    parts_of(runs, parts=("cold", "gnnaccel"), native=False)
    first, second, other, _ = places
    assert first == second != "the user's" and other not in (first, "the user's")
    places.clear()
    parts_of(runs, parts=("gnnaccel",))
    assert set(places) == {"the user's"}


def test_a_script_that_uses_no_gpu_has_two_runs(runs):
    runs.answers["native"] = seen(gpu=False, ended="script")
    assert [record.impl for record in parts_of(runs)] == ["native", "gnnaccel"] * 2
    assert runs.calls[1] == ("gnnaccel", 200, math.inf)


@pytest.mark.parametrize("answer, impls, error", [
    ((1, "RuntimeError: boom"), ["native"], "RuntimeError: boom"),
    ((1, "  File x\nOutOfMemoryError: CUDA out of memory."),
     ["native", "cold", "gnnaccel", "capture"], "OutOfMemoryError: CUDA out of memory."),
    ((1, "  File x\nValueError: a line\n  and more\nof it"), ["native"],
     "ValueError: a line of it"),
    ((None, ""), ["native"], "no end within 60 s (--limit)"),
    ((-11, ""), ["native"], "ended by SIGSEGV"), ((3, ""), ["native"], "exit status 3")])
def test_a_native_run_that_fails(answer, impls, error, runs):
    runs.answers["native"] = answer
    records = parts_of(runs, scripts=runs.plan.scripts[:1])
    assert [record.impl for record in records] == impls and records[0].error == error
    assert {call[1:] for call in runs.calls} == {(200, 10.0)}


def test_a_run_that_its_limit_stopped_has_no_wall_time(runs):
    runs.answers["cold"] = seen(ended="limit")
    section = script_table.section(Result(records=parts_of(runs)))
    assert "cold wall" not in section.columns and "wall" in section.columns


def test_scripts_for_which_the_budget_does_not_suffice_are_named(runs):
    [record] = parts_of(runs, budget=1.0)
    assert (record.kind, record.layer) == ("note", "a.py, b.py") and "budget" in record.error


def test_parts_for_which_the_budget_does_not_suffice_are_named(runs):
    left = iter([50.0] * 4 + [1.0] * 9)  # asked before a script and a run, and for its limit
    budget = type("Budget", (), {"left": property(lambda self: next(left))})()
    assert [(record.kind, record.impl or record.layer)
            for record in suite_scripts.scripts(runs.plan, budget)] == [
        ("script", "native"), ("script", "cold"), ("note", "a.py: gnnaccel, capture"),
        ("note", "b.py")]


def test_where_runs_cannot_be_forked_each_is_a_new_process(runs, monkeypatch, capsys):
    def refuse(*_):
        raise script_forks.CannotFork("no forks here")

    monkeypatch.setattr(suite_scripts, "Forks", refuse)
    assert len(parts_of(runs, preload=("torch",))) == 8
    assert "no forks here; a new process for each run" in capsys.readouterr().err


@pytest.mark.long
def test_a_module_that_cannot_be_loaded_beforehand():
    with pytest.raises(script_forks.CannotFork, match="ended"):
        script_forks.Forks(["no_such_module"], dict(os.environ), 60.0)


def test_a_forked_run_ends_at_its_limit_with_what_it_started():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert script_forks._end(process.pid, 0.05) is None
    assert process.wait(10.0) is not None


@pytest.mark.long
def test_what_is_preloaded_reads_torch_s_build_without_looking_for_gpus(tmp_path):
    file = tmp_path / "asks.py"  # it fails where this process itself is asked
    file.write_text("import torch\n"
                    "torch._C._show_config = None\n"
                    "assert 'PyTorch' in torch.__config__.show()\n")
    script_forks.Forks([str(file)], dict(os.environ), 60.0).close()


def test_torch_is_asked_for_its_build_again_once_all_is_loaded():
    show = torch.__config__.show
    with script_forks._build_told():
        assert torch.__config__.show is not show and torch.__config__.show() == show()
    assert torch.__config__.show is show
