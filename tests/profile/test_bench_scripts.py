"""Whole scripts, natively and enabled: runs in processes, what they come to, and the table."""
from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main  # noqa: E402
from gnnaccel.profile.bench import (result, script_figures, script_table,  # noqa: E402
                                    script_ways, suite_scripts, table)
from gnnaccel.profile.bench.result import Record, Result  # noqa: E402
from gnnaccel.profile.bench.script_child import Run, Spec  # noqa: E402

HEAD = """
import sys, torch, gnnaccel
from torch_geometric.nn import GATConv
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop = GATConv(8, 8, dropout=0.5), torch.nn.Dropout(0.5)
    def forward(self, x, edges):
        return torch.nn.functional.dropout(self.drop(self.conv(x, edges)), 0.5, self.training)
def train(steps):
    net, x, edges = Net(), torch.randn(300, 8), torch.randint(0, 300, (2, 3000))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        planted(net(x, edges)).square().mean().backward()
        optimizer.step()
planted = lambda x: x
assert PREPARED == sys.argv, "no file ran before the script"
"""
SCRIPTS = {
    "good": "train(int(sys.argv[1]))",
    "long": """
        import atexit, pathlib
        atexit.register(pathlib.Path(sys.argv[1]).write_text, "ended")
        try:
            train(10**6)
        finally:
            print("cleaned")""",
    "two_models": "train(6)\ntrain(6)",
    "wrong": """
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, grad):
                return -grad if gnnaccel.status()["enabled"] else grad
        planted = Doubled.apply
        train(8)""",
    "fails": """
        train(4)
        if gnnaccel.status()["enabled"]:
            print("a line of its own", file=sys.stderr)
            raise ValueError("only enabled")""",
    "broken": "import no_such_package",
}
BEFORE = "import builtins, sys\nbuiltins.PREPARED = list(sys.argv)\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All scripts in one run, forked from one process, without dropout; 12 steps at most. Each
    asserts that the file named by ``--before`` ran, and with the script's arguments."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(HEAD + textwrap.dedent(text))
    (folder / "before.py").write_text(BEFORE)
    given = [f"{folder}/good.py 9", f"{folder}/long.py {folder}/told",
             *(f"{folder}/{name}.py" for name in SCRIPTS if name not in ("good", "long"))]
    patch = pytest.MonkeyPatch()
    with patch.context() as environment:
        environment.setenv("GNNACCEL_WHEN", "supported")
        environment.setenv("OMP_NUM_THREADS", "1")
        # where the tests' process has it
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        assert main(["bench", "--suite", "scripts", "--device", "cpu", "--exact", "--steps", "12",
                     "--limit", "30",
                     "--parts", "native,gnnaccel,bound", "--preload", "torch_geometric.nn",
                     "--before", str(folder / "before.py"), "--scripts", *given,
                     "--out", str(folder / "out.json")]) == 0
    found = result.load(folder / "out.json")
    found.folder = folder
    return found


def run(made, name, impl):
    found = made.one(kind="script", layer=name, impl=impl)
    assert found is not None and found.device == "cpu"
    return found


@pytest.mark.long
@pytest.mark.parametrize("impl", ["native", "gnnaccel"])
def test_what_a_run_records(impl, made):
    found = run(made, "good.py 9", impl)
    values = found.values
    assert found.error is None and 0 < found.timing["min_ms"] <= found.ms
    assert found.timing["calls"] == 6  # a third of nine do not count
    assert found.timing["first_ms"] > 0 and values["loop_ms"] >= found.timing["min_ms"]
    assert (values["what"], values["steps"], values["ended"]) == ("training step", 9, "script")
    assert values["wall_s"] > values["first_step_s"] > 0 and values["peak_mib"] > 1
    assert len(values["losses"]) == 9 and len(set(values["losses"])) == 9
    assert values["kernels"] == 0


