"""`gpu_record` on a small tree of its own: what changes the hash, and what makes a record
worthless."""
from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_record.py")


@pytest.fixture(scope="module")
def gpu_record():
    spec = importlib.util.spec_from_file_location("gpu_record", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {"cuda/src/a.cu": "kernel\n", "cuda/runtime/driver.py": "x = 1\n",
             "dispatch/plan.py": "y = 2\n", "adapters/pyg/gat.py": "z = 3\n",
             "profile/sink.py": "p\n", "cuda/notes.md": "n\n"}
    for name, text in files.items():
        path = tmp_path / "gnnaccel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def write_record(gpu_record, root: Path, **changes) -> Path:
    record = {"schema": gpu_record.SCHEMA, "hash": gpu_record.sources_hash(root), "arguments": [],
              "counts": {"passed": 3, "failed": 0, "skipped": 1}, "failures": [], **changes}
    path = root / "gpu_record.json"
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("name",
                         ["cuda/src/a.cu", "cuda/runtime/driver.py", "dispatch/plan.py",
                          "adapters/pyg/gat.py"])
def test_hash_follows_the_content_of_a_source(gpu_record, tree, name):
    before = gpu_record.sources_hash(tree)
    path = tree / "gnnaccel" / name
    path.write_text(path.read_text() + "# more\n")
    assert gpu_record.sources_hash(tree) != before


def test_hash_follows_names_and_new_files(gpu_record, tree):
    before = gpu_record.sources_hash(tree)
    (tree / "gnnaccel/cuda/src/a.cu").rename(tree / "gnnaccel/cuda/src/b.cu")
    renamed = gpu_record.sources_hash(tree)
    (tree / "gnnaccel/cuda/src/b.cuh").write_text("")
    assert len({before, renamed, gpu_record.sources_hash(tree)}) == 3


def test_hash_ignores_line_endings_and_other_files(gpu_record, tree):
    before = gpu_record.sources_hash(tree)
    (tree / "gnnaccel/cuda/src/a.cu").write_bytes(b"kernel\r\n")
    (tree / "gnnaccel/profile/sink.py").write_text("changed\n")
    (tree / "gnnaccel/cuda/notes.md").write_text("changed\n")
    assert gpu_record.sources_hash(tree) == before


def test_a_green_record_of_these_sources_passes(gpu_record, tree):
    assert gpu_record.complaint(tree, write_record(gpu_record, tree)) is None


@pytest.mark.parametrize("changes, words", [
    ({"hash": "0"}, "sources changed"),
    ({"schema": 0}, "schema"),
    ({"counts": {"passed": 3, "failed": 2, "skipped": 0}}, "2 GPU tests failed"),
    ({"counts": {"passed": 0, "failed": 0, "skipped": 5}}, "no passed test"),
    ({"arguments": ["-k", "gat"]}, "partial run"),
    ({"oracle": {"alarms": ["python -m tests.oracle table GATConv --seed 1"]}},
     "1 random cases alarmed"),
])
def test_other_records_do_not(gpu_record, tree, changes, words):
    assert words in gpu_record.complaint(tree, write_record(gpu_record, tree, **changes))


@pytest.mark.parametrize("text, words",
                         [(None, "missing"), ("{", "not a record"), ("[]", "not a record"),
                          ("{}", "not a record")])
def test_no_record(gpu_record, tree, text, words):
    path = tree / "gpu_record.json"
    if text is not None:
        path.write_text(text)
    assert words in gpu_record.complaint(tree, path)


def test_command_line_needs_only_the_standard_library(gpu_record, tree):
    script = tree / "tests" / SCRIPT.name
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text())

    def call(option: str):
        return subprocess.run([sys.executable, "-S", "-I", str(script), option],
                              capture_output=True, text=True)

    assert call("--hash").stdout.strip() == gpu_record.sources_hash(tree)
    missing = call("--check")
    assert missing.returncode == 1 and len(missing.stdout.splitlines()) == 1
    write_record(gpu_record, tree).rename(script.with_name("gpu_record.json"))
    fine = call("--check")
    assert fine.returncode == 0 and len(fine.stdout.splitlines()) == 1


def test_counts_take_each_test_once(gpu_record):
    class Report:
        def __init__(self, when, outcome, nodeid="t"):
            self.when, self.outcome, self.nodeid = when, outcome, nodeid

    counts = gpu_record.Counts()
    for report in [Report("setup", "passed"), Report("call", "passed"),
                   Report("teardown", "passed"), Report("setup", "skipped"),
                   Report("setup", "failed", "broken"), Report("call", "failed", "wrong")]:
        counts.pytest_runtest_logreport(report)
    assert counts.counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert counts.failures == ["broken", "wrong"]


def test_failures_are_run_again(gpu_record, tree, monkeypatch, capsys):
    """Those that pass count as passed, and the record names them; of other sources none is run."""
    monkeypatch.setattr(gpu_record, "_from_root", lambda: None)
    path = write_record(gpu_record, tree, failures=["a", "b"],
                        counts={"passed": 3, "failed": 2, "skipped": 1})

    def main(arguments, plugins):
        assert arguments[-2:] == ["a", "b"]
        plugins[0].passed.add("b")
        return 1

    monkeypatch.setattr(pytest, "main", main)
    assert gpu_record.again(path, tree) == 1
    record = json.loads(path.read_text())
    assert record["counts"] == {"passed": 4, "failed": 1, "skipped": 1}
    assert record["failures"] == ["a"] and record["again"] == ["b"]
    assert "1 GPU tests failed" in gpu_record.complaint(tree, path)
    (tree / "gnnaccel/cuda/runtime/driver.py").write_text("other\n")
    monkeypatch.setattr(pytest, "main", None)
    assert gpu_record.again(path, tree) == 1 and "sources changed" in capsys.readouterr().out


def test_other_random_cases_run_where_some_were_alarms(gpu_record, tree, monkeypatch):
    """The record names the alarms. Without failures no test runs."""
    monkeypatch.setattr(gpu_record, "_from_root", lambda: None)
    monkeypatch.setattr(pytest, "main", None)
    for alarms in ([], ["another"]):
        path = write_record(gpu_record, tree, oracle={"seconds": 7.0, "alarms": ["a case"]})
        monkeypatch.setattr(gpu_record, "oracle",
                            lambda seconds, alarms=alarms: {"seconds": seconds, "alarms": alarms})
        assert gpu_record.again(path, tree) == len(alarms)
        record = json.loads(path.read_text())
        assert record["oracle"] == {"seconds": 7.0, "alarms": alarms}
        assert record["again"] == ["a case"]
