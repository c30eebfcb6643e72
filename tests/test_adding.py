"""docs/adding.md is true: its files are put in their places for these tests, and its tests are
collected here."""
from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from gnnaccel.adapters import pyg
from gnnaccel.cuda.runtime import nvrtc, sources
from tests.helpers import needs_nvrtc
from tests.routes import clean, emulated, gpu, one_thread, route  # noqa: F401

PAGE = Path(__file__).parents[1] / "docs" / "adding.md"
FILES = dict(re.findall(r"\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"),
                        re.S))
KERNEL = FILES["gnnaccel/cuda/src/row_norm.cu"]


def module(path: str) -> types.ModuleType:
    """The page's file as a module under the name that it would have."""
    name = path.removesuffix(".py").replace("/", ".")
    made = types.ModuleType(name)
    made.__file__ = str(PAGE)
    exec(compile("\n" * (PAGE.read_text().split(FILES[path])[0].count("\n")) + FILES[path],
                 str(PAGE), "exec"), made.__dict__)
    sys.modules[name] = made
    return made


for _path in FILES:
    if _path.endswith(".py"):
        _made = module(_path)
        globals().update({name: value for name, value in vars(_made).items()
                          if name.startswith("test_")})


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The layer registered, the kernel's source in its folder."""
    names, read = sources._names(), sources._read
    monkeypatch.setitem(pyg.LAYERS, "GeneralConv", ("layers.general", 0))
    monkeypatch.setattr(sources, "_names", lambda: (*names, "row_norm.cu"))
    monkeypatch.setattr(sources, "_read",
                        lambda name: KERNEL if name == "row_norm.cu" else read(name))
    yield
    sources.source.cache_clear()


def test_the_page_has_all_files():
    assert [Path(path).name for path in FILES] == ["general.py", "test_options_general.py",
                                                   "row_norm.cu", "row_norm.py", "test_row_norm.py"]


@needs_nvrtc
def test_the_kernel_compiles_for_gpus():
    import torch

    from gnnaccel.cuda import row_norm
    for size, dtype in (((8, 8), torch.float32), ((3, 512), torch.bfloat16)):
        assert nvrtc.compile_text(sources.source("row_norm"),
                                  row_norm.kernels(*size, dtype).defines, 90)
