"""``python -m gnnaccel``: what is run cannot tell the difference, but for gnnaccel being
enabled."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import zipapp

import pytest

import gnnaccel
from gnnaccel import runner

ROOT = os.path.dirname(os.path.dirname(gnnaccel.__file__))
ACCEL = ["-m", "gnnaccel"]

PROBE = """
import sys, os
spec = getattr(__spec__, "name", None)
loader = type(__loader__).__name__ if "__loader__" in globals() and __spec__ is not None else ""
print(sys.argv, sys.path[0], __name__, globals().get("__file__"), spec, loader, __package__,
      __builtins__ is sys.modules["builtins"],
      sys.modules["__main__"].__dict__ is globals(), len([p for p in sys.path if p == sys.path[0]]))
"""


def python(*arguments, cwd, stdin="", **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("GNNACCEL")}
    env.update(PYTHONPATH=ROOT, PYTHONDONTWRITEBYTECODE="1", **environment)
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, input=stdin,
                          capture_output=True, text=True, timeout=120)


def both(arguments, cwd, stdin="", front=()):
    """The same command line natively and with gnnaccel."""
    return (python(*front, *arguments, cwd=cwd, stdin=stdin),
            python(*front, *ACCEL, *arguments, cwd=cwd, stdin=stdin))


@pytest.fixture
def folder(tmp_path):
    """Programs of every kind that python runs."""
    (tmp_path / "probe.py").write_text(PROBE)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("value = 5\n")
    (package / "module.py").write_text(PROBE + "from .helper import value\nprint(value)\n")
    (package / "__main__.py").write_text(PROBE + "from . import helper\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__main__.py").write_text(PROBE
                                                    + "import beside; print(beside.__file__)\n")
    (tmp_path / "inner" / "beside.py").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "far.py").write_text(PROBE + "import near\n")
    (tmp_path / "sub" / "near.py").write_text("")
    (tmp_path / "link.py").symlink_to("sub/far.py")
    (tmp_path
     / "latin.py").write_bytes(
         "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))\n".encode("latin-1"))
    (tmp_path / "future.py").write_text("def f(x: undefined): ...\n"
                                        if sys.version_info >= (3, 14) else
                                        "try:\n    exec('def f(x: undefined): ...')\nexcept "
                                        "NameError: " "print('evaluated')\n")
    zipapp.create_archive(tmp_path / "inner", tmp_path / "archive.pyz")
    return tmp_path


@pytest.mark.parametrize("arguments", [
    ["probe.py"], ["probe.py", "--log", "-m", "x", "--", "-c"], ["probe.py", "bench"],
    ["sub/far.py"], ["link.py"], ["latin.py"],
    ["future.py"], ["-m", "package.module", "-v", "--strict"], ["-mpackage.module"],
    ["-m", "package", "a b"], ["-m", "probe"],
    ["inner"],
    ["archive.pyz", "1"], ["-c", PROBE, "-x", "--report"], ["-", "x"]], ids=" ".join)
def test_what_runs_sees_what_python_shows_it(folder, arguments):
    native, ours = both(arguments, folder, PROBE if arguments[0] == "-" else "")
    assert native.returncode == ours.returncode == 0, native.stderr + ours.stderr
    assert native.stdout and ours.stdout == native.stdout and ours.stderr == ""


def test_compiled_files_run(folder):
    import py_compile

    py_compile.compile(folder / "probe.py", cfile=folder / "probe.pyc")
    native, ours = both(["probe.pyc", "1"], folder)
    assert native.stdout and ours.stdout == native.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")
def test_a_safe_path_stays_safe(folder):
    native, ours = both(["probe.py"], folder, front=["-P"])
    assert native.stdout and ours.stdout == native.stdout


ENDINGS = {
    "falls off the end": "x = 1",
    "exit 3": "import sys; sys.exit(3)",
    "exit none": "import sys; sys.exit(None)",
    "exit text": "import sys; sys.exit('no such data')",
    "exits within a function": "def f():\n    raise SystemExit(7)\nf()",
    "raises": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)",
    "raises from": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "group": "raise ExceptionGroup('g', [ValueError(1)])"
    if sys.version_info >= (3, 11) else "raise ValueError",
    "interrupted": "raise KeyboardInterrupt",
    "syntax": "x = (1,\ny = 2",
    "imports nothing": "import no_such_module",
    "own hook": "import sys, traceback\n"
                "sys.excepthook = lambda k, e, tb: (print(k, "
    "len(traceback.extract_tb(tb)), e.__traceback__ is tb),"
                " sys.__excepthook__(k, e, tb))\ndef f(): raise OSError('x')\nf()",
    "at exit": "import atexit, pickle\nclass A: pass\natexit.register(lambda: "
    "print(len(pickle.dumps(A()))))",
    "thread": "import threading\nthreading.Thread(target=lambda: print(1 / 1)).start()",
    "leaves at once": "import os; os._exit(9)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("code", ENDINGS.values(), ids=ENDINGS)
def test_a_run_ends_as_the_script_ends(tmp_path, code):
    (tmp_path / "script.py").write_text(code)
    native, ours = both(["script.py"], tmp_path)
    assert ours.returncode == native.returncode and ours.stdout == native.stdout
    assert ours.stderr == native.stderr


def test_a_modules_traceback_begins_with_the_module(tmp_path):
    (tmp_path / "broken.py").write_text("def f():\n    1 / 0\nf()\n")
    ours = python(*ACCEL, "-m", "broken", cwd=tmp_path)
    assert ours.returncode == 1 and "runpy" not in ours.stderr and "gnnaccel" not in ours.stderr
    assert ours.stderr.splitlines()[1] == f'  File "{tmp_path}/broken.py", line 3, in <module>'


def test_a_package_that_does_not_import_shows_why(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import missing_one\n")
    (tmp_path / "pack" / "mod.py").write_text("")
    ours = python(*ACCEL, "-m", "pack.mod", cwd=tmp_path)
    assert ours.returncode == 1
    assert f'File "{tmp_path}/pack/__init__.py", line 1' in ours.stderr and "No module named 'missing_one'" in ours.stderr


@pytest.mark.parametrize("arguments, status, text", [
    (["none.py"], 2, "can't open file '{}/none.py': [Errno 2] No such file or directory"),
    (["benhc"], 2, "No such file or directory. Did you mean 'bench'?"),
    (["-m", "none"], 1, "No module named none"),
    (["-m", "none.of.it"], 1, "(ModuleNotFoundError: No module named 'none')"),
    (["-m", "empty"], 1,
     "No module named empty.__main__; 'empty' is a package and cannot be directly executed"),
    (["empty"], 1, "can't find '__main__' module in 'empty'"),
    (["-m"], 2, "-m needs an argument"), ([], 2, "nothing to run"),
    (["--strikt", "x.py"], 2, "unrecognized arguments: --strikt"),
    (["--backend", "gpu", "x.py"], 2, "invalid choice: 'gpu'"),
    (["--log=/no/such/folder/x.jsonl", "x.py"], 2, "No such file or directory"),
    (["--exclude=re:(", "x.py"], 2, "re:(")])
def test_what_cannot_run_is_said_in_a_line(tmp_path, arguments, status, text):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").write_text("")
    (tmp_path / "x.py").write_text("print('ran')")
    ours = python(*ACCEL, *arguments, cwd=tmp_path)
    assert ours.returncode == status and "Traceback" not in ours.stderr and not ours.stdout
    assert text.format(tmp_path) in ours.stderr


# --- enabled --------------------------------------------------------------------------------------

STATUS = ("import gnnaccel; s = gnnaccel.status(); print(s['enabled'], {k: v for k, v in "
          "(s['config'] or {}).items() if k in %r})")


def test_options_are_those_of_enable(tmp_path):
    keys = ("backend", "when", "on_fallback", "include", "exclude", "log")
    (tmp_path / "x.py").write_text(STATUS % (keys,))
    ours = python(*ACCEL, "--backend=torch", "--when", "supported", "--strict", "--include",
                  "GATConv,RGCNConv", "--exclude", "a.b", "--exclude=c", "--log=run.jsonl", "x.py",
                  "--log", cwd=tmp_path)
    assert ours.stdout.strip() == ("True {'backend': 'torch', 'when': 'supported', 'on_fallback': "
                                   "'raise', "
                                   "'include': ('GATConv', 'RGCNConv'), 'exclude': ('a.b', 'c'), "
                                   "'log': " "'run.jsonl'}")
    assert (tmp_path / "run.jsonl").exists()


def test_options_not_given_come_from_the_environment(tmp_path):
    ours = python(*ACCEL, "--when", "supported", "-c", STATUS % (("backend", "when"),),
                  cwd=tmp_path, GNNACCEL_BACKEND="torch", GNNACCEL_WHEN="profitable")
    assert ours.stdout.strip() == "True {'backend': 'torch', 'when': 'supported'}"


def test_switched_off_by_the_environment_the_script_runs_natively_and_is_told(tmp_path):
    ours = python(*ACCEL, "-c", STATUS % ((),), cwd=tmp_path, GNNACCEL="0")
    assert ours.stdout.strip() == "False {}" and ours.returncode == 0
    assert ours.stderr.strip() == "python -m gnnaccel: the environment variable GNNACCEL says off: everything runs natively"


@pytest.mark.long
def test_log_alone_takes_no_value(tmp_path):
    ours = python(*ACCEL, "--log", "-c", STATUS % (("log",),), cwd=tmp_path)
    assert ours.stdout.strip() == "True {'log': True}" and "gnnaccel: enabled, version" in ours.stderr


@pytest.mark.parametrize("arguments, expected", [
    (["x.py", "-m", "y"], ([], "", ["x.py", "-m", "y"])),
    (["--log", "x.py"], (["--log"], "", ["x.py"])),
    (["--exclude", "A", "x.py", "--strict"], (["--exclude", "A"], "", ["x.py", "--strict"])),
    (["--report=o.html", "-m", "a", "b"], (["--report=o.html"], "-m", ["a", "b"])),
    (["-mjson.tool", "f"], ([], "-m", ["json.tool", "f"])),
    (["--strict", "--", "-odd.py", "a"], (["--strict"], "", ["-odd.py", "a"])),
    (["-"], ([], "", ["-"])),
    (["--help"], (["--help"], "", [])),
    (["-c", "x=1", "-c"], ([], "-c", ["x=1", "-c"]))])
def test_where_our_options_end(arguments, expected):
    assert runner.split(arguments) == expected


@pytest.mark.long
def test_the_help_names_every_subcommand(tmp_path):
    from gnnaccel.__main__ import COMMANDS

    ours = python(*ACCEL, "--help", cwd=tmp_path)
    assert ours.returncode == 0 and all(f"\n  {name} " in ours.stdout for name in COMMANDS)
    for name in COMMANDS:
        shown = python(*ACCEL, name, "--help", cwd=tmp_path)
        assert shown.returncode == 0 and shown.stdout.startswith(
            f"usage: python -m gnnaccel {name}"), shown.stderr


def test_a_script_named_like_a_subcommand_needs_its_path(tmp_path):
    (tmp_path / "bench").write_text("print('mine')")
    assert python(*ACCEL, "./bench", cwd=tmp_path).stdout == "mine\n"
    assert "usage: python -m gnnaccel [-h] {bench}" in python(*ACCEL, "bench", "--no-such-option",
                                                              cwd=tmp_path).stderr


# --- observers ------------------------------------------------------------------------------------

OBSERVE = """
    import sys, types, gnnaccel.profile
    observe = types.ModuleType("gnnaccel.profile.observe")
    observe.start = lambda profile, compare, report, autotune, lines=False: (
        print("start", profile, compare, report, autotune), "it")[1]
    observe.finish = lambda observer: print("finish", observer)
    gnnaccel.profile.observe = sys.modules["gnnaccel.profile.observe"] = observe
    from gnnaccel import __main__
    sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options, seen, end, status", [
    (["--profile"], "True False None False", "pass", 0),
    (["--compare"], "False True None False", "raise SystemExit(4)", 4),
    (["--report", "o.html", "--autotune"], "False False o.html True", "1 / 0", 1)])
