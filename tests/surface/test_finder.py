"""The finder for ``dgl.graphbolt``: stands in where that part of DGL cannot be loaded, is in nobody's way elsewhere. DGL and
torchdata are made up here; tests/dgl has the real one."""
from __future__ import annotations

import os
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from gnnaccel.finder import GraphboltFinder

ROOT = Path(__file__).resolve().parents[2]
TORCH = "9.9.9"
LIBRARY = {"darwin": "libgraphbolt_pytorch_9.9.9.dylib", "win32": "graphbolt_pytorch_9.9.9.dll"}.get(
    sys.platform, "libgraphbolt_pytorch_9.9.9.so")
LIBINFO = "import os\ndef find_lib_path():\n    return [os.path.join(os.path.dirname(os.path.dirname(__file__)), 'libdgl.so')]\n"
DGL = {
    "torch/__init__.py": f"__version__ = '{TORCH}+cpu'\n",
    "dgl/__init__.py": "import torch\nfrom . import _ffi\nfrom . import graphbolt as gb\nfrom .part import *\n",
    "dgl/part.py": "from . import graphbolt as gb\ndef plain(x):\n    return not isinstance(x, gb.FusedCSCSamplingGraph)\n",
    "dgl/_ffi/__init__.py": "",
    "dgl/_ffi/libinfo.py": LIBINFO,
    "dgl/graphbolt/__init__.py": "from .base import *\nfrom . import impl\nREAL = True\nclass FusedCSCSamplingGraph: pass\n",
    "dgl/graphbolt/base.py": "from torchdata.datapipes.iter import IterDataPipe\nclass ItemSampler: pass\n",
    "dgl/graphbolt/impl/__init__.py": "import torchdata.dataloader2.graph as dp_utils\ntry:\n    import torchdata.nodes\n"
                                      "except ImportError:\n    pass\n",
}
TORCHDATA = {"torchdata/__init__.py": "", "torchdata/datapipes/__init__.py": "", "torchdata/datapipes/iter.py": "class IterDataPipe: pass\n",
             "torchdata/dataloader2/__init__.py": "", "torchdata/dataloader2/graph/__init__.py": ""}
WITH_LIBRARY = {f"dgl/graphbolt/{LIBRARY}": ""}
COMPLETE = {**DGL, **TORCHDATA, **WITH_LIBRARY}


@pytest.fixture
def run(tmp_path):
    """Runs code in a process that sees these files as packages, after ``import gnnaccel``; gives what it prints."""
    def run(files: dict[str, str], code: str, first: str = "import sys, gnnaccel\n") -> str:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


CAUGHT = "def caught(f):\n    try:\n        print(f())\n    except Exception as error:\n        print(type(error).__name__, error)\n"


def test_a_complete_installation_is_left_alone(run):
    code = ("import dgl, importlib, importlib.util\nimport dgl.graphbolt.impl\nfrom dgl.graphbolt import ItemSampler\n"
            "print(dgl.graphbolt.REAL, type(dgl.graphbolt.__loader__).__name__, 'gnnaccel.adapters' in sys.modules)\n"
            "print(importlib.reload(dgl.graphbolt).REAL, importlib.util.find_spec('dgl.graphbolt.no_such'))\n")
    assert run(COMPLETE, code) == "True SourceFileLoader True\nTrue None"


def test_what_a_complete_installation_raises_comes_through(run):
    broken = {**COMPLETE, "dgl/graphbolt/base.py": "raise RuntimeError('its own')\n"}
    assert run(broken, CAUGHT + "caught(lambda: __import__('dgl'))") == "RuntimeError its own"


