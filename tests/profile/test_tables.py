"""Tables for a terminal, by rich and without it."""
from __future__ import annotations

import builtins

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
    assert lines[0] == "title [red]" and any("[bold]a[/bold]" in line and line.endswith("-") for line in lines)
    assert "a rather long name of a layer" in lines[-1] or "a rather long name of a layer" in lines[-2]
    assert all(line == line.rstrip() for line in lines)


def test_numbers_are_to_the_right(way, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = table("t", ("layer", "calls", "note"), ROWS, right=("calls",))
    one, two = (line for line in text.splitlines() if "bold" in line or "rather" in line)
    assert one.index("1") == two.index("23") + 1


def test_a_narrow_terminal_folds_inside_its_cells(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "30")
    text = table("t", ("layer", "calls", "note"), ROWS, right=("calls",))
    assert all(len(line) <= 30 for line in text.splitlines()) and "23" in text


def test_numbers_are_short():
    numbers = (None, 0.012345, 12.345, 999.6, 12345.6, 3e9)
    assert [milliseconds(v) for v in numbers] == [None, "0.0123", "12.3", "1000", "12346", "3e+09"]
    assert [times(*v) for v in ((None, 1.0), (1.0, None), (30.0, 2.0), (5e6, 1.0))] == [None, None, "15.0x", "5e+06x"]
    assert [size(v) for v in (None, 1 << 20, 5 << 19)] == [None, "1.0", "2.5"]
