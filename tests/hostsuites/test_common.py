"""Running test files in processes: what each leaves behind, whatever ends it."""
from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.hostsuites import common

_PLUGIN = '''
import os
from tests.hostsuites import common

journal = common.Journal()

def pytest_collection_modifyitems(items):
    items[:] = common.remaining(items)

def pytest_runtest_logstart(nodeid, location):
    journal.write(test=nodeid)

def pytest_runtest_logreport(report):
    if report.when == "call":
        journal.write(test=report.nodeid, outcome=report.outcome)

def pytest_sessionfinish(session):
    journal.write(process=os.getpid())
'''
_TESTS = '''
import os, time

def test_passes(): pass
def test_fails(): assert False
def test_ends_the_process(): os._exit(3)
def test_hangs(): time.sleep(60)
def test_goes_on(): pass
'''


@pytest.mark.long
def test_a_process_that_ends_costs_one_test(tmp_path, monkeypatch):
    (tmp_path / "plugin_of_this_test.py").write_text(_PLUGIN)
    (tmp_path / "test_some.py").write_text(_TESTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcomes, notes = common.Suite(tmp_path, "plugin_of_this_test",
                                   patience=2.0).run([common.Chunk(("test_some.py",))])
    assert {test.partition("::test_")[2]: found["outcome"] for test, found in outcomes.items()} == {
        "passes": "passed", "fails": "failed", "ends_the_process": "crashed", "hangs": "hung",
        "goes_on": "passed"}
    assert len(notes) == 1  # of the process that came to its end


_STARTS = """
import os, subprocess, sys, time

def _start():
    with open(os.environ["STARTED"], "a") as file:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        file.write(f"{process.pid} ")

def test_ends_the_process():
    _start()
    os._exit(3)

def test_hangs():
    _start()
    time.sleep(60)
"""


@pytest.mark.long
def test_what_a_test_started_ends_with_its_process(tmp_path, monkeypatch):
    (tmp_path / "plugin_of_this_test.py").write_text(_PLUGIN)
    (tmp_path / "test_some.py").write_text(_STARTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    common.Suite(tmp_path, "plugin_of_this_test",
                 patience=2.0).run([common.Chunk(("test_some.py",))])
    started = [Path(f"/proc/{number}/cmdline")
               for number in (tmp_path / "started").read_text().split()]
    time.sleep(0.2)
    assert len(started) == 2 and not any(b"sleep" in file.read_bytes() for file in started
                                         if file.exists())


def test_a_file_that_cannot_start_is_told_of(tmp_path):
    outcomes, _ = common.Suite(tmp_path, "no_such_plugin").run([common.Chunk(("test_some.py",))])
    assert outcomes["test_some.py"]["outcome"] == "crashed" and "no_such_plugin" in outcomes[
        "test_some.py"]["error"]


def test_nothing_begins_after_the_deadline(tmp_path):
    suite = common.Suite(tmp_path, "no_such_plugin", deadline=time.monotonic())
    assert suite.run([common.Chunk(("test_some.py",))]) == ({}, [{"unfinished": ("test_some.py",)}])


@pytest.mark.long
def test_a_share_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "plugin_of_this_test.py").write_text(_PLUGIN)
    (tmp_path
     / "test_some.py").write_text(
         "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_one(n): pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcomes, _ = common.Suite(tmp_path,
                               "plugin_of_this_test").run([common.Chunk(("test_some.py",), 1, 3)])
    assert list(outcomes) == ["test_some.py::test_one[1]", "test_some.py::test_one[4]"]


def test_files_are_shared_out_by_size(tmp_path):
    for name, size in (("a/test_large.py", 50), ("a/test_small.py", 20), ("b/test_other.py", 20),
                       ("a/helper.py", 90)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#" * size)
    found = common.chunks_of(tmp_path, ["a", "b", "a/test_small.py"], 2)
    assert found == [(("a/test_large.py",), 0, 1), (("a/test_small.py", "b/test_other.py"), 0, 1)]
    found = common.chunks_of(tmp_path, ["a", "b"], 1, {"test_small.py": 2})
    assert found == [(("a/test_small.py",), 0, 2), (("a/test_small.py",), 1, 2),
                     (("a/test_large.py", "b/test_other.py"), 0, 1)]


def test_what_counts_as_a_regression():
    native = {name: {"outcome": name.split()[0]}
              for name in ("passed a", "passed b", "passed c", "failed a", "failed b", "skipped a")}
    enabled = {"passed a": {"outcome": "crashed"}, "passed b": {"outcome": "passed"},
               "failed a": {"outcome": "failed"}, "failed b": {"outcome": "passed"},
               "skipped a": {"outcome": "skipped"}}
    assert common.regressions(native, enabled) == ["passed a", "passed c"]
    assert common.regressions(native, enabled, complete=False) == ["passed a"]
    assert common.repairs(native, enabled) == ["failed b"]