def test_observers_see_the_whole_run(tmp_path, options, seen, end, status):
    (tmp_path / "driver.py").write_text(textwrap.dedent(OBSERVE))
    ours = python("driver.py", *options, "-c", f"print('script')\n{end}", cwd=tmp_path)
    assert ours.stdout.splitlines() == [f"start {seen}", "script",
                                        "finish it"] and ours.returncode == status, ours.stderr


@pytest.mark.long
def test_processes_started_after_disable_are_native(tmp_path):
    (tmp_path / "many.py").write_text(textwrap.dedent("""
        import multiprocessing, gnnaccel
        def work(queue):
            queue.put(gnnaccel.status()["enabled"])
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            for _ in range(2):
                process = context.Process(target=work, args=(queue,))
                process.start(); print(queue.get()); process.join()
                gnnaccel.disable()
        """))
    assert python(*ACCEL, "many.py", cwd=tmp_path).stdout.split() == ["True", "False"]


def test_a_missing_observer_is_named_before_anything_runs(tmp_path):
    code = ("import sys; sys.modules['gnnaccel.profile.observe'] = None\nfrom "
            "gnnaccel import __main__\n"
            "sys.exit(__main__.main(['--profile', '-c', 'print(1)']))")
    ours = python("-c", code, cwd=tmp_path)
    assert ours.returncode == 2 and not ours.stdout and "need gnnaccel.profile.observe" in ours.stderr


