"""gain: seeing a script's steps from outside, the runs and their failures, the verdict."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gnnaccel import __main__ as front  # noqa: E402
from gnnaccel.profile.gain import cli  # noqa: E402
from gnnaccel.profile.gain.looking import kept, layers  # noqa: E402
from gnnaccel.profile.gain.steps import Steps, _noted  # noqa: E402
from gnnaccel.profile.gain.verdict import Gain, Kept, Layer, Side  # noqa: E402


# --- steps, seen from outside ---------------------------------------------------------------------

@pytest.fixture
def steps():
    before = (torch.optim.Optimizer.zero_grad, torch.autograd.backward, torch.nn.Module.__call__)
    told = []
    found = Steps(lambda: told.append(found.count))
    found.told = told
    found.install()
    yield found
    found.uninstall()
    assert before == (torch.optim.Optimizer.zero_grad, torch.autograd.backward,
                      torch.nn.Module.__call__)


def trained(count, zero=True, extra=None):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        if zero:
            optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if extra is not None:
            extra.step()
        losses.append(loss.item())
    return losses


def test_training_steps_and_losses_are_seen(steps):
    call = torch.nn.Module.__call__
    losses = trained(25)
    assert torch.nn.Module.__call__ is not call  # no longer watched: it trains
    found = steps.as_dict()
    assert found["what"] == "training step" and steps.told[-25:] == list(range(1, 26))
    assert len(found["ms"]) == 25 and len(found["loop_ms"]) == 24
    # a step ends where the next loop begins, and zero_grad comes later
    assert all(0 < step <= loop for step, loop in zip(found["ms"][1:], found["loop_ms"]))
    assert found["losses"] == {n: losses[n - 1] for n in (*range(1, 11), 20)}


def test_without_zero_grad_the_loop_between_steps_counts(steps):
    trained(6, zero=False)
    found = steps.as_dict()
    assert found["ms"] == found["loop_ms"] and len(found["ms"]) == 5


def test_a_second_optimizer_of_the_same_step_does_not_count(steps):
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    trained(6, extra=torch.optim.SGD([weight], lr=0.1))
    assert len(steps.as_dict()["ms"]) == 6


def test_an_optimizer_that_takes_the_place_of_another_counts(steps):
    trained(6)
    trained(6)
    assert len(steps.as_dict()["ms"]) >= 10


def test_each_step_may_make_an_optimizer_of_its_own(steps):
    """As PyG's `ogc.py` does: whether the next one lies where the last did is chance."""
    weight, optimizer = torch.nn.Parameter(torch.ones(1)), None
    for _ in range(6):
        following = torch.optim.SGD([weight], lr=0.1)  # while the last is there
        optimizer = following
        del following
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    assert len(steps.as_dict()["ms"]) == 6


def test_a_script_that_does_not_train_is_measured_by_its_models_calls(steps):
    model, small = torch.nn.Sequential(*[torch.nn.Linear(64, 64)] * 20), torch.nn.Identity()
    with torch.no_grad():
        for _ in range(7):
            small(model(torch.ones(64, 64)))
    found = steps.as_dict()
    assert (found["what"], len(found["ms"]), found["losses"]) == ("call of Sequential", 7, {})
    assert steps.told == list(range(1, 15))


def test_nothing_seen(steps):
    assert steps.as_dict() == {"what": "call", "ms": [], "loop_ms": [], "losses": {}}


def test_losses_are_kept_ever_more_rarely():
    assert [n for n in range(1, 1001) if _noted(n)] == [*range(1, 11), *range(20, 101, 10),
                                                        *range(200, 1001, 100)]


# --- the verdict ----------------------------------------------------------------------------------

def gain(native, ours, **fields):
    return Gain("training step", Side(native, 10, 20.0, 2 << 20, {1: 2.0, 5: 1.0}),
                Side(ours, 12, 10.0, 1 << 20, {1: 2.0, 5: 1.1, 9: 3.0}), **fields)


@pytest.mark.parametrize("native, ours, verdict", [
    ([10.0, 11.0], [5.0, 6.0], "faster"), ([5.0, 6.0], [10.0, 11.0], "slower"),
    ([10.0, 14.0], [9.0, 10.5], "no difference"), ([10.0, 10.1], [9.85, 9.9], "no difference"),
    ([9.0, 10.0, 10.1, 10.2, 10.3], [4.0, 5.0, 5.0, 5.1, 9.5], "faster"),
    ([10.0], [9.3], "no difference"), ([10.0], [8.0], "faster")])
