"""The relational example runs from end to end, trains natively as a plain PyG loop does, and
reports what it measured."""
from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from torch_geometric.nn import GATConv, HGTConv, RGCNConv  # noqa: E402

import gnnaccel  # noqa: E402
import relational_hosted  # noqa: E402
import relational_models  # noqa: E402
import relational_npz  # noqa: E402
import relational_training  # noqa: E402
from relational_report import Decisions, Run, cells, markdown, summarize  # noqa: E402
from tests.examples.test_relational_npz import KINDS, entity_arrays, hetero_arrays, write_all  # noqa: E402


def main_on(folder: Path, *given: str) -> dict:
    """What the script writes when run in this process."""
    out = folder / "out.json"
    relational_training.main(["--data", str(folder), "--device", "cpu", "--out", str(out), *given])
    return json.loads(out.read_text())


# -- the whole script ------------------------------------------------------------------------------

@pytest.mark.long
def test_script_writes_all_it_measured(tmp_path):
    write_all(tmp_path)
    given = ["--data", str(tmp_path), "--device", "cpu", "--layer", "rgcn", "fast_rgcn", "rgat",
             "--seeds", "2", "--epochs", "3", "--out", str(tmp_path / "out.json"), "--table",
             str(tmp_path / "table.md")]
    done = subprocess.run([sys.executable, str(ROOT / "examples/relational_training.py"), *given],
                          capture_output=True, text=True, encoding="utf-8", timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    environment = written["environment"]
    assert (environment["seeds"], environment["epochs"],
            environment["torch"]) == (2, 3, torch.__version__)
    names = [(result["dataset"], result["layer"]) for result in written["results"]]
    layers = ["RGCNConv", "FastRGCNConv", "RGATConv"]
    assert names == [*(("AIFB", layer) for layer in layers),
                     *(("MUTAG", layer) for layer in layers), ("DBLP", "HGTConv")]
    for result in written["results"]:
        check_result(result)
    assert str(tmp_path) not in json.dumps(written)
    rows = [line for line in (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
            if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {dataset}, {layer}"
                                                         for dataset, layer in names]
    assert all(len(row.split(" | ")) == len(rows[0].split(" | ")) for row in rows)
    assert "HGTConv" in done.stdout and "gnnaccel" in done.stdout


def check_result(result: dict) -> None:
    for side in ("native", "gnnaccel"):
        runs = result[side]["runs"]
        assert len(runs) == 2 and all(run["epoch_s"] > 0 and 0 <= run["accuracy"] <= 1
                                      for run in runs)
        assert result[side]["accuracy_mean"] == pytest.approx(
            np.mean([run["accuracy"] for run in runs]))
        assert result[side]["accuracy_std"] == pytest.approx(
            np.std([run["accuracy"] for run in runs], ddof=1))
    # the same weights and seeds on both sides: after three steps the losses agree but for rounding
    for native, fast in zip(result["native"]["runs"], result["gnnaccel"]["runs"]):
        assert fast["loss"] == pytest.approx(native["loss"], rel=1e-3)
    assert result["native"]["runs"][0]["loss"] != result["native"]["runs"][1]["loss"]
    assert result["speedup"] == pytest.approx(
        result["native"]["epoch_s"] / result["gnnaccel"]["epoch_s"])
    calls = result["calls"]
    assert calls["total"] == 2 * 2 * (3 + 1)  # layers x seeds x (epochs and the test)
    assert set(calls["shares"]) <= {"cuda", "torch", "native",
                                    "unseen"} and sum(calls["shares"].values()) == pytest.approx(1)


@pytest.mark.long
def test_quick_runs_one_seed_and_says_so(tmp_path, capsys):
    write_all(tmp_path)
    written = main_on(tmp_path, "--datasets", "aifb", "--quick")
    assert (written["environment"]["seeds"], len(written["results"])) == (1, 1)
    assert written["results"][0]["native"]["accuracy_std"] is None
    assert "1 seed x 4 epochs" in capsys.readouterr().out.replace("\n", " ")


# -- native is what a plain loop does --------------------------------------------------------------

def plain_loop(model: torch.nn.Module, y: torch.Tensor, train: torch.Tensor, test: torch.Tensor,
               **adam) -> tuple[float, float]:
    """Loss of the last of four epochs, and test accuracy."""
    optimizer = torch.optim.Adam(model.parameters(), **adam)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model()[train], y[train])
        loss.backward()
        optimizer.step()
    return float(loss.detach()), float((model().argmax(1)[test] == y[test]).double().mean())


class PlainRGCN(torch.nn.Module):
    def __init__(self, arrays: dict) -> None:
        super().__init__()
        edges, kinds = torch.as_tensor(arrays["edge_index"]).long(), torch.as_tensor(
            arrays["edge_type"]).long()
        self.edges, self.kinds = torch.cat([edges, edges.flip(0)],
                                           1), torch.cat([2 * kinds, 2 * kinds + 1])
        self.a, self.b = RGCNConv(40, 16, 6, num_bases=30), RGCNConv(16, 2, 6, num_bases=30)

    def forward(self) -> torch.Tensor:
        return self.b(self.a(None, self.edges, self.kinds).relu(), self.edges, self.kinds)


class PlainHGT(torch.nn.Module):
    def __init__(self, arrays: dict) -> None:
        super().__init__()
        edges, kinds = torch.as_tensor(arrays["edge_index"]).long(), arrays["edge_type"]
        self.x = torch.as_tensor(arrays["x"]).float()
        ends = {("paper", "0", "author"): (12, 0), ("author", "1", "paper"): (0, 12),
                ("paper", "2", "term"): (12, 32), ("term", "3", "paper"): (32, 12)}
        self.edges = {kind: edges[:, kinds == i] - torch.tensor(start).view(2, 1)
                      for i, (kind, start) in enumerate(ends.items())}
        self.enter = torch.nn.Linear(5, 64)
        self.papers, self.terms = torch.nn.Embedding(20, 64), torch.nn.Embedding(8, 64)
        self.convs = torch.nn.ModuleList(HGTConv(64, 64, (list(KINDS), list(ends)), 4)
                                         for _ in range(2))
        self.out = torch.nn.Linear(64, 3)

    def forward(self) -> torch.Tensor:
        hidden = {"author": self.enter(self.x).relu(), "paper": self.papers.weight,
                  "term": self.terms.weight}
        for conv in self.convs:
            hidden = conv(hidden, self.edges)
        return self.out(hidden["author"])


@pytest.mark.long
@pytest.mark.parametrize("dataset, plain, arrays, adam", [
    ("mutag", PlainRGCN, entity_arrays(1), {"lr": 0.01, "weight_decay": 5e-4}),
    ("dblp", PlainHGT, hetero_arrays(2), {"lr": 0.005, "weight_decay": 1e-3})])
def test_native_runs_equal_a_plain_loop(tmp_path, dataset, plain, arrays, adam):
    result = main_on(write_all(tmp_path), "--datasets", dataset, "--seeds", "2", "--epochs",
                     "4")["results"][0]
    y, train, test = (torch.as_tensor(arrays[key]).long() for key in ("y", "train_idx", "test_idx"))
    for seed in range(2):
        torch.manual_seed(seed)
        loss, accuracy = plain_loop(plain(arrays), y, train, test, **adam)
        run = result["native"]["runs"][seed]
        assert run["loss"] == pytest.approx(loss,
                                            rel=1e-4) and run["accuracy"] == pytest.approx(accuracy)


# -- the two sides ---------------------------------------------------------------------------------

class Known(torch.nn.Module):
    """A model of a layer that gnnaccel takes over, which notes how each of its calls was made."""

    calls: list[tuple[bool, bool, float]] = []  # is gnnaccel enabled, training, a weight

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 8)
        self.conv = GATConv(8, 2)

    def forward(self, edge_index: torch.Tensor, edge_type: torch.Tensor) -> torch.Tensor:
        Known.calls.append((gnnaccel.status()["enabled"], self.training,
                            float(self.embedding.weight.detach()[0, 0])))
        return self.conv(self.embedding.weight, edge_index)


