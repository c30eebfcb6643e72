"""The .npz files of the relational example: what is made of them, and what is said of wrong
ones."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import relational_npz

KINDS = ("author", "paper", "term")


def entity_arrays(seed: int) -> dict:
    """40 nodes, 3 relations, 120 facts; two classes that a relation tells apart."""
    random = np.random.default_rng(seed)
    edges, kinds = random.integers(0, 40, (2, 120)), random.integers(0, 3, 120)
    y = np.full(40, -1, np.int8)
    y[:24] = np.arange(24) % 2
    return {"edge_index": edges.astype(np.int32), "edge_type": kinds.astype(np.int16),
            "num_nodes": 40, "num_relations": 3, "y": y, "train_idx": np.arange(16, dtype=np.int32),
            "test_idx": np.arange(16, 24, dtype=np.int32)}


def hetero_arrays(seed: int) -> dict:
    """12 authors with 5 features, 20 papers, 8 terms; four relations, each between two types."""
    random = np.random.default_rng(seed)
    node_type = np.repeat([0, 1, 2], [12, 20, 8])
    start = {0: 0, 1: 12, 2: 32}
    edges, kinds = [], []
    for relation, (source, target) in enumerate([(1, 0), (0, 1), (1, 2), (2, 1)]):
        ends = [start[kind] + random.integers(0, (node_type == kind).sum(), 30)
                for kind in (source, target)]
        edges.append(ends)
        kinds.append(np.full(30, relation))
    y = np.full(40, -1, np.int8)
    y[:12] = np.arange(12) % 3
    return {"edge_index": np.concatenate(edges, 1).astype(np.int32),
            "edge_type": np.concatenate(kinds), "num_nodes": 40, "num_relations": 4, "y": y,
            "node_type": node_type.astype(np.int8), "node_type_names": np.array(KINDS),
            "x_node_type": np.array("author"), "x": random.integers(0, 2, (12, 5)).astype(np.uint8),
            "train_idx": np.arange(8, dtype=np.int32), "test_idx": np.arange(8, 12, dtype=np.int32)}


def write_all(folder: Path) -> Path:
    """All three files in ``folder``."""
    np.savez(folder / "aifb.npz", **entity_arrays(0))
    np.savez(folder / "mutag_rdf.npz", **entity_arrays(1))
    np.savez(folder / "het_dblp.npz", **hetero_arrays(2))
    return folder


def test_entities_get_inverse_relations_in_the_order_of_pyg(tmp_path):
    arrays = {**entity_arrays(0), "edge_index": np.array([[3, 3, 1], [5, 0, 2]]),
              "edge_type": np.array([1, 2, 0])}
    np.savez(tmp_path / "aifb.npz", **arrays)
    task = relational_npz.load(tmp_path, "aifb")
    found = list(zip(*task.edge_index.tolist(), task.edge_type.tolist()))
    assert found == [(0, 3, 5), (1, 2, 0), (2, 1, 1), (3, 0, 4), (3, 5, 2), (5, 3, 3)]
    assert (task.num_nodes, task.num_relations, task.classes) == (40, 6, 2)
    assert task.test_idx.tolist() == list(range(16, 24)) and task.test_y.tolist() == [0, 1] * 4


def test_hetero_edges_are_numbered_within_their_types(tmp_path):
    arrays = hetero_arrays(2)
    np.savez(tmp_path / "het_dblp.npz", **arrays)
    task = relational_npz.load(tmp_path, "dblp")
    assert task.num_nodes == {"author": 12, "paper": 20, "term": 8} and task.target == "author"
    assert [(source, target)
            for source, _, target in task.edges] == [("paper", "author"), ("author", "paper"),
                                                     ("paper", "term"), ("term", "paper")]
    expected = arrays["edge_index"][:, arrays["edge_type"] == 3] - np.array([[32], [12]])
    assert torch.equal(task.edges["term", "3", "paper"],
                       torch.as_tensor(expected, dtype=torch.int64))
    assert torch.equal(task.x["author"],
                       torch.as_tensor(arrays["x"],
                                       dtype=torch.float32)) and set(task.x) == {"author"}


@pytest.mark.parametrize("ones", [True, False])
def test_sparse_features_are_the_dense_ones(tmp_path, ones):
    from scipy.sparse import csr_matrix
    arrays = hetero_arrays(2)
    dense = arrays.pop("x").astype(np.float32) * (1 if ones else 2.5)
    sparse = csr_matrix(dense)
    data = {} if ones else {"x_data": sparse.data}
    np.savez(tmp_path / "het_dblp.npz", **arrays, **data, x_shape=dense.shape,
             x_indptr=sparse.indptr, x_indices=sparse.indices)
    assert dense.any() and torch.equal(relational_npz.load(tmp_path, "dblp").x["author"],
                                       torch.from_numpy(dense))


WRONG_ENTITIES = {
    "edge_index has 0 to 40, outside of 0 to 39": {"edge_index": np.array([[0], [40]]),
                                                   "edge_type": np.array([0])},
    "edge_type has 3 to 3, outside of 0 to 2": {"edge_index": np.array([[0], [1]]),
                                                "edge_type": np.array([3])},
    "edge_index is [2, 2] and edge_type [1], not [2, E] and [E]": {"edge_index": np.eye(2),
                                                                   "edge_type": np.zeros(1)},
    "y is [3], but there are 40 nodes": {"y": np.zeros(3, int)},
    "train_idx and test_idx overlap": {"test_idx": np.array([15, 16])},
    "test_idx has nodes without a class": {"test_idx": np.array([30])},
    "test_idx has -1 to 20, outside of 0 to 39": {"test_idx": np.array([-1, 20])},
    "train_idx is empty": {"train_idx": np.array([], int)},
}
WRONG_HETERO = {
    "relation 0 joins nodes of several types": {"edge_index": np.array([[12, 0], [0, 1]]),
                                                "edge_type": np.array([0, 0])},
    "the features' 11 rows are not the nodes of type author": {"x": np.ones((11, 5))},
    "x_node_type is editor, which is not among node_type_names": {
        "x_node_type": np.array("editor")},
    "node_type is [5], but there are 40 nodes": {"node_type": np.zeros(5, int)},
    "the split has nodes that are not of type author": {"test_idx": np.array([30]),
                                                        "y": np.zeros(40, int)},
}


@pytest.mark.parametrize("message", [*WRONG_ENTITIES, *WRONG_HETERO])
def test_wrong_arrays_are_named(tmp_path, message):
    if message in WRONG_ENTITIES:
        name, arrays = "aifb", {**entity_arrays(0), **WRONG_ENTITIES[message]}
    else:
        name, arrays = "dblp", {**hetero_arrays(2), **WRONG_HETERO[message]}
    path = tmp_path / relational_npz.FILES[name]
    np.savez(path, **arrays)
    with pytest.raises(SystemExit) as stop:
        relational_npz.load(tmp_path, name)
    assert str(stop.value).startswith(f"{path}: ") and message in str(stop.value)


def test_missing_arrays_are_named(tmp_path):
    arrays = entity_arrays(0)
    del arrays["y"], arrays["test_idx"]
    np.savez(tmp_path / "aifb.npz", **arrays)
    with pytest.raises(SystemExit, match="aifb.npz has no y, test_idx; it needs edge_index, "):
        relational_npz.load(tmp_path, "aifb")
    arrays = hetero_arrays(2)
    del arrays["x"]
    np.savez(tmp_path / "het_dblp.npz", **arrays)
    with pytest.raises(SystemExit, match="neither x nor x_shape, x_indptr, x_indices"):
        relational_npz.load(tmp_path, "dblp")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut off"])
def test_what_is_no_npz_file_is_named(tmp_path, content):
    (tmp_path / "mutag_rdf.npz").write_bytes(content)
    with pytest.raises(SystemExit, match="mutag_rdf.npz is no .npz file of plain arrays"):
        relational_npz.load(tmp_path, "mutag")


def test_a_bare_array_is_no_npz_file(tmp_path):
    with open(tmp_path / "aifb.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(SystemExit, match="aifb.npz is no .npz file of plain arrays"):
        relational_npz.load(tmp_path, "aifb")


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(SystemExit, match="has no het_dblp.npz, which dblp is read from"):
        relational_npz.load(tmp_path, "dblp")
    with pytest.raises(SystemExit,
                       match="nowhere is not a folder; --data takes one with aifb.npz, "
                       "mutag_rdf.npz, het_dblp.npz"):
        relational_npz.load(tmp_path / "nowhere", "aifb")