@pytest.mark.parametrize("files, told", [
    ({**DGL, **TORCHDATA}, f"no graphbolt library for torch {TORCH} ({LIBRARY})"),
    (DGL, f"no graphbolt library for torch {TORCH} ({LIBRARY})"),
    ({**DGL, **WITH_LIBRARY}, "no torchdata.dataloader2.graph, torchdata.datapipes.iter"),
    ({**DGL, **WITH_LIBRARY, "torchdata/__init__.py": "raise RuntimeError('imported')\n"}, "torchdata 0.9 or older"),
], ids=["no library", "neither", "no torchdata", "torchdata without datapipes"])
def test_it_stands_in_where_something_is_missing(run, files, told):
    code = CAUGHT + ("import dgl\nprint(dgl.plain(3), hasattr(dgl.graphbolt, 'REAL'), dgl.graphbolt.__path__)\n"
                     "caught(lambda: dgl.graphbolt.ItemSampler)\n"
                     "caught(lambda: exec('from dgl.graphbolt import ItemSampler'))\n"
                     "caught(lambda: exec('import dgl.graphbolt.impl'))\n"
                     "caught(lambda: dgl.graphbolt.FusedCSCSamplingGraph())\n"
                     "print(dgl.graphbolt.__doc__)\n")
    first, *lines, doc = run(files, code).splitlines()
    assert first == "True False []" and told in doc
    starts = ["AttributeError dgl.graphbolt.ItemSampler is not there: ", "ModuleNotFoundError dgl.graphbolt.ItemSampler is not there: ",
              "ModuleNotFoundError dgl.graphbolt.impl is not there: ", "ImportError dgl.graphbolt.FusedCSCSamplingGraph cannot be made: "]
    assert len(lines) == 4
    for line, start in zip(lines, starts):
        assert line.startswith(start) and told in line and "install" in line


def test_a_dgl_without_graphbolt(run):
    older = {**{path: text for path, text in DGL.items() if "graphbolt" not in path}, "dgl/__init__.py": "import torch\n"}
    del older["dgl/part.py"]
    assert run(older, CAUGHT + "import dgl\ncaught(lambda: exec('import dgl.graphbolt'))") == \
        "ModuleNotFoundError No module named 'dgl.graphbolt'"


def test_no_dgl_and_no_torch(run):
    assert run({}, CAUGHT + "sys.path[:] = [p for p in sys.path if 'packages' not in p]\ncaught(lambda: __import__('dgl.graphbolt'))") == \
        "ModuleNotFoundError No module named 'dgl'"


def test_tools_that_look_through_modules(run):
    code = ("import dgl, importlib, importlib.util, inspect, pickle, pkgutil\n"
            "print(importlib.util.find_spec('dgl.graphbolt').origin, list(pkgutil.iter_modules(dgl.graphbolt.__path__)))\n"
            "again = importlib.reload(dgl.graphbolt)\n"
            "print(again is dgl.graphbolt, inspect.getmodule(dgl.plain).__name__, pickle.loads(pickle.dumps(dgl.plain)) is dgl.plain)\n"
            "cls = dgl.graphbolt.FusedCSCSamplingGraph\n"
            "print(pickle.loads(pickle.dumps(cls)) is cls, cls)\n"
            "def nameless(): pass\n"
            "nameless.__module__ = None\n"
            "print(pickle.whichmodule(nameless, 'nameless'))\n")  # asks every module for the name
    assert run(DGL, code).splitlines() == [
        "stand-in by gnnaccel []", "True dgl.part True", "True <class 'dgl.graphbolt.FusedCSCSamplingGraph'>", "__main__"]


def test_gnnaccel_imported_after_dgl_changes_nothing(run):
    code = "import gnnaccel\nprint(dgl.graphbolt.REAL)\n"
    assert run(COMPLETE, code, "import sys, dgl\n") == "True"


def test_it_answers_for_no_other_module():
    for name in ("dgl", "dgl.nn", "dgl.graphbolts", "graphbolt", "torch", "dgl.nn.graphbolt"):
        assert GraphboltFinder.find_spec(name) is None
    assert sys.meta_path.count(GraphboltFinder) == 1
    assert min(timeit.repeat(lambda: GraphboltFinder.find_spec("torch.nn"), number=1000, repeat=5)) < 0.01  # 10 us each
