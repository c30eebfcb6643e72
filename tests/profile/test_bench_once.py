"""Graphs that come once, on the CPU: that graphs are new in each call, and what is kept and shown
of the times."""
from __future__ import annotations

import argparse
import contextlib
import time

import pytest
import torch

pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main
from gnnaccel.adapters.pyg.bench import once as pyg
from gnnaccel.profile.bench import accel, guard, once_cells, result, table, timing
from gnnaccel.profile.bench.result import Record, Result

QUICK = ["bench", "--suite", "relational", "--parts", "once", "--quick", "--device", "cpu"]
CPU = torch.device("cpu")
SMALL = once_cells.OnceSize(5, 40, 6, 8)
VALUES = {f"{who}_{name}" for who in ("native", "ours")
          for name in ("least_us", "median_us")} | {"ratio_least", "ratio_median"}


def tensors(arguments) -> list[torch.Tensor]:
    parts = [list(part.values()) if isinstance(part, dict) else [part] for part in arguments]
    return [tensor for part in parts for tensor in part]


@pytest.mark.long
def test_quick_run_keeps_whole_records_and_shows_them(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main([*QUICK, "--out", str(out), "--table", "markdown"]) == 0
    records = result.load(out).records
    name = once_cells.QUICK.name
    assert [(record.kind, record.shape, record.layer, record.mode) for record in records] == [
        ("once", name, layer, mode) for layer in once_cells.QUICK_LAYERS
        for mode in ("forward", "training")]
    for record in records:
        values = record.values
        assert record.error is None and record.device == "cpu" and VALUES <= values.keys()
        assert 0 < values["native_least_us"] <= values["native_median_us"]
        assert values["ratio_least"] == pytest.approx(
            values["native_least_us"] / values["ours_least_us"])
        assert values["ratio_median"] == pytest.approx(
            values["native_median_us"] / values["ours_median_us"])
        # those inside of a HeteroConv are counted too
        layers = sum(values["routes"].values()) / values["turns"]
        assert layers == 1 if record.layer == "RGCN" else layers >= 1
    shown = capsys.readouterr()
    pair = " / ".join(f"{record.values['ratio_median']:.2f}" for record in records[:2])
    assert f"| {name} (cpu) |" in shown.out and f"| RGCN | {pair} |" in shown.out
    assert "ratio_median=" in shown.err


@pytest.mark.parametrize("name", pyg.LAYERS)
def test_every_layer_runs_over_edges_that_are_new_but_the_same(name):
    step = once_cells.once_step(pyg.LAYERS[name], SMALL, CPU, "training")
    first, before = step.results(), step.arguments
    step.renew()
    after = step.arguments
    assert after[0] is before[0], "features need not be new"
    pairs = list(zip(tensors(before[1:]), tensors(after[1:]), strict=True))
    assert pairs and all(old is not new and old.data_ptr() != new.data_ptr()
                         and torch.equal(old, new) for old, new in pairs)
    again = once_cells.once_step(pyg.LAYERS[name], SMALL, CPU, "training").results()
    for key in ("output", "x.grad", "weights.grad"):
        assert float(first[key].abs().max()) > 0
        torch.testing.assert_close(first[key], again[key], rtol=1e-4, atol=1e-5)
    assert len(first["output"]) == 3 * SMALL.nodes * SMALL.channels


@pytest.mark.parametrize("size",
                         (*once_cells.SIZES["cuda"], *once_cells.SIZES["cpu"], once_cells.QUICK))
def test_sizes_join_all_node_types_and_have_names_of_their_own(size):
    assert len(set(size.triples)) == size.relations
    assert {source for source, _, _ in size.triples} == {target
                                                         for _, _, target in size.triples} == set(
                                                             pyg.NODE_TYPES)
    for sizes in once_cells.SIZES.values():
        assert len({other.name for other in sizes}) == len(sizes)


def test_native_and_gnnaccel_take_turns_and_no_graph_comes_twice(monkeypatch):
    inside, calls, seen = [], [], []

    @contextlib.contextmanager
    def context(name):
        inside.append(name)
        yield
        inside.pop()

    for name in ("native", "gnnaccel"):
        monkeypatch.setitem(accel.CONTEXTS, name, lambda name=name: context(name))
    step = once_cells.once_step(pyg.LAYERS["RGCN"], SMALL, CPU, "forward")
    step.module.register_forward_pre_hook(lambda _,
                                          arguments: calls.append(inside[-1])
                                          or seen.append(arguments[1]))
    values = once_cells._turns(step, timing.Effort(batches=2, seconds=0.0))
    assert calls == ["native"] * 2 + ["gnnaccel"] * 5 + ["native",
                                                         "gnnaccel"] * 4 and values["turns"] == 4
    assert len({id(edges) for edges in seen}) == len(seen)


def test_time_ends_the_turns_but_not_before_the_least():
    step = once_cells.once_step(pyg.LAYERS["RGCN"], SMALL, CPU, "forward")
    assert once_cells._turns(step,
                             timing.Effort(batches=50, seconds=0.0))["turns"] == once_cells.TURNS


def test_what_else_runs_on_one_thread_does_not_count(monkeypatch):
    """A sleep inside of a call stands for the other processes of a busy CPU."""
    def sleeping(device):
        step = once_cells.once_step(pyg.LAYERS["RGCN"], SMALL, CPU, "forward")
        step.module.register_forward_hook(lambda *_: time.sleep(0.05))
        step.device = torch.device(device)
        return once_cells._call(step)

    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert sleeping("cpu") < 50_000 <= sleeping("cuda")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert sleeping("cpu") >= 50_000


def test_slower_calls_make_smaller_ratios():
    values = once_cells._statistics([1.0, 3.0, 2.0], [4.0, 8.0, 5.0])
    assert values == {"turns": 3, "native_least_us": 1.0, "ours_least_us": 4.0, "ratio_least": 0.25,
                      "native_median_us": 2.0, "ours_median_us": 5.0, "ratio_median": 0.4}


def test_nothing_starts_when_the_budget_is_spent(tmp_path):
    out = tmp_path / "bench.json"
    assert main([*QUICK, "--budget", "0", "--out", str(out)]) == 0
    assert not out.exists()
    budget = argparse.Namespace(spent=False)
    made = once_cells.records((pyg.LAYERS["RGCN"],), (SMALL,), CPU, timing.QUICK, 0, budget)
    assert next(made).mode == "forward"
    budget.spent = True
    assert list(made) == []


def test_a_failure_is_a_record(monkeypatch):
    monkeypatch.setattr(once_cells, "once_step",
                        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    record = once_cells.once_record(pyg.LAYERS["RGAT"], SMALL, CPU, "training", timing.QUICK)
    assert (record.error, record.values, record.layer) == (guard.OUT_OF_MEMORY, {}, "RGAT")


@pytest.mark.parametrize("options", [["--layers", "nosuch"], ["--shapes", "tiny-typed"],
                                     ["--parts", "layers,once", "--layers", "rgcn64"]])
def test_names_that_mean_nothing_here_are_an_error(options, capsys):
    assert main([*QUICK, *options]) == 2
    said = capsys.readouterr().err
    assert "HeteroConv SAGE and GAT" in said or "sizes and layers of its own" in said


def test_named_layers_and_defaults():
    from gnnaccel.profile.bench import suite_relational

    def planned(**given):
        options = argparse.Namespace(**{**dict(
            device="cpu", parts=None, shapes=None, layers=None, quick=False, data=None, repeat=None,
            patience=20.0, native=True, compile_limit=0.0,
            seed=0, order="random"), **given})
        return suite_relational.from_options(options)

    assert "once" not in planned().parts and planned().once_sizes == ()
    once = planned(parts=[["once"]])
    assert once.jobs == once.cpu_jobs == () and len(
        once.once_layers) == 20 and once.once_sizes == once_cells.SIZES["cpu"]
    named = planned(parts=[["once"]], layers=[["hgt4heads", "rgcn max"]], quick=True)
    assert [layer.name for layer in named.once_layers] == ["HGT 4 heads", "RGCN max"]
    both = planned(parts=[["layers", "once"]])
    assert both.jobs and both.once_layers


def once(layer, mode, median, least, shape="5 relations, 500 edges, 64 channels", device="cuda",
         error=None):
    return Record("once", shape, layer, mode, device=device, error=error,
                  values={} if error else {"ratio_median": median, "ratio_least": least})


def test_the_table_names_what_is_slow_by_both_ratios():
    tiny = "5 relations, 100 edges, 16 channels"
    made = Result({}, {}, [
        once("RGCN", "forward", 0.1, 0.1), once("RGCN", "forward", 1.234, 1.5),
        once("RGCN", "training", 0.90, 0.99),
        once("HAN", "forward", 0.80, 0.94), once("HAN", "training", 0, 0, error="out of memory"),
        once("HAN", "forward", 0.70, 0.60, shape=tiny, device="cpu")])
    shown = {section.title: section
             for section in table.sections(made)}[
                 "Graphs that come once: x native, forward / training"]
    assert shown.columns == ("layer", "5 relations, 500 edges, 64 channels", f"{tiny} (cpu)")
    assert shown.rows == [("RGCN", "1.23 / 0.90", "-"), ("HAN", "0.80 / out of memory", "0.70 / -")]
    assert shown.notes[-1] == (
        "below 0.95 by the median and by the least: 2 of 4 cells, the lowest first: "
        f"HAN, {tiny} (cpu), forward: 0.700 and 0.600; HAN, 5 relations, 500 "
        "edges, 64 channels, forward: 0.800 and 0.940")
    made.records = made.records[1:3]
    assert table.once(made).notes == (
        "below 0.95 by the median and by the least: none of 2 cells",)
