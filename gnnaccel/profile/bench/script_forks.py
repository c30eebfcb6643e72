"""Runs that begin with their imports done: a process that imports once, and forks another for each
run."""
from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from gnnaccel.profile.bench.script_child import load_file
from gnnaccel.profile.gain.child import kill_group

_POLL_S = 0.01
_ENDS_S = 2.0


class CannotFork(Exception):
    """The message says why runs cannot be forked here."""


class Forks:
    """A process that has loaded ``names`` (modules, or paths of ``.py`` files); ``limit``: seconds
    that it may take to load them. Raises CannotFork."""

    def __init__(self, names: list[str], environment: dict[str, str], limit: float):
        if not hasattr(os, "fork"):
            raise CannotFork("this system does not fork processes")
        # asking for a GPU otherwise begins what forked processes cannot go on with
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "gnnaccel.profile.bench.script_child",
             json.dumps({"preload": names})], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)
        try:
            ready = self._answer(limit)
        except CannotFork:
            self.close()
            raise
        if ready is not None:
            self.close()
            raise CannotFork(ready)

    def run(self, spec: dict[str, Any], environment: dict[str, str], said: dict[str, str],
            limit: float) -> int | None:
        """One run; as `child.limited`. ``said``: paths of files for ``output`` and
        ``errors``."""
        assert self._server.stdin is not None
        job = {"spec": spec, "environment": environment, "said": said, "limit": limit}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return self._answer(limit + 60.0)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        with contextlib.suppress(OSError):
            self._server.stdin.close()
        try:
            self._server.wait(_ENDS_S)  # by itself, unless a run or a module keeps it
        except subprocess.TimeoutExpired:
            self._server.terminate()
            self._server.wait()
        self._server.stdout.close()

    def _answer(self, limit: float) -> Any:
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], limit)[0]:
            raise CannotFork(f"the process that loads modules did not answer within {limit:g} s")
        line = self._server.stdout.readline()
        if not line:
            raise CannotFork("the process that loads modules ended; what it said is above")
        return json.loads(line)


# --- in that process ------------------------------------------------------------------------------

def serve(names: list[str]) -> dict[str, Any] | None:
    """Load, then fork a process for each line of standard input. Returns in each of these with its
    spec; in the server, None when there is no more to do."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print is no answer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run is not left behind
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that are running would be missing after a fork
    with _build_told():
        for name in names:
            if name.endswith(".py"):
                load_file(name)
            else:
                importlib.import_module(name)
    gc.freeze()  # what is loaded is not looked through, and so not copied, when a run ends
    _tell(answers, _cannot())
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            answers.close()
            _arrive(job)
            torch.set_num_threads(threads)
            return job["spec"]
        _tell(answers, _end(process, job["limit"]))
    return None


@contextlib.contextmanager
def _build_told() -> Iterator[None]:
    """Meanwhile a text is at hand for whoever asks torch how it was built, as PyG does when it is
    imported. torch looks for GPUs to say so. That starts CUDA's driver, which processes that are
    forked afterwards cannot use; so a forked process asks first."""
    import torch

    show = torch.__config__.show
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, show().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(process, 0)
    torch.__config__.show = lambda: text
    try:
        yield
    finally:
        torch.__config__.show = show


def _tell(answers: Any, what: Any) -> None:
    print(json.dumps(what), file=answers, flush=True)


def _cannot() -> str | None:
    """Why forked processes cannot use the GPU, if so."""
    import torch

    if torch.cuda.is_initialized():
        return "what is loaded beforehand uses the GPU already"
    process = os.fork()
    if process == 0:
        status = 1
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
            status = 0
        except (RuntimeError, AssertionError):  # AssertionError: torch has no CUDA
            traceback.print_exc()  # the reason, for whoever looks at what was said
        finally:
            os._exit(status)
    return None if _end(process, 60.0) == 0 else "the GPU does not work in forked processes"


def _arrive(job: dict[str, Any]) -> None:
    """Be a process like one that was started anew."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(job["environment"])
    for place, path, how in ((0, os.devnull, os.O_RDONLY),
                             (1, job["said"]["output"], os.O_WRONLY | os.O_CREAT),
                             (2, job["said"]["errors"], os.O_WRONLY | os.O_CREAT)):
        opened = os.open(path, how)
        os.dup2(opened, place)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    job["spec"]["start"] = time.time()


def _end(process: int, limit: float) -> int | None:
    """The exit status of the forked process, a signal's number as a negative one; None where it
    was ended at the limit."""
    last = time.monotonic() + limit
    try:
        while time.monotonic() < last:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(_POLL_S)
        return None
    finally:
        kill_group(process)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
