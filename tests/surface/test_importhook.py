"""when_imported: now, later, in odd ways, never."""
from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import subprocess
import sys
import threading
import zipfile

import pytest

from gnnaccel.adapters import importhook
from gnnaccel.adapters.importhook import when_imported

_serial = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes the files of a package with a fresh name, and gives that name. NAME in a body stands
    for it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**bodies):
        name = f"hooked{next(_serial)}"
        for path, body in bodies.items():
            file = tmp_path / name / (path.replace("__", "/") + ".py"
                                      if path != "init" else "__init__.py")
            if path.endswith("_init"):
                file = tmp_path / name / path.removesuffix("_init") / "__init__.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body.replace("NAME", name))
        importlib.invalidate_caches()
        return name

    return write


def hooked() -> bool:
    return importhook._finder in sys.meta_path


def test_right_away_when_imported():
    calls = []
    handle = when_imported("json", lambda: calls.append(1))
    assert calls == [1] and not handle.pending and not hooked()


def test_after_the_body_and_before_the_import_statement_returns(package):
    name = package(init="value = 1\n")
    calls = []
    handle = when_imported(name, lambda: calls.append(sys.modules[name].value))
    assert handle.pending and hooked() and calls == []
    module = importlib.import_module(name)
    assert calls == [1] and not handle.pending and not hooked()
    assert type(module.__loader__).__name__ == "SourceFileLoader" and module.__spec__.loader is module.__loader__


def test_a_submodule_is_bound_to_its_parent_when_called(package):
    name = package(init="", nn_init="value = 2\n")
    calls = []
    when_imported(f"{name}.nn", lambda: calls.append(sys.modules[name].nn.value))
    importlib.import_module(name)
    assert calls == []
    importlib.import_module(f"{name}.nn")
    assert calls == [2] and not hooked()


def test_waits_for_a_parent_that_imports_the_submodule_halfway(package):
    name = package(init="import NAME.nn\nversion = 3\n", nn_init="")
    calls = []
    when_imported(f"{name}.nn", lambda: calls.append(sys.modules[name].version))
    importlib.import_module(f"{name}.nn")
    assert calls == [3] and not hooked()


def test_circular_imports(package):
    name = package(init="from NAME.a import A\n", a="import NAME.b\nA = 1\nfrom NAME.b import B\n",
                   b="import NAME.a\nB = 2\n")
    calls = []
    when_imported(f"{name}.b",
                  lambda: calls.append((sys.modules[f"{name}.a"].A, sys.modules[name].A)))
    importlib.import_module(name)
    assert calls == [(1, 1)]


def test_registered_during_the_import_itself_is_noticed_at_the_next_import(package):
    name = package(init="import gnnaccel.adapters.importhook as h\nCALLS = []\n"
                        "h.when_imported('NAME', lambda: CALLS.append(DONE))\nDONE = 4\n")
    other = package(init="")
    module = importlib.import_module(name)
    assert module.CALLS == []
    importlib.import_module(other)
    assert module.CALLS == [4] and not hooked()


def test_several_wait_and_one_that_raises_stops_no_other(package):
    name = package(init="")
    calls = []

    def broken():
        raise KeyError("broken")

    when_imported(name, lambda: calls.append("a"))
    when_imported(name, broken)
    when_imported(name, lambda: calls.append("b"))
    with pytest.raises(KeyError, match="broken"):
        importlib.import_module(name)
    assert calls == ["a", "b"] and not hooked()


def test_cancel(package):
    name = package(init="")
    calls = []
    handle, other = (when_imported(name, lambda word=word: calls.append(word))
                     for word in ("no", "yes"))
    handle.cancel()
    handle.cancel()
    assert not handle.pending and hooked()
    importlib.import_module(name)
    assert calls == ["yes"]
    other.cancel()


def test_cancelling_the_last_removes_the_finder():
    handle = when_imported("there_is_no_such_module_at_all", lambda: None)
    assert hooked()
    handle.cancel()
    assert not hooked()


def test_a_failing_import_is_awaited_anew(package):
    name = package(init="import sys\nif not hasattr(sys, 'NAME'): raise RuntimeError('not yet')\n")
    calls = []
    handle = when_imported(name, lambda: calls.append(1))
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(name)
    assert calls == [] and handle.pending and name not in sys.modules
    setattr(sys, name, True)
    importlib.import_module(name)
    delattr(sys, name)
    assert calls == [1]


