"""Linear maps of a layer over a part: the choice of the rows that are mapped, and of those that are
sent.

A map that comes before rows are gathered can be applied to own rows, whose results are sent, or to
own and halo rows. The first is cheaper where rows have gradients, the second where they have none:
then the same rows stay with their receiver, and a step sends nothing for them.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.observe import watch

#: layers called with (sources, destinations): maps of the sources' rows that are gathered, where
#: the layer does nothing else with them
_SOURCE = {"GATConv": ("lin", "lin_src"), "GATv2Conv": ("lin_l",)}
#: rows without gradients are sent as they are where they are at most so many times as wide as the
#: mapped rows that are gathered, forward and backward
_WIDER = 2


@contextlib.contextmanager
def before_exchange(call: Any, x: Any) -> Iterator[Tensor | None]:
    """A block in which a layer is called with a pair, of which this gives the rows of sources. None
    where these are `x` with the halo's rows, mapped as the layer does.

    Maps of sources may be applied to own rows, whose results are sent. Then a tensor of the rows'
    shape, full of NaN, stands for them, which holds one number. A map that makes both rows of the
    pair is applied to those of the sources alone (`state.leading`).

    ``call``: the layer's, `calls._Call`; ``x``: its first argument.
    """
    names, shared = _of_sources(call, x), _shared(call, x)
    results: dict[int, Tensor] = {}

    def forward(module: Any, rows: Tensor) -> Tensor:
        if not names or (rows is not sources and rows is not x):
            return type(module).forward(module, rows)
        own = results.get(id(module))
        if own is None:
            own = results[id(module)] = type(module).forward(module, x)
        return call.extend(own, "mapped x") if rows is sources else own

    if names:
        sources = x.new_full((1, 1), float("nan")).expand(call.size[0], x.shape[1])
    elif shared:
        sources = call.extend(x, "x")
    else:
        yield None
        return
    with _replaced(call.layer, names or ["lin"], forward):
        before, state.leading = state.leading, sources if shared else None
        try:
            yield sources
        finally:
            state.leading = before


def _shared(call: Any, x: Any) -> bool:
    """Whether the layer makes the rows of sources and of destinations by one map."""
    return (call.session.maps_first and isinstance(x, Tensor) and x.dim() == 2
            and "lin" in _of_class(call.layer.__class__)
            and guards.plain_linear(call.layer._modules.get("lin")) and not watch.repeating())


def _of_sources(call: Any, x: Any) -> list[str]:
    """The names of maps that are applied to own rows alone; the same on all processes."""
    layer = call.layer
    if not (call.session.maps_first and isinstance(x, Tensor) and x.dim() == 2
            and torch.is_grad_enabled() and x.requires_grad
            and not watch.repeating()):  # with copies of the rows' stand-in
        return []
    names = [name for name in _of_class(layer.__class__) if layer._modules.get(name) is not None]
    return names if all(_narrows(layer._modules[name], x) for name in names) else []


@functools.cache
def _of_class(cls: type) -> tuple[str, ...]:
    """`_SOURCE` of a class, or of the one that it derives from."""
    return next((_SOURCE[base.__name__] for base in cls.__mro__ if base.__name__ in _SOURCE), ())


def _narrows(module: Any, x: Tensor) -> bool:
    return guards.plain_linear(module) and module.weight.shape[0] <= x.shape[1]


class Watched:
    """The maps of a layer during one call, which lets go of everything at its end. ``x``: the
    layer's first argument."""

    def __init__(self, call: Any, x: Any):
        self._call, self._x = call, x
        self._made: list[tuple[Tensor, int, Any]] = []

    def extended(self, value: Tensor) -> Tensor | None:
        """``value`` as [own + halo, ...], where it is a map's result of rows without gradients: the
        halo's rows are mapped here. None for other tensors, and where it was written since."""
        module = next((module for result, version, module in self._made
                       if result is value and version == value._version), None)
        if module is None:
            return None
        own = len(value)
        halo = self._call.extend(self._x, "x")[own:]
        return torch.cat([value, type(module).forward(module, halo)])

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block in which the layer runs."""
        def forward(module: Any, rows: Tensor) -> Tensor:
            mapped = type(module).forward(module, rows)
            if rows is self._x and mapped.requires_grad:
                self._made.append((mapped, mapped._version, module))
            return mapped

        try:
            with _replaced(self._call.layer, self._maps(), forward):
                yield
        finally:
            self._x, self._made = None, []

    def _maps(self) -> list[str]:
        x = self._x
        if not (self._call.session.maps_first and isinstance(x, Tensor) and x.dim() == 2
                and torch.is_grad_enabled() and not x.requires_grad):
            return []
        return [name for name, module in self._call.layer._modules.items()
                if module is not None and guards.plain_linear(module)
                and x.shape[1] <= _WIDER * module.weight.shape[0]]


class _Standin(torch.nn.Module):
    """The stand-in of a map: ``run(map, rows)``. Its class is the same in each call, so that calls
    are known again, as they would not be with another ``forward`` on the map itself."""

    def __init__(self, module: Any, run: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.map, self.run, self.training = module, run, module.training

    def forward(self, rows: Tensor) -> Tensor:
        return self.run(self.map, rows)


@contextlib.contextmanager
def _replaced(layer: Any, maps: list[str], run: Callable[[Any, Tensor], Tensor]) -> Iterator[None]:
    """A block in which ``run(module, rows)`` stands for these maps of a layer."""
    modules = layer._modules
    originals = {name: modules[name] for name in maps}
    try:
        modules.update((name, _Standin(module, run)) for name, module in originals.items())
        yield
    finally:
        modules.update(originals)
