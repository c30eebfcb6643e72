"""Every tensor that gnnaccel makes says on which device and of which dtype, read off the syntax trees
of all modules.

A script's `torch.set_default_device` must not move tensors that kernels or the host read, and its
`torch.set_default_dtype` must not change how large the numbers in them are.
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


def _calls(source: str) -> list[tuple[ast.Call, set[str]]]:
    """Calls of functions of torch with their names: two of ``(torch.empty if a else torch.zeros)``."""
    found = []
    for node in filter(lambda n: isinstance(n, ast.Call), ast.walk(ast.parse(source))):
        called = ([node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp)
                  else [node.func])
        names = {f.attr for f in called
                 if isinstance(f, ast.Attribute) and getattr(f.value, "id", "") == "torch"}
        found.append((node, names))
    return found


def _says(node: ast.Call, *names: str) -> bool:
    return not {keyword.arg for keyword in node.keywords}.isdisjoint({*names, None})  # **options


def undecided(source: str) -> list[tuple[int, str]]:
    """(line, text) of each call of a factory that leaves the device to the default."""
    return [(node.lineno, ast.unparse(node)) for node, names in _calls(source)
            if names & FACTORIES and not _says(node, "device")
            and not (names == {"Generator"} and node.args)]


#: functions of torch that make numbers of the default dtype, whatever their arguments are
OF_DEFAULT_DTYPE = {"empty", "zeros", "ones", "rand", "randn", "normal", "eye"}
#: what follows the default dtype as the host's own: a package stood in for, measurements by scripts
#: that set no default
AS_THE_HOST = ("adapters/standins/", "profile/bench/")


def unsized(source: str) -> list[tuple[int, str]]:
    """(line, text) of each call of a factory that leaves the dtype to the default."""
    return [(node.lineno, ast.unparse(node)) for node, names in _calls(source)
            if names & OF_DEFAULT_DTYPE and not _says(node, "dtype", "out")]


@pytest.mark.long
def test_every_tensor_says_how_large_its_numbers_are():
    missing = {f"{path.relative_to(ROOT)}:{line}": text for path in sorted(ROOT.rglob("*.py"))
               if not path.relative_to(ROOT).as_posix().startswith(AS_THE_HOST)
               for line, text in unsized(path.read_text())}
    assert not missing


@pytest.mark.parametrize("text", ["torch.empty((2, 3), device=d)", "torch.ones(3).to(x)",
                                  "(torch.empty if a else torch.zeros)(3, device=d)"])
def test_the_check_sees_what_leaves_the_dtype_open(text):
    assert unsized(text)


@pytest.mark.parametrize("text", ["torch.zeros(3, dtype=t)", "torch.zeros_like(x)",
                                  "x.new_zeros(3)", "torch.empty(3, **options)"])
def test_the_check_lets_pass_what_names_a_dtype(text):
    assert not unsized(text)


@pytest.mark.long
def test_every_tensor_says_where():
    missing = {f"{path.relative_to(ROOT)}:{line}": text for path in sorted(ROOT.rglob("*.py"))
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
