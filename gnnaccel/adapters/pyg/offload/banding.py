"""A layer's call over rows in the host's memory, as a call in bands."""
from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import guards
from gnnaccel.adapters.pyg.distributed import arguments, calls, layers
from gnnaccel.adapters.pyg.distributed.arguments import Arguments
from gnnaccel.adapters.pyg.distributed.calls import within
from gnnaccel.adapters.pyg.offload import steps
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.building import Relation
from gnnaccel.dispatch.distributed.draws import Draws
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.offload import plan
from gnnaccel.dispatch.offload.calls import Call, is_recorded
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.plan import Bands
from gnnaccel.dispatch.offload.rowwise import RowWise
from gnnaccel.dispatch.offload.session import BandSession, Key
from gnnaccel.dispatch.offload.sizes import Widths
from gnnaccel.dispatch.policy import config
from gnnaccel.errors import OffloadError

guards.PASSIVE_MODES.add(RowWise)


#: options within bands: layers run by kernels where they can, profitable or not, and wait for
#: them, so that no rows are written for edges
_WITHIN = {"when": "supported", "first_use": "wait"}
#: bytes that an edge of a band that stays takes in the cache of structures
_STRUCTURE = 24
#: the largest part of the memory before that more bands may take, to be tried again
_HELPS = 0.9
_BY_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


#: a graph's bands by edge_index, then by device and sizes, then by the number asked for
plans: TensorMap[dict[Any, dict[int, Bands]]] = TensorMap()
#: by layer and the call's title: the inputs that it gathers as they are
_known: weakref.WeakKeyDictionary[Any, dict[str, dict[Key, int]]] = weakref.WeakKeyDictionary()


class _Graph(NamedTuple):
    """A graph that is to be cut. ``sizes``: the numbers of sources and destinations, of the types
    in ``relation``; ``flipped``: whether edge_index has destinations first."""

    edge_index: Tensor
    sizes: tuple[int, int]
    relation: Relation
    flipped: bool = False


