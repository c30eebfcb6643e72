"""The rule by which the oracle judges, its drawing of cases, and its driver."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from . import driver, graphs, histories, judge, messages, metagraphs, trees  # noqa: E402
from .backends import Backend  # noqa: E402
from .table import TABLE, attempt, drawn  # noqa: E402


def results(**values):
    return {
        name.replace("_", " "): torch.tensor(v) if v is not None else None
        for name, v in values.items()
    }


def test_what_differs_in_kind():
    host = results(out=[1.0, 2.0], gradient_of_x=[0.0], count=[1, 2])
    assert judge.differing(dict(host), host) is None
    assert ("not finite" in judge.differing({**host, "out": torch.tensor([1.0, float("nan")])},
                                            host).text)
    assert "no result" in judge.differing({**host, "out": None}, host).text
    assert judge.differing({**host, "gradient of x": None}, host) is None  # nothing, and zeros
    assert "whole" in judge.differing({**host, "count": torch.tensor([1, 3])}, host).text
    assert "float64" in judge.differing({**host, "out": host["out"].double()}, host).text
    assert "results" in judge.differing({"out": host["out"]}, host).text


def test_what_is_not_finite():
    inf, half = float("inf"), torch.float16
    host = results(out=[1.0, inf], gradient_of_x=[1.0])
    assert judge.differing(dict(host), host) is None
    # infinities of the host excuse no others, but for those of 16 bits
    spread = results(out=[inf, inf], gradient_of_x=[1.0])
    assert "not finite" in judge.differing(spread, host).text
    of_16 = [{k: t.to(half) for k, t in one.items()} for one in (spread, host)]
    assert judge.differing(*of_16) is None
    fine = {k: torch.ones_like(t) for k, t in of_16[0].items()}
    assert "not finite" in judge.differing(of_16[0], fine).text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nudged_numbers_are_one_rounding_away_and_equal_ones_stay_equal(dtype):
    x = torch.randn(1000).to(dtype)
    found = judge.nudged(torch.stack([x, x]), 3)
    assert torch.equal(found[0], found[1])
    step = ((found[0] - x).double() / x.double()).abs() / torch.finfo(dtype).eps
    assert 0.4 <= step.min() and step.max() <= 1.0
    assert ((found[0] > x).sum() - 500).abs() < 100


def test_an_error_that_the_inputs_rounding_explains_is_ill_conditioned():
    truth = {"out": torch.tensor([1.0], dtype=torch.float64)}
    got, near = {"out": truth["out"] + 1e-3}, {"out": truth["out"] - 8e-4}
    assert judge.beyond([(got, truth, truth)], judge.FLOOR)
    assert judge.beyond([(got, truth, truth, near)], judge.FLOOR) is None
    assert judge.beyond([(got, truth, truth, truth)], judge.FLOOR)
    assert not judge.is_alarm(judge.CONDITIONED + "out") and judge.is_alarm("out")
    assert not judge.is_alarm("refused") and not judge.is_alarm(None)


@pytest.mark.parametrize("ours, theirs, rounding",
                         [(0.2, 1e-6, True), (0.9, 1e-2, False), (0.9, 0.1, True)])
def test_large_errors_are_rounding_where_the_host_has_lost_its_digits(ours, theirs, rounding):
    truth = {"out": torch.tensor([1.0], dtype=torch.float64)}
    found = judge.beyond([({"out": truth["out"] + ours}, {"out": truth["out"] + theirs}, truth)],
                         judge.FLOOR)
    assert found is not None and found.rounding == rounding


@pytest.mark.parametrize("theirs, rounding", [(1e-8, False), (1e-6, True)])
def test_digits_are_lost_of_a_result_itself_however_small_beside_another(theirs, rounding):
    large, small = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1e-6]).double()
    truth = {"gradient of a": large, "gradient of b": small}
    got, host = ({**truth, "gradient of b": small + off} for off in (1e-3, theirs))
    found = judge.beyond([(got, host, truth)], judge.FLOOR)
    assert found is not None and found.rounding == rounding


def test_digits_are_lost_of_a_result_that_is_zero():
    """As a second gradient is through a softmax over equal edges, with inputs of a thousand: terms
    of 1e17 cancel, in the host's order of operations nearly all of them."""
    truth = {"second gradient of v": torch.tensor([1e13]).double(), "second gradient of q":
             torch.tensor([1e-5]).double()}
    got, host = ({**truth, "second gradient of q": torch.tensor([off]).double()}
                 for off in (2e16, 9e9))
    found = judge.beyond([(got, host, truth)], judge.FLOOR)
    assert found is not None and found.rounding
    assert judge.beyond([(got, got, truth)], judge.FLOOR) is None  # as in some of the other draws
    off = {**truth, "second gradient of v": truth["second gradient of v"] * 2}  # is no rounding
    found = judge.beyond([(off, truth, truth)], judge.FLOOR)
    assert found is not None and not found.rounding