@pytest.mark.long
def test_calls_by_kernels_are_counted(made):
    native, ours = (run(made, "good.py 9", impl).values for impl in ("native", "gnnaccel"))
    assert native["routes"] == {} and native["share"] is None
    assert ours["share"] == 1.0 and ours["routes"] == {"torch": 9} and ours["reasons"] == {}


@pytest.mark.long
def test_without_dropout_losses_agree(made):
    assert 0 <= run(made, "good.py 9", "gnnaccel").values["loss_difference"] < 1e-5


@pytest.mark.long
def test_a_wrong_gradient_is_seen_in_the_losses(made):
    found = run(made, "wrong.py", "gnnaccel").values
    assert found["loss_difference"] > 1e-3
    assert found["losses"][0] == pytest.approx(run(made, "wrong.py", "native").values["losses"][0])


@pytest.mark.long
def test_a_long_script_is_stopped_cleanly(made):
    for impl in ("native", "gnnaccel"):
        values = run(made, "long.py told", impl).values
        assert (values["steps"], values["ended"]) == (12, "steps")
    assert (made.folder / "told").read_text() == "ended"


@pytest.mark.long
def test_two_models_in_turn(made):
    values = run(made, "two_models.py", "gnnaccel").values
    # the second optimizer counts once the first one is gone
    assert values["steps"] == 12 and values["ended"] in ("script", "steps")
    assert values["loss_difference"] < 1e-5


@pytest.mark.long
def test_what_lies_outside_of_layers(made):
    native, bound = (run(made, "good.py 9", impl) for impl in ("native", "bound"))
    assert bound.error is None and 0 < bound.values["layers_share"] <= 1
    assert bound.ms == pytest.approx((1 - bound.values["layers_share"]) * native.ms)


@pytest.mark.long
def test_failures_have_the_exceptions_text(made):
    assert run(made, "fails.py", "native").error is None
    assert run(made, "fails.py", "gnnaccel").error == "ValueError: only enabled"
    error = run(made, "broken.py", "native").error
    assert error == "ModuleNotFoundError: No module named 'no_such_package'"
    assert made.find(layer="broken.py", impl="gnnaccel") == []  # nothing to compare with


@pytest.mark.long
def test_the_result_names_no_folder(made):
    assert str(made.folder) not in str(made.settings) + str(made.provenance)


@pytest.mark.long
def test_the_table(made):
    said = table.markdown(made)
    head = ["script", "native ms", "gnnaccel ms", "gain", "bound", "loop gain", "wall",
            "memory", "loss", "by kernels", "steps"]
    assert f"| {' | '.join(head)} |" in said  # no column of what was not run
    rows = {cells[0]: cells[1:] for line in said.splitlines() if line.startswith("| ")
            for cells in [[cell.strip() for cell in line.strip("| ").split("|")]]}
    good = dict(zip(head[1:], rows["good.py 9 (cpu)"]))
    assert good["by kernels"] == "100%" and good["steps"] == "9" and good["gain"].endswith("x")
    assert rows["fails.py (cpu)"][1] == "failed [1]" and rows["broken.py (cpu)"][0] == "failed [2]"
    assert "* [1] ValueError: only enabled" in said and "* [2] ModuleNotFoundError" in said
    assert "* fails.py (cpu), bound: ValueError: only enabled" in said
    assert "geometric mean of 4" in rows  # of those that did not fail


def test_the_table_counts_scripts_whose_ways_took_turns():
    folder = Path(__file__).parents[2] / "docs" / "results"
    said = table.markdown(result.load(folder / "h200-scripts-turns-joined.json"))
    assert "| geometric mean of 18 | 1.53x | 2.14x |" in said


@pytest.mark.long
def test_a_new_process_for_each_run(tmp_path):
    script = tmp_path / "one.py"
    script.write_text("import torch\nnet = torch.nn.Linear(2, 2)\n"
                      "o = torch.optim.SGD(net.parameters(), 0.1)\n"
                      "for _ in range(5):\n    net(torch.ones(1, 2)).sum().backward(); o.step()\n")
    out = tmp_path / "out.json"
    assert main(["bench", "--suite", "scripts", "--device", "cpu", "--scripts", str(script),
                 "--parts", "native", "--out", str(out)]) == 0
    found = result.load(out).one(kind="script")
    # without zero_grad() a step reaches from the end of one to the end of the next
    assert found.error is None and found.timing["calls"] == 3 and found.values["steps"] == 4


