"""The IPython extension, against a shell that has the methods of IPython's which it uses."""
from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

import gnnaccel
import gnnaccel.profile


class Shell:
    """As IPython's: magics by kind and name; a cell beginning with %% calls the one named up to the
    first space."""

    def __init__(self):
        self.magics, self.ran, self.user_ns = {}, [], {}

    def register_magic_function(self, func, magic_kind="line", magic_name=None):
        self.magics[magic_kind, magic_name] = func

    def run_cell(self, cell):
        self.ran.append((cell, gnnaccel.status()["enabled"]))
        if cell.startswith("%%"):
            first, _, body = cell.partition("\n")
            name, _, line = first[2:].partition(" ")
            return self.magics["cell", name](line, body)
        exec(cell, self.user_ns)

    def run_line(self, line):
        name, _, rest = line[1:].partition(" ")
        return self.magics["line", name](rest)


@pytest.fixture
def observe(monkeypatch):
    module, calls = types.ModuleType("observe"), []
    module.start = lambda profile, compare, report: calls.append(("start", profile, compare,
                                                                  report)) or 7
    module.finish = lambda observer: calls.append(("finish", observer))
    monkeypatch.setitem(sys.modules, "gnnaccel.profile.observe", module)
    monkeypatch.setattr(gnnaccel.profile, "observe", module, raising=False)
    return calls


@pytest.fixture
def shell():
    shell = Shell()
    gnnaccel.load_ipython_extension(shell)
    return shell


def test_loading_enables_and_unloading_disables(shell):
    assert gnnaccel.status()["enabled"]
    gnnaccel.load_ipython_extension(shell)  # %reload_ext
    gnnaccel.unload_ipython_extension(shell)
    assert not gnnaccel.status()["enabled"]


@pytest.mark.parametrize("name, first",
                         [("profile", ("start", True, False, None)),
                          ("compare", ("start", False, True, None))])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_cell_is_observed(shell, observe, name, first, loaded):
    if not loaded:
        gnnaccel.unload_ipython_extension(shell)
    shell.run_cell(f"%%gnnaccel.{name}\nx = 1\ny = x + 1\n")
    assert shell.ran[-1] == ("x = 1\ny = x + 1\n", True) and shell.user_ns["y"] == 2
    assert observe == [first, ("finish", 7)] and gnnaccel.status()["enabled"] is loaded


def test_a_failing_cell_is_finished_as_well(shell, observe):
    with pytest.raises(ZeroDivisionError):
        shell.run_cell("%%gnnaccel.profile\n1 / 0\n")
    assert observe[-1] == ("finish", 7)


def test_arguments_are_refused(shell, observe):
    with pytest.raises(ValueError, match="takes no arguments, got '-x'"):
        shell.run_cell("%%gnnaccel.profile -x\n1\n")
    assert not observe


def test_the_line_magic_switches_with_the_options_of_the_command_line(shell):
    shell.run_line("%gnnaccel off")
    assert not gnnaccel.status()["enabled"]
    shell.run_line("%gnnaccel on --when supported --exclude 're:a, re:b' --strict")
    config = gnnaccel.status()["config"]
    assert (config["when"], config["on_fallback"], config["exclude"]) == (
        "supported", "raise", ("re:a", "re:b"))
    shell.run_line("%gnnaccel on")
    assert gnnaccel.status()["config"]["when"] == "supported"  # what is not named stays


def test_the_line_magic_shows_the_status_and_the_counts(shell, capsys):
    for line in ("%gnnaccel", "%gnnaccel status"):
        shell.run_line(line)
        assert capsys.readouterr().out == f"{gnnaccel.status()}\n"
    shell.run_line("%gnnaccel status --json")
    assert json.loads(capsys.readouterr().out)["enabled"] is True
    assert shell.run_line("%gnnaccel stats") == gnnaccel.stats()


@pytest.mark.parametrize("line, message", [
    ("on --when never", "invalid choice"), ("of", "invalid choice"), ("on x", "unrecognized"),
    ("gain", "needs a statement"), ("gain --seconds x step()", "'x' is not a number"),
    ("gain --seconds 3", "needs a statement"), ("gain --seconds", "'' is not a number")])
def test_wrong_lines_are_refused(line, message, shell):
    with pytest.raises(ValueError, match=message):
        shell.run_line(f"%gnnaccel {line}")


def test_wrong_lines_are_ipythons_errors_where_it_is_loaded(shell, monkeypatch):
    error = types.ModuleType("IPython.core.error")
    error.UsageError = type("UsageError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "IPython.core.error", error)
    with pytest.raises(error.UsageError, match="invalid choice"):
        shell.run_line("%gnnaccel on --when never")


def test_a_statement_is_measured_in_the_notebooks_namespace(shell):
    shell.user_ns["steps"] = []
    found = shell.run_line('%gnnaccel gain --seconds=0.01 steps.append("a b")')
    assert len(shell.user_ns["steps"]) > 20 and set(shell.user_ns["steps"]) == {"a b"}
    assert found.as_dict()["what"] == "step" and "gnnaccel makes" in repr(found)


def test_ipython_is_not_imported():
    code = ("import sys; sys.modules['IPython'] = None; import gnnaccel; "
            "gnnaccel.load_ipython_extension; print('fine')")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True,
                          text=True).stdout == "fine\n"
