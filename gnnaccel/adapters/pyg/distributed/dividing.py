"""``python -m gnnaccel --partition``: every process runs the whole script, and divides each layer's
call over a large graph with the others.

Before and after a layer every process holds all rows, as a script of one process does. Within it a
process has the rows of its own nodes and the edges that enter them, as over a part that
`partition` wrote; its results are put together with those of the others. So losses, masks, norms
and metrics see what they see in one process.
"""
from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.adapters import guards
from gnnaccel.adapters.pyg.distributed import layers
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.ranges import Cut, Take
from gnnaccel.dispatch.distributed.replicas import enter, leave
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.errors import PartitionError


class _Plan(NamedTuple):
    """A call that is divided: over which session, and which rows of each argument are taken, by the
    argument's name (and place, where it is a pair)."""

    session: Session
    cut: Cut
    bound: Any
    takes: dict[tuple[str, int | None], Any]


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
        x = found.bound.arguments["x"]
        device = (x if isinstance(x, Tensor) else x[0]).device
        with (self._own_cache(layer, found.session), _active(found.session),
              _own_numbers(device, self.rank, layer.training)):
            out = torch.func.functional_call(layer, shared, found.bound.args[1:],
                                             found.bound.kwargs)
        own = found.cut.nodes[found.cut.target]
        if not isinstance(out, Tensor) or len(out) != own.counts[self.rank]:
            raise PartitionError(f"{name} gave {_looks(out)}; divided over processes it has to "
                                 f"give a tensor with a row for each of {own.counts[self.rank]} "
                                 "nodes. Run the script without --partition")
        return leave(out, own.rows, own.counts, self.group, weakref.ref(layer))

    def _plan(self, layer: Any, args: tuple, kwargs: dict) -> _Plan | Reason:
        why = undividable(layer)
        if why is not None:
            return why
        bound = layers.signature(type(layer).forward).bind(layer, *args, **kwargs)
        given = bound.arguments
        edge_index, x = given.get("edge_index"), given.get("x")
        if (type(edge_index) is not Tensor or edge_index.dtype != torch.long
                or edge_index.dim() != 2 or len(edge_index) != 2
                or edge_index.layout is not torch.strided):
            return reason("GA704", "edge_index is no plain tensor [2, E] of int64")
        edges = edge_index.shape[1]
        if edges < self.least:
            return reason("GA704", f"its graphs have less than {self.least} edges",
                          "--partition=EDGES sets another limit")
        if given.get("return_attention_weights") is not None:
            return reason("GA704", "return_attention_weights asks for rows of edges")
        sizes, why = _sizes(layer, x, edges)
        if why is not None:
            return why
        session, cut = self._cut(edge_index, sizes, isinstance(x, Tensor))
        if cut is None:
            return reason("GA704", "its graph has edges of nodes that do not exist, or too few "
                          "nodes or edges to give each process some")
        takes = _takes(given, sizes, edges, cut)
        if takes is None:
            return reason("GA704", "an argument besides x could be rows of sources or of "
                          "destinations")
        return _Plan(session, cut, bound, takes)

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
        given = plan.bound.arguments
        tensors, takes, places = [], [], []
        for (name, at), take in plan.takes.items():
            value = given[name] if at is None else given[name][at]
            if value.requires_grad and torch.is_grad_enabled():
                tensors.append(value)
                takes.append(take)
                places.append((name, at))
            elif take is not None:
                _put(given, name, at, self._rows_of(value, take))
        found = enter([*tensors, *weights.values()], [*takes, *[None] * len(weights)],
                      self.group, weakref.ref(given["self"]))
        for (name, at), value in zip(places, found):
            _put(given, name, at, value)
        given["edge_index"] = next(iter(plan.session.part.edges.values()))
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
        x = plan.bound.arguments["x"]
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

    @contextlib.contextmanager
    def _own_cache(self, layer: Any, session: Session) -> Iterator[None]:
        """A block in which what ``cached=True`` keeps is that of the divided calls."""
        own = layer.__dict__
        names = [name for name in own if name.startswith("_cached")]
        held = {name: own[name] for name in names}
        known = self._caches.get(layer)
        kept = known[1] if known is not None and known[0]() is session else {}
        own.update({name: kept.get(name) for name in names})
        try:
            yield
        finally:
            if names:
                self._caches[layer] = weakref.ref(session), {name: own[name] for name in names}
                own.update(held)