# --- several processes ----------------------------------------------------------------------------

SPAWN = """
    import multiprocessing, sys
    print("imported as", __name__)
    def inner(queue):
        import gnnaccel
        config = gnnaccel.status()["config"]
        queue.put(("inner", config and config["when"]))
    def work(queue, context):
        import gnnaccel
        queue.put(("outer", gnnaccel.status()["enabled"]))
        process = context.Process(target=inner, args=(queue,)); process.start(); process.join()
    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        queue = context.Queue()
        process = context.Process(target=work, args=(queue, multiprocessing.get_context(sys.argv[1])))
        process.start(); print(queue.get(), queue.get()); process.join(); sys.exit(process.exitcode)
"""


@pytest.mark.long
@pytest.mark.parametrize("method, how",
                         [("spawn", "script"), ("spawn", "module"), ("fork", "script"),
                          ("forkserver", "script")])
def test_processes_that_multiprocessing_starts_are_enabled_too(tmp_path, method, how):
    (tmp_path / "many.py").write_text(textwrap.dedent(SPAWN))
    ours = python(*ACCEL, "--when", "supported",
                  *(["many.py"] if how == "script" else ["-m", "many"]), method, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert "('outer', True) ('inner', 'supported')" in ours.stdout
    assert ours.stdout.count("imported as __main__") == 1
    assert ours.stdout.count("imported as __mp_main__") == {"spawn": 2,
                                                            "fork": 0}.get(method,
                                                                           ours.stdout.count(
                                                                               "__mp_main__"))


RANKS = """
    import sys, torch, torch.distributed as dist
    from torch_geometric.nn import GATConv, GATv2Conv
    from .sizes import NODES
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    first, second = GATConv(4, 2, heads=2), GATv2Conv(4, 2)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList([first, second]))
    net.module.forward = lambda x, edges: second(first(x, edges), edges)
    edges = torch.randint(0, NODES, (2, 60))
    for _ in range(2):
        net(torch.randn(NODES, 4), edges).sum().backward()
    total = first.lin.weight.grad.sum()
    dist.all_reduce(total)
    same = float(total) == 2 * float(first.lin.weight.grad.sum())
    sys.stdout.write(f"rank {rank} {__name__} {__package__} {sys.argv[1:]} {same}\\n")  # at once, as the other rank writes, too
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(3 * rank)
"""


@pytest.mark.long
def test_every_option_under_torchrun(tmp_path):
    """Two ranks share one graph's gradients; each has files and tables of its own, and torchrun
    hears of the second one's end."""
    pytest.importorskip("torch_geometric")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("NODES = 12\n")
    (package / "train.py").write_text(textwrap.dedent(RANKS))
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                  "--", "gnnaccel", "--compare", "--profile", "--report=out.html",
                  "--log=run.jsonl", "--exclude", "GATv2Conv", "--strict", "--backend=torch",
                  "--when=supported", "-m", "package.train", "--strict", "x", cwd=tmp_path,
                  OMP_NUM_THREADS="1")
    assert done.returncode == 1 and "exitcode  : 3 " in done.stderr, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank} __main__ package ['--strict', 'x'] True" in done.stdout
        assert f"rank {rank}: report: out{'.rank1' if rank else ''}.html" in done.stderr
    assert done.stderr.count("compared with the host's own code") == done.stderr.count(
        "in layers, by the clock") == 2
    assert sorted(path.name for path in tmp_path.iterdir()
                  if path.suffix) == ["out.html", "out.rank1.html", "run.jsonl",
                                      "run.rank1.jsonl"]
    for name in ("run.jsonl", "run.rank1.jsonl"):
        taken = {(r["layer"], r["route"])
                 for r in map(json.loads, (tmp_path / name).read_text().splitlines())}
        assert taken == {("GATConv", "torch"), ("GATv2Conv", "native")}
    for name in ("out.html", "out.rank1.html"):
        page = (tmp_path / name).read_text()
        assert "0 (GATConv)" in page and "same" in page and "GA101" in page