# --- in the process -------------------------------------------------------------------------------

@pytest.mark.parametrize("spec, counts, why", [
    ({}, (5, 1.0, True), "steps"), ({}, (4, 1.0, True), None), ({}, (4, 9.0, True), "seconds"),
    ({}, (5, 1.0, False), None), ({}, (5, 9.0, False), "steps"),  # it may yet train
    ({"trains": True}, (5, 9.0, False), None), ({"trains": False}, (5, 1.0, False), "steps"),
    ({"until": 0.0}, (1, 0.0, False), "limit")])
def test_when_a_script_is_stopped(spec, counts, why):
    made = Run(Spec(**{**dict(mode="native", script="x", arguments=[], out="", steps=5,
                              until=1e9, start=0.0, seconds=5.0), **spec}))
    made.steps = types.SimpleNamespace(count=counts[0], trains=counts[2])
    assert made._over(counts[1], 10.0) == why


def test_dropout_is_off(monkeypatch):
    for name in script_ways._FUNCTIONS:
        for found in (name, f"{name}_"):
            for place in (torch, torch._VF):
                monkeypatch.setattr(place, found, getattr(place, found))
    monkeypatch.setattr(torch.nn.Module, "__setattr__", torch.nn.Module.__setattr__)
    dropout = torch.nn.functional.dropout
    script_ways.switch_dropout_off()
    x, modules = torch.ones(64, 8), torch.nn
    assert torch.nn.functional.dropout is dropout  # so that what reads messages knows it
    for made in (modules.Dropout(0.5), modules.AlphaDropout(0.5), modules.Dropout(0.5, True)):
        assert torch.equal(made(x.clone()), x) and made.p == 0
    assert torch.equal(dropout(x, 0.5, True), x) and torch.equal(torch.dropout(x, 0.5, True), x)
    from torch_geometric.nn import GATConv, GENConv
    assert GATConv(4, 4, dropout=0.5).dropout == 0 and GENConv(4, 4, eps=0.5).eps == 0.5


# --- options --------------------------------------------------------------------------------------

def test_scripts_by_pattern_and_with_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gat.py").write_text("")
    (tmp_path / "one" / "a b.py").write_text("")
    made = suite_scripts._scripts(["one/*.py", "two/gat.py --root /data/x", "one/gat.py"])
    assert [(one.path, one.arguments, one.name) for one in made] == [
        ("one/a b.py", (), "'a b.py'"), ("one/gat.py", (), "one/gat.py"),
        ("two/gat.py", ("--root", "/data/x"), "two/gat.py --root x")]


@pytest.mark.parametrize("options, said", [
    ([], "--suite scripts needs --scripts"), (["--scripts", "none.py"], "no script 'none.py'"),
    (["--scripts", __file__, "--steps", "0"], "--steps 0 is not above 0"),
    (["--scripts", __file__, "--before", "none.py"], "no file none.py"),
    (["--scripts", __file__, "--preload", "none.py"], "no file none.py"),
    (["--scripts", __file__, "--before", "README.md"], "README.md is no .py file"),
    (["--scripts", __file__, "--parts", "layers"], "no part layers"),
    (["--scripts", __file__, "--suite", "peers"], "--scripts belongs to --suite scripts")])
