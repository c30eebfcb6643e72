"""Graphs for classifying nodes, from .npz files. Nothing in here is about gnnaccel.

A file holds edge_index [2, E] (source, target), num_nodes, y [N] (-1: no class), num_classes,
features as x [N, F] or in CSR form (x_shape, x_indptr, x_indices and, unless all are one, x_data),
and possibly a public split as train_mask, test_mask [N].
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = ("cora", "citeseer", "pubmed")  # whose test sets are so small that accuracy varies more
NAMES = (*SMALL, "amazon_computers", "coauthor_physics")
TRAIN = 100  # nodes of each class, where there is no public split
DENSE = 1 << 25  # numbers up to which features are kept dense


@dataclass
class Task:
    """``x``: [N, F], rows of length one, dense where that is not large, else sparse and with its
    transpose; ``split``: a public split, or None."""

    name: str
    x: Tensor | tuple[Tensor, Tensor]
    edge_index: Tensor
    y: Tensor
    classes: int
    split: tuple[Tensor, Tensor] | None

    @property
    def features(self) -> int:
        return (self.x if isinstance(self.x, Tensor) else self.x[0]).shape[1]

    def to(self, device: torch.device) -> Task:
        split = None if self.split is None else tuple(mask.to(device) for mask in self.split)
        x = self.x.to(device) if isinstance(self.x, Tensor) else tuple(x.to(device) for x in self.x)
        return Task(self.name, x, self.edge_index.to(device), self.y.to(device), self.classes,
                    split)

    def masks(self, seed: int) -> tuple[Tensor, Tensor]:
        """Nodes for training and testing: the public split, or else one by ``seed``, 100 nodes of
        each class and the others."""
        if self.split is not None:
            return self.split
        order = torch.randperm(self.y.shape[0],
                               generator=torch.Generator().manual_seed(seed)).to(self.y.device)
        train, test = (torch.zeros_like(self.y, dtype=torch.bool) for _ in range(2))
        for label in range(self.classes):
            nodes = order[self.y[order] == label]
            train[nodes[:TRAIN]], test[nodes[TRAIN:]] = True, True
        return train, test


def margin(name: str) -> float:
    """Points of accuracy within which two precisions count as equivalent."""
    return 1.0 if name in SMALL else 0.5


def load(folder: Path, name: str) -> Task:
    """SystemExit with one line if ``folder`` does not hold it."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise SystemExit(f"{folder} has no {path.name}; --data takes a folder with "
                         f"{', '.join(f'{n}.npz' for n in NAMES)}")
    with np.load(path, allow_pickle=False) as file:
        data = dict(file)
    masks = [data.get(f"{part}_mask") for part in ("train", "test")]
    split = None if masks[0] is None else tuple(torch.from_numpy(mask) for mask in masks)
    return Task(name, _features(data), torch.from_numpy(data["edge_index"].astype(np.int64)),
                torch.from_numpy(data["y"].astype(np.int64)), int(data["num_classes"]), split)


def _features(data: dict[str, np.ndarray]) -> Tensor | tuple[Tensor, Tensor]:
    if "x" in data:
        return F.normalize(torch.from_numpy(data["x"].astype(np.float32)))
    shape = tuple(int(n) for n in data["x_shape"])
    indptr, column = (torch.from_numpy(data[name].astype(np.int64))
                      for name in ("x_indptr", "x_indices"))
    row = torch.repeat_interleave(torch.arange(shape[0]), indptr.diff())
    values = data.get("x_data")
    values = (torch.ones(len(column))
              if values is None else torch.from_numpy(values.astype(np.float32)))
    length = torch.zeros(shape[0]).index_add_(0, row, values ** 2).sqrt().clamp(min=1e-12)
    # The one tensor that is not made of another is checked, and the others are not. torch 2.11 and
    # 2.12 want that said of the process:
    # they warn before they look at the argument.
    torch.sparse.check_sparse_tensor_invariants.disable()
    x = torch.sparse_coo_tensor(torch.stack([row, column]), values / length[row], shape,
                                check_invariants=True)
    return x.to_dense() if shape[0] * shape[1] <= DENSE else (x.coalesce(), x.t().coalesce())
