"""Runs each script of the folder ``scripts`` in this process, unmodified, and prints how far its
``result`` is from what its ``native()`` computes without the packages, as JSON."""
from __future__ import annotations

import json
import runpy
import traceback
from pathlib import Path

import torch

import gnnaccel

SCRIPTS = sorted(path.stem for path in Path(__file__).with_name("scripts").glob("[a-z]*.py"))


def difference(name: str) -> str | float:
    try:
        scope = runpy.run_path(str(Path(__file__).with_name("scripts") / f"{name}.py"))
        result, expected = scope["result"], scope["native"]()
        if result.shape != expected.shape or not bool(result.any()):
            return f"{list(result.shape)} and {list(expected.shape)}"
        return float((result - expected).abs().max() / expected.abs().max())
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    gnnaccel.standins(pyg=True)
    torch.set_num_threads(1)
    print(json.dumps({name: difference(name) for name in SCRIPTS}))
