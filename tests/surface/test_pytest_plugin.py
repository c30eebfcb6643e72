"""The pytest plugin, in runs of their own."""
from __future__ import annotations

import configparser
import os
import subprocess
import sys
from collections import Counter

import pytest

import gnnaccel
from gnnaccel import pytest_plugin

ROOT = os.path.dirname(os.path.dirname(gnnaccel.__file__))
SUITE = """
import gnnaccel, torch, pytest
from torch_geometric.nn import GATConv
x, edges = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
def test_taken(): assert GATConv(4, 2)(x, edges).shape == (3, 2)
def test_native(): assert GATConv(4, 2, aggr="mean")(x, edges).shape == (3, 2)
def test_is_on(): assert gnnaccel.status()["enabled"] is MODE
"""


def run(folder, *options, mode=True, plugin=("-p", "gnnaccel.pytest_plugin")):
    pytest.importorskip("torch_geometric")
    (folder / "test_suite.py").write_text(SUITE.replace("MODE", str(mode)))
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("GNNACCEL", "PYTEST"))}
    env.update(PYTHONPATH=ROOT, GNNACCEL_WHEN="supported")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin,
                           *options, "test_suite.py"], cwd=folder, env=env, capture_output=True,
                          text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("more", [[], pytest.param(["-n", "2"], marks=pytest.mark.long)],
                         ids=["one process", "xdist"])
def test_a_suite_with_it_on(tmp_path, more):
    status, said = run(tmp_path, *more, "--gnnaccel")
    assert status == 0, said
    assert "1 of 2 calls taken over (torch 1)\nnative: GATConv GA201 x1\n" in said and "- gnnaccel -" in said


@pytest.mark.long
def test_strict(tmp_path):
    status, said = run(tmp_path, "--gnnaccel-strict")
    assert status == 1 and "FallbackError: GATConv would run natively" in said and "1 failed, 2 passed" in said


@pytest.mark.long
def test_without_the_option_nothing_is_on(tmp_path):
    status, said = run(tmp_path, mode=False)
    assert status == 0 and "gnnaccel -" not in said


def installed_beside(folder):
    """Metadata as pip leaves it, with this repository's entry points, in ``folder``, for a Python
    that finds the package by its path."""
    setup = configparser.ConfigParser()
    setup.read(os.path.join(ROOT, "setup.cfg"), encoding="utf-8")
    points = setup["options.entry_points"]
    about = folder / "gnnaccel-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gnnaccel\nVersion: 0\n")
    (about / "entry_points.txt").write_text("".join(f"[{group}]{lines}\n"
                                                    for group, lines in points.items()))


@pytest.mark.long
@pytest.mark.parametrize("plugin", [(), ("-p", "gnnaccel.pytest_plugin")],
                         ids=["by its entry point", "named as well"])
def test_installed_it_needs_no_naming(tmp_path, plugin):
    installed_beside(tmp_path)
    status, said = run(tmp_path, "--gnnaccel", plugin=plugin)
    assert status == 0 and "1 of 2 calls taken over (torch 1)" in said, said


def test_importing_it_is_cheap(tmp_path):
    code = ("import sys, pytest; before = set(sys.modules); import gnnaccel.pytest_plugin; "
            "print(sorted(m for m in set(sys.modules) - before if m.startswith(('gnnaccel', "
            "'torch', 'dgl', 'numpy'))))")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GNNACCEL")}
    done = subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONPATH": ROOT},
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(["gnnaccel", "gnnaccel._version", "gnnaccel.finder",
                                       "gnnaccel.lazy", "gnnaccel.pytest_plugin"]), done.stderr


@pytest.mark.parametrize("counts, lines", [
    ({}, ["no call of a layer that gnnaccel knows"]),
    ({("A", "route", "cuda"): 3, ("B", "route", "torch"): 2},
     ["5 of 5 calls taken over (cuda 3, torch 2)"]),
    ({("A", "route", "native"): 3, ("A", "reason", "GA201"): 1, ("A", "reason", "GA301"): 2},
     ["0 of 3 calls taken over", "native: A GA301 x2, A GA201 x1"])])
def test_summary(counts, lines):
    assert pytest_plugin.summary(Counter(counts)) == lines
