"""The code graph of a small package tree: nodes, typed edges, features, labels, cache."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import code_graph
import code_parse

TREE = {
    "alpha/__init__.py": "from .core import Base, run\n",
    "alpha/core.py": '''
import beta
from beta.tools import *

class Base:
    """Frobnicates alpha things."""
    def step(self, rateLimit, max_size): ...

class Child(Base):
    def go(self):
        self.step(1, 2)
        helper()

def run():
    def inner(): ...
    inner()
    Base().uniquely_named()
    print(len([]))
''',
    "alpha/broken.py": "def f(:\n",
    "alpha/tests/test_core.py": "def test(): ...\n",
    "beta/__init__.py": "",
    "beta/tools.py": '''
from alpha import Base as Start, run

def helper(): run()

class Other(Start):
    def uniquely_named(self): ...
    async def len(self): ...
''',
    "tiny.py": "def only(): ...\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def graph(folder: Path) -> code_graph.CodeGraph:
    return code_graph.build(code_graph.sources_in(folder), min_nodes=4)


def edges(graph: code_graph.CodeGraph, relation: str) -> set[tuple[str, str]]:
    names = graph.node_names()
    wanted = graph.edge_index[:, graph.edge_type == code_graph.RELATIONS.index(relation)]
    return {(names[source], names[target]) for source, target in wanted.T}


def test_nodes_have_dotted_names_and_kinds(graph):
    kinds = dict(zip(graph.node_names(), (code_parse.KINDS[kind] for kind in graph.kind)))
    assert kinds["alpha"] == kinds["alpha.core"] == kinds["tiny"] == "module"
    assert kinds["alpha.core.Base"] == "class"
    assert kinds["alpha.core.Base.step"] == kinds["alpha.core.run.inner"] == kinds[
        "beta.tools.Other.len"] == "function"
    assert not any("tests" in name for name in kinds)


def test_unparsable_files_are_counted_and_left_out(graph):
    assert graph.files.tolist() == [5, 1]
    assert "alpha.broken" not in graph.node_names()


def test_defines_edges(graph):
    assert {("alpha.core", "alpha.core.Base"), ("alpha.core.Base", "alpha.core.Base.step"),
            ("alpha.core.run", "alpha.core.run.inner")} <= edges(graph, "defines")


def test_imports_edges_reach_modules_and_definitions(graph):
    found = edges(graph, "imports")
    assert {("alpha.core", "beta"), ("alpha.core", "beta.tools"),
            ("alpha", "alpha.core.Base")} <= found
    assert ("beta.tools", "alpha.core.run") in found  # re-exported by alpha/__init__.py


def test_inherits_edges(graph):
    base = "alpha.core.Base"  # beta reaches it under another name, through alpha/__init__.py
    assert edges(graph, "inherits") == {("alpha.core.Child", base), ("beta.tools.Other", base)}


def test_calls_edges(graph):
    assert edges(graph, "calls") == {
        ("alpha.core.Child.go", "alpha.core.Base.step"),  # self.step, found in the base class
        ("alpha.core.Child.go", "beta.tools.helper"),  # from a star import
        ("alpha.core.run", "alpha.core.run.inner"),
        ("alpha.core.run", "alpha.core.Base"),
        ("alpha.core.run", "beta.tools.Other.uniquely_named"),  # a name that exists once; the built-in len is not one
        ("beta.tools.helper", "alpha.core.run"),
    }


def test_features_are_hashed_name_argument_and_docstring_tokens(graph):
    expected = np.zeros(code_parse.FEATURES)
    for token in ("step", "rate", "limit", "max", "size"):
        code = code_parse.hash_code(token)
        expected[abs(code) - 1] += np.sign(code)
    row = graph.x[graph.node_names().index("alpha.core.Base.step")].astype(float)
    assert np.allclose(row, expected / np.linalg.norm(expected), atol=1e-3)


def test_features_do_not_name_the_package(graph):
    names = graph.node_names()
    assert not graph.x[names.index("alpha")].any() and not graph.x[names.index("beta")].any()
    hidden = code_parse._Visitor(None,
                                 code_graph.package_tokens({"torch_geometric", "PIL", "stdlib"}),
                                 None)
    codes = hidden._codes("TorchLoader", ["torch_geometric", "pil_image"],
                          "Geometric PIL data of stdlib")
    wanted = ("loader", "image", "data", "of", "stdlib")
    assert codes == [code_parse.hash_code(token) for token in wanted]


def test_labels_are_packages_with_enough_nodes(graph):
    labels = dict(zip(graph.node_names(), graph.y))
    assert sorted(graph.classes) == ["alpha", "beta"]
    assert graph.classes[labels["alpha.core.run"]] == "alpha" and graph.classes[
        labels["beta.tools"]] == "beta"
    assert labels["tiny"] == labels["tiny.only"] == -1


def test_split_is_a_fixed_partition_of_the_labelled_nodes():
    y = np.array([0, 1, -1, 2, 0] * 40)
    masks = np.stack(code_graph.split(y))
    assert masks.sum(axis=1).tolist() == [96, 32, 32]
    assert (masks.sum(axis=0) == (y >= 0)).all()
    assert (masks == np.stack(code_graph.split(y))).all()


def test_building_is_deterministic_and_the_cache_keeps_everything(graph, folder, tmp_path):
    path = tmp_path / "cache" / "graph.npz"
    code_graph.save(graph, path)
    again = code_graph.build(code_graph.sources_in(folder), min_nodes=4)
    for other in (again, code_graph.read(path)):
        for name, value in vars(graph).items():
            assert np.array_equal(getattr(other, name),
                                  value) and getattr(other, name).dtype == value.dtype, name
    assert [file.name for file in path.parent.iterdir()] == ["graph.npz"]


def test_load_builds_once(monkeypatch, folder, tmp_path):
    pytest.importorskip("platformdirs")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.setattr(code_graph, "all_sources", lambda max_files: code_graph.sources_in(folder))
    first = code_graph.load(progress=False)
    monkeypatch.setattr(code_graph, "all_sources", lambda max_files: pytest.fail("built again"))
    assert code_graph.load(progress=False).node_names() == first.node_names()
    assert f"{len(first.y)} nodes" in code_graph.summary(first)


def test_large_packages_come_first_under_a_cap(monkeypatch, folder):
    monkeypatch.setattr(code_graph, "site_folders", lambda: [folder])
    monkeypatch.setattr(code_graph.sysconfig, "get_path", lambda key: str(folder / "beta"))
    kept = {source.package for source in code_graph.all_sources(max_files=4)}
    assert kept == {"alpha", "stdlib"}  # beta has no room left


@pytest.mark.parametrize("identifier, expected", [
    ("snake_case_2", ["snake", "case", "2"]), ("camelCase", ["camel", "case"]),
    ("HTTPServer", ["http", "server"]),
    ("__init__", ["init"]), ("X", ["x"]),
])
def test_identifiers_are_split_into_tokens(identifier, expected):
    assert code_parse.tokens(identifier) == expected
