"""A clean session around each test, and the routes that are held against DGL's own layers."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
_INSTALLED = importlib.util.find_spec("dgl") is not None
if _INSTALLED:  # then it has to import
    import gnnaccel  # noqa: F401  before dgl, which does not import without it on a current torch
    import dgl
else:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")
                      if path.name != "test_installed.py"]

from tests.routes import by_torch, clean, emulated, one_thread, opened, stated  # noqa: E402, F401


@pytest.fixture(params=["torch", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def route(request):
    """The torch backend, the CUDA kernels emulated, the CUDA kernels on a GPU, if DGL knows
    GPUs."""
    with opened(request.param) as found:
        if found.device.type == "cuda":
            try:
                dgl.graph(([0], [0])).to(found.device)
            except dgl.DGLError:
                pytest.skip("this DGL was built without CUDA")
        yield found