@pytest.mark.long
def test_both_sides_start_from_the_same_weights_and_only_one_is_enabled(tmp_path, monkeypatch):
    task = relational_npz.load(write_all(tmp_path), "aifb")
    monkeypatch.setattr(relational_models, "build", lambda task, layer: Known())
    monkeypatch.setattr(relational_models, "layer_name", lambda task, layer: "GATConv")
    monkeypatch.setattr(Known, "calls", [])
    result = relational_training.compare(task, "rgcn", seeds=2, epochs=2,
                                         progress=lambda text: None)
    calls = Known.calls[2:]  # after the warm-up: an epoch and a test
    fits = [calls[start:start + 3] for start in range(0, 12, 3)]  # two epochs and a test each
    # the second seed has the sides the other way round
    assert [fit[0][0] for fit in fits] == [False, True, True, False]
    assert all(len({enabled for enabled, _, _ in fit}) == 1 for fit in fits)
    assert all([training for _, training, _ in fit] == [True, True, False] for fit in fits)
    first = [fit[0][2] for fit in fits]
    assert first[0] == first[1] and first[2] == first[3] and first[0] != first[2]
    assert result["calls"]["total"] == 6 and "unseen" not in result["calls"]["shares"]
    assert sum(result["calls"]["shares"].values()) == pytest.approx(1)
    assert not gnnaccel.status()["enabled"]


