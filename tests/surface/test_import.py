"""``import gnnaccel`` does nothing but watch for ``dgl.graphbolt`` (test_finder.py) and for its own
modules (test_lazy.py), and make the stand-ins that a variable asks for (tests/standins), and its
public names resolve."""
from __future__ import annotations

import configparser
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gnnaccel
from gnnaccel import _HOMES

HEAVY = ("torch", "torch_geometric", "dgl", "cupy", "numpy")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_loads_no_other_package():
    code = ("import sys; before = set(sys.modules); import gnnaccel; dir(gnnaccel); "
            "print(sorted(m for m in set(sys.modules) - before if not m.startswith('gnnaccel') "
            f"and m.partition('.')[0] in {HEAVY!r}), sorted(m for m in sys.modules "
            "if m.startswith('gnnaccel')))")
    assert run(code) == ("[] ['gnnaccel', 'gnnaccel._version', 'gnnaccel.finder', "
                         "'gnnaccel.lazy']")


def test_type_checkers_are_told_that_there_are_types():
    """By a file, which an installed package has too."""
    root, setup = Path(gnnaccel.__file__).parents[1], configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    assert (root
            / "gnnaccel/py.typed").is_file() and "py.typed" in setup["options.package_data"][
                "*"].split()


def test_import_changes_nothing_but_the_list_of_finders():
    code = ("import builtins, importlib, os, sys, threading, warnings, atexit, "
            "codecs, gc, signal\n"
            "def state():\n"
            "    return dict(hooks=list(sys.path_hooks), path=list(sys.path), "
            "env=dict(os.environ), filters=list(warnings.filters),\n"
            "                builtins=sorted(vars(builtins)), "
            "imp=builtins.__import__, excepthook=sys.excepthook, gc=list(gc.callbacks),\n"
            "                threads=threading.active_count(), "
            "interrupt=signal.getsignal(signal.SIGINT), cwd=os.getcwd())\n"
            "before, finders = state(), list(sys.meta_path)\n"
            "import gnnaccel, gnnaccel.finder, gnnaccel.lazy\n"
            "importlib.reload(gnnaccel)\n"
            "print(state() == before, sys.meta_path == "
            "[gnnaccel.finder.GraphboltFinder, gnnaccel.lazy.LazyFinder, *finders])")
    assert run(code) == "True True"


def test_enabling_imports_no_host_and_no_torch():
    code = ("import sys, gnnaccel; gnnaccel.enable(); gnnaccel.exclude('GATConv'); "
            f"print([m for m in {HEAVY!r} if m in sys.modules])")
    assert run(code) == "[]"


@pytest.mark.parametrize("layout", ["dgl.py", "dgl/__init__.py"])
def test_another_module_by_the_name_of_a_host(tmp_path, layout):
    """A folder or file of the user's that is called dgl breaks nothing."""
    pytest.importorskip("torch")
    path = tmp_path / layout
    path.parent.mkdir(exist_ok=True)
    path.write_text("name = 'mine'\n")
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gnnaccel, dgl\n"
            "with gnnaccel.enabled(): print(dgl.name)")
    assert run(code) == "mine"


def test_import_reads_no_other_variable():
    assert run("import os; os.environ['GNNACCEL'] = os.environ['GNNACCEL_WHEN'] = 'nonsense'\n"
               "import gnnaccel; print(gnnaccel.__version__)") == gnnaccel.__version__


@pytest.mark.parametrize("name", sorted(set(_HOMES) - {"cache"}))
def test_public_name_resolves_and_is_documented(name):
    value = getattr(gnnaccel, name)
    assert inspect.getdoc(value)
    assert name in gnnaccel.__all__ and name in dir(gnnaccel)


def test_cache_is_the_cache_module():
    cache = pytest.importorskip("gnnaccel.dispatch.graph.cache")
    assert gnnaccel.cache is cache and callable(cache.clear) and callable(cache.info)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'gnnaccel' has no attribute 'enabel'"):
        _ = gnnaccel.enabel
