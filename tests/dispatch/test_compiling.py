"""Kernels that are compiled beside the program, while calls run natively."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel.cuda.runtime import background, driver
from gnnaccel.cuda.structures import structure
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy import config as configs

ROOT = Path(__file__).resolve().parents[2]


def finished() -> None:
    until = time.monotonic() + 20
    while background.pending():
        assert time.monotonic() < until, "the background never ends"
        time.sleep(0.005)


class Early:
    """A driver that notes what is to be compiled early."""

    def __init__(self):
        self.asked: list = []
        self.there: list = []

    def ahead(self, compile_):
        self.asked.append(("ahead", compile_))

    def together(self, compile_):
        self.asked.append(("together", compile_))

    def ready(self, compile_):
        return compile_ in self.there


@pytest.fixture
def beside(monkeypatch, tmp_path):
    """A machine with a GPU and no compiled kernels, as far as `first_use` can tell."""
    one = Early()
    monkeypatch.setattr(driver, "current", lambda: one)
    monkeypatch.setattr(structure, "prepare", lambda: None)
    monkeypatch.setattr(compiling, "_folder", lambda: tmp_path)
    monkeypatch.setattr(compiling, "_mark_of", lambda key: tmp_path / str(abs(hash(key))))
    compiling.forget()
    yield one
    finished()
    compiling.forget()


class Compile:
    """Compiles when it is allowed to."""

    def __init__(self, error: Exception | None = None):
        self.go, self.threads, self.error = threading.Event(), [], error

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        assert self.threads[-1] is threading.main_thread() or self.go.wait(20)
        if self.error is not None:
            raise self.error


def test_a_call_is_native_until_its_kernels_are_there(beside, monkeypatch):
    work = Compile()
    monkeypatch.delenv("GNNACCEL_FIRST_USE", raising=False)
    with gnnaccel.enabled():
        before = configs.current().epoch
        for _ in range(3):
            assert compiling.problem("k", work).code == "GA408"
        assert background.pending() == 1
        assert gnnaccel.status()["compiled"]["pending"] == 1
        work.go.set()
        finished()
        assert compiling.problem("k", work) is None
        assert configs.current().epoch > before, "what was decided before still holds"
    assert len(work.threads) == 1 and work.threads[0] is not threading.main_thread()


def test_new_kernels_are_compiled_side_by_side_and_likely_ones_ahead(beside):
    def later():
        pass

    first, prepare = Compile(), structure.prepare
    with gnnaccel.enabled():
        assert compiling.problem("k", first, later=later) is None
        assert beside.asked == [("ahead", prepare), ("together", first), ("ahead", later)]
        assert compiling.problem("k", first, later=later) is None
        assert len(beside.asked) == 3 and len(first.threads) == 1
        compiling.forget()  # another process: they are on disk
        assert compiling.problem("k", first, later=later) is None
        assert len(beside.asked) == 3 and len(first.threads) == 2
        failing = Compile(driver.CompileError("line 3"))
        assert compiling.problem("other", failing, later=later).code == "GA403"
        assert beside.asked[3:] == [("ahead", prepare), ("together", failing)]


@pytest.mark.long
def test_training_brings_the_kernels_of_evaluation(monkeypatch):
    """What is compiled ahead is what evaluation asks for."""
    geometric = pytest.importorskip("torch_geometric.nn")
    from tests.emulation.emulator import EmulatedDriver

    said = []
    problem = compiling.problem

    def listen(key, compile_, config=None, later=None):
        said.append((compile_, later))
        return problem(key, compile_, config, later)

    def asked(compile_):
        class Asked(EmulatedDriver):
            def kernel(self, family, entry, defines=()):
                of.add((family, entry, defines))
                return super().kernel(family, entry, defines)
        of: set = set()
        with driver.using(Asked()):
            compile_()
        return of

    monkeypatch.setattr(compiling, "problem", listen)
    x, edges = torch.randn(30, 8), torch.randint(0, 30, (2, 200))
    for layer in (geometric.GATConv(8, 4, heads=2, dropout=0.5), geometric.GATv2Conv(8, 4)):
        said.clear()
        with driver.using(EmulatedDriver()), gnnaccel.enabled(when="supported"):
            layer(x, edges)
            training = [pair for pair in said if pair[1] is not None]
            said.clear()
            with torch.no_grad():
                layer.eval()(x, edges)
        assert training and said and all(later is None for _, later in said)
        assert asked(said[0][0]) <= asked(training[0][1])


def test_a_call_of_another_size_that_needs_no_new_kernel_does_not_wait(beside):
    work = Compile()
    beside.there.append(work)
    with gnnaccel.enabled(first_use="background"):
        before = configs.current().epoch
        assert compiling.problem("another size", work) is None
        assert configs.current().epoch == before, "all was decided anew for nothing"
    assert work.threads == [threading.main_thread()]


def test_what_does_not_compile_says_so(beside):
    work = Compile(driver.CompileError("line 3\nmore"))
    work.go.set()
    with gnnaccel.enabled(first_use="background"):
        assert compiling.problem("k", work).code == "GA408"
        finished()
        for _ in range(2):
            assert compiling.problem("k", work).code == "GA403"
    assert len(work.threads) == 1


def test_an_error_that_is_not_the_compilers_ends_the_waiting(beside, capfd):
    broken, next_ = Compile(OSError("no space\non disk")), Compile()
    broken.go.set()
    next_.go.set()
    with gnnaccel.enabled(first_use="background"):
        before = configs.current().epoch
        assert compiling.problem("k", broken).code == "GA408"
        finished()
        why = compiling.problem("k", broken)
        assert why.code == "GA403" and "OSError: no space" in str(why)
        assert configs.current().epoch > before
        assert compiling.problem("next", next_).code == "GA408"  # the thread goes on
        finished()
        assert compiling.problem("next", next_) is None
    assert "Traceback" not in capfd.readouterr().err


def test_kernels_are_compiled_for_the_device_of_the_thread_that_asks(beside, monkeypatch):
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append((self.index, threading.current_thread() is threading.main_thread()))

        def __exit__(self, *_):
            pass

    work = Compile()
    work.go.set()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", Device)
    with gnnaccel.enabled(first_use="background"):
        assert compiling.problem("k", work).code == "GA408"
        finished()
    assert entered == [(3, False)] and len(work.threads) == 1


def test_what_this_machine_has_compiled_before_is_waited_for(beside):
    first, second = Compile(), Compile()
    with gnnaccel.enabled(first_use="wait"):
        assert compiling.problem("k", first) is None
    compiling.forget()  # another process
    with gnnaccel.enabled(first_use="background"):
        assert compiling.problem("k", second) is None
        assert compiling.problem("another", second).code == "GA408"
        second.go.set()


@pytest.mark.parametrize("options", [dict(first_use="wait"), dict(when="supported"),
                                     dict(backend="cuda"), dict(on_fallback="warn")], ids=str)
def test_options_with_which_calls_wait(beside, options):
    work = Compile()
    with gnnaccel.enabled(**{"first_use": "background", **options}):
        assert compiling.problem("k", work) is None
    assert work.threads == [threading.main_thread()]


def test_deterministic_mode_and_checkpoints_wait(beside):
    with gnnaccel.enabled(first_use="background"):
        torch.use_deterministic_algorithms(True)
        try:
            assert compiling.problem("k", Compile()) is None
        finally:
            torch.use_deterministic_algorithms(False)
        seen = []

        def inside(x):
            seen.append(compiling.problem("other", Compile()))
            return x * x

        checkpoint(inside, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
        assert seen == [None, None]


def test_who_must_not_run_natively_does_not_wait_for_the_background(beside):
    work = Compile()
    with gnnaccel.enabled(first_use="background"):
        assert compiling.problem("k", work).code == "GA408"
        with gnnaccel.enabled(when="supported"):
            assert compiling.problem("k", work) is None
        work.go.set()
        finished()
        assert compiling.problem("k", work) is None


def test_fewer_threads_beside_a_program_that_goes_on(monkeypatch):
    monkeypatch.setattr(background, "_workers", background._Workers())
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    go, ended = threading.Event(), threading.Semaphore(0)

    def work():
        go.wait(20)
        ended.release()

    def within():  # shares its own work with nobody else
        background.share([work] * 20)

    for _ in range(20):
        background.submit(work)
    background.submit(within)
    assert len(background._workers.pieces) == 4
    go.set()
    background.share([work] * 20)
    assert len(background._workers.pieces) <= 12
    for _ in range(60):
        assert ended.acquire(timeout=20)


def _run(text: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})


_SLOW = """
import os, time, threading
from gnnaccel.cuda.runtime import background
begun = threading.Event()
def work():
    for part in ("first", "second"):
        with background.piece():
            begun.set()
            time.sleep(0.5)
            print(part, os.getpid() == parent, flush=True)
