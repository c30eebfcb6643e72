"""Files in the user's cache folder: whole, locked, and out of the way when they are not there."""
from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gnnaccel import store
from gnnaccel.errors import GnnaccelError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNACCEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_made_changed_and_read(folder):
    assert store.read("a.json") is None and not folder.exists()
    assert store.update("a.json", lambda held: {**held, "x": 1}) == folder / "a.json"
    store.update("a.json", lambda held: {**held, "y": 2})
    assert store.read("a.json") == {"x": 1, "y": 2}
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize("text, problem",
                         [("{", "cannot be read"), ("[1]", "no JSON object"),
                          ("\xff", "cannot be read")])
def test_a_spoilt_file_is_left_aside_and_replaced(folder, text, problem):
    folder.mkdir()
    (folder / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match=problem):
        assert store.read("a.json") is None
    with pytest.warns(RuntimeWarning):
        store.update("a.json", lambda held: {**held, "x": 1})
    assert store.read("a.json") == {"x": 1}


def test_a_change_that_fails_changes_nothing(folder):
    store.update("a.json", lambda held: {"x": 1})
    with pytest.raises(ZeroDivisionError):
        store.update("a.json", lambda held: {"x": 1 / 0})
    with pytest.raises(TypeError):
        store.update("a.json", lambda held: {"x": object()})
    assert store.read("a.json") == {"x": 1} and not [p for p in folder.iterdir()
                                                     if p.suffix == ".part"]


@pytest.mark.long
def test_many_processes_lose_no_change(folder):
    code = ("import sys; from gnnaccel import store\n"
            "for i in range(20): store.update('a.json', lambda held: {**held, "
            "f'{sys.argv[1]}-{i}': i})")
    many = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(4)]
    assert [process.wait() for process in many] == [0] * 4
    assert len(json.loads((folder / "a.json").read_text())) == 80


def test_without_platformdirs_the_variable_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert store.folder().name == "cache"
    monkeypatch.delenv("GNNACCEL_CACHE_DIR")
    assert store.read("a.json") is None
    with pytest.raises(GnnaccelError, match="pip install platformdirs, or set GNNACCEL_CACHE_DIR"):
        store.update("a.json", dict)


def test_without_filelock_nothing_is_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(GnnaccelError, match="pip install filelock"):
        store.update("a.json", dict)


def test_sizes(tmp_path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_bytes(b"1234")
    assert store.size(tmp_path / "d") == (1, 4) and store.size(tmp_path / "none") == (0, 0)
