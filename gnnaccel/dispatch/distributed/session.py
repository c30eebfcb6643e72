"""The part that is active in this process: its links, its checks, and the rows last exchanged."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.exchange import EXCHANGES, Link, halo_rows
from gnnaccel.dispatch.distributed.part import Part, check_edges
from gnnaccel.dispatch.graph.tensor_ref import TensorMap, TensorRef
from gnnaccel.errors import PartitionError

#: prefix of the names of rows that the graph alone decides
OF_THE_GRAPH = "the graph's degrees"


class Session:
    """Exchanges for one part in one process group. Making one is collective: every process of the
    group takes part, and each raises PartitionError where one holds a part that does not fit."""

    #: whether rows may be mapped before they are sent, or the halo's where they arrive
    maps_first = True

    def __init__(self, part: Part, group: Any, exchange: str):
        if exchange not in EXCHANGES:
            raise PartitionError(f"exchange={exchange!r}; it has to be one of {EXCHANGES}")
        _agree(part, group, exchange)
        self._begin(part, _beside(group), exchange)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A block in which layers run over this part."""
        before, state.current = state.current, self
        try:
            yield
        finally:
            state.current = before

    @classmethod
    def of_group(cls, part: Part, group: Any) -> Session:
        """A session that exchanges by ``group`` itself, of parts that are known to be of one
        graph."""
        session = cls.__new__(cls)
        session._begin(part, group, "fp32")
        return session

    def _begin(self, part: Part, group: Any, exchange: str) -> None:
        self.part, self.exchange, self.group = part, exchange, group
        self.links = {kind: Link(rows, part.rank, self.group, exchange)
                      for kind, rows in part.rows.items()}
        self._last: dict[tuple[Any, ...], tuple[TensorRef, Tensor]] = {}
        #: values that adapters derive from edges alone, by edges and then by a key of the adapter's
        self.norms: TensorMap[dict[Any, Any]] = TensorMap()
        self._widths: dict[tuple[Any, ...], None] = {}
        self._checked: TensorMap[tuple[int, int]] = TensorMap()

    def extend(self, kind: str, x: Tensor, name: str = "x", who: str = "",
               layer: Any = None) -> Tensor:
        """`halo_rows` of nodes of a type. A tensor that was sent, unwritten since, is not sent
        again: several relations of a layer share it, and features that no gradient is asked of stay
        while a model trains. ``who``, ``layer``: the asking layer, by name and as an object."""
        # rows with gradients, and those of evaluation, do not put features in training out
        key = kind, torch.is_grad_enabled(), x.requires_grad, "" if x.requires_grad else name
        entry = self._last.get(key)
        if entry is not None and entry[0].unmoved(x):
            return entry[1]
        extended = self._extended(kind, x, name, who, layer)
        if not (x.is_inference() or extended.is_inference()):
            last = self._last

            def forget(ref: weakref.ref) -> None:
                if key in last and last[key][0] is ref:
                    del last[key]

            last[key] = TensorRef(x, forget), extended
        return extended

    def _extended(self, kind: str, x: Tensor, name: str, who: str, layer: Any) -> Tensor:
        self._compare(kind, x, name, who)
        return halo_rows(x, self.links[kind], who if layer is None else weakref.ref(layer))

    def check_edges(self, edge_index: Tensor, source: str, target: str) -> None:
        """PartitionError where edges are not numbered as this part's. Each tensor is looked at
        once."""
        sizes = self.part.rows[source].extended, len(self.part.rows[target].own)
        if edge_index.is_inference():
            check_edges(edge_index, *sizes)
        elif self._checked.get(edge_index) != sizes:
            check_edges(edge_index, *sizes)
            self._checked.set(edge_index, sizes)

    def close(self) -> None:
        """Let go of the rows last exchanged."""
        self._last.clear()

    def _compare(self, kind: str, x: Tensor, name: str, who: str) -> None:
        """Check, before the first exchange of rows of this form, that all processes agree."""
        own = len(self.part.rows[kind].own)
        if x.dim() == 0 or len(x) != own:
            raise PartitionError(
                f"{who or 'a layer'} was given {name} of shape {list(x.shape)}; part "
                f"{self.part.rank} has {own} own nodes{f' of type {kind!r}' * self.part.hetero}, "
                "so it needs as many rows. Use the rows of the part's own data")
        key = (kind, who, name, tuple(x.shape[1:]), x.dtype)
        if key in self._widths:
            return
        mine = f"{who or 'a layer'}: {name} with rows {list(x.shape[1:])} of {x.dtype}"
        forms = _gathered(mine, self.group)
        if len(set(forms)) > 1:
            raise PartitionError("the processes exchange different rows: "
                                 + "; ".join(f"{what} on rank {rank}"
                                             for rank, what in enumerate(forms))
                                 + ". Every process has to run the same model over its part")
        self._widths[key] = None


#: by a group's ranks: the group, and the one beside it
_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _beside(group: Any) -> Any:
    """A second group of these processes for exchanges alone, whose order of calls does not depend
    on when DDP sums gradients up. One for all parts: NCCL takes GPU memory for each, which it
    keeps. Collective where there is none yet."""
    whole = dist.group.WORLD if group is None else group
    ranks = tuple(dist.get_process_group_ranks(whole))
    entry = _groups.get(ranks)
    if entry is None or entry[0] is not whole:  # a group that is gone has ended those beside it
        entry = _groups[ranks] = whole, dist.new_group(list(ranks))
    return entry[1]


def _gathered(mine: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return values


def _agree(part: Part, group: Any, exchange: str) -> None:
    """Raise the same PartitionError on all ranks where their parts are not one graph."""
    facts = _gathered((part.rank, part.parts, part.fingerprint, str(part.folder), exchange), group)
    wrong = []
    for rank, (own, parts, fingerprint, folder, how) in enumerate(facts):
        if parts != len(facts):
            wrong.append(f"{folder} has {parts} parts and there are {len(facts)} processes")
        if own != rank:
            wrong.append(f"rank {rank} holds part {own}; it has to load part {rank}")
        if fingerprint != facts[0][2]:
            wrong.append(f"rank {rank} holds a part of another graph than rank 0 ({folder}): "
                         "the graph was changed or partitioned anew in between")
        if how != facts[0][4]:
            wrong.append(f"rank {rank} exchanges {how}, rank 0 {facts[0][4]}")
    if wrong:
        raise PartitionError("; ".join(dict.fromkeys(wrong)))
