"""The script that measures on a GPU runs, over few nodes, without one."""
from __future__ import annotations

import json

import pytest

from gnnaccel.dispatch.offload import rowwise
from tests import offload_run


@pytest.mark.long
def test_the_script_runs(monkeypatch, capsys):
    monkeypatch.setattr(rowwise, "_SMALL", 0)  # relu, too, runs in bands
    assert offload_run.main(["--nodes", "3000", "--edges", "30000", "--width", "8", "--limit",
                             "1000000", "--limit", "100000", "--no-checks",
                             "--train", "--again"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    checked, = (line for line in lines if "check" in line)
    assert checked["difference"] < 1e-5
    measured = [line for line in lines if "measure" in line]
    assert [line["measure"] for line in measured] == 4 * ["first", "second", "third"]
    assert [line["results"] for line in measured[2::3]] == 2 * ["stay", "come again"]
    assert [line["stayed_gb"] > 0 for line in measured[2::3]] == [True, False, False, False]
    assert [line["train"] for line in lines if "train" in line] == ["first", "second"]
    assert all(line["bands"][0] > 1 and line["fetched_gb"] > 0 for line in measured)


@pytest.mark.long
def test_what_is_wrong_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(offload_run, "check", lambda device: 1.0)
    assert offload_run.main(["--nodes", "300", "--edges", "3000", "--width", "8"]) == 1
