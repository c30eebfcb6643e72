"""`make matrix`: which combinations there are, and how their outcomes are shown."""
from __future__ import annotations

import sys

import pytest

from tests import matrix


def test_the_oldest_and_newest_releases_come_from_setup_cfg_and_the_constraints():
    assert [matrix.releases(name)[0] for name in ("torch", "torch-geometric")] == ["2.4.0", "2.6.0"]
    made = list(matrix.rows(["3.11", "3.12"]))
    assert len(made) == len(set(made)) == 8
    newest = (matrix.releases("torch")[1], matrix.releases("torch-geometric")[1])
    assert made[3] == ("3.11", *newest)
    assert list(matrix.rows(["3.11"], ["2.15.0"])) == [
        ("3.11", "2.15.0", pyg) for pyg in matrix.releases("torch-geometric")]


def test_a_python_is_told_by_what_it_says():
    assert matrix._runs(sys.executable) == "{}.{}".format(*sys.version_info[:2])
    assert matrix._runs("/bin/false") is None


def test_the_core_is_there():
    assert all((matrix.ROOT / name).is_file() for name in matrix.CORE)


def test_the_table_shows_what_was_run_and_nothing_else():
    shown = matrix.table({"3.11 2.13.0 2.6.0": {"outcome": "passed", "passed": 9, "failed": 0,
                                                "skipped": 2},
                          "3.9 2.4.0 2.6.0": {"outcome": "failed", "passed": 8, "failed": 1,
                                              "skipped": 0},
                          "3.13 2.4.0 2.6.0": {"outcome": "not installable"}})
    assert shown.splitlines()[-3:] == [
        "| 3.9 | 2.4.0 | 2.6.0 | 8 passed, 1 failed |",
        "| 3.11 | 2.13.0 | 2.6.0 | 9 passed, 2 skipped |",
        "| 3.13 | 2.4.0 | 2.6.0 | not installable |"]


@pytest.mark.parametrize("found, status", [
    ({"outcome": "passed"}, 0), ({"outcome": "failed"}, 1),
    ({"outcome": "pytest did not run to its end"}, 1)])
def test_a_failure_is_the_exit_status(monkeypatch, tmp_path, capsys, found, status):
    monkeypatch.setattr(matrix, "interpreters", lambda: {"3.11": sys.executable})
    monkeypatch.setattr(matrix, "prepare", lambda row, interpreter: None)
    monkeypatch.setattr(matrix, "run", lambda row, tests: found)
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "matrix.json")
    torch = matrix.releases("torch")[0]
    assert matrix.main(["--torch", torch]) == status
    assert len(matrix.load()) == 2 and all(f" {torch} " in name for name in matrix.load())


def test_what_pip_cannot_install_is_no_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(matrix, "interpreters", lambda: {"3.13": sys.executable})
    monkeypatch.setattr(matrix, "prepare", lambda row, interpreter: "ERROR: no such release")
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "matrix.json")
    assert matrix.main([]) == 0 and "ERROR: no such release" in capsys.readouterr().out
    assert {found["outcome"] for found in matrix.load().values()} == {"not installable"}
