"""``enable(offload=)``: what an `offload` block does, until it is asked for otherwise."""
from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

import gnnaccel
from gnnaccel.dispatch.distributed import state
from gnnaccel.errors import OffloadError
from tests.offload import checks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 20_000


def bands():
    """How many calls ran in bands since gnnaccel was enabled so; None where none would."""
    return None if state.divider is None else sum(state.divider.ran.values())


def agree(found, right):
    assert max(map(checks.difference, found, right)) < 1e-5


@pytest.fixture
def right():
    return checks.trained("cpu", 60, 6, 400)


def test_it_holds_until_it_is_asked_for_otherwise(right):
    with checks.small_bands():
        gnnaccel.enable(offload=LIMIT)
        agree(checks.trained(DEVICE, 60, 6, 400), right)
        assert bands() > 0 and gnnaccel.status()["config"]["offload"] == LIMIT
        before = state.divider
        gnnaccel.enable(when="supported")  # leaves the others as they are
        assert state.divider is before
        gnnaccel.enable(offload="auto")
        assert state.divider is not before and bands() == 0
        gnnaccel.enable(offload=False)
        assert bands() is None and _get_current_function_mode() is None
        agree(checks.trained("cpu", 60, 6, 400), right)
        gnnaccel.enable(offload=LIMIT)
        gnnaccel.disable()
    assert bands() is None and _get_current_function_mode() is None


@pytest.mark.long
def test_blocks(right):
    with checks.small_bands():
        with gnnaccel.enabled(offload=LIMIT):
            agree(checks.trained(DEVICE, 60, 6, 400), right)
            outer = state.divider
            with gnnaccel.enabled(offload=False):
                assert bands() is None
                agree(checks.trained("cpu", 60, 6, 400), right)
            with gnnaccel.enabled(offload="auto"), gnnaccel.enabled(when="supported"):
                assert state.divider is outer  # that of the outer block
            count = bands()
            agree(checks.trained(DEVICE, 60, 6, 400), right)
            assert bands() == 2 * count
            with pytest.raises(OffloadError, match="another offload"), gnnaccel.offload():
                pass
        assert bands() is None and _get_current_function_mode() is None


class Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_disabled_within_a_mode_of_the_users(right):
    with checks.small_bands():
        gnnaccel.enable(offload=LIMIT)
        ours = _get_current_function_mode()
        with Counting() as mode:
            gnnaccel.disable()
            assert _get_current_function_mode() is mode
            agree(checks.trained("cpu", 60, 6, 400), right)
        assert mode.count and _get_current_function_mode() is ours  # it does nothing
        agree(checks.trained("cpu", 60, 6, 400), right)
        ours.__exit__(None, None, None)


def test_disabled_in_another_thread(right):
    gnnaccel.enable(offload=LIMIT)
    ours = _get_current_function_mode()
    thread = threading.Thread(target=gnnaccel.disable)
    thread.start()
    thread.join()
    assert bands() is None
    with checks.small_bands():
        agree(checks.trained("cpu", 60, 6, 400), right)
    ours.__exit__(None, None, None)


@pytest.mark.parametrize("wrong", [0, -1, True, "all", 1.5])
def test_wrong_values(wrong):
    with pytest.raises(ValueError, match="use 'auto', or the bytes"):
        gnnaccel.enable(offload=wrong)
    assert bands() is None and not gnnaccel.status()["enabled"]


def test_where_it_cannot_be_everything_is_as_before():
    gnnaccel.enable()
    with gnnaccel.offload(LIMIT):
        with pytest.raises(OffloadError, match="another offload"):
            gnnaccel.enable(offload="auto")
        assert gnnaccel.status()["config"]["offload"] is None
    assert bands() is None


@pytest.mark.long
def test_from_the_command_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import gnnaccel\nprint(gnnaccel.status()['config']['offload'])\n")
    said = subprocess.run([sys.executable, "-m", "gnnaccel", "--offload", str(script)],
                          capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert said.returncode == 0 and said.stdout.strip() == "auto", said.stderr