class Bander:
    """The runner of layers whose features are in the host's memory, band by band on
    ``memory.device``. ``limit``: the bytes that a call may take there; None: by the device's free
    memory. ``installed``: gives the block that a layer runs in, also in backward. ``rowwise``: the
    mode for operations between layers; ``ran``: how many layers' calls ran, by class and number of
    bands."""

    def __init__(self, memory: Memory, limit: int | None,
                 installed: Callable[[], contextlib.AbstractContextManager[Any]]):
        self.memory, self.limit, self._installed = memory, limit, installed
        self.rowwise = RowWise(memory, self.room, self._stays)
        self.ran: Counter[tuple[str, int]] = Counter()
        self._resident: list[Bands] = []
        self._edges = 0  # edges that stay on the device

    def __str__(self) -> str:
        ran = "".join(f"{name} in {bands} band{'s' * (bands != 1)}: {count} "
                      f"call{'s' * (count != 1)}; " for (name, bands), count in self.ran.items())
        memory = self.memory
        return (f"{ran or 'no layer; '}{memory.fetched / 1e9:.3g} GB came to {memory.device}, "
                f"{memory.stored / 1e9:.3g} GB went back")

    def call(self, native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        """The layer's result for all nodes, in the host's memory."""
        if not _on_host((*args, *kwargs.values())):
            return native(layer, *args, **kwargs)
        why = guards.context_reason()
        if why is not None and why.code != "GA501":  # hooks see the same as over the whole graph
            raise OffloadError(f"{type(layer).__name__} cannot run in bands: {why.text}")
        with self.rowwise.paused():
            call_arguments = arguments.read(layer, args, kwargs)
            if isinstance(call_arguments, Arguments):
                return self._whole(layer, call_arguments)
        with calls.steps(layer, functools.partial(self._step, layer)):
            return native(layer, *args, **kwargs)

    def _whole(self, layer: Any, arguments: Arguments) -> Tensor:
        """The result of a call of which everything runs in bands."""
        places = [place for place, kind in arguments.kinds.items() if kind is not None]
        inputs = [arguments.value(place) for place in places]
        kinds = [kind for kind in arguments.kinds.values() if kind is not None]
        others = [place for place, kind in arguments.kinds.items() if kind is None]

        def function(session: BandSession, inputs: list[Tensor], whole: list[Tensor],
                     weights: dict[str, Tensor]) -> Tensor:
            tensors = dict(zip([*places, *others], [*inputs, *whole]))
            return _over_band(layer, arguments.copy(), tensors, weights, session)

        graph = _Graph(arguments.edge_index, arguments.sizes, arguments.relation)
        return self._in_bands(layer, type(layer).__name__, function, graph, inputs, kinds,
                              [arguments.value(place) for place in others])

    def _step(self, layer: Any, name: str, edge_index: Any, size: Any, kwargs: dict) -> Tensor:
        """`propagate` or `edge_updater` of a layer, of which nothing else runs in bands."""
        with self.rowwise.paused():
            step = steps.read(layer, name, edge_index, size, kwargs)
            graph = _Graph(step.edge_index, step.sizes, step.relation, step.reversed)
            return self._in_bands(layer, step.title, step.over_band, graph, step.inputs, step.kinds,
                                  step.whole_values, step.result)

    def _in_bands(self, layer: Any, title: str, function: Callable[..., Tensor], graph: _Graph,
                  inputs: list[Tensor], kinds: list[str], others: list[Tensor],
                  result: str | None = None) -> Tensor:
        """``function(session, inputs, others, weights)`` over each band."""
        inputs = [t.resolve_neg().contiguous() for t in inputs]
        weights = dict(layer.named_parameters()) | {
            name: t for name, t in layer.named_buffers() if t.device != self.memory.device}
        # messages of a step alone may be any, so rows for edges are allowed for
        widths = Widths.of(inputs, kinds, weights.values(), layers.is_bipartite(layer),
                           result is None and self._fused(layer, inputs))
        near = widths.near(graph.sizes[0], self.room())
        # rows that come once for all bands come no more often for smaller ones
        small = not (near == 0 or result is not None or torch.is_inference_mode_enabled()
                     or is_recorded(inputs, others, list(weights.values())))
        bands = self._bands(graph, widths, self.room() - near, small)
        self.ran[title, len(bands.bands)] += 1

        def over_band(session: BandSession | None, inputs: list[Tensor],
                      whole: list[Tensor]) -> Tensor:
            assert session is not None
            with session.active(), within():
                return function(session, inputs, whole[len(weights):], dict(zip(weights, whole)))

        gathered = _known.setdefault(layer, {}).setdefault(title, {})
        call = Call(over_band, bands, kinds, self.memory, title, self._around,
                    Draws(self.memory.device) if layer.training else None, gathered,
                    near, result, self._stays() - near - widths.of_bands(bands),
                    gathers=small and layers.gathers(layer))
        return call(inputs, [*weights.values(), *others])

    def _fused(self, layer: Any, inputs: list[Tensor]) -> bool:
        """Whether kernels run the layer, as far as is known before."""
        names = {cls.__name__ for cls in type(layer).__mro__}
        return (config.current() is not None and self.memory.device.type == "cuda"
                and driver.available()[0] and names.isdisjoint(layers.NATIVE)
                and all(t.dtype in _BY_KERNELS for t in inputs if t.is_floating_point()))

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """A block for a call's bands."""
        base = config.current()
        with (self._installed(), self.rowwise.paused(),
              contextlib.nullcontext() if base is None
              else config.override(config.make(_WITHIN, base))):
            yield

    def room(self) -> int:
        """The bytes that a call may take, as they were free at the first."""
        if self.limit is None:
            self.limit = Widths.room(self.memory.device)
        return self.limit

    def _stays(self) -> int:
        """The bytes of `room` that the edges on the device do not take."""
        return self.room() - Widths.staying(self._edges)

    def _bands(self, graph: _Graph, widths: Widths, room: int, small: bool) -> Bands:
        """The graph's bands for rows of these widths; kept while it is unwritten. ``room``: the
        bytes that they and the edges may take; ``small``: so small that the result may stay."""
        lasting = not graph.edge_index.is_inference()
        stay = widths.stay(graph.edge_index.shape[1], room) if lasting else 0
        room -= stay
        room -= widths.aside(graph.sizes[1], room, self.room()) if small else 0
        by_key = (plans.get(graph.edge_index) if lasting else None) or {}
        key = self.memory.device, *graph[1:]
        by_parts = by_key.get(key, {})
        parts = widths.parts(graph.sizes, graph.edge_index.shape[1], room)
        cut_bands = by_parts.get(parts)
        if cut_bands is None or (cut_bands.fitted and widths.of_bands(cut_bands) > room):
            cut_bands = self._cut(graph, widths, parts, room)
            for bands in by_parts.values():
                cut_bands.derived = bands.derived  # which does not depend on how it is cut
            if lasting:
                plans.set(graph.edge_index, {**by_key, key: {**by_parts, parts: cut_bands}})
        if stay and not cut_bands.resident and widths.stay(self._edges + graph.edge_index.shape[1],
                                                           self.room()):
            self._keep(cut_bands, graph.edge_index.shape[1])
        return cut_bands

    def _cut(self, graph: _Graph, widths: Widths, parts: int, room: int) -> Bands:
        """``parts`` bands, or as many more as it takes, while that helps: the edges that enter one
        node are in one band."""
        self.memory.kept.drop()
        edge_index, most, before = graph.edge_index, max(graph.sizes), math.inf
        if graph.flipped:
            edge_index = edge_index.flip(0)
        while True:
            bands = plan.cut(edge_index, graph.sizes, graph.relation, parts, self.memory,
                             self._stays())
            need = widths.of_bands(bands)
            if need <= room or parts >= most or need > _HELPS * before:
                bands.fitted = need <= room
                return bands
            before = need
            parts = min(most, max(parts + 1, int(parts * min(need / room, 4.0))))

    def _keep(self, bands: Bands, edges: int) -> None:
        """Edges stay on the device until the block ends, with their structures."""
        bands.keep_edges()
        self._resident.append(bands)
        self._edges += edges
        cache.set_limit(cache.limit() + edges * _STRUCTURE)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A block in which nothing runs in bands."""
        state.divider, self.rowwise.idle = None, True
        self.memory.kept.drop()
        try:
            yield
        finally:
            state.divider, self.rowwise.idle = self, False

    def close(self) -> None:
        """Release all that stays on the device, at the end of the block."""
        self.memory.kept.drop()
        while self._resident:
            self._resident.pop().let_go()
        cache.set_limit(cache.limit() - self._edges * _STRUCTURE)
        self._edges = 0


def _over_band(layer: Any, given: Arguments, values: dict[arguments.Place, Tensor],
               weights: dict[str, Tensor], session: BandSession) -> Any:
    for place, value in values.items():
        given.put(place, value)
    given.bound.arguments["edge_index"] = next(iter(session.part.edges.values()))
    with arguments.caches(layer, {}):
        return torch.func.functional_call(layer, weights, given.bound.args[1:], given.bound.kwargs)


def _on_host(values: tuple) -> bool:
    """Whether a call's features are in the host's memory: its first tensor of floating point is."""
    for value in values:
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, Tensor) and one.is_floating_point():
                return one.device.type == "cpu"
    return False
