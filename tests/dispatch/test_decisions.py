"""What is written down and said of a decision, whatever it is about."""
from __future__ import annotations

import warnings

import pytest
import torch

import gnnaccel
from gnnaccel.dispatch.observe import decisions, records
from gnnaccel.dispatch.observe.decisions import Subject
from gnnaccel.dispatch.plan.planner import Plan, native_plan
from gnnaccel.dispatch.policy.reasons import reason
from gnnaccel.errors import FallbackError


@pytest.fixture
def written():
    found: list = []
    sink = records.subscribe(found.append)
    yield found
    assert records.unsubscribe(sink) and not records.listening()
    for record in found:
        records.validate(record)


def test_a_record_has_the_plan_and_the_mode(written):
    why = reason("GA301", "slow")
    plan = Plan("cuda", "a kernel", (("torch operations", why),), 2e-6, 5e-6, storage="int8")
    layer = torch.nn.Linear(2, 2)
    subject = Subject("pyg", "Linear", layer, "cpu", torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        number = decisions.forward(subject, plan, None, "hit", 7.0)
    record, = written
    assert record["call"] == number and record["rejected"] == [
        dict(candidate="torch operations", code="GA301", text="slow", hint=why.hint)]
    shown = {name: record[name] for name in ("route", "kernel", "cost_us", "storage", "autocast",
                                             "dtype", "out_dtype", "training", "cache")}
    assert shown == dict(route="cuda", kernel="a kernel", cost_us=2.0, storage="int8",
                         autocast="bfloat16", dtype="bfloat16", out_dtype="float32", training=True,
                         cache="hit")


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_that_is_recorded_runs_on_torch_operations(written, again):
    x = torch.ones(3, requires_grad=True)
    out = x * 2
    decisions.told(Subject("dgl", "dgl.gspmm"), Plan("cuda", "a kernel"), None, 1.0, [None, out])
    torch.autograd.grad(out.sum(), x, create_graph=again)
    forward, backward = written
    assert (backward["direction"], backward["forward_call"]) == ("backward", forward["call"])
    assert backward["kernel"] == ("torch backend" if again else "a kernel")


def test_results_without_gradients_report_no_backward(written):
    decisions.told(Subject("pyg", "pyg.scatter"), Plan("torch", "torch operations"), None, 1.0,
                   torch.ones(2))
    assert [record["direction"] for record in written] == ["forward"]


def test_only_native_plans_have_a_code():
    why = reason("GA401", "on the cpu")
    assert native_plan(("kernels", why)).code == "GA401" and native_plan().code is None
    assert Plan("torch", "torch operations", (("kernels", why),)).code is None


def test_what_is_said_of_native_calls_is_said_once_for_each_cause(monkeypatch):
    monkeypatch.setattr(decisions, "_warned", set())
    slow, cpu = (native_plan(("kernels", reason(code, text))).rejected
                 for code, text in (("GA301", "slow"), ("GA401", "on the cpu")))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rejected in (slow, slow, cpu):
            decisions.object_to("GATConv", "warn", rejected)
    assert len(said) == 2 and said[0].filename == __file__
    with pytest.raises(FallbackError, match="GATConv would run natively: kernels: GA301 slow"):
        decisions.object_to("GATConv", "raise", slow)


def test_layers_aggregations_and_operations_write_alike(written):
    """By each of the three ways that a call can go."""
    pyg = pytest.importorskip("torch_geometric")
    x, edges = torch.randn(6, 4), torch.randint(6, (2, 20))
    with gnnaccel.enabled(when="supported"), torch.autocast("cpu", torch.bfloat16):
        pyg.nn.GATConv(4, 2)(x, edges)
        pyg.nn.SAGEConv(4, 2)(x, edges)
        pyg.utils.scatter(x, torch.zeros(6, dtype=torch.long))
    assert {record["layer"] for record in written} == {"GATConv", "SAGEConv", "pyg.scatter"}
    assert {record["autocast"] for record in written} == {"bfloat16"}