def test_options_that_mean_nothing(options, said, capsys):
    assert main(["bench", "--suite", "scripts", "--device", "cpu", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_record_of_the_kind_can_be_read_and_merged():
    first = Record("script", layer="a.py", impl="native")
    again = dataclasses.replace(first, timing={"ms": 1.0})
    assert result.merge([Result(records=[first]), Result(records=[again])]).records == [again]
    assert "script" in result.KINDS


# --- ways that take turns -------------------------------------------------------------------------

TURNS = """
calls, seen, own = [0], [], GATConv.forward
def planted(x):
    before, calls[0] = calls[0], gnnaccel.stats().get("GATConv", {}).get("calls", 0)
    seen.append((gnnaccel.status()["enabled"], calls[0] - before,
                 own is GATConv.forward))
    return x
try:
    train(10**6)
finally:
    import json
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(seen) + "\\n")
"""


@pytest.mark.long
def test_ways_take_turns_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNACCEL_WHEN", "supported")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    script, told, out = tmp_path / "one.py", tmp_path / "told", tmp_path / "out.json"
    script.write_text(HEAD.replace("assert PREPARED", "PREPARED = sys.argv\nassert PREPARED")
                      + TURNS)
    assert main(["bench", "--suite", "scripts", "--device", "cpu", "--steps", "20", "--parts",
                 "turns,bound", "--scripts", f"{script} {told}", "--out", str(out)]) == 0
    both = result.load(out)
    found = both.one(kind="script", impl="turns")
    turns = found.values["turns"]
    assert found.error is None and found.timing["ms"] == turns["gnnaccel"]["ms"]
    assert {way: one["calls"] for way, one in turns.items()} == {"native": 21, "gnnaccel": 21}
    seen = json.loads(told.read_text().splitlines()[0])
    native, ours = [False, 0, True], [True, 1, False]  # what stands where, and whose calls count
    assert seen == [native] * 10 + [ours] * 20 + [native] * 20 + [ours] * 20 + [native] * 10
    bound = both.one(kind="script", impl="bound")
    left = 1 - bound.values["layers_share"]
    assert bound.error is None and bound.ms == pytest.approx(left * turns["native"]["ms"])
    assert "| script | in turns | bound |" in table.markdown(both)


def test_steps_that_count_where_ways_take_turns():
    ways = ["native"] * 10 + ["gnnaccel"] * 10 + ["native"] * 10 + ["gnnaccel"] * 8
    found = script_figures.counted(ways, [float(number) for number in range(38)])
    assert found == {"native": [23.0, 24.0, 25.0, 26.0, 27.0, 28.0, 29.0],
                     "gnnaccel": [33.0, 34.0, 35.0, 36.0, 37.0]}
    assert set(script_figures.counted(ways[:-1], [1.0] * 37)) == {"native"}  # four steps are few


def test_the_table_of_ways_that_took_turns():
    turns = {"native": {"ms": 3.0}, "gnnaccel": {"ms": 2.0}}
    said = table.markdown(Result(records=[Record("script", layer="a.py", impl="turns",
                                                 timing={"ms": 2.0}, values={"turns": turns}),
                                          Record("script", layer="b.py", impl="turns",
                                                 error="too few steps")]))
    assert "| script | in turns |" in said and "| a.py | 1.5x |" in said
    assert "b.py, turns: too few steps" in said


@pytest.mark.parametrize("parts, shown", [
    ({"turns": 3.0}, "6x"), ({"native": 4.0, "turns": 3.0}, "8x"), ({"native": 4.0}, "8x"),
    ({"native": None, "turns": 3.0}, "6x"), ({}, None)])
def test_the_bound_of_native_steps_that_took_turns(parts, shown):
    """Those of a native run come first, where it did not fail."""
    records = [Record("script", layer="a.py", impl="bound", timing={"ms": 0.5}),
               Record("script", layer="a.py", impl="gnnaccel", timing={"ms": 2.0},
                      values={"steps": 9})]
    for part, ms in parts.items():
        values = {"steps": 9, "turns": {"native": {"ms": ms}, "gnnaccel": {"ms": 2.0}}}
        records.append(Record("script", layer="a.py", impl=part, values=values,
                              **({"timing": {"ms": ms}} if ms else {"error": "out of memory"})))
    section = script_table.section(Result(records=records))
    assert dict(zip(section.columns, section.rows[0])).get("bound") == shown
