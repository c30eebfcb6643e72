"""Modules that run when something of them is first used."""
from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest

from gnnaccel import lazy


@pytest.fixture
def made(tmp_path, monkeypatch):
    """``made(text)``: a module of this text that has not run."""
    def make(text: str) -> ModuleType:
        path = tmp_path / "later.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("later", path)
        spec.loader = lazy._Loader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "later", module)
        spec.loader.exec_module(module)
        assert type(module) is lazy.Lazy
        return module
    return make


def test_it_runs_once_when_it_is_used_and_is_a_plain_module_then(made):
    module = made("import sys\nsys.ran = getattr(sys, 'ran', 0) + 1\nvalue = 3\n")
    try:
        assert not hasattr(sys, "ran") and "value" not in vars(module)
        assert module.__file__ and module.__spec__.name == "later" and not hasattr(sys, "ran")
        assert module.value == 3 and type(module) is ModuleType
        assert module.value == 3 and sys.ran == 1
        assert not isinstance(module.__spec__.loader, lazy._Loader)
        assert module.__loader__ is module.__spec__.loader
    finally:
        del sys.ran


@pytest.mark.parametrize("use", [
    lambda m: setattr(m, "value", 4), lambda m: delattr(m, "value"), dir, lambda m: m.value,
    lambda m: hasattr(m, "other"), inspect.getdoc, lambda m: getattr(m, "__all__", None)])
def test_what_runs_it(made, use):
    module = made("value = 3\n")
    use(module)
    assert type(module) is ModuleType and "__builtins__" in vars(module)


def test_what_is_set_before_is_not_lost(made):
    module = made("value = 3\n")
    module.value = 4
    assert module.value == 4


def test_a_name_that_is_not_there(made):
    module = made("value = 3\n")
    with pytest.raises(AttributeError, match="module 'later' has no attribute 'other'"):
        module.other  # noqa: B018
    module = made("import later\nfound = hasattr(later, 'value')\nvalue = 3\n")
    assert module.found is False and module.value == 3  # its own code asks too early


def test_an_error_is_raised_each_time(made):
    module = made("value = 1\nraise ValueError('no')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            module.other  # noqa: B018


def test_threads_wait_for_all_of_it(made):
    """Nobody sees what it has made of a name so far."""
    module = made("import time\nvalue, other = 1, 1\ntime.sleep(0.3)\nvalue = last = 2\n")
    seen = []
    names = ["last", *["value", "last"] * 4]
    threads = [threading.Thread(target=lambda name: seen.append(getattr(module, name)),
                                args=(name,)) for name in names]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert seen == [2] * 9


def test_functions_are_found_by_name_and_have_a_text(made):
    module = made("def f():\n    return 7\n")
    text = inspect.getsource(module.f)
    assert text.startswith("def f") and pickle.loads(pickle.dumps(module.f)) is module.f


def test_reload_runs_it_again(made, tmp_path):
    module = made("value = 3\n")
    assert module.value == 3
    (tmp_path / "later.py").write_text("value = 4444\n")
    lazy._Loader(module.__spec__.loader).exec_module(module)
    assert module.value == 4444


def test_packages_scripts_and_other_modules_are_not_found():
    for name in ("gnnaccel.adapters", "gnnaccel.__main__", "json", "gnnaccelerated"):
        spec = lazy.LazyFinder.find_spec(name, importlib.import_module("gnnaccel").__path__)
        assert spec is None or not isinstance(spec.loader, lazy._Loader)
    finders = list(sys.meta_path)
    lazy.install()
    assert sys.meta_path == finders and lazy.LazyFinder in finders


_RUN = """
import sys
import torch_geometric.nn
import gnnaccel
from gnnaccel import lazy
gnnaccel.enable()
ours = [m for n, m in sys.modules.items() if n.startswith("gnnaccel")]
ran = {m.__name__ for m in ours if type(m) is not lazy.Lazy}
print(len(ran), "gnnaccel.adapters.pyg.layers.pna" in sys.modules)
import torch
layer = torch_geometric.nn.PNAConv(4, 4, ["mean"], ["identity"], torch.ones(9))
layer(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]]))
print(type(sys.modules["gnnaccel.adapters.pyg.layers.pna"]) is not lazy.Lazy)
"""


@pytest.mark.long
def test_enabling_runs_half_of_what_a_session_may_need():
    """Layers' own modules run at the first call of such a layer."""
    pytest.importorskip("torch_geometric")
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, pna, later = done.stdout.split()
    assert int(count) < 165 and pna == "False" and later == "True"


def test_layers_whose_forward_is_wrapped_are_those_that_are_read_at_once():
    pytest.importorskip("torch_geometric")
    from gnnaccel.adapters import contract, pyg

    wrapped = set()
    for name, (module, _) in pyg.LAYERS.items():
        found = contract.read(importlib.import_module(f"gnnaccel.adapters.pyg.{module}"))
        if (found.inside, found.around, found.propagates) != (None,) * 3:
            wrapped.add(name)
    assert wrapped == pyg.WRAPPED


def test_a_module_that_runs_counts_as_being_imported(made):
    """As those who wait for whole modules see it (`adapters.importhook`)."""
    module = made("import later\nwhile_it_runs = later.__spec__._initializing\n")
    assert module.while_it_runs is True and module.__spec__._initializing is False


def test_what_is_read_when_it_is_asked_for():
    from gnnaccel.adapters.contract import Unread

    class Two(Unread):
        times = 0

        def _read(self, first, second):
            Two.times += 1
            self.first, self._second = first, second

    two = Two(1, 2)
    assert Two.times == 0 and two._second == 2 and two.first == 1 and Two.times == 1
    assert not hasattr(Two.__new__(Two), "first")  # as a copy is, at first
    for name in ("third", "_third", "__third__"):
        assert not hasattr(two, name)
    assert Two.times == 1
