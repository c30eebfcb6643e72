"""A layer's call over rows in the host's memory, as a call in bands."""
from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.distributed import arguments, layers
from gnnaccel.adapters.pyg.distributed.arguments import Arguments
from gnnaccel.cuda import driver
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.draws import Draws
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.offload import calls, plan
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.plan import Bands
from gnnaccel.dispatch.offload.rowwise import RowWise
from gnnaccel.dispatch.offload.session import BandSession, Key
from gnnaccel.dispatch.offload.sizes import Widths
from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.errors import OffloadError


#: options within bands: layers run by kernels where they can, profitable or not, and wait for
#: them, so that no rows are written for edges
_WITHIN = {"when": "supported", "first_use": "wait"}
_BY_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


class Bander:
    """Runs layers whose features are in the host's memory band by band on ``memory.device``.
    ``limit``: the bytes that a call may take there; None: by the device's free memory.
    ``installed``: gives the block that a layer runs in, also in backward. ``rowwise``: the mode for
    what is called between layers; ``ran``: how many layers' calls ran, by class and number of
    bands."""

    def __init__(self, memory: Memory, limit: int | None,
                 installed: Callable[[], contextlib.AbstractContextManager[Any]]):
        self.memory, self.limit, self._installed = memory, limit, installed
        self.rowwise = RowWise(memory, self.room)
        self.ran: Counter[tuple[str, int]] = Counter()
        self._plans: TensorMap[dict[Any, list[Bands]]] = TensorMap()
        self._known: weakref.WeakKeyDictionary[Any, dict[Key, int]] = weakref.WeakKeyDictionary()

    def call(self, native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        """What the layer gives, for all nodes, in the host's memory."""
        if not _on_host((*args, *kwargs.values())):
            return native(layer, *args, **kwargs)
        with self.rowwise.paused():
            return self._call(layer, args, kwargs)

    def _call(self, layer: Any, args: tuple, kwargs: dict) -> Tensor:
        name = type(layer).__name__
        given = arguments.read(layer, args, kwargs)
        if isinstance(given, Reason):
            raise OffloadError(f"{name} cannot run over rows in the host's memory: {given.text}. "
                               "Move its inputs to the GPU before, or call it on sampled batches")
        places = [place for place, kind in given.kinds.items() if kind is not None]
        inputs = [given.value(place).contiguous() for place in places]
        kinds = [kind for kind in given.kinds.values() if kind is not None]
        others = [place for place, kind in given.kinds.items() if kind is None]
        weights = dict(layer.named_parameters())
        widths = Widths.of(inputs, kinds, weights.values(), layers.is_bipartite(layer),
                           self._fused(layer, inputs))
        bands = self._bands(given, widths)
        self.ran[name, len(bands.bands)] += 1

        def function(session: BandSession | None, inputs: list[Tensor],
                     whole: list[Tensor]) -> Tensor:
            return self._over_band(layer, given.copy(), [*places, *others],
                                   [*inputs, *whole[len(weights):]],
                                   dict(zip(weights, whole)), session)

        call = calls.Call(function, bands, kinds, self.memory, name, self._around,
                          Draws(self.memory.device) if layer.training else None,
                          self._known.setdefault(layer, {}), Widths.near(self.room()))
        return call(inputs, [*weights.values(), *map(given.value, others)])

    def _over_band(self, layer: Any, given: Arguments, places: list[arguments.Place],
                   values: list[Tensor], weights: dict[str, Tensor],
                   session: BandSession | None) -> Any:
        assert session is not None
        for place, value in zip(places, values):
            given.put(place, value)
        given.bound.arguments["edge_index"] = next(iter(session.part.edges.values()))
        with _active(session), arguments.caches(layer, {}):
            return torch.func.functional_call(layer, weights, given.bound.args[1:],
                                              given.bound.kwargs)

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

    def _bands(self, given: Arguments, widths: Widths) -> Bands:
        """The graph's bands for rows of these widths; kept while it is unwritten."""
        edge_index, lasting = given.edge_index, not given.edge_index.is_inference()
        known = (self._plans.get(edge_index) if lasting else None) or {}
        key, room = (given.sizes, given.one), self.room() - Widths.near(self.room())
        parts = widths.parts(given.sizes, edge_index.shape[1], room)
        for bands in known.get(key, ()):
            if len(bands.bands) <= 2 * parts and widths.of_bands(bands) <= room:
                return bands
        while True:
            found = plan.cut(edge_index, given.sizes, given.relation, parts, self.memory,
                             room)
            need = widths.of_bands(found)
            if need <= room or parts >= max(given.sizes):
                break
            parts = min(max(given.sizes), max(parts + 1, int(parts * min(need / room, 4.0))))
        if lasting:
            if widths.stay(edge_index.shape[1], room):
                found.keep_edges(self.memory)
            self._plans.set(edge_index, {**known, key: [found, *known.get(key, ())]})
        return found


def _on_host(values: tuple) -> bool:
    """Whether a call's features are in the host's memory: its first tensor of floating point is."""
    for value in values:
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, Tensor) and one.is_floating_point():
                return one.device.type == "cpu"
    return False


@contextlib.contextmanager
def _active(session: BandSession) -> Iterator[None]:
    held, state.current = state.current, session
    try:
        yield
    finally:
        state.current = held
