"""Tables for a terminal, by rich and without it."""
from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnaccel.profile.tables import milliseconds, size, table, times

ROWS = [("[bold]a[/bold]", 1, None), ("a rather long name of a layer", 23, "x")]


@pytest.fixture(params=["rich", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        native = builtins.__import__

        def without_rich(name, *args, **kwargs):
            if name.partition(".")[0] == "rich":
                raise ImportError(name)
            return native(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_rich)
    return request.param


def test_cells_are_shown_as_they_are(way, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = table("title [red]", ("layer", "calls", "note"), ROWS, right=("calls",)).splitlines()
    assert lines[0] == "title [red]" and any("[bold]a[/bold]" in line and line.endswith("-")
                                             for line in lines)
    assert "a rather long name of a layer" in lines[-1] or "a rather long name of a layer" in lines[
        -2]
    assert all(line == line.rstrip() for line in lines)


def test_numbers_are_to_the_right(way, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = table("t", ("layer", "calls", "note"), ROWS, right=("calls",))
    one, two = (line for line in text.splitlines() if "bold" in line or "rather" in line)
    assert one.index("1") == two.index("23") + 1


NOTES = ("layer", "calls", "note"), [("GATConv #1", 1, "several words that need room"),
                                     ("GATConv #2", 2.345678, "none")]


def test_a_narrow_terminal_folds_inside_its_cells(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "40")
    text = table("t", *NOTES, right=("calls",))
    assert all(len(line) <= 40
               for line in text.splitlines()) and "several words that need room" not in text
    assert "GATConv #1" in text and "2.345678" in text


@pytest.mark.parametrize("columns", [1, 10, 25])
def test_names_and_numbers_stay_whole_in_any_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = table("t", *NOTES, right=("calls",))
    for words in ("GATConv #1", "GATConv #2", "layer", "calls", "2.345678", "several"):
        assert words in text, text


@pytest.mark.parametrize("environment",
                         [{}, {"TERM": "dumb", "FORCE_COLOR": "1"},
                          {"TERM": "unknown", "TTY_COMPATIBLE": "1"}, {"LINES": "7"}])
def test_without_a_terminal_nothing_is_folded(environment):
    """In a process of its own, whose environment is this alone."""
    code = ("from gnnaccel.profile.tables import table\n"
            "print(table('t', ['layer', 'kernel', 'note'], [['GATConv #1', 'k ' * "
            "20, 'n ' * 30]]))")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH")
            if name in os.environ}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
                          env={**kept, **environment})
    (row,) = (line for line in made.stdout.splitlines() if "GATConv" in line)
    assert "GATConv #1" in row and "k " * 20 in row and row.endswith(("n " * 30).strip())


def test_a_table_without_rows(way):
    assert "layer" in table("t", ("layer", "calls"), [], right=("calls",))


def test_numbers_are_short():
    numbers = (None, 0.012345, 12.345, 999.6, 12345.6, 3e9)
    assert [milliseconds(v) for v in numbers] == [None, "0.0123", "12.3", "1000", "12346", "3e+09"]
    assert [times(*v)
            for v in ((None, 1.0), (1.0, None), (30.0, 2.0),
                      (5e6, 1.0))] == [None, None, "15.0x", "5e+06x"]
    assert [size(v) for v in (None, 1 << 20, 5 << 19)] == [None, "1.0", "2.5"]