def test_the_largest_of_the_host_s_errors_over_nudged_inputs_counts():
    truth = {"out": torch.tensor([1.0], dtype=torch.float64)}
    got, near = {"out": truth["out"] + 1e-3}, {"out": truth["out"] + 6e-4}
    assert judge.beyond([(got, truth, truth, truth, near, truth)], judge.FLOOR) is None


def test_where_the_host_has_no_number_no_other_number_is_wrong():
    """An error elsewhere is."""
    truth = {"out": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    host = {"out": torch.tensor([float("nan"), 1.0], dtype=torch.float16)}
    for got, wrong in (([1.1, 1.0], False), ([1.0, 1.1], True)):
        draw = {"out": torch.tensor(got, dtype=torch.float16)}, host, truth
        assert (judge.beyond([draw], judge.FLOOR) is not None) == wrong


def test_self_loops_of_a_node_have_one_weight_where_the_host_takes_any():
    edges = torch.tensor([[0, 1, 1, 2, 1], [0, 1, 2, 2, 1]])
    case = graphs.Case(torch.nn.Identity(), (None, edges), {"edge_weight": torch.arange(5.0)})
    found = graphs.with_one_weight_a_loop(case).kwargs["edge_weight"]
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0]
    of_one = torch.tensor(2.5).expand(5)  # all of them in one place, which is not written to
    case = graphs.Case(torch.nn.Identity(), (None, edges), {"edge_weight": of_one})
    assert graphs.with_one_weight_a_loop(case).kwargs["edge_weight"] is of_one


def test_gradients_that_vanish_are_measured_against_the_outputs():
    exact = {k: t.double() for k, t in results(out=[1.0], gradient_of_x=[1e-17]).items()}
    near, far = (results(out=[1.0], gradient_of_x=[v]) for v in (1e-8, 1e-3))
    assert judge.distances(near, exact)["gradient of x"] < 1e-6
    assert judge.distances(far, exact)["gradient of x"] > 1e-4


@pytest.mark.parametrize(
    "ours, theirs, found",
    [(1.9e-3, 1e-3, False), (2.1e-3, 1e-3, True), (9e-7, 0, False), (2e-6, 0, True)],
)
def test_twice_the_error_of_the_host_and_a_floor(ours, theirs, found):
    truth = {"out": torch.tensor([1.0], dtype=torch.float64)}
    draw = {"out": truth["out"] + ours}, {"out": truth["out"] + theirs}, truth
    assert (judge.beyond([draw], judge.FLOOR) is not None) == found


def test_errors_are_averaged_over_draws():
    truth = {"out": torch.tensor([1.0], dtype=torch.float64)}
    draws = [({"out": truth["out"] + 1e-3}, {"out": truth["out"] + error}, truth)
             for error in (0.0, 1e-3)]
    assert judge.beyond(draws[:1], judge.FLOOR) and not judge.beyond(draws, judge.FLOOR)


def test_one_draw_alone_decides_nothing():
    truth = {"out": torch.tensor([1.0], dtype=torch.float64)}

    def draws(*errors):
        return [({"out": truth["out"] + e}, {"out": truth["out"] + 1e-6}, truth) for e in errors]

    assert not judge.beyond(draws(1e-4, *[1e-6] * 7), judge.FLOOR)
    assert judge.beyond(draws(*[1e-4] * 3, *[1e-6] * 5), judge.FLOOR)


