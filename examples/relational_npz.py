"""The tasks from .npz files, brought into the form of PyG's own datasets. Nothing in here is about
gnnaccel.

A file holds edge_index [2, E] (source, target), edge_type [E], num_nodes, num_relations, y [N] (-1:
no class), train_idx and test_idx (nodes). With several node types it also holds node_type [N],
node_type_names, x_node_type, and features of the nodes of that type, which come first: x [rows, F],
or x_shape, x_indptr, x_indices and (unless all are one) x_data. Edges of an entity graph are the
facts themselves; the inverse ones are added here.
"""
from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from relational_tasks import EdgeType, EntityTask, HeteroTask, Task

FILES = {"aifb": "aifb.npz", "mutag": "mutag_rdf.npz", "dblp": "het_dblp.npz"}
KEYS = ("edge_index", "edge_type", "num_nodes", "num_relations", "y", "train_idx", "test_idx")
HETERO_KEYS = (*KEYS, "node_type", "node_type_names", "x_node_type")


def load(folder: Path, name: str) -> Task:
    """``name`` is "aifb", "mutag" or "dblp". SystemExit with one line if the folder does not hold
    it."""
    if not folder.is_dir():
        raise SystemExit(
            f"{folder} is not a folder; --data takes one with {', '.join(FILES.values())}")
    path = folder / FILES[name]
    if not path.is_file():
        raise SystemExit(f"{folder} has no {path.name}, which {name} is read from")
    hetero = name == "dblp"
    arrays = _arrays(path, HETERO_KEYS if hetero else KEYS)
    try:
        _check(arrays)
        return _hetero(name, arrays) if hetero else _entities(name, arrays)
    except _WrongFile as error:
        raise SystemExit(f"{path}: {error}") from None


class _WrongFile(Exception):
    """What is wrong with a file's arrays."""


def _arrays(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as data:
            missing = [key for key in keys if key not in data]
            if missing:
                raise SystemExit(f"{path} has no {', '.join(missing)}; it needs {', '.join(keys)}")
            return dict(data)
    # numpy has no common exception for this; a lone array is no context manager, which is a
    # TypeError (3.10: AttributeError)
    except (ValueError, zipfile.BadZipFile, EOFError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path} is no .npz file of plain arrays ({error})") from None


def _check(arrays: dict[str, np.ndarray]) -> None:
    """_WrongFile unless edges and split are about nodes, relations and classes that exist."""
    edges, kinds, nodes = arrays["edge_index"], arrays["edge_type"], int(arrays["num_nodes"])
    if edges.ndim != 2 or edges.shape[0] != 2 or kinds.shape != edges.shape[1:]:
        raise _WrongFile(f"edge_index is {list(edges.shape)} and edge_type "
                         f"{list(kinds.shape)}, not [2, E] and [E]")
    _within("edge_index", edges, nodes)
    _within("edge_type", kinds, int(arrays["num_relations"]))
    if arrays["y"].shape != (nodes,):
        raise _WrongFile(f"y is {list(arrays['y'].shape)}, but there are {nodes} nodes")
    for key in ("train_idx", "test_idx"):
        if not arrays[key].size:
            raise _WrongFile(f"{key} is empty")
        _within(key, arrays[key], nodes)
        if (arrays["y"][arrays[key]] < 0).any():
            raise _WrongFile(f"{key} has nodes without a class")
    if np.intersect1d(arrays["train_idx"], arrays["test_idx"]).size:
        raise _WrongFile("train_idx and test_idx overlap")


def _within(key: str, values: np.ndarray, end: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= end):
        raise _WrongFile(
            f"{key} has {int(values.min())} to {int(values.max())}, outside of 0 to {end - 1}")


def _long(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _split(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor | int]:
    y, train, test = arrays["y"], arrays["train_idx"], arrays["test_idx"]
    return {"train_idx": _long(train), "train_y": _long(y[train]), "test_idx": _long(test),
            "test_y": _long(y[test]), "classes": int(y.max()) + 1}


# -- entities --------------------------------------------------------------------------------------

def _entities(name: str, arrays: dict[str, np.ndarray]) -> EntityTask:
    """As PyG's ``Entities``: relation r becomes 2r, its inverse 2r + 1, and edges are sorted by
    source, target, relation."""
    (source,
     target), kind = arrays["edge_index"].astype(np.int64), arrays["edge_type"].astype(np.int64)
    edges = np.stack([np.concatenate([source, target]), np.concatenate([target, source])])
    kinds = np.concatenate([2 * kind, 2 * kind + 1])
    order = np.lexsort((kinds, edges[1], edges[0]))
    return EntityTask(title=f"{name.upper()} ({FILES[name]})", num_nodes=int(arrays["num_nodes"]),
                      num_relations=2 * int(arrays["num_relations"]),
                      edge_index=_long(edges[:, order]), edge_type=_long(kinds[order]),
                      **_split(arrays))


# -- several node types ----------------------------------------------------------------------------

def _hetero(name: str, arrays: dict[str, np.ndarray]) -> HeteroTask:
    kinds, names = arrays["node_type"], [str(name) for name in arrays["node_type_names"]]
    target = str(arrays["x_node_type"])
    if kinds.shape != arrays["y"].shape:
        raise _WrongFile(
            f"node_type is {list(kinds.shape)}, but there are {len(arrays['y'])} nodes")
    _within("node_type", kinds, len(names))
    if target not in names:
        raise _WrongFile(f"x_node_type is {target}, which is not among node_type_names")
    counts = np.bincount(kinds, minlength=len(names))
    x = _features(arrays)
    first = counts[names.index(target)]
    if len(x) != first or (kinds[:first] != names.index(target)).any():
        raise _WrongFile(f"the features' {len(x)} rows are not the nodes of type {target}, "
                         "which have to come first")
    split = _split(arrays)
    if max(int(split["train_idx"].max()), int(split["test_idx"].max())) >= first:
        raise _WrongFile(f"the split has nodes that are not of type {target}")
    return HeteroTask(title=f"{name.upper()} ({FILES[name]})", target=target,
                      x={target: torch.from_numpy(x)},
                      num_nodes={kind: int(n) for kind, n in zip(names, counts)},
                      edges=_edges(arrays, names), **split)


def _edges(arrays: dict[str, np.ndarray], names: list[str]) -> dict[EdgeType, torch.Tensor]:
    """Edges by (type of the source, relation, type of the target), nodes numbered within their
    type."""
    kinds = arrays["node_type"]
    place = np.zeros(len(kinds), np.int64)
    for kind in range(len(names)):
        mine = kinds == kind
        place[mine] = np.arange(mine.sum())
    found = {}
    for relation in range(int(arrays["num_relations"])):
        edges = arrays["edge_index"][:, arrays["edge_type"] == relation]
        if not edges.size:
            continue
        ends = kinds[edges]
        if (ends != ends[:, :1]).any():
            raise _WrongFile(f"relation {relation} joins nodes of several types")
        found[names[ends[0, 0]], str(relation), names[ends[1, 0]]] = _long(place[edges])
    return found


def _features(arrays: dict[str, np.ndarray]) -> np.ndarray:
    if "x" in arrays:
        return arrays["x"].astype(np.float32)
    missing = [key for key in ("x_shape", "x_indptr", "x_indices") if key not in arrays]
    if missing:
        raise _WrongFile(f"there is neither x nor {', '.join(missing)}")
    x = np.zeros(tuple(int(size) for size in arrays["x_shape"]), np.float32)
    row = np.repeat(np.arange(len(x)), np.diff(arrays["x_indptr"]))
    x[row, arrays["x_indices"]] = arrays.get("x_data", 1)
    return x