def test_verdicts(native, ours, verdict):
    found = gain(native, ours)
    assert found.verdict == verdict and found.as_dict()["verdict"] == verdict
    assert verdict in str(found)


def test_it_says_all_and_is_data():
    found = gain([10.0], [5.0], layers=[Layer("convs.0", "GATConv", "k", 4.0, 1.0),
                                        Layer("last", "GCNConv", None, 1.0, 1.1)],
                 kept=[Kept("GA201", "the aggregation is a median", 7, ["last"])],
                 to_try=["one", "two", "three", "four"], notes=["a note"])
    text = str(found)
    for part in ("2.00x faster", "10 ms", "5 ms", "-50%", "loss of step 5", "1.0e-01",
                 "convs.0 (GATConv)", "4.0x", "7", "GA201 the aggregation is a median",
                 " 3. three", "a note"):
        assert part in text, (part, text)
    assert "four" not in text and "0.9x" not in text  # of a native layer there is no gain
    data = json.loads(json.dumps(found.as_dict()))
    assert data["loss"] == [5, 1.0, 1.1] and data["loss_difference"] == pytest.approx(0.1)
    assert data["times"] == 2.0 and data["layers"][0]["name"] == "convs.0"


def test_layers_of_two_reports_and_native_calls():
    from gnnaccel.profile.entries import Entry
    ours = [Entry("A", "a", "cuda", "k", calls=3, timed=3, forward_ms=3.0, backward_ms=3.0),
            Entry("A", "a", "native", None, calls=1, timed=1, forward_ms=2.0)]
    native = [Entry("A", "a", "native", None, calls=2, timed=2, forward_ms=10.0)]
    assert layers(ours, native) == [Layer("a", "A", "k", 5.0, 2.0)]
    stats = {"A": {"reasons": {"GA201": 2, "GA301": 1}}, "B": {"reasons": {"GA201": 5}}}
    seen = [{"code": "GA201", "text": "seen", "layers": ["a"], "calls": 1}]
    assert kept(stats, seen) == [Kept("GA201", "seen", 7, ["a"]),
                                 Kept("GA301", "estimated to be no faster", 1, ["A"])]


# --- runs -----------------------------------------------------------------------------------------

def written(ms=2.0, count=20, startup=0.1, **fields):
    look = dict(layers=[Layer("a", "A", "k", 2.0, 1.0).__dict__], fallbacks=[], advice=["do it"])
    return {**dict(what="training step", ms=[ms] * count, loop_ms=[2 * ms] * count,
                   losses={"1": 1.0, "10": 0.5}, ended=True, memory_bytes=1 << 20,
                   startup=startup, compiled=[0.0, 0], look=look,
                   stats={"A": {"reasons": {"GA201": 3}}}), **fields}


@pytest.fixture
def runs(monkeypatch):
    """Runs that end as `answers` says, by mode: what is written, or (exit status, what is
    said)."""
    made, answers = [], {"native": written(4.0), "enabled": written(1.0), "look": written()}

    def pretended(command, environment, output, limit):
        spec = json.loads(command[-1])
        made.append((spec["mode"], environment.get("GNNACCEL"), environment["PYTHONHASHSEED"]))
        answer = answers[spec["mode"]]
        if isinstance(answer, dict):
            with open(spec["out"], "w") as file:
                json.dump(answer, file)
            return 0
        status, said = answer
        output.write(said.encode())
        output.flush()
        return status

    monkeypatch.setattr(cli, "limited", pretended)
    monkeypatch.setenv("GNNACCEL", "1")
    return made, answers


def test_runs_take_turns_and_native_ones_are_native(runs, capsys):
    assert front.main(["gain", "--seed", "3", "x.py", "--seconds", "9"]) == cli.DONE
    assert runs[0] == [("native", "0", "3"), ("enabled", None, "3"), ("enabled", None, "3"),
                       ("native", "0", "3"), ("look", None, "3")]
    out = capsys.readouterr().out
    assert "4.00x faster" in out and "34 and 34 steps" in out and "GA201" in out
    assert " 1. write `import gnnaccel" in out and " 2. do it" in out


def test_on_a_gpu_captured_calls_are_a_way_of_their_own(runs, capsys):
    replayed = dict(replays={"Net": 16}, refused={"Head": {"it waits for the device": 2}})
    runs[1]["enabled"] = written(1.0, gpu=True)
    runs[1]["capture"] = written(0.5, captured=replayed)
    assert front.main(["gain", "x.py"]) == cli.DONE
    assert [mode for mode, *_ in runs[0]] == ["native", "enabled", "enabled", "native", "capture",
                                              "look"]
    out = " ".join(capsys.readouterr().out.split())
    assert "4.00x faster" in out and "with capture=True 500 µs 8.00x as fast" in out
    assert "2. gnnaccel.enable(capture=True)" in out and "takes 50% of the time" in out
    assert "calls of Head were not replayed: it waits for the device" in out