@pytest.mark.parametrize("terms", [300, 1100])
@pytest.mark.parametrize("first, least", [(0, 8), (2, 2)])
def test_a_sum_in_turn_is_off_by_a_share_of_its_terms(terms, first, least):
    """``first``: how much larger than the sum of the others the first number is."""
    draws = torch.Generator().manual_seed(1)
    x, more = torch.randn(200, generator=draws), 1 + torch.rand(200, generator=draws)
    numbers = x.expand(terms, 200).clone()
    numbers[0] += first * terms * x * more
    found = torch.zeros(1, 200).index_add(0, torch.zeros(terms, dtype=torch.long), numbers)
    error = (found / numbers.double().sum(0) - 1).abs().mean() / terms
    assert judge.OF_A_TERM / least < error < judge.OF_A_TERM


def test_the_longest_sum_of_a_case():
    hub = torch.stack([torch.arange(9), torch.zeros(9, dtype=torch.long)])
    assert trees.longest_sum((torch.randn(2, 5), hub, {"a": hub.flip(0)})) == 9
    assert trees.longest_sum((torch.randn(2, 5), torch.zeros(2, 0, dtype=torch.long), None)) == 0


def test_small_gradients_are_measured_against_the_largest():
    truth = {"gradient of a": torch.tensor([1.0]), "gradient of b": torch.tensor([1e-12])}
    got = {"gradient of a": torch.tensor([1.0]), "gradient of b": torch.tensor([3e-10])}
    assert judge.distances(got, truth)["gradient of b"] < 1e-6


def test_the_same_seed_draws_the_same_case():
    assert drawn(5) == drawn(5)
    for name in ("GATConv", "HeteroConv", "RGCNConv"):
        first, again, other = (TABLE[name](graphs.Draw("case", look)) for look in (0, 0, 1))
        flat = [trees.named((c.args, c.kwargs)) for c in (first, again, other)]
        assert flat[0].keys() == flat[1].keys() == flat[2].keys()
        assert all(torch.equal(flat[0][k], flat[1][k]) for k in flat[0])
        for k, t in flat[0].items():  # the same graph, other numbers
            assert t.shape == flat[2][k].shape and (t.is_floating_point()
                                                    or torch.equal(t, flat[2][k]))


@pytest.mark.long
def test_messages_are_classes_that_run():
    """Most of them: PyG refuses some of what users write."""
    kinds = [messages.user_class(graphs.Draw(f"class {seed}"))[0] for seed in range(40)]
    ran = [messages.built(kind, graphs.Draw("inputs")) for kind in kinds]
    outs = [attempt(lambda case=case: case.module(*case.args))[0] for case in ran]
    alike = [out is not None and len(out) == len(case.args[0]) for out, case in zip(outs, ran)]
    assert sum(alike) >= 32


def test_loops_have_one_weight_each_and_nothing_else_changes():
    edges, weight = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 0]]), torch.rand(4)
    module, x = torch.nn.Identity(), torch.rand(3, 2)
    given = {"edge_weight": weight.clone()}
    made = graphs.with_one_weight_a_loop(graphs.Case(module, (x, edges), given, ""))
    expected = weight[[0, 1, 1, 3]]
    assert torch.equal(made.kwargs["edge_weight"], expected)
    for other in (torch.rand(2, 8), torch.zeros(2, 8, dtype=torch.long)):  # features, an index
        given = {"edge_weight": weight.clone()}
        graphs.with_one_weight_a_loop(graphs.Case(module, (x, other), given, ""))
        assert torch.equal(given["edge_weight"], weight)


def test_strides_survive_the_move():
    for t in (torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2], torch.randn(1, 6).expand(3, 6)):
        moved = trees.with_strides(t, torch.device("cpu"))
        assert torch.equal(moved, t) and (moved.stride() == t.stride() or 0 in t.stride())


DEATH = """
import json, os, sys
first = int(next(a for a in sys.argv if a.startswith("--first=")).split("=")[1])
for seed in range(first, first + 4):
    print(json.dumps({"begin": seed}), flush=True)
    if seed == 12:
        os._exit(134)
    if seed == 14:
        print(json.dumps({"end": seed, "what": "a", "wrong": "wrong", "checks": 2, "seconds": 0}), flush=True)
    else:
        print(json.dumps({"end": seed, "what": "a", "wrong": None, "checks": 2, "seconds": 0}), flush=True)
"""


