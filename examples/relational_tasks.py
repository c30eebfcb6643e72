"""What there is to learn: classes of some nodes of a graph whose edges have types. Nothing in here
is about gnnaccel."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

EdgeType = tuple[str, str, str]


@dataclass(kw_only=True)
class Task:
    """A classification of nodes with its public split."""

    title: str
    classes: int
    train_idx: Tensor  # int64, nodes (of the target's type)
    train_y: Tensor  # int64, their classes
    test_idx: Tensor
    test_y: Tensor

    @property
    def inputs(self) -> tuple:
        """What a model of this task is called with."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Task:
        """The same on ``device``."""
        return replace(self,
                       **{field.name: _moved(getattr(self, field.name), device)
                          for field in fields(self)})


@dataclass(kw_only=True)
class EntityTask(Task):
    """One kind of node without features, edges of many relations: as in PyG's ``Entities``, inverse
    edges included."""

    num_nodes: int
    num_relations: int
    edge_index: Tensor  # [2, E] int64
    edge_type: Tensor  # [E] int64

    @property
    def inputs(self) -> tuple:
        return self.edge_index, self.edge_type


@dataclass(kw_only=True)
class HeteroTask(Task):
    """Nodes of several types, some with features; the nodes of type ``target`` have classes."""

    target: str
    num_nodes: dict[str, int]
    x: dict[str, Tensor]  # [N, F] float32, only of the types that have features
    edges: dict[EdgeType, Tensor]  # [2, E] int64 each

    @property
    def inputs(self) -> tuple:
        return self.x, self.edges


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