def undividable(layer: Any) -> Reason | None:
    """Why a layer runs whole, whatever it is called with."""
    why = guards.context_reason() or layers.refusal(layer)
    if why is not None:
        return why
    base = next(cls for cls in type(layer).__mro__ if cls.__module__.startswith("torch_geometric."))
    if base.__name__ not in layers.COMPARED or not layers.forward_is_hosts(layer):
        return reason("GA704", "its forward is the script's own, which may look at all nodes")
    if guards.has_hooks(layer) or guards.lazy_reason(*layer.modules()) is not None:
        return reason("GA704", "it has hooks, or parameters that are not initialised yet")
    if base.__name__ == "SuperGATConv" and layer.training:
        return reason("GA704", "its loss draws pairs of all nodes")
    for module in layer.modules():
        if module is layer:
            continue
        why = layers.whole_graph(module)
        if why is not None:
            return why
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and (
                module.training or module.running_mean is None):
            return reason("GA704", "batch normalisation inside it takes statistics of all nodes")
    return None


def _sizes(layer: Any, x: Any, edges: int) -> tuple[tuple[int, int], Reason | None]:
    """The numbers of sources and destinations, or why they are not clear."""
    pair = x if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) != 2 or not all(type(one) in (Tensor, torch.nn.Parameter) and one.dim()
                                 for one in pair):
        return (0, 0), reason("GA704", "x is no tensor, and no pair of tensors, with a row a node")
    if any(layer.node_dim % one.dim() for one in pair if one.is_floating_point() and one.dim() > 1):
        return (0, 0), reason("GA704", "its nodes are not the first dimension of x")
    if pair is x and getattr(layer, "add_self_loops", False):
        return (0, 0), reason("GA704", "it adds self loops between a pair's nodes")
    sizes = len(pair[0]), len(pair[1])
    if edges in sizes:
        return sizes, reason("GA704", "the graph has as many edges as nodes, so arguments could be "
                             "rows of either")
    return sizes, None


def _takes(given: Any, sizes: tuple[int, int], edges: int, cut: Cut
           ) -> dict[tuple[str, int | None], Any] | None:
    """Which rows of each tensor among the arguments are taken, None being the whole; or None, where
    that is not clear."""
    def of(value: Tensor, kind: str) -> Take | None:
        rows = len(value) if value.dim() else -1
        return (cut.edges if rows == edges else
                cut.nodes[kind] if rows == sizes[kind == cut.target] else None)

    found: dict[tuple[str, int | None], Any] = {}
    for name, value in given.items():
        if name in ("self", "edge_index", "size"):
            continue
        if isinstance(value, Tensor):
            found[name, None] = of(value, cut.target)
            if cut.source != cut.target and value.dim() and len(value) in sizes:
                return None
        elif isinstance(value, (tuple, list)):
            for at, one in enumerate(value[:2]):
                if isinstance(one, Tensor):
                    found[name, at] = of(one, (cut.source, cut.target)[at])
    return found


def _put(given: Any, name: str, at: int | None, value: Tensor) -> None:
    if at is None:
        given[name] = value
    else:
        pair = list(given[name])
        pair[at] = value
        given[name] = tuple(pair)


@contextlib.contextmanager
def _active(session: Session) -> Iterator[None]:
    state.current = session
    try:
        yield
    finally:
        state.current = None


@contextlib.contextmanager
def _own_numbers(device: torch.device, rank: int, wanted: bool) -> Iterator[None]:
    """A block in which each process draws random numbers of its own, which follow from the state of
    the generators before it; after it the generators are alike in all processes again."""
    if not wanted:
        yield
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]
    for generator, known in zip(generators, before):
        digest = hashlib.blake2b(known.numpy().tobytes(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little") + rank)
    seeded = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, known, start in zip(generators, before, seeded):
            drawn = not torch.equal(generator.get_state(), start)
            generator.set_state(known)
            if drawn:  # so that the next layer draws others
                torch.rand(1, generator=generator, dtype=torch.float32, device=generator.device)


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
