"""The import rule of docs/architecture.md, read off the syntax trees of all modules.

``adapters -> dispatch -> cuda``; nothing on the call path imports ``profile``; a host or CuPy is
imported by its own room only, and inside a function.
"""
from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gnnaccel

ROOT = Path(gnnaccel.__file__).parent

#: third-party package -> the rooms that may import it, inside functions
OWNERS = {
    "torch_geometric": ("gnnaccel.adapters.pyg",),
    "torch_sparse": ("gnnaccel.adapters.pyg",),
    "dgl": ("gnnaccel.adapters.dgl",),
    "cupy": ("gnnaccel.cuda",),
}
#: room -> rooms it must not import
FORBIDDEN = {
    "gnnaccel.cuda": ("gnnaccel.dispatch", "gnnaccel.adapters", "gnnaccel.profile",
                      "gnnaccel.session"),
    "gnnaccel.dispatch": ("gnnaccel.adapters", "gnnaccel.profile", "gnnaccel.session"),
    "gnnaccel.adapters": ("gnnaccel.profile", "gnnaccel.session"),
    "gnnaccel.adapters.tracing": ("gnnaccel.adapters.pyg", "gnnaccel.adapters.dgl",
                                  "gnnaccel.adapters.plain"),
    "gnnaccel.adapters.pyg": ("gnnaccel.adapters.dgl",),
    "gnnaccel.adapters.dgl": ("gnnaccel.adapters.pyg",),
    "gnnaccel.errors": ("gnnaccel.cuda", "gnnaccel.dispatch", "gnnaccel.adapters",
                        "gnnaccel.profile", "gnnaccel.session"),
}


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imports(source: str, module: str, package: bool) -> list[tuple[str, bool, int]]:
    """Everything imported: (absolute name, inside a function?, line). ``from a import b`` counts as
    a and a.b."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[:len(parts) - node.level + package]
                base = ".".join([*parts, *([base] if base else [])])
            found.append((base, inside, node.lineno))
            found.extend((f"{base}.{alias.name}", inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = (node.func.attr
                      if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.args[0].value, inside, node.lineno))
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def violations(source: str, module: str, package: bool = False) -> list[str]:
    wrong = []
    for name, inside, line in imports(source, module, package):
        top = name.partition(".")[0]
        if top in OWNERS:
            if not any(within(module, room) for room in OWNERS[top]):
                wrong.append(f"{module}:{line} imports {top}; only {', '.join(OWNERS[top])} may")
            elif not inside:
                wrong.append(
                    f"{module}:{line} imports {top} at module level; do it inside a function")
        for room, banned in FORBIDDEN.items():
            for ban in banned:
                if within(module, room) and within(name, ban):
                    wrong.append(f"{module}:{line} imports {name}; {room} may not")
    return wrong


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.mark.parametrize("module, path", modules(),
                         ids=lambda value: value if isinstance(value, str) else "")
def test_module_keeps_the_import_rule(module, path):
    assert violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module, source", [
    ("gnnaccel.dispatch.router", "def f():\n    import torch_geometric.utils"),
    ("gnnaccel.dispatch.router",
     "def f():\n    import importlib\n    importlib.import_module('cupy')"),
    ("gnnaccel.dispatch.router", "import cupy"),
    ("gnnaccel.dispatch.router", "from gnnaccel import adapters"),
    ("gnnaccel.dispatch.router", "def f():\n    from gnnaccel.profile import sinks"),
    ("gnnaccel.dispatch.router", "from .. import profile"),
    ("gnnaccel.dispatch.router", "from ..session import enable"),
    ("gnnaccel.cuda.runtime.driver", "import cupy"),
    ("gnnaccel.cuda.runtime.driver", "if True:\n    from cupy import RawModule"),
    ("gnnaccel.cuda.runtime.driver", "from gnnaccel.dispatch.ir import program"),
    ("gnnaccel.cuda.runtime.driver", "from gnnaccel import adapters"),
    ("gnnaccel.adapters.patching", "def f():\n    import torch_geometric"),
    ("gnnaccel.adapters.pyg.layers.gat", "from torch_geometric.nn import GATConv"),
    ("gnnaccel.adapters.pyg.layers.gat", "class A:\n    import torch_geometric"),
    ("gnnaccel.adapters.pyg.layers.gat", "def f():\n    import dgl"),
    ("gnnaccel.adapters.dgl", "from gnnaccel.adapters import pyg"),
    ("gnnaccel.adapters.dgl.udf.memory", "from gnnaccel.adapters.pyg.propagate import reading"),
    ("gnnaccel.adapters.dgl.udf.memory", "from gnnaccel.adapters.pyg import guards"),
    ("gnnaccel.adapters.tracing.tracing", "from gnnaccel.adapters.pyg import guards"),
    ("gnnaccel.adapters.tracing.tracing", "def f():\n    import torch_geometric"),
    ("gnnaccel.adapters.pyg.layers.gat", "import gnnaccel.profile.sinks"),
    ("gnnaccel.profile.bench", "def f():\n    import torch_geometric"),
    ("gnnaccel.session", "def f():\n    import dgl"),
])
def test_the_check_sees_a_violation(module, source):
    assert violations(source, module)


@pytest.mark.parametrize("module, source, package", [
    ("gnnaccel.dispatch.router", "from gnnaccel.cuda.runtime import driver\nimport torch", False),
    ("gnnaccel.dispatch", "from .graph import GraphView", True),
    ("gnnaccel.cuda.runtime.driver", "def f():\n    import cupy", False),
    ("gnnaccel.adapters.pyg", "def f():\n    from torch_geometric.nn import GATConv", True),
    ("gnnaccel.adapters.pyg.layers.gat",
     "from gnnaccel.dispatch import router\nfrom ..patching import PatchSet", False),
    ("gnnaccel.adapters.dgl", "def f():\n    import dgl", True),
    ("gnnaccel.adapters.dgl.udf.memory",
     "from gnnaccel.adapters.tracing.tracing import looks", False),
    ("gnnaccel.profile.bench",
     "from gnnaccel.adapters.pyg import bench\nfrom gnnaccel import session", False),
])
def test_the_check_lets_pass_what_is_allowed(module, source, package):
    assert violations(source, module, package) == []


def test_one_module_writes_the_records_of_calls():
    """What a record says of a call must not depend on whether it was a layer, an aggregation or a
    single operation."""
    writers = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
               if "records.new(" in path.read_text(encoding="utf-8")]
    assert writers == ["dispatch/observe/decisions.py"]


def test_files_stay_small():
    """A file of more than 400 lines holds more than one idea."""
    long = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
            if path.read_text(encoding="utf-8").count("\n") > 400}
    assert not long


def test_the_planner_is_found_at_its_former_place():
    from gnnaccel import dispatch
    from gnnaccel.dispatch import planner
    from gnnaccel.dispatch.plan import planner as moved

    assert planner is moved
    with pytest.raises(AttributeError, match="no attribute 'elsewhere'"):
        dispatch.elsewhere  # noqa: B018
