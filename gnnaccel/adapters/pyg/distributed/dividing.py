"""``python -m gnnaccel --partition``: every process runs the whole script, and divides each layer's
call over a large graph with the others.

Before and after a layer every process holds all rows, as a script of one process does. Within it a
process has the rows of its own nodes and the edges that enter them, as over a part that `partition`
wrote; its results are put together with those of the others. So losses, masks, norms and metrics
see the same as in one process.
"""
from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.adapters.pyg.distributed import arguments
from gnnaccel.adapters.pyg.distributed.arguments import Arguments
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
    """The division of layers' calls over graphs of at least ``least`` edges. ``ran``: how many
    calls were divided or not, by the layer's class and the reason why not (None: divided)."""

    def __init__(self, least: int):
        self.group = dist.new_group()
        self.rank, self.parts, self.least = dist.get_rank(), dist.get_world_size(), least
        self.ran: Counter[tuple[str, Reason | None]] = Counter()
        self._cuts: TensorMap[dict[Any, tuple[Session, Cut]]] = TensorMap()
        self._taken: TensorMap[tuple[Any, Tensor]] = TensorMap()
        self._compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._caches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def call(self, native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        """The layer's result for all nodes."""
        plan = self._plan(layer, args, kwargs)
        name = type(layer).__name__
        if isinstance(plan, Reason):
            self.ran[name, plan] += 1
            return native(layer, *args, **kwargs)
        self.ran[name, None] += 1
        self._compare(layer, plan)
        weights = {key: weight for key, weight in layer.named_parameters()
                   if weight.requires_grad and torch.is_grad_enabled()}
        shared = self._arguments(plan, weights)
        draws = Draws(plan.given.device) if layer.training else None
        bound = plan.given.bound
        with (arguments.caches(layer, self._kept(layer, plan.session)), plan.session.active(),
              draws.within(self.rank) if draws is not None else contextlib.nullcontext()):
            out = torch.func.functional_call(layer, shared, bound.args[1:], bound.kwargs)
        if draws is not None:
            draws.end()
        own = plan.cut.nodes[plan.cut.target]
        if not isinstance(out, Tensor) or len(out) != own.counts[self.rank]:
            raise PartitionError(f"{name} gave {_looks(out)}; divided over processes it has to "
                                 f"give a tensor with a row for each of {own.counts[self.rank]} "
                                 "nodes. Run the script without --partition")
        return leave(out, own.rows, own.counts, self.group, weakref.ref(layer))

    def _plan(self, layer: Any, args: tuple, kwargs: dict) -> _Plan | Reason:
        inputs = arguments.read(layer, args, kwargs, self.least)
        if isinstance(inputs, Reason):
            return inputs
        session, cut = self._cut(inputs.edge_index, inputs.sizes, inputs.one)
        if cut is None:
            return reason("GA704", "its graph has edges of nodes that do not exist, or too few "
                          "nodes or edges to give each process some")
        return _Plan(session, cut, inputs)

    def _cut(self, edge_index: Tensor, sizes: tuple[int, int], one: bool) -> tuple[Any, Any]:
        """(session, cut) of a graph; (None, None) where it cannot be divided. Collective when the
        graph is new."""
        lasting = not edge_index.is_inference()
        cuts = self._cuts.get(edge_index) if lasting else None
        if cuts is not None and (sizes, one) in cuts:
            return cuts[sizes, one]
        high = edge_index.amax(1).tolist()
        entry: tuple[Any, Any] = None, None
        if int(edge_index.min()) >= 0 and high[0] < sizes[0] and high[1] < sizes[1]:
            cut = Cut(edge_index, sizes, one, self.rank, self.parts)
            same(self.group, f"a graph of {sizes[0]} sources, {sizes[1]} destinations and "
                 f"{edge_index.shape[1]} edges", _checksum(edge_index))
            if cut.gives_all_some():
                entry = Session.of_group(cut.part, self.group), cut
        if lasting:
            self._cuts.set(edge_index, {**(cuts or {}), (sizes, one): entry})
        return entry

    def _arguments(self, plan: _Plan, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the own rows in place of the arguments. Returns the weights, by name, as the call is
        to use them."""
        inputs = plan.given
        tensors, takes, places = [], [], []
        for place, kind in inputs.kinds.items():
            value, take = inputs.value(place), plan.cut.take(kind)
            if value.requires_grad and torch.is_grad_enabled():
                tensors.append(value)
                takes.append(take)
                places.append(place)
            elif take is not None:
                inputs.put(place, self._rows_of(value, take))
        entered = enter([*tensors, *weights.values()], [*takes, *[None] * len(weights)],
                        self.group, weakref.ref(inputs.bound.arguments["self"]))
        for place, value in zip(places, entered):
            inputs.put(place, value)
        inputs.bound.arguments["edge_index"] = next(iter(plan.session.part.edges.values()))
        return dict(zip(weights, entered[len(places):]))

    def _rows_of(self, value: Tensor, take: Any) -> Tensor:
        """The own rows of a tensor without gradients: the same tensor while nothing is written, so
        that its halo is sent once."""
        lasting = not value.is_inference()
        entry = self._taken.get(value) if lasting else None
        if entry is not None and entry[0] is take:
            return entry[1]
        rows = value[take.rows]
        if lasting and not rows.is_inference():
            self._taken.set(value, (take, rows))
        return rows

    def _compare(self, layer: Any, plan: _Plan) -> None:
        """Check at a layer's first call that all processes hold the same features."""
        x = plan.given.bound.arguments["x"]
        x = x if isinstance(x, Tensor) else x[0]
        if layer not in self._compared and not x.requires_grad:
            same(self.group, f"features for {type(layer).__name__}", float(x.double().sum()))
        self._compared.add(layer)

    def compare_weights(self, optimizer: Any) -> None:
        """Check before an optimizer's first step that all processes hold the same weights. Those
        without gradients are left out: nobody may have given them values."""
        if optimizer not in self._compared:
            self._compared.add(optimizer)
            sums = [weight.detach().double().sum().cpu() for group in optimizer.param_groups
                    for weight in group["params"] if weight.grad is not None]
            same(self.group, f"{len(sums)} weights", float(sum(sums)))

    def _kept(self, layer: Any, session: Session) -> dict[str, Any]:
        """Tensors that ``cached=True`` keeps of the divided calls over a session."""
        entry = self._caches.get(layer)
        if entry is None or entry[0]() is not session:
            entry = self._caches[layer] = weakref.ref(session), {}
        return entry[1]


def _checksum(edge_index: Tensor) -> int:
    places = torch.arange(edge_index.shape[1], device=edge_index.device) % 1009 + 1
    return int(((edge_index[0] * 31 + edge_index[1] * 17) % 65537 * places).sum())


def same(group: Any, what: str, number: float) -> None:
    """Check that all processes hold the same ``what`` and ``number``, an int to the digit and a
    float to four. Raises PartitionError on every rank otherwise."""
    facts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(facts, (what, number), group=group)
    near = 0.0 if isinstance(number, int) else 1e-4 * max(1.0, abs(facts[0][1]))
    for rank, (theirs, value) in enumerate(facts):
        if theirs != facts[0][0] or abs(value - facts[0][1]) > near:
            raise PartitionError(
                f"rank {rank} holds {theirs} (sum {value:.12g}), and rank 0 {facts[0][0]} (sum "
                f"{facts[0][1]:.12g}); with --partition every process has to compute the same. Set "
                "seeds that do not depend on the process or the time, for each generator")


def _looks(value: Any) -> str:
    return (f"a tensor {list(value.shape)}" if isinstance(value, Tensor)
            else f"a {type(value).__name__}")