def test_a_process_that_dies_is_an_alarm_and_another_goes_on(monkeypatch):
    monkeypatch.setattr(driver.Task, "command",
                        lambda self: [sys.executable, "-c", DEATH, f"--first={self.first}"])
    summary = driver.run([driver.Task("histories", "cpu", 10, 1, 60, 8)], 1)
    assert [alarm["seed"] for alarm in summary.alarms] == [12, 14]
    assert "134" in summary.alarms[0]["text"] or "status" in summary.alarms[0]["text"]
    assert "--seed 14" in summary.alarms[1]["reproduce"]
    assert summary.counts["histories cpu"]["alarms"] == 2


@pytest.mark.long
def test_the_command_line_runs_one_case(tmp_path):
    out = tmp_path / "summary.json"
    command = [
        "table",
        "SAGEConv",
        "--seed",
        "3",
        "--mode",
        "grad",
        "--backend",
        "cpu",
        "--out",
        str(out),
    ]
    done = subprocess.run([sys.executable, "-m", "tests.oracle", *command], capture_output=True,
                          text=True, cwd=driver.ROOT, env=driver.environment())
    found = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["counts"]["table cpu"]["cases"] == 1 and not found["alarms"]


def test_in_fp64_the_hosts_rounding_of_large_terms_is_no_truth():
    """0.09 where 1e7 cancels is found nowhere else; one percent of a small gradient is an error."""
    large = torch.full((4,), 5e6).double()
    for ours, theirs, found in ((0.0, 0.05, False), (1e4, 1.01e4, True)):
        got, host = ({"gradient of x": large, "gradient of a": torch.full((4,), a).double()}
                     for a in (ours, theirs))
        assert (judge.beyond([(got, host, host)], judge.FLOOR, judge.SMALL_IN_FP64)
                is not None) is found
        assert judge.beyond([(got, host, host)], judge.FLOOR) is not None


def test_equal_numbers_are_nudged_apart_where_that_is_asked_for():
    equal = torch.full((6, 4), 0.3)
    together, apart = judge.nudged(equal, 1), judge.nudged(equal, 1, apart=True)
    assert len(together.unique()) == 1 and len(apart.unique()) == 2
    assert float((apart - equal).abs().max()) < 1e-7


def test_ties_explain_gradients_and_not_outputs():
    truth = {k: torch.tensor([1.0], dtype=torch.float64) for k in ("d x a", "out a")}
    near = [{k: t + 0.1 for k, t in truth.items()}] * 2
    got = {k: t + 0.11 for k, t in truth.items()}
    assert metagraphs._by_ties((got, truth, truth, *near), {"d x a": (0.11, 0, 0)})
    assert not metagraphs._by_ties((got, truth, truth, truth), {"d x a": (0.11, 0, 0)})
    assert not metagraphs._by_ties((got, truth, truth, *near), {"out a": (0.11, 0, 0)})


def test_where_largest_messages_are_taken():
    from torch_geometric.nn import GATConv, SAGEConv, to_hetero

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = SAGEConv((-1, -1), 4)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    types = ["a"], [("a", "x", "a"), ("a", "y", "a")]
    assert metagraphs.takes_extrema(SAGEConv(4, 4, aggr="max"))
    assert metagraphs.takes_extrema(to_hetero(Net(), types, aggr="min"))
    assert not metagraphs.takes_extrema(to_hetero(Net(), types, aggr="mean"))
    assert not metagraphs.takes_extrema(GATConv(4, 4))


@pytest.mark.parametrize("inference", [False, True])
def test_a_history_has_one_weight_for_the_loops_of_a_node(inference):
    """Those that are edited, too, and nothing else changes."""
    history = histories.History(3, Backend("cpu"), "GCNConv weighted")
    history.nodes, history.edges = 5, 200
    with torch.inference_mode(inference):
        history.new_graph()
    before, (src, dst) = history.values.clone(), history.edge_index
    history.one_weight_a_loop()
    values = history.values
    assert torch.equal(values[src != dst], before[src != dst])
    for node in range(5):
        own = values[(src == dst) & (src == node)]
        assert len(own) > 1 and own.unique().numel() == 1 and own[0] in before
    version = None if inference else values._version
    history.one_weight_a_loop()  # and is left alone where it has them
    assert history.values is values and (inference or values._version == version)
