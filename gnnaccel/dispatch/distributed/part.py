"""A part as a process holds it: its own nodes, the halo, the edges that enter, and the plan of
exchanges."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed import storage
from gnnaccel.dispatch.distributed.building import Relation
from gnnaccel.errors import PartitionError


@dataclass
class Rows:
    """The nodes of one type that a part knows, and the plan by which their rows are exchanged.

    ``own``: int64 [own] and ``halo``: int64 [halo], numbers in the whole graph; ``send_rows``: the
    own rows that other parts need, by receiver and then by row, each once a receiver; ``send`` and
    ``receive``: how many rows go to each part and come from it.
    """

    total: int
    own: Tensor
    halo: Tensor
    send_rows: Tensor
    send: list[int]
    receive: list[int]

    @property
    def extended(self) -> int:
        """How many nodes are numbered: own and halo."""
        return len(self.own) + len(self.halo)

    def to(self, device: Any) -> None:
        self.own, self.halo = self.own.to(device), self.halo.to(device)
        self.send_rows = self.send_rows.to(device)


@dataclass
class Part:
    """One part of a partitioned graph, made by `gnnaccel.distributed.load_part`.

    ``rank``: which part; ``parts``: how many there are; ``fingerprint``: the digest of the manifest
    of all, equal in every part of one graph; ``hetero``: whether nodes have types; ``rows``: the
    nodes by type; ``edges``: int64 [2, E] by relation, sources numbered over [own | halo] and
    destinations over [own]; ``edge_ids``: each edge's number in the whole graph; ``data``: the
    host's data object over the own nodes.
    """

    rank: int
    parts: int
    folder: Path
    fingerprint: str
    hetero: bool
    rows: dict[str, Rows]
    edges: dict[Relation, Tensor]
    edge_ids: dict[Relation, Tensor]
    tensors: dict[tuple[str, ...], Tensor] = field(repr=False)
    plain: dict[str, Any] = field(repr=False)
    data: Any = field(default=None, repr=False)

    @property
    def own(self) -> Tensor:
        """The own nodes' numbers in the whole graph, int64 [own], of a graph without types."""
        if self.hetero:
            raise AttributeError("this graph has types of nodes: use part.rows[type].own")
        return next(iter(self.rows.values())).own

    def to(self, device: Any) -> Part:
        """Move the plan and ``data`` to a device. Returns the part itself."""
        for rows in self.rows.values():
            rows.to(device)
        if self.data is not None:
            self.data = self.data.to(device)
        return self


def load(folder: Any, rank: int, verify: bool = True) -> Part:
    """Part ``rank`` of a folder. PartitionError where the folder is not complete and unchanged, or
    has no such part."""
    out = Path(folder)
    manifest, fingerprint = storage.read_manifest(out)
    parts = manifest["parts"]
    if not 0 <= rank < parts:
        raise PartitionError(f"{out} has {parts} parts, numbered from 0; there is no part {rank}. "
                             f"Start {parts} processes, or partition the graph anew")
    tensors = storage.read_part(out, rank, manifest["manifests"][rank], verify)
    rows = {kind: Rows(total, tensors.pop(("own", kind)), tensors.pop(("halo", kind)),
                       tensors.pop(("send_rows", kind)), tensors.pop(("send", kind)).tolist(),
                       tensors.pop(("receive", kind)).tolist())
            for kind, total in manifest["nodes"].items()}
    relations = [(source, name, target) for source, name, target, _ in manifest["edges"]]
    return Part(rank, parts, out, fingerprint, manifest["hetero"], rows,
                {relation: tensors.pop(("edges", *relation)) for relation in relations},
                {relation: tensors.pop(("edge_ids", *relation)) for relation in relations},
                tensors, manifest["plain"])


def sizes(folder: Any) -> dict[str, Any]:
    """Facts of the manifest of all parts: parts, nodes by type, edges by relation, method."""
    manifest, _ = storage.read_manifest(Path(folder))
    return {"parts": manifest["parts"], "nodes": manifest["nodes"], "method": manifest["method"],
            "edges": {tuple(edge[:3]): edge[3] for edge in manifest["edges"]}}


def check_edges(edge_index: Tensor, sources: int, targets: int) -> None:
    """PartitionError where ``edge_index`` is not numbered over ``sources`` and ``targets`` nodes.
    Waits for the device."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise PartitionError(f"edge_index has shape {list(edge_index.shape)}; a layer over a part "
                             "needs [2, E]")
    if not edge_index.shape[1]:
        return
    low, high = (end.tolist() for end in torch.aminmax(edge_index, dim=1))
    if min(low) < 0 or high[0] >= sources or high[1] >= targets:
        raise PartitionError(
            f"edge_index names sources up to {high[0]} and destinations up to {high[1]}; this part "
            f"has {sources} sources (own and halo) and {targets} destinations: the graph is not "
            "the one that was partitioned. Use the part's own data, or partition the graph anew")
