"""Every tensor that gnnaccel makes says on which device, read off the syntax trees of all modules.

A script's `torch.set_default_device` must not move tensors that kernels or the host read.
"""
from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import gnnaccel

ROOT = Path(gnnaccel.__file__).parent
#: functions of torch that a default device moves, but for those that take the device of an argument
FACTORIES = {name for name in dir(torch)
             if any(getattr(torch, name) is f for f in _device_constructors())} | {"Generator"}
#: examples of layers and inputs, made under `torch.device("cpu")` by profile/compatibility.py
UNDER_A_DEVICE = {"adapters/pyg/options.py", "adapters/dgl/options.py"}


def undecided(source: str) -> list[tuple[int, str]]:
    """(line, text) of each call of a factory that leaves the device to the default."""
    found = []
    for node in filter(lambda n: isinstance(n, ast.Call), ast.walk(ast.parse(source))):
        called = ([node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp)
                  else [node.func])
        names = {f.attr for f in called
                 if isinstance(f, ast.Attribute) and getattr(f.value, "id", "") == "torch"}
        said = {keyword.arg for keyword in node.keywords} & {"device", None}  # None: **options
        if names & FACTORIES and not said and not (names == {"Generator"} and node.args):
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_every_tensor_says_where():
    missing = {f"{path.relative_to(ROOT)}:{line}": text for path in sorted(ROOT.rglob("*.py"))
               if path.relative_to(ROOT).as_posix() not in UNDER_A_DEVICE
               for line, text in undecided(path.read_text())}
    assert not missing


@pytest.mark.parametrize("text", ["torch.zeros(3)", "torch.tensor([1], dtype=torch.int32)",
                                  "(torch.empty if a else torch.zeros)(3)",
                                  "torch.Generator()", "torch.arange(3).to(x.device)"])
def test_the_check_sees(text):
    assert undecided(text)


@pytest.mark.parametrize("text", ["torch.zeros(3, device=d)", "torch.zeros_like(x)",
                                  "x.new_zeros(3)", "torch.Generator(d)",
                                  "torch.empty(3, **options)", "torch.cumsum(x, 0)"])
def test_the_check_lets_pass(text):
    assert not undecided(text)