def test_a_missing_module_stays_missing():
    handle = when_imported("there_is_no_such_module_at_all", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("there_is_no_such_module_at_all")
    assert importlib.util.find_spec("there_is_no_such_module_at_all") is None
    handle.cancel()


def test_reload_during_and_after(package):
    name = package(init="count = globals().get('count', 0) + 1\n", nn_init="")
    module = importlib.import_module(name)
    calls = []
    when_imported(f"{name}.nn", lambda: calls.append(1))
    assert importlib.reload(module).count == 2 and calls == []  # the parent is watched meanwhile
    importlib.import_module(f"{name}.nn")
    assert importlib.reload(module).count == 3 and calls == [1]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_namespace_package(package):
    name = package(nn_init="value = 5\n")
    calls = []
    when_imported(f"{name}.nn", lambda: calls.append(sys.modules[f"{name}.nn"].value))
    module = importlib.import_module(name)
    assert not hasattr(module, "__file__") or module.__file__ is None
    importlib.import_module(f"{name}.nn")
    assert calls == [5]


def test_zipimport(tmp_path, monkeypatch):
    name = f"zipped{next(_serial)}"
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(f"{name}/__init__.py", "value = 6\n")
        opened.writestr(f"{name}/data.txt", "text")
    monkeypatch.syspath_prepend(str(archive))
    calls = []
    when_imported(name, lambda: calls.append(sys.modules[name].value))
    module = importlib.import_module(name)
    assert calls == [6] and type(module.__loader__).__name__ == "zipimporter"
    assert importlib.resources.files(module).joinpath("data.txt").read_text() == "text"


def test_the_stand_in_answers_for_the_loader_meanwhile(package):
    name = package(init="value = 7\n")
    handle = when_imported(name, lambda: None)
    spec = importlib.util.find_spec(name)
    assert "value = 7" in spec.loader.get_source(name) and name not in sys.modules
    handle.cancel()


def test_lives_with_another_finder_that_asks_all_finders(package):
    name = package(init="value = 8\n")

    class Other:
        busy = False

        def find_spec(self, fullname, path=None, target=None):
            if fullname != name or Other.busy:
                return None
            Other.busy = True
            try:
                return importlib.util.find_spec(fullname)
            finally:
                Other.busy = False

    calls = []
    when_imported(name, lambda: calls.append(1))
    sys.meta_path.insert(0, Other())
    try:
        module = importlib.import_module(name)
    finally:
        del sys.meta_path[0]
    assert calls == [1] and type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_lives_with_another_finder_that_asks_all_others(package):
    """Such as a second copy of ours: each asks the other in turn."""
    name = package(init="")

    class Other:
        def find_spec(self, fullname, path=None, target=None):
            specs = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
            return next((spec for spec in specs if spec is not None), None)

    calls = []
    when_imported(name, lambda: calls.append(1))
    handle = when_imported(f"{name}.missing", lambda: calls.append(2))
    other = Other()
    sys.meta_path.append(other)
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{name}.missing")
    finally:
        sys.meta_path.remove(other)
    assert calls == [1] and handle.pending
    handle.cancel()


def test_two_threads_importing_call_back_once(package):
    name = package(init="import time\ntime.sleep(0.05)\nvalue = 9\n")
    calls = []
    when_imported(name, lambda: calls.append(sys.modules[name].value))
    threads = [threading.Thread(target=importlib.import_module, args=(name,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [9]


def test_not_called_while_modules_of_ours_are_being_imported(package, monkeypatch):
    """A callback that imports these again would find them half done."""
    name = package(init="import gnnaccel.adapters.importhook as h\nCALLS = []\n"
                        "h.when_imported('NAME', lambda: CALLS.append(1))\n")
    first, second = package(init=""), package(init="")
    calls = importlib.import_module(name).CALLS
    half = type(sys)("gnnaccel.half")
    half.__spec__ = importlib.util.spec_from_loader("gnnaccel.half", None)
    half.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "gnnaccel.half", half)
    importlib.import_module(first)
    assert calls == [] and hooked()
    half.__spec__._initializing = False
    importlib.import_module(second)
    assert calls == [1] and not hooked()


def test_a_thread_that_imports_does_not_wait_for_one_that_holds_the_lock_and_imports(package):
    """The finder runs under the import system's own lock, which the other thread needs."""
    other, ours = package(init=""), package(init="")
    name = package(init=f"""
        import threading
        from gnnaccel.adapters.importhook import when_imported
        from tests.surface import test_importhook as test
        thread = threading.Thread(target=test.await_and_import, args=(__name__, "{ours}"))
        thread.daemon = True
        thread.start()
        test.Shared.held.wait()
    """.replace("\n        ", "\n"))
    importlib.import_module(name)
    first = threading.Thread(target=importlib.import_module, args=(other,), daemon=True)
    first.start()
    first.join(10)
    Shared.go.set()
    importlib.import_module(name).thread.join(10)
    assert not first.is_alive() and ours in sys.modules
    assert Shared.calls == [name] and not hooked()


class Shared:
    """What the threads of the test above share."""

    lock, held, go = threading.RLock(), threading.Event(), threading.Event()
    calls: list[str] = []


def await_and_import(name: str, ours: str) -> None:
    """Await ``name``, whose import is under way, and import ``ours`` with the lock held."""
    def call() -> None:
        with Shared.lock:
            Shared.calls.append(name)

    with Shared.lock:
        when_imported(name, call, Shared.lock)
        Shared.held.set()
        Shared.go.wait(10)
        importlib.import_module(ours)


def test_a_block_that_the_end_of_the_interpreter_leaves_says_nothing():
    """A generator holds it, which is closed when there are no finders any more."""
    code = ("import contextlib, gnnaccel\n@contextlib.contextmanager\ndef block():\n"
            "    with gnnaccel.enabled():\n        yield\nheld = block()\nheld.__enter__()\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.long
def test_the_real_host_is_whole_when_called():
    """torch_geometric imports its nn halfway through its own __init__, before it has a version."""
    pytest.importorskip("torch_geometric")
    code = ("from gnnaccel.adapters.importhook import when_imported\n"
            "def called():\n    import torch_geometric as pyg\n    "
            "print(pyg.__version__, pyg.nn.GATConv)\n"
            "when_imported('torch_geometric.nn', called)\nfrom torch_geometric.nn import GCNConv\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.match(r"\d+\.\d+.* <class 'torch_geometric.nn.conv.gat_conv.GATConv'>\n$",
                    done.stdout)
