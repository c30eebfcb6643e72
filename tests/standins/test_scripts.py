"""Scripts in the style of public GNN repositories run unmodified, with values as computed natively:
results after some steps of training, or with gradients."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standins.run_scripts import SCRIPTS


@pytest.fixture(scope="module")
def differences():
    pytest.importorskip("torch_geometric")
    done = subprocess.run([sys.executable, "-m", "tests.standins.run_scripts"], text=True,
                          capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(differences, name):
    found = differences[name]
    assert isinstance(found, float), found
    assert found < 1e-5


def test_there_are_ten():
    assert len(SCRIPTS) >= 10
