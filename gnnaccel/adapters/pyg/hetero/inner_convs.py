"""The layers inside a HeteroConv, looked through as one relational layer.

Looking through them costs much more than running them together, so it is done once;
`Together.unchanged` then sees at each call, without a loop in Python over every attribute, whether
one of them became something else.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike
from gnnaccel.adapters.guards import HOOKS_OF_MODULES, MODULE_HOOKS
from gnnaccel.adapters.own import MESSAGE_PASSING, Path, Paths
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.hetero.dicts import EdgeType
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.reasons import Reason, reason


class Kind(NamedTuple):
    """A class of layers that can run together. ``maps``: linear maps that such a layer may have;
    ``off``: options that must not be set; ``options``: those that must be the same for all;
    ``aggregations``, ``node_dim``: as in `guards.layer_reason`; ``called``: modules that are called
    as they are, whatever they do; ``shaped``: the linear map whose weights have to be of one
    shape."""

    maps: tuple[str, ...]
    off: tuple[str, ...]
    options: tuple[str, ...]
    aggregations: tuple[str, ...] = ("SumAggregation", "MeanAggregation")
    node_dim: int = -2
    called: tuple[str, ...] = ()
    shaped: str = ""


#: name of a class of layers that can run together -> its `Kind`
KINDS = {
    "SAGEConv": Kind(("lin_l", "lin_r"), ("normalize", "project"), ("root_weight",),
                     shaped="lin_l"),
    "GraphConv": Kind(("lin_rel", "lin_root"), (), (), shaped="lin_rel"),
    "GATConv": Kind(("lin", "lin_src", "lin_dst"), (),
                    ("heads", "out_channels", "concat", "negative_slope", "dropout",
                                                       "training", "add_self_loops"),
                    ("SumAggregation",), 0),
    "GATv2Conv": Kind(("lin_l", "lin_r"), (),
                      ("heads", "out_channels", "concat", "negative_slope", "dropout", "training",
                       "add_self_loops", "share_weights"), ("SumAggregation",), 0),
    "GCNConv": Kind(("lin",), ("cached", "improved"), ("normalize", "add_self_loops"),
                    ("SumAggregation",), shaped="lin"),
    "GINConv": Kind((), (), (), ("SumAggregation",), called=("nn",)),
}

_ALL_HOOKS = guards.HOOKS + HOOKS_OF_MODULES
_conv_hooks = itemgetter(*_ALL_HOOKS)
_conv_state = itemgetter("_explain", "_decomposed_layers", "flow", "node_dim", "_modules")
_part_hooks, _parameters_of = MODULE_HOOKS, itemgetter("_parameters")
_disjoint: Callable[[Any, Iterable[Any]], bool] = type({}.keys()).isdisjoint
_REPLACED = frozenset(("forward", *MESSAGE_PASSING))
_shape, _looks = attrgetter("shape"), attrgetter("dtype", "device")


class Together:
    """Alike layers, one for each relation.

    ``kind``: their class's name; ``convs``: the layers; ``names``: edge types in the layer's order;
    ``sources``, ``targets``: node types at their ends, each once, in the order in which they come
    up; ``of_source``, ``of_target``: the relations at each; ``mean``: the aggregation.
    """

    def __init__(self, names: tuple[EdgeType, ...], convs: tuple[Any, ...], kind: Kind):
        self.names, self.convs, self.kind = names, convs, type(convs[0]).__name__
        self.mean = type(convs[0].aggr_module).__name__ == "MeanAggregation"
        self.numbers = {name: at for at, name in enumerate(names)}
        self.sources, self.targets = (tuple(dict.fromkeys(name[end] for name in names))
                                      for end in (0, -1))
        # in one order, so that features of both ends are the same rows
        if set(self.sources) == set(self.targets):
            self.sources = self.targets
        self.nodes = tuple(dict.fromkeys(self.sources + self.targets))
        self.of_source, self.of_target = (tuple(tuple(at for at, name in enumerate(names)
                                                      if name[end] == t) for t in types)
                                          for end, types in ((0, self.sources), (-1, self.targets)))
        self._epoch, self._path = _epoch(), path_of(type(convs[0]))
        self._owns = tuple(conv.__dict__ for conv in convs)
        # a view: of what the dictionary holds when it is asked
        self._attributes = tuple(own.keys() for own in self._owns)
        self._modules = tuple(own["_modules"] for own in self._owns)
        parts = tuple(part for modules in self._modules for name, part in modules.items()
                      if name not in kind.called)
        self._parts = tuple(part.__dict__ for part in parts if part is not None)
        self._objects = convs + parts
        self._options = itemgetter(*kind.off, *kind.options,  # type: ignore[call-arg]
                                   "_modules")
        self._parameters = {name: [modules[name].__dict__["_parameters"]
                                   for modules in self._modules] for name in kind.maps
                            if self._modules[0].get(name) is not None}
        self._parameters[""] = [own["_parameters"] for own in self._owns]
        self._seen = self._look()
        self._hooks = tuple(chain(*map(_conv_hooks, self._owns), *map(_part_hooks, self._parts)))

    def _look(self) -> tuple:
        """A picture of all that the layers are made of. Equal pictures hold the same objects:
        comparing them costs no more than comparing pointers. Classes are in it because
        parametrizations change that of an object."""
        every = chain(self._owns, self._parts)
        return (list(map(_conv_hooks, self._owns)), list(map(_conv_state, self._owns)),
                list(map(self._options, self._owns)), list(map(_part_hooks, self._parts)),
                list(map(id, map(_parameters_of, every))),
                [tuple(modules.values()) for modules in self._modules],
                list(map(type, self._objects)))

    def unchanged(self) -> bool:
        """Whether the layers still are what they were, and nobody watches them."""
        return (not any(self._hooks) and self._epoch == _epoch() and not guards._any_global_hook()
                and self._look() == self._seen
                and all(map(_disjoint, self._attributes, repeat(_REPLACED))) and self._path.same()
                and guards.linear_is_own()
                and all(map(_disjoint, map(dict.keys, self._parts), repeat(guards.REDUCING))))

    def looks(self) -> list[tuple]:
        """Types, dtypes, devices and shapes of all parameters: they may change while the layers
        stay the same objects."""
        return [(None,) if p is None else (type(p), *_looks(p), p.shape)
                for of_part in self._parameters.values() for own in of_part for p in own.values()]

    def option(self, name: str) -> Any:
        """An option that all have in common."""
        return self._owns[0].get(name)

    def has(self, part: str) -> bool:
        """Whether the layers have this linear map."""
        return part in self._parameters

    def parameters(self, part: str, name: str) -> list[Tensor] | None:
        """The parameter ``name`` of each relation, of a linear map of theirs, or of their own where
        ``part`` is ""; None when none has it."""
        tensors = [own.get(name) for own in self._parameters[part]]
        return tensors if any([t is not None for t in tensors]) else None


def tensors_reason(*groups: list[Tensor] | None) -> Reason | None:
    """Why these parameters cannot run together: not plain tensors of one dtype on one device."""
    for group in filter(None, groups):
        if not set(map(type, group)) <= {Tensor, torch.nn.Parameter}:
            lazy = any(isinstance(t, torch.nn.parameter.UninitializedParameter) for t in group)
            return (reason("GA209")
                    if lazy else reason("GA208", "some weights are missing, or no plain tensors"))
    looks = set(map(_looks, chain(*filter(None, groups))))
    return reason("GA203", "the weights differ in dtype or device") if len(looks) > 1 else None


def one_shape(group: list[Tensor]) -> bool:
    return len(set(map(_shape, group))) == 1


class Memo:
    """`LayerMemory.inner` of a HeteroConv.

    ``together``, ``divisions`` (`hetero_groups`): by whether the layer is training, and by which of
    its edge types a call names; the latter also by whether relations are added up.
    """

    def __init__(self, modules: dict[str, Any], names: tuple[EdgeType, ...]):
        self.keys, self.convs, self.names = tuple(modules), tuple(modules.values()), names
        self.together: dict[tuple[bool, ...], Together] = {}
        self.divisions: dict[tuple[bool, ...], Any] = {}


MOST = 16  # of each, that are remembered for a layer


def look_through(layer: Any, edge_index_dict: Mapping) -> Together | Reason:
    """The layers of the edge types that a call names, or why they cannot run as one."""
    memo = memo_of(layer)
    if type(memo) is Reason:
        return memo
    present = tuple(map(edge_index_dict.__contains__, memo.names))
    key = (layer.training, *present)
    together: Together | Reason | None
    together = memo.together.get(key)
    if together is None or not together.unchanged():
        together = _look_closely(memo, present)
        if type(together) is Reason:
            return together
        if len(memo.together) >= MOST:
            memo.together.clear()
        memo.together[key] = together
    return together


def memo_of(layer: Any) -> Memo | Reason:
    """The memo of a layer, or why there can be none."""
    module = layer._modules.get("convs")
    if (type(module).__name__ != "ModuleDict"
        or not type(module).__module__.startswith("torch_geometric.")):
        return reason("GA205", f"convs is a {type(module).__name__}")
    inside = module._modules
    memory = layer_memory.memories.get(layer) or layer_memory.of(layer)
    memo = memory.inner
    if memo is None or tuple(inside) != memo.keys or tuple(inside.values()) != memo.convs:
        memo = memory.inner = Memo(inside, tuple(module.keys()))
    return memo


def remember(layer: Any, together: Together) -> None:
    """Remember that ``layer`` has been made of ``together``, which need no further look."""
    memo = Memo(layer.convs._modules, tuple(layer.convs.keys()))
    every = (True,) * len(together.names)
    memo.together[(layer.training,) + every] = together
    layer_memory.of(layer).inner = memo


def _look_closely(memo: Memo, present: tuple[bool, ...]) -> Together | Reason:
    names = tuple(name for name, named in zip(memo.names, present) if named)
    convs = tuple(conv for conv, named in zip(memo.convs, present) if named)
    if not convs:
        return reason("GA303", "no edge type of the layer is in edge_index_dict")
    cls = type(convs[0])
    kind = KINDS.get(cls.__name__) if cls.__module__.startswith("torch_geometric.") else None
    if kind is None:
        return reason("GA208", f"the layer of {names[0]!r} is a {cls.__name__}",
                      f"layers that run together: {', '.join(KINDS)}")
    for name, conv in zip(names, convs):
        if type(conv) is not cls:
            return reason("GA208",
                          f"the layer of {name!r} is a {type(conv).__name__}, that of "
                          f"{names[0]!r} a {cls.__name__}")
        why = conv_reason(conv, cls, kind)
        if why is not None:
            return Reason(why.code, f"the layer of {name!r}: {why.text}", why.hint)
    if len({settings_of(conv, kind) for conv in convs}) > 1:
        return reason("GA208", "the layers' options differ")
    return Together(names, convs, kind)


def key_of(conv: Any, added: bool) -> tuple[Any, bool]:
    """(key that is equal for layers that can run together, None for one that can run with no other;
    whether ``conv`` is of a class of which some can). ``added``: whether their results are added
    up. Otherwise they are handed on side by side in one tensor, and those of modules that may do
    anything need not be of one width."""
    cls = type(conv)
    kind = KINDS.get(cls.__name__) if cls.__module__.startswith("torch_geometric.") else None
    if kind is None or (kind.called and not added):
        return None, False
    if conv_reason(conv, cls, kind) is not None:
        return None, True
    part = conv._modules.get(kind.shaped)
    return (cls, *settings_of(conv, kind),
            None if part is None else getattr(part._parameters.get("weight"), "shape", None)), True


def together(names: tuple[EdgeType, ...], convs: tuple[Any, ...]) -> Together:
    """The layers of one `key_of` as one `Together`."""
    return Together(names, convs, KINDS[type(convs[0]).__name__])


def settings_of(conv: Any, kind: Kind) -> tuple:
    """Options and parts that have to be the same for all layers that run together."""
    own, modules = conv.__dict__, conv._modules
    has = (()
           if kind.called
           else tuple(name for name, t in own["_parameters"].items() if t is not None))
    maps = tuple((name, part is None or (name in kind.maps and part.bias is None))
                 for name, part in modules.items())
    return (type(conv.aggr_module), has, maps, *(own.get(name) for name in kind.options))


def conv_reason(conv: Any, cls: type, kind: Kind,
                hooks: tuple[str, ...] = guards.HOOKS) -> Reason | None:
    """Why a layer cannot run with others of its class; ``hooks``: those that it must not have."""
    why = alike.excluded(conv) or guards.layer_reason(
        conv, path_of(cls), kind.node_dim, kind.aggregations, hooks)
    if why is not None:
        return why
    replaced = _REPLACED.intersection(conv.__dict__)
    if replaced:
        return reason("GA205", f"{min(replaced)} is replaced on the layer object")
    if guards.has_hooks(conv) or guards._any_global_hook():
        return reason("GA501", "it has hooks")
    for name in kind.off:
        if conv.__dict__[name]:
            return reason("GA208", f"{name}={conv.__dict__[name]!r}")
    for name, part in conv._modules.items():
        if name != "aggr_module" and name not in kind.called and part is not None:
            why = _part_reason(name, part, kind)
            if why is not None:
                return why
    return None


_paths: dict[type, Paths] = {}


def path_of(cls: type) -> Path:
    """The functions that layers of a class run."""
    paths = _paths.get(cls)
    if paths is None:
        kind = KINDS[cls.__name__]
        paths = _paths[cls] = Paths(cls, ("forward", *MESSAGE_PASSING),
                                    guards.aggregations(kind.aggregations),
                                    options=(*kind.off, *kind.options, *guards.SETTINGS))
    return paths.of(cls)


def _part_reason(name: str, part: Any, kind: Kind) -> Reason | None:
    if name not in kind.maps:
        return reason("GA208", f"it has a {name}")
    why = guards.lazy_reason(part)
    if why is not None:
        return why
    if not guards.plain_linear(part) or "forward" in part.__dict__:
        return reason("GA208",
                      f"{name} is no plain Linear: a {type(part).__name__}, perhaps with hooks "
                      "or a weight of another type")
    return None


def _epoch() -> int | None:
    config = current()
    return None if config is None else config.epoch


@functools.cache
def _routed() -> frozenset[str]:
    from gnnaccel.adapters.pyg import LAYERS

    return frozenset(LAYERS)


def routed_alone(layer: Any) -> bool:
    """Whether a layer inside is one that gnnaccel takes over by itself."""
    convs = layer._modules["convs"]._modules.values() if "convs" in layer._modules else ()
    return any(cls.__name__ in _routed() for conv in convs for cls in type(conv).__mro__)