def test_reasons_come_with_the_words_of_the_records(tmp_path, monkeypatch):
    """A maximum is none of the attention kernels' sums, so every call is native and says why."""
    class Largest(Known):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GATConv(8, 2, aggr="max")

    task = relational_npz.load(write_all(tmp_path), "aifb")
    monkeypatch.setattr(relational_models, "build", lambda task, layer: Largest())
    monkeypatch.setattr(relational_models, "layer_name", lambda task, layer: "GATConv")
    calls = relational_training.compare(task, "rgcn", seeds=1, epochs=2,
                                        progress=lambda text: None)["calls"]
    assert calls["shares"] == {"native": 1}
    assert calls["reasons"] == {"GA201": {"calls": 3, "text": "the aggregation is MaxAggregation"}}


# -- the numbers -----------------------------------------------------------------------------------

def test_summary_of_known_runs():
    native = [Run(0.5, 1.0, 0.2, 9.0), Run(0.7, 1.0, 0.4, 9.0), Run(0.9, 1.0, 0.4, 9.0)]
    fast = [Run(0.6, 1.0, 0.1, 9.0), Run(0.7, 1.0, 0.1, 9.0), Run(0.9, 1.0, 0.3, 9.0)]
    decisions = Decisions(calls=10)
    stats = {"routes": {"cuda": 3, "native": 1}, "reasons": {"GA301": 1}}
    decisions.add({"RGCNConv": stats, "GATConv": stats}, "RGCNConv")
    decisions.add({"RGCNConv": stats}, "RGCNConv")
    summary = summarize(native, fast, decisions)
    assert summary["native"]["accuracy_mean"] == pytest.approx(0.7) and summary["native"][
        "accuracy_std"] == pytest.approx(0.2)
    difference = summary["difference"]
    assert difference["mean"] == pytest.approx(0.1
                                               / 3) and difference[
                                                   "in_native_std"] == pytest.approx(1 / 6)
    assert difference["paired_standard_error"] == pytest.approx(math.sqrt(0.01 / 3) / math.sqrt(3))
    assert difference["seeds_equal"] == 2
    assert summary["speedup"] == pytest.approx(4)
    assert summary["calls"]["shares"] == pytest.approx({"cuda": 0.6, "native": 0.2, "unseen": 0.2})
    assert cells({**summary, "dataset": "AIFB", "layer": "RGCNConv"}) == [
        "AIFB, RGCNConv", "70.00 ± 20.00", "73.33 ± 15.28", "+3.33 (+0.17 std)",
        "±3.33; 2 of 3 equal",
        "400.0 -> 100.0", "4.00x",
        "cuda 60 %, native 20 %, unseen 20 % (GA301)"]