parent = os.getpid()
background.submit(work)
begun.wait()
"""


def test_the_end_of_the_process_waits_for_one_kernel():
    done = _run(_SLOW)
    assert (done.returncode, done.stdout, done.stderr) == (0, "first True\n", "")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_one_kernel_and_its_child_has_a_background_of_its_own():
    done = _run(_SLOW + """
child = os.fork()
if not child:
    begun.clear()
    background.submit(lambda: print("of the child", flush=True) or begun.set())
    os._exit(0 if begun.wait(20) and background.pending() < 2 else 1)
assert os.waitpid(child, 0)[1] == 0
""")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "first True" and "of the child" in lines


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_take_along_the_lock_of_configurations():
    done = _run("""
import os, signal, threading, time
import gnnaccel
from gnnaccel.cuda.runtime import background
from gnnaccel.cuda.structures import structure
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy import config as configs
begun = threading.Event()
class Slow(dict):
    def clear(self):
        begun.set()
        time.sleep(0.5)
        super().clear()
gnnaccel.enable()
configs._epochs = Slow(configs._epochs)
structure.prepare = compiling._mark = lambda *_: None
compiling._marked = lambda key: True
background.submit(lambda: compiling._in_background(("k",), "k", lambda: None, None, -1))
begun.wait()
child = os.fork()
if not child:
    signal.alarm(10)
    with gnnaccel.enabled(records=1):
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child hangs"
""")
    assert done.returncode == 0, done.stderr


def test_a_layer_goes_by_kernels_once_they_are_there(monkeypatch, tmp_path):
    """End to end, over emulated kernels."""
    geometric = pytest.importorskip("torch_geometric.nn")
    from tests.emulation.emulator import EmulatedDriver

    monkeypatch.setattr(compiling, "may_run_natively", lambda config: True)
    monkeypatch.setattr(compiling, "_mark_of", lambda key: tmp_path / "never")
    go, prepared = threading.Event(), structure.prepare
    monkeypatch.setattr(structure, "prepare", lambda: go.wait(20) and prepared())
    layer, x = geometric.GATConv(8, 4, heads=2), torch.randn(30, 8)
    edges = torch.randint(0, 30, (2, 200))
    expected = layer(x, edges)
    with driver.using(EmulatedDriver()), gnnaccel.enabled(backend="cuda", records=100):
        compiling.forget()
        for _ in range(3):
            assert torch.equal(layer(x, edges), expected)
        assert {r["route"] for r in gnnaccel.records()} == {"native"}
        assert [reason["code"] for reason in gnnaccel.records()[-1]["rejected"]] == ["GA408"] * 2
        go.set()
        finished()
        for _ in range(3):
            torch.testing.assert_close(layer(x, edges), expected)
        assert [r["route"] for r in gnnaccel.records()[-3:]] == ["cuda"] * 3
    compiling.forget()


_SCRIPT = """
import json, time, torch, gnnaccel
from torch_geometric.nn import GATConv
gnnaccel.enable()
torch.manual_seed(0)
layer = GATConv(64, 24, heads=3).cuda()
x, edges = torch.randn(20_000, 64).cuda(), torch.randint(0, 20_000, (2, 400_000)).cuda()
with gnnaccel.disabled():
    expected = layer(x, edges)
    expected.sum().backward()
    grad = layer.lin.weight.grad.clone()
worst, until = 0.0, time.monotonic() + 60
done = 0
while time.monotonic() < until and done < 3:
    layer.zero_grad()
    out = layer(x, edges)
    out.sum().backward()
    worst = max(worst, *(float((a - b).norm() / b.norm()) for a, b in
                         ((out, expected), (layer.lin.weight.grad, grad))))
    done += gnnaccel.status()["compiled"]["pending"] == 0
entry = gnnaccel.stats()["GATConv"]
print(json.dumps([entry["routes"], entry["reasons"], worst]))
"""


@pytest.mark.gpu
def test_the_first_and_the_second_run_on_a_machine(tmp_path):
    import json

    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": str(tmp_path)}
    env.pop("GNNACCEL_FIRST_USE", None)
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True,
                              timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (first, reasons, worst), (second, none, other) = found
    assert first["native"] == reasons["GA408"] > 0 and first["cuda"] >= 2
    assert second.keys() == {"cuda"} and not none
    assert worst < 1e-4 and other < 1e-4
