"""``python -m gnnaccel --partition``: every process runs the whole script, and divides each layer's
call over a large graph with the others.

Before and after a layer every process holds all rows, as a script of one process does. Within it a
process has the rows of its own nodes and the edges that enter them, as over a part that
`partition` wrote; its results are put together with those of the others. So losses, masks, norms
and metrics see what they see in one process.
"""
from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.adapters.pyg.distributed import arguments
from gnnaccel.adapters.pyg.distributed.arguments import Arguments
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.draws import Draws
from gnnaccel.dispatch.distributed.ranges import Cut
from gnnaccel.dispatch.distributed.replicas import enter, leave
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.errors import PartitionError


class _Plan(NamedTuple):
    """A call that is divided, and over which session."""

    session: Session
    cut: Cut
    given: Arguments


class Divider:
    """Divides layers' calls over graphs of at least ``least`` edges. ``ran``: how many calls were
    divided or not, by the layer's class and the reason why not (None: divided)."""

    def __init__(self, least: int):
        self.group = dist.new_group()
        self.rank, self.parts, self.least = dist.get_rank(), dist.get_world_size(), least
        self.ran: Counter[tuple[str, Reason | None]] = Counter()
        self._cuts: TensorMap[dict[Any, tuple[Session, Cut]]] = TensorMap()
        self._taken: TensorMap[tuple[Any, Tensor]] = TensorMap()
        self._compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._caches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def call(self, native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        """What the layer gives, for all nodes."""
        found = self._plan(layer, args, kwargs)
        name = type(layer).__name__
        if isinstance(found, Reason):
            self.ran[name, found] += 1
            return native(layer, *args, **kwargs)
        self.ran[name, None] += 1
        self._compare(layer, found)
        weights = {key: weight for key, weight in layer.named_parameters()
                   if weight.requires_grad and torch.is_grad_enabled()}
        shared = self._arguments(found, weights)
        draws = Draws(found.given.device) if layer.training else None
        bound = found.given.bound
        with (arguments.caches(layer, self._kept(layer, found.session)), _active(found.session),
              draws.within(self.rank) if draws is not None else contextlib.nullcontext()):
            out = torch.func.functional_call(layer, shared, bound.args[1:], bound.kwargs)
        if draws is not None:
            draws.end()
        own = found.cut.nodes[found.cut.target]
        if not isinstance(out, Tensor) or len(out) != own.counts[self.rank]:
            raise PartitionError(f"{name} gave {_looks(out)}; divided over processes it has to "
                                 f"give a tensor with a row for each of {own.counts[self.rank]} "
                                 "nodes. Run the script without --partition")
        return leave(out, own.rows, own.counts, self.group, weakref.ref(layer))

    def _plan(self, layer: Any, args: tuple, kwargs: dict) -> _Plan | Reason:
        given = arguments.read(layer, args, kwargs, self.least)
        if isinstance(given, Reason):
            return given
        session, cut = self._cut(given.edge_index, given.sizes, given.one)
        if cut is None:
            return reason("GA704", "its graph has edges of nodes that do not exist, or too few "
                          "nodes or edges to give each process some")
        return _Plan(session, cut, given)

    def _cut(self, edge_index: Tensor, sizes: tuple[int, int], one: bool) -> tuple[Any, Any]:
        """(session, cut) of a graph; (None, None) where it cannot be divided. Collective when the
        graph is new."""
        lasting = not edge_index.is_inference()
        known = self._cuts.get(edge_index) if lasting else None
        if known is not None and (sizes, one) in known:
            return known[sizes, one]
        high = edge_index.amax(1).tolist()
        found: tuple[Any, Any] = None, None
        if int(edge_index.min()) >= 0 and high[0] < sizes[0] and high[1] < sizes[1]:
            cut = Cut(edge_index, sizes, one, self.rank, self.parts)
            same(self.group, f"a graph of {sizes[0]} sources, {sizes[1]} destinations and "
                 f"{edge_index.shape[1]} edges", _checksum(edge_index))
            if cut.gives_all_some():
                found = Session.of_group(cut.part, self.group), cut
        if lasting:
            self._cuts.set(edge_index, {**(known or {}), (sizes, one): found})
        return found

    def _arguments(self, plan: _Plan, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Puts the own rows in place of the arguments; the weights, by name, as the call is to use
        them."""
        given = plan.given
        tensors, takes, places = [], [], []
        for place, kind in given.kinds.items():
            value, take = given.value(place), plan.cut.take(kind)
            if value.requires_grad and torch.is_grad_enabled():
                tensors.append(value)
                takes.append(take)
                places.append(place)
            elif take is not None:
                given.put(place, self._rows_of(value, take))
        found = enter([*tensors, *weights.values()], [*takes, *[None] * len(weights)],
                      self.group, weakref.ref(given.bound.arguments["self"]))
        for place, value in zip(places, found):
            given.put(place, value)
        given.bound.arguments["edge_index"] = next(iter(plan.session.part.edges.values()))
        return dict(zip(weights, found[len(places):]))

    def _rows_of(self, value: Tensor, take: Any) -> Tensor:
        """The own rows of a tensor without gradients: the same tensor while nothing is written, so
        that its halo is sent once."""
        lasting = not value.is_inference()
        known = self._taken.get(value) if lasting else None
        if known is not None and known[0] is take:
            return known[1]
        found = value[take.rows]
        if lasting and not found.is_inference():
            self._taken.set(value, (take, found))
        return found

    def _compare(self, layer: Any, plan: _Plan) -> None:
        """At a layer's first call: whether all processes hold the same features."""
        x = plan.given.bound.arguments["x"]
        x = x if isinstance(x, Tensor) else x[0]
        if layer not in self._compared and not x.requires_grad:
            same(self.group, f"features for {type(layer).__name__}", float(x.double().sum()))
        self._compared.add(layer)

    def compare_weights(self, optimizer: Any) -> None:
        """Before an optimizer's first step: whether all processes hold the same weights. Those
        without gradients are left out: nobody may have given them values."""
        if optimizer not in self._compared:
            self._compared.add(optimizer)
            sums = [weight.detach().double().sum().cpu() for group in optimizer.param_groups
                    for weight in group["params"] if weight.grad is not None]
            same(self.group, f"{len(sums)} weights", float(sum(sums)))

    def _kept(self, layer: Any, session: Session) -> dict[str, Any]:
        """What ``cached=True`` keeps of the divided calls over a session."""
        known = self._caches.get(layer)
        if known is None or known[0]() is not session:
            known = self._caches[layer] = weakref.ref(session), {}
        return known[1]


@contextlib.contextmanager
def _active(session: Session) -> Iterator[None]:
    state.current = session
    try:
        yield
    finally:
        state.current = None


def _checksum(edge_index: Tensor) -> int:
    places = torch.arange(edge_index.shape[1], device=edge_index.device) % 1009 + 1
    return int(((edge_index[0] * 31 + edge_index[1] * 17) % 65537 * places).sum())


def same(group: Any, what: str, number: float) -> None:
    """PartitionError, on every rank, where processes hold another ``what``: another ``number``, an
    int to the digit and a float to four."""
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, (what, number), group=group)
    near = 0.0 if isinstance(number, int) else 1e-4 * max(1.0, abs(seen[0][1]))
    for rank, (other, value) in enumerate(seen):
        if other != seen[0][0] or abs(value - seen[0][1]) > near:
            raise PartitionError(
                f"rank {rank} holds {other} (sum {value:.12g}), and rank 0 {seen[0][0]} (sum "
                f"{seen[0][1]:.12g}); with --partition every process has to compute the same. Set "
                "seeds that do not depend on the process or the time, for each generator")


def _looks(value: Any) -> str:
    return (f"a tensor {list(value.shape)}" if isinstance(value, Tensor)
            else f"a {type(value).__name__}")