def test_an_interrupt_from_outside_ends_it_as_it_ends_python(tmp_path):
    (tmp_path / "wait.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    ends = []
    for front in ([], ACCEL):
        process = subprocess.Popen([sys.executable, *front, "wait.py"], cwd=tmp_path, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True,
                                   # a shell starts what runs in its background with interrupts ignored
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                                   env={**os.environ, "PYTHONPATH": ROOT})
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        # which line was interrupted is chance
        said = process.communicate(timeout=30)[1].splitlines()
        ends.append((said[:1], "wait.py" in said[1], said[-1], process.returncode))
    assert ends[0] == ends[1] and ends[0][2] == "KeyboardInterrupt"


# --- layers ---------------------------------------------------------------------------------------

LAYER = """
    import torch
    from torch_geometric.nn import GATConv
    conv = GATConv(4, 2, heads=2, aggr="mean")
    conv(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
    print("done")
"""


@pytest.mark.long
def test_strict_raises_at_the_scripts_line(tmp_path):
    pytest.importorskip("torch_geometric")
    (tmp_path / "model.py").write_text(textwrap.dedent(LAYER))
    assert python(*ACCEL, "model.py", cwd=tmp_path).stdout == "done\n"
    ours = python(*ACCEL, "--strict", "model.py", cwd=tmp_path)
    assert ours.returncode == 1 and "FallbackError: GATConv would run natively: GATConv: GA201" in ours.stderr
    assert ours.stderr.splitlines()[1] == f'  File "{tmp_path}/model.py", line 5, in <module>'