def test_seeds_that_all_agree_have_no_spread_to_compare_with():
    runs = [Run(0.5, 1.0, 0.2, 9.0)] * 2
    summary = {**summarize(runs, runs, Decisions(calls=4)), "dataset": "AIFB", "layer": "RGCNConv"}
    assert summary["difference"]["in_native_std"] is None and summary["difference"][
        "paired_std"] == 0
    meta = {"seeds": 2, "epochs": 1, "device": "cpu", "torch": "2", "pyg": "2", "gnnaccel": "0",
            "backend": None}
    assert "| +0.00 | ±0.00; 2 of 2 equal |" in markdown(meta,
                                                         [summary]) and "switched off" in markdown(
                                                             meta, [summary])


# -- PyG's own datasets, and errors ----------------------------------------------------------------

def test_dblp_of_pyg_becomes_the_same_kind_of_task(monkeypatch):
    from torch_geometric.data import HeteroData
    data = HeteroData()
    data["author"].x, data["author"].y = torch.ones(4, 3), torch.tensor([0, 2, 1, 0])
    data["author"].train_mask, data["author"].test_mask = (torch.tensor([1, 1, 0, 0]).bool(),
                                                           torch.tensor([0, 0, 0, 1]).bool())
    data["conference"].num_nodes = 2
    data["author", "conference"].edge_index = torch.tensor([[0, 3], [1, 0]])
    monkeypatch.setattr("torch_geometric.datasets.DBLP", lambda root: [data])
    task = relational_hosted.load("dblp")
    assert (task.num_nodes, task.classes, list(task.x)) == ({"author": 4, "conference": 2}, 3,
                                                            ["author"])
    assert task.train_idx.tolist() == [0, 1] and task.train_y.tolist() == [0, 2] and task.test_idx.tolist() == [3]
    assert list(task.edges) == [("author", "to", "conference")]


@pytest.mark.parametrize("error, said", [
    (OSError("no route\nto host"),
     r"AIFB is not in PyG's cache and could not be downloaded \(no route to host\)"),
    (ImportError("No module named 'rdflib'"),
     r"PyG needs more packages to read AIFB \(No module named 'rdflib'\): pip install")])
def test_a_dataset_that_cannot_be_had_names_the_way_out(monkeypatch, error, said):
    def fail(*given):
        raise error
    monkeypatch.setattr("torch_geometric.datasets.Entities", fail)
    with pytest.raises(SystemExit, match=said) as stop:
        relational_training.main(["--datasets", "aifb", "--device", "cpu"])
    assert "use --data DIR with aifb.npz in it" in str(stop.value)


def test_missing_data_stops_before_any_training(tmp_path, monkeypatch):
    write_all(tmp_path)
    (tmp_path / "het_dblp.npz").unlink()
    monkeypatch.setattr(relational_training, "compare", lambda *given: pytest.fail("trained"))
    with pytest.raises(SystemExit, match="has no het_dblp.npz"):
        relational_training.main(["--data", str(tmp_path), "--device", "cpu"])


@pytest.mark.parametrize("given, said", [
    (["--seeds", "0"], "'0' is not a positive whole number"),
    (["--layer", "gcn"], "invalid choice: 'gcn'"),
    (["--out", "no/such/folder/a.json"], "there is no folder 'no/such/folder'"),
    (["--table", "."], "'.' is a folder")])
def test_wrong_options_are_named(capsys, given, said):
    with pytest.raises(SystemExit):
        relational_training.main(given)
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match="--device warp cannot be used: "):
        relational_training.main(["--data", str(tmp_path), "--device", "warp"])