@pytest.mark.parametrize("answer", [
    (1, "Boom"), written(0.5, captured=dict(replays={}, refused={"Net": {"why not": 1}}))])
def test_a_verdict_without_captured_calls(answer, runs, capsys):
    runs[1]["enabled"], runs[1]["capture"] = written(1.0, gpu=True), answer
    assert front.main(["gain", "x.py"]) == cli.DONE
    out = capsys.readouterr().out
    assert "4.00x faster" in out and "enable(capture=True)" not in out
    assert ("why not" in out) == isinstance(answer, dict)


def test_a_script_that_takes_long_to_start_runs_once_each_way(runs, capsys):
    runs[1]["native"] = written(4.0, startup=30.0)
    assert front.main(["gain", "x.py"]) == cli.DONE
    assert [mode for mode, *_ in runs[0]] == ["native", "enabled", "look"]
    assert "takes long to start" in capsys.readouterr().out


def test_the_verdict_does_without_a_look(runs, capsys):
    runs[1]["look"] = written(count=4)
    assert front.main(["gain", "x.py"]) == cli.DONE
    out = capsys.readouterr().out
    assert "layers were not looked at" in out and "4.00x faster" in out


def test_losses_that_differ_compiling_and_a_slower_script(runs, capsys, tmp_path):
    runs[1]["enabled"] = written(8.0, losses={"10": 0.9}, compiled=[4.5, 27])
    path = tmp_path / "out.json"
    assert front.main(["gain", "--json", str(path), "x.py"]) == cli.DONE
    out = capsys.readouterr().out
    assert "2.00x slower" in out and "27 kernels were compiled" in out and "losses differ" in out
    assert "--autotune" in out and json.loads(path.read_text())["verdict"] == "slower"


@pytest.mark.parametrize("mode, answer, status, said", [
    ("native", (1, "Traceback\nBoom: x\n"), cli.FAILED, "Boom: x"),
    ("native", (2, "can't open file 'x.py'"), cli.USAGE, "can't open file"),
    ("native", written(count=0), cli.NOTHING, "no optimizer made a step"),
    ("native", written(count=6), cli.NOTHING, "ended after 3 steps"),
    ("native", (None, ""), cli.TIMEOUT, "within 300 s"),
    ("enabled", (1, "Boom: y\n"), cli.BROKEN, "Boom: y"),
    ("enabled", (None, ""), cli.TIMEOUT, "with gnnaccel enabled")])
def test_no_verdict(mode, answer, status, said, runs, capsys):
    runs[1][mode] = answer
    assert front.main(["gain", "x.py"]) == status
    err = capsys.readouterr()
    assert said in err.err and err.out == ""


# --- many scripts ---------------------------------------------------------------------------------

@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """The path of a list of three scripts, one of which has no verdict, with captured calls of
    the first."""
    def all_(self):
        if self._target[0] == "broken.py":
            raise cli.GainError("Boom\nthe script fails natively", cli.FAILED)
        ours = 2.0 if self._target[1:] == ["--hidden", "two words"] else 8.0
        found = cli.Found([written(4.0)], [written(ours, gpu=True)], None, written())
        if ours == 2.0:
            found.captured = written(1.0, captured=dict(replays={"Net": 1}, refused={}))
        return found

    monkeypatch.setattr(cli.Runs, "all", all_)
    path = tmp_path / "scripts.txt"
    path.write_text("# ours\na.py --hidden 'two words'  # the first\n\nbroken.py\na.py\n")
    return path


