"""docs/compatibility.md says what the adapters and kernels say now."""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import matrix

DOC = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"


@pytest.mark.long
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch_geometric", "dgl"))),
                    reason="it is about both hosts")
def test_it_is_current():
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("GNNACCEL")}
    made = subprocess.run([sys.executable, "-m", "tests.record_compatibility"],
                          capture_output=True, text=True, check=False,
                          env={**environment, "PYTHONPATH": str(DOC.parents[1])})
    assert made.returncode == 0, made.stderr
    shown = made.stdout + "\n" + matrix.table(matrix.load())
    assert shown == DOC.read_text(encoding="utf-8"), (
        "(python -m tests.record_compatibility; echo; python -m tests.matrix --table) "
        "> docs/compatibility.md")


def test_every_code_in_it_is_documented():
    codes = set(re.findall(r"GA\d+", DOC.read_text(encoding="utf-8")))
    assert codes and codes <= set(re.findall(r"GA\d+",
                                             (DOC.parent
                                              / "reasons.md").read_text(encoding="utf-8")))
