"""A band as a layer sees it: a part of the graph whose halo rows are in the host's memory."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed.part import Part, Rows
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.dispatch.offload.memory import count
from gnnaccel.dispatch.offload.plan import Band, Bands
from gnnaccel.errors import OffloadError

#: key of rows that a layer asks of all bands: (name, how many of that name it asked for before)
Key: TypeAlias = "tuple[str, int]"


class Reached(Exception):
    """A band has computed rows, [own sources, ...], that other bands need before it goes on."""

    def __init__(self, key: Key, rows: Tensor):
        super().__init__(key)
        self.key, self.rows = key, rows


class BandSession(Session):
    """One run of a layer over a band. ``halo``: (key, own rows) -> the rows [own + halo, ...] that
    were asked for, of which the own may hold anything; or None, where other bands have to compute
    them first, and then the run ends by `Reached`. ``in_place``: the halo are all rows of the
    graph. ``leaves``: the halo's rows whose gradients are wanted."""

    maps_first = False  # rows that bands compute and gather again are a stage of their own

    def __init__(self, bands: Bands, band: Band, edges: Tensor,
                 halo: Callable[[Key, Tensor], Tensor | None], in_place: bool = False):
        nothing = torch.empty(0, dtype=torch.long, device="cpu")
        source, _, target = bands.relation
        rows = {kind: Rows(bands.sizes[kind], nothing.new_empty(1).expand(count(own)), nothing,
                           nothing, [0], [0]) for kind, own in band.own.items()}
        rows[source].halo = nothing.new_empty(1).expand(
            bands.sizes[source] if in_place else count(band.halo))
        self._begin(Part(band.number, len(bands.bands), Path("the rows of the host"), "",
                         source != target, rows, {bands.relation: edges}, {}, {}, {},
                         _Edges(bands.relation, edges)), None, "fp32")
        self.norms = bands.norms
        self._halo, self._asked = halo, Counter[str]()
        self.leaves: dict[Key, Tensor] = {}

    def close(self) -> None:
        """Let go of rows of the device, but for ``leaves``, once the layer has run. A layer's own
        `propagate`, which is put back by functions that refer to each other, holds the session."""
        super().close()
        self._halo = _closed

    def taken_leaves(self) -> dict[Key, Tensor]:
        """``leaves``, which the session then lets go of."""
        leaves, self.leaves = self.leaves, {}
        return leaves

    def check_edges(self, edge_index: Tensor, source: str, target: str) -> None:
        """Nothing: the plan has made them."""

    def _extended(self, kind: str, x: Tensor, name: str, who: str, layer: Any) -> Tensor:
        key = name, self._asked[name]
        self._asked[name] += 1
        own = len(self.part.rows[kind].own)
        if x.dim() == 0 or len(x) != own:
            raise OffloadError(f"{who} gathers {name} of shape {list(x.shape)} over a band of "
                               f"{own} sources; it needs a row for each")
        rows = self._halo(key, x)
        if rows is None:
            raise Reached(key, x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            if rows.is_inference() and not torch.is_inference_mode_enabled():
                return torch.cat([x, rows[own:]])  # for what a layer keeps, such as GCN's norm
            if rows.data_ptr() != x.data_ptr():
                rows[:own] = x
            return rows
        self.leaves[key] = rows[own:].detach().requires_grad_()
        return torch.cat([x, self.leaves[key]])


def _closed(key: Key, x: Tensor) -> None:
    """None for rows that are asked for once the layer has run."""


class _Edges:
    """A part's data with the attributes that layers over parts read."""

    def __init__(self, relation: Any, edges: Tensor):
        self._relation, self.edge_index = relation, edges

    def __getitem__(self, relation: Any) -> _Edges:
        return self
