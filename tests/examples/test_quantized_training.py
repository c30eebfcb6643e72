"""The study of accuracy runs from end to end on a made-up graph, and its statistics are right."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch_geometric")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402

import quantized_data  # noqa: E402
import quantized_report  # noqa: E402
import quantized_stress  # noqa: E402
import quantized_training  # noqa: E402


def write(folder: Path, name: str, split: bool = True, nodes: int = 90) -> None:
    """Three classes; nodes prefer neighbours and words of their own."""
    random = np.random.default_rng(0)
    y = np.arange(nodes) % 3
    words = [np.sort(random.choice(np.arange(20) * 3 + label, 6, replace=False)) for label in y]
    ends = random.integers(0, nodes // 3, (2, 4 * nodes)) * 3 + random.integers(0, 3, 4 * nodes)
    masks = {}
    if split:
        part = random.permutation(nodes)
        for i, key in enumerate(("train", "test")):
            masks[f"{key}_mask"] = np.isin(np.arange(nodes),
                                           part[i * nodes // 2:(i + 1) * nodes // 2])
    np.savez(folder / f"{name}.npz", edge_index=ends.astype(np.int32), num_nodes=nodes,
             y=y.astype(np.int8), num_classes=3, x_shape=np.array([nodes, 60]),
             x_indptr=np.arange(nodes + 1) * 6, x_indices=np.concatenate(words).astype(np.uint16),
             **masks)


@pytest.mark.long
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_all_precisions_run_and_are_compared(tmp_path, monkeypatch, model):
    write(tmp_path, "cora")
    # so features are sparse
    monkeypatch.setattr(quantized_data, "DENSE", 0 if model == "gat" else quantized_data.DENSE)
    monkeypatch.setattr(quantized_training, "CHUNK", 1)
    out = tmp_path / "out.json"
    quantized_training.main(["--data", str(tmp_path), "--datasets", "cora", "--models", model,
                             "--device", "cpu", "--seeds", "1", "--epochs", "15", "--out",
                             str(out)])
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["graph"] == "cora" and list(cell["sides"]) == list(quantized_training.SIDES)
    for side, found in cell["sides"].items():
        assert len(found["runs"]) == 2 and all(run["accuracy"] > 0.5 for run in found["runs"]), side
        assert found["maps_in_fp32"] == (0.0 if side == "int8" and model == "gcn" else None)
        # a run of bf16 or int8 that fell back would count as fp32
        assert found["share_in_fp32"] == (0.0 if side in ("bf16", "int8") else None)
        assert ("against_fp32" in found) is (side != "fp32")
    assert set(cell["sides"]["int8"]["runs"][0]["guard"].values()) == {"passed"}


@pytest.mark.filterwarnings("error")
def test_features_and_splits(tmp_path, monkeypatch):
    write(tmp_path, "coauthor_physics", split=False, nodes=300)
    task = quantized_data.load(tmp_path, "coauthor_physics")
    assert torch.allclose(task.x.norm(dim=1), torch.ones(300)) and task.features == 60
    monkeypatch.setattr(quantized_data, "DENSE", 0)
    monkeypatch.setattr(quantized_data, "TRAIN", 20)
    sparse, transposed = (x.to_dense() for x in quantized_data.load(tmp_path, "coauthor_physics").x)
    assert torch.equal(sparse, task.x) and torch.equal(sparse.t(), transposed)
    train, test = task.masks(1)
    assert (int(train.sum()), int(test.sum())) == (60, 240)
    assert (train ^ test).all() and not torch.equal(train, task.masks(2)[0])
    assert quantized_data.margin("coauthor_physics") == 0.5 and quantized_data.margin("cora") == 1.0
    with pytest.raises(SystemExit, match="has no cora.npz"):
        quantized_data.load(tmp_path, "cora")


@pytest.mark.long
def test_intervals_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = [81.2, 80.5, 82.0, 79.9, 81.1]
    mean, half = quantized_report.interval(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert mean - half == pytest.approx(low,
                                        abs=1e-3) and mean + half == pytest.approx(high, abs=1e-3)


def test_equivalence_needs_the_whole_interval():
    reference = [0.8] * 4
    near = quantized_report.against(reference, [0.801, 0.799, 0.802, 0.798], 0.5)
    wide = quantized_report.against(reference, [0.82, 0.78, 0.81, 0.79], 0.5)
    assert near["equivalent"] and near["worst_seed"] == pytest.approx(-0.2)
    assert not wide["equivalent"] and wide["mean"] == pytest.approx(0.0)


@pytest.mark.long
def test_stress_tells_where_the_guard_steps_in(monkeypatch):
    monkeypatch.setattr(quantized_stress, "NODES", 300)
    monkeypatch.setattr(quantized_stress, "EDGES", 4000)
    monkeypatch.setattr(quantized_stress, "DEPTHS", (3,))
    rows = quantized_stress.rows("cpu", lambda text: None)
    found = {(row["case"], row["precision"]): row for row in rows}
    assert not found["normal", "int8"]["guard"] and not found["hubs", "int8"]["guard"]
    assert found["a channel 1000 times the others",
                 "int8"]["guard"] and found["an infinity in one row", "int8"]["guard"]
    assert found["hubs",
                 "int8"]["median_row_error"] < 0.02 < found["hubs",
                                                            "int8 per tensor"]["median_row_error"]
    assert "| hubs | 3 |" in quantized_stress.table(rows)
