"""The contracts of adapters: `Contract` for the module of a layer class, `Host` for the package of
a host.

Each layer class that is taken over has a module (`gnnaccel.adapters.pyg.layers.gat`, ...). It has
to have ``state`` and ``run``; all else has a default, for layers whose module leaves it out. `read`
reads a module once, when its class is patched.
"""
from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gnnaccel import lazy


def _plain(layer: Any, args: tuple, kwargs: dict, kept: None) -> Any:
    """The tensors of a call ``layer(x, edge_index)``."""
    from gnnaccel.dispatch.plan.request import CallInputs

    x, edge_index = args
    return CallInputs(x, x, edge_index)


@dataclasses.dataclass(frozen=True)
class Contract:
    """The functions and constants of a layer's module, by their names there. ``layer``, ``args``,
    ``kwargs``: of a host's call.

    A call:

    * ``ARGUMENTS``: the names of the required and of the optional arguments of ``forward``.
    * ``state(layer, *arguments)``: as in `router.Adapter`, of these arguments, None for those not
      given; without ``ARGUMENTS`` ``state(layer, args, kwargs)``.
    * ``run(layer, spec, inputs, attend)``: as in `router.Adapter`.
    * ``bind(layer, call)``: as in `router.Adapter`; None: no call is bound.

    * ``shapes(layer, inputs)``: shapes of the parameters that kernels read, by their dotted names,
      by the layer's sizes, for `guards.stated`; ``ONE_DTYPE``: whether all must be of the dtype
      of the rows. None: the layer's own modules are called.

    A call that repeats another one (`signature.Signature` makes the keys):

    * ``FIELDS``: the attributes of a layer that its Program depends on; None: no call is repeated.
    * ``reads(layer, args, kwargs)``: values that ``state`` reads besides, such as attributes of
      submodules.
    * ``parts(layer, args)``: the state of all modules and weights of the layer, None where it
      cannot be told; without it `signature.of_modules`.
    * ``again(layer, args, kwargs, kept)``: the tensors of a repeated call. PyG: without it, only
      ``layer(x, edge_index)`` is repeated. DGL's are found by `dgl.repeated`.
    * ``keep(spec, inputs)``: values that ``again`` needs besides the arguments, without tensors;
      None: nothing.
    * ``resized(layer, args, kwargs, spec, kept)``: PyG: the result of ``state`` for a call
      whose key differs from that of the call of ``spec`` in numbers of rows alone; None where
      ``state`` has to be asked. ``kept``: the result of ``keep`` for that one. Keys say nothing of
      integer tensors, so these are looked at. Without it calls over new graphs are stated each
      time.
    * ``WATCHED``: PyG's plain calls: submodules that ``run`` may leave out, so they must be linear
      maps and nothing else; None: the layer has no plain calls, or they have the longer key.
    * ``LINEAR``: those that a bound call leaves out.

    * ``TURNS``: PyG: whether a call with the other ``flow`` is this one over edges that are turned
      round, where there are as many nodes at both ends.

    What has to be the host's own:

    * ``AGGREGATIONS``: names of PyG's aggregation classes, one of which the layer must have;
      ``INSIDE``: of those that an aggregation itself runs.
    * ``ABSORBED``: DGL: submodules, by name, whose work goes into the Program, and their classes.

    Layers around others:

    * ``inside(native, forward)``: the function that stands in for the host's forward where that
      runs; layers that are made of it are called by ``forward``, the routed one.
    * ``around(forward, native)``: the function that replaces ``forward``, the routed one.

    A class of which some layers just pass messages:

    * ``propagates(layer)``: PyG: whether this is one of them. Its ``forward`` is the host's own
      then, and its ``propagate`` is taken over as in classes without a module. None: none is.
    """

    state: Callable[..., Any]
    run: Callable[..., Any]
    ARGUMENTS: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    bind: Callable[..., Any] | None = None
    shapes: Callable[..., Any] | None = None
    ONE_DTYPE: bool = False
    FIELDS: tuple[str, ...] | None = None
    reads: Callable[..., Any] | None = None
    parts: Callable[..., Any] | None = None
    again: Callable[..., Any] | None = None
    keep: Callable[..., Any] | None = None
    resized: Callable[..., Any] | None = None
    WATCHED: tuple[str, ...] | None = None
    LINEAR: tuple[str, ...] = ()
    TURNS: bool = False
    AGGREGATIONS: tuple[str, ...] = ("SumAggregation",)
    INSIDE: tuple[str, ...] = ()
    ABSORBED: dict[str, type] = dataclasses.field(default_factory=dict)
    inside: Callable[..., Any] | None = None
    around: Callable[..., Any] | None = None
    propagates: Callable[[Any], bool] | None = None

    def repeated(self) -> Callable[..., Any]:
        """``again``, or the function that gives the tensors of a plain call."""
        return self.again or _plain


def _nothing(of: Any) -> None:
    """None: the default of a host's functions."""


@dataclasses.dataclass(frozen=True)
class Host:
    """The functions of a host's package, by their names there; those of the same names in
    `gnnaccel.adapters` say what they mean.

    * ``install(patches)``: puts the host's patches in; gives the dotted names of what was patched.
    * ``LAYERS``: the class names of the layers that are taken over.
    * ``adapter_of(layer)``, ``storable(layer)``, ``linear_maps(layer)``.
    * ``update_on_demand(patches)``: puts in or out what only quantized or compiled models or
      large graphs need; ``on_demand(patches)``: puts in all of that.
    * ``redone()``: the host's functions whose work is done again, without being replaced.
    """

    install: Callable[..., Any]
    LAYERS: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapter_of: Callable[[Any], Any] = _nothing
    storable: Callable[[Any], Any] = _nothing
    linear_maps: Callable[[Any], list] = lambda layer: []
    update_on_demand: Callable[[Any], None] = _nothing
    on_demand: Callable[[Any], None] = _nothing
    redone: Callable[[], Sequence[Any]] = tuple


def read_host(package: str) -> Host:
    """The contract of a host's package, which is imported."""
    module = importlib.import_module(package)
    lazy.run(module)
    attributes = vars(module)
    return Host(**{field.name: attributes[field.name] for field in dataclasses.fields(Host)
                   if field.name in attributes})


_NAMES = tuple(field.name for field in dataclasses.fields(Contract))


def read(module: Any) -> Contract:
    """The contract of a layer's module.

    Raises AttributeError for a module without ``state`` or ``run``, and for one with a constant
    whose name is nearly one of the contract's: misspelt, it would have no effect.
    """
    lazy.run(module)
    attributes = vars(module)
    for name in ("state", "run"):
        if name not in attributes:
            raise AttributeError(f"{module.__name__} lacks {name}: see gnnaccel.adapters.contract")
    for name in attributes:
        if name.isupper() and name not in _NAMES:
            meant = difflib.get_close_matches(name, _NAMES, 1, 0.75)
            if meant:
                raise AttributeError(f"{module.__name__} has {name}: did you mean {meant[0]}, "
                                     "as gnnaccel.adapters.contract has it?")
    return Contract(**{name: attributes[name] for name in _NAMES if name in attributes})


class Unread:
    """An object whose attributes are those that ``_read(*of)`` sets, when one is first asked for:
    what a layer's module gives, which runs then."""

    def __init__(self, *of: Any):
        self._of, self._is_read = of, False

    def _read(self, *of: Any) -> None:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:  # of what is not there
        if not name.startswith("__") and not vars(self).get("_is_read", True):
            self._read(*self._of)
            self._is_read = True
        return object.__getattribute__(self, name)  # by another thread, perhaps
