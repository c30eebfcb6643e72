"""docs/patches.md lists what enable() replaces, and every replacement says why."""
from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "gnnaccel" / "adapters").rglob("*.py"))


def calls(name: str) -> list[ast.Call]:
    """All calls of ``patches.<name>(...)`` in the adapters."""
    return [node for file in SOURCES for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            and node.func.attr == name and ast.unparse(node.func.value) == "patches"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["set", "add"])
def test_every_call_that_replaces_something_gives_a_reason(name):
    found = calls(name)
    assert len(found) > 1
    for call in found:
        given = len(call.args) > 3 or any(keyword.arg == "why" for keyword in call.keywords)
        assert given, f"patches.{name}({', '.join(map(ast.unparse, call.args))}) has no reason"


def test_reasons_are_sentences_and_functions_of_torch_are_explained_in_full():
    pytest.importorskip("torch_geometric")
    pytest.importorskip("dgl")
    from tests.record_patches import collect

    found = collect()
    assert all(found.values())
    for patch in (patch for patches in found.values() for patch in patches):
        assert patch.why.endswith(".") and patch.why[0].isupper(), patch.path
    names = {patch.path for patch in found["torch"]}
    assert {"torch.jit.script", "torch.autograd._engine_run_backward"} <= names
    assert all(patch.active and patch.cost for patch in found["torch"])


@pytest.mark.long
def test_the_page_is_up_to_date():
    pytest.importorskip("torch_geometric")
    pytest.importorskip("dgl")
    from tests.record_patches import PAGE, versions

    if versions() not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("docs/patches.md was written with other versions")
    ran = subprocess.run([sys.executable, "-m", "tests.record_patches", "--check"], cwd=ROOT,
                         env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert ran.returncode == 0, "run python -m tests.record_patches"
