"""Processes that end in time, and everything that they started with them."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any


def limited(command: list[str], environment: dict[str, str], output: Any, limit: float,
            errors: Any = subprocess.STDOUT) -> int | None:
    """The exit status; None where it was ended after ``limit`` seconds. What it started goes with
    it. ``output``: a file, or None to let all through; ``errors``: a file for what goes to standard
    error, with ``output`` by default."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=None if output is None else errors, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(leader: int) -> None:
    """End the processes of the group that ``leader`` leads, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