def test_many_scripts_have_a_row_each(scripts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out.json"
    assert front.main(["gain", "--list", str(scripts), "--json", str(out)]) == cli.FAILED
    said = capsys.readouterr()
    rows = [" ".join(line.split()) for line in said.out.splitlines()]
    assert any(row.startswith("a.py --hidden 'two words' 4 2 2.00x 4.00x 2.00x 1.0 -> 1.0 0e+00 "
                              "faster") for row in rows)
    assert any(row.startswith("a.py 4 8 0.50x - 0.50x") and row.endswith("slower") for row in rows)
    assert any(row.startswith("broken.py") and row.endswith("the script fails natively")
               for row in rows)
    assert rows[-2:] == ["geometric means: a step 1.00x; a step with capture=True 4.00x; step to "
                         "step, with loading and evaluation 1.00x",
                         "scripts: 1 faster, 0 no difference, 1 slower, 1 no verdict"]
    assert "2 of 3: broken.py" in said.err and "gain: Boom" in said.err
    found = json.loads(out.read_text())
    assert list(found["scripts"]) == ["a.py --hidden 'two words'", "broken.py", "a.py"]
    assert found["means"]["captured"] == pytest.approx(4) and found["provenance"]["torch"]


@pytest.mark.parametrize("arguments, text, said", [
    (["x.py"], "a.py\n", "name scripts either in the list or after"),
    ([], "# nothing\n", "names no script"), ([], "\na.py 'b\n", "line 2 of"),
    ([], None, "No such file")])
def test_a_list_that_cannot_be_used(arguments, text, said, scripts, capsys):
    scripts.unlink() if text is None else scripts.write_text(text)
    assert front.main(["gain", "--list", str(scripts), *arguments]) == cli.USAGE
    assert said in capsys.readouterr().err


def test_what_is_run(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(cli.Runs, "all", lambda self: seen.append((self._kind, self._target))
                        or (_ for _ in ()).throw(KeyboardInterrupt))
    for arguments in (["x.py", "-m", "y"], ["-m", "x.y", "--seconds", "3"], ["-c", "pass", "a"]):
        assert front.main(["gain", *arguments]) == cli.STOPPED
    assert seen == [("", ["x.py", "-m", "y"]), ("-m", ["x.y", "--seconds", "3"]),
                    ("-c", ["pass", "a"])]
    assert front.main(["gain"]) == cli.USAGE
    for wrong in (["--seconds", "0"], ["--limit", "x"]):
        with pytest.raises(SystemExit) as end:
            front.main(["gain", *wrong, "x.py"])
        assert end.value.code == 2


def ours(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "gnnaccel", "gain", *arguments],
                          capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


@pytest.mark.long
def test_a_run_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    path = tmp_path / "pid"
    code = (f"import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
            f"open({str(path)!r}, 'w').write(str(child.pid)); time.sleep(60)")
    assert cli.limited([sys.executable, "-S", "-c", code], dict(os.environ), None, 5) is None
    patience = time.monotonic() + 10.0  # it was sent a signal, and may be about to end
    while _runs(path.read_text()):
        assert time.monotonic() < patience
        time.sleep(0.05)


def _runs(pid):
    try:
        state = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.long
def test_a_script_that_fails_natively(tmp_path):
    (tmp_path / "x.py").write_text("print('hello')\nraise ValueError('boom')\n")
    done = ours(str(tmp_path / "x.py"))
    assert done.returncode == cli.FAILED and done.stdout == ""
    assert "hello" in done.stderr and "ValueError: boom" in done.stderr
    assert "gain/child.py" not in done.stderr  # the traceback begins with the script


SCRIPT = """
import random, sys, numpy, torch
from torch_geometric.nn import GATConv
print("seeds", torch.rand(1).item(), numpy.random.rand(), random.random())
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GATConv(8, 8), GATConv(8, 8, aggr="mean")])
    def forward(self, x, edges):
        for conv in self.convs:
            x = conv(x, edges)
        return x
net, x = Net(), torch.randn(300, 8)
edges = torch.randint(0, 300, (2, 3000))
optimizer = torch.optim.Adam(net.parameters())
for step in range(10**6 if sys.argv[1:] == ["--forever"] else 14):
    optimizer.zero_grad()
    net(x, edges).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--forever"], []])
def test_a_whole_verdict(arguments, tmp_path):
    pytest.importorskip("torch_geometric")
    (tmp_path / "x.py").write_text(textwrap.dedent(SCRIPT))
    path = tmp_path / "out.json"
    done = ours("--seconds", "3", "--show-output", "--json", str(path), str(tmp_path / "x.py"),
                *arguments, GNNACCEL_WHEN="supported")
    assert done.returncode == cli.DONE, done.stderr
    seeds = [line for line in done.stdout.splitlines() if line.startswith("seeds")]
    assert len(seeds) >= 3 and len(set(seeds)) == 1
    found = json.loads(path.read_text())
    assert found["what"] == "training step" and found["loss_difference"] < 1e-4
    assert {one["name"]: one["kernel"] is None for one in found["layers"]} == {
        "convs.0": False, "convs.1": True}
    assert all(one["native_ms"] > 0 and one["ours_ms"] > 0 for one in found["layers"])
    assert [one["layers"] for one in found["kept"] if one["code"] == "GA201"] == [["convs.1"]]
    assert found["native"]["memory_bytes"] > 1 << 20


