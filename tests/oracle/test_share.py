"""A fixed share of the oracle, in every run of the suite: the same cases each time."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from . import worker
from .backends import Backend
from .judge import is_alarm

SEED = 4_000_000
#: part, backend, cases
SHARES = [
    ("table", "cpu", 100),
    ("table", "emulated", 40),
    ("dgl", "cpu", 50),
    ("dgl", "emulated", 15),
    ("histories", "cpu", 8),
    ("histories", "emulated", 4),
    ("messages", "cpu", 30),
    ("messages", "emulated", 15),
    ("metagraphs", "cpu", 20),
    ("metagraphs", "emulated", 10),
    ("programs", "cpu", 8),
    ("programs", "emulated", 4),
    ("scripts", "cpu", 3),
    ("scripts", "emulated", 2),
]


@pytest.mark.parametrize("part, name, cases", SHARES, ids=[f"{p}-{b}" for p, b, _ in SHARES])
def test_no_case_of_the_share_alarms(part, name, cases):
    if name == "emulated" and shutil.which("g++") is None:
        pytest.skip("the CPU emulation of kernels needs g++")
    alarms, backend = [], Backend(name)
    with backend.session():
        check = worker.part(part, backend)
        if check is None:
            pytest.skip(f"{part} cannot run here")
        for seed in range(SEED, SEED + cases):
            mode = "" if part != "table" or "compiled" not in drawn(seed) else "grad"
            what, wrong, _ = check(seed, "", mode)
            if is_alarm(wrong):
                alarms.append(f"{part} {what} --seed {seed} --backend {name}: {wrong}")
    assert not alarms, "\n".join(alarms)


def drawn(seed: int) -> tuple[str, str]:
    from .table import drawn as layer_and_mode

    return layer_and_mode(seed)


@pytest.mark.parametrize(
    "part, cases", [("table", 150), ("histories", 10), ("messages", 40), ("captures", 12)]
)
@pytest.mark.gpu
def test_no_case_alarms_on_a_gpu(part, cases, tmp_path):
    """In processes of their own: a fault of the device, or a capture that is refused, ends one."""
    from .driver import Task, run

    summary = run([Task(part, "gpu", SEED, 1, 120, cases)], 1)
    assert not summary.alarms, "\n".join(alarm["reproduce"] + ": " + alarm["text"]
                                         for alarm in summary.alarms)
    assert sum(amounts["cases"] for amounts in summary.counts.values())
