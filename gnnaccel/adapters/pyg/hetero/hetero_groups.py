"""HeteroConv whose layers do not all run as one: layers that are alike run in groups, each as one,
the others by themselves.

A group is a HeteroConv of the same layer objects, which goes its own way through the router, with a
record, an estimate and the host's own loop where that is faster. Results of the groups and the
layers are put together as the host does.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import dicts, inner_convs
from gnnaccel.adapters.pyg.hetero.dicts import EdgeType
from gnnaccel.adapters.pyg.hetero.inner_convs import Together
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import current


class Group(NamedTuple):
    """A group of layers. ``layer``: its HeteroConv; ``names``: its edge types."""

    layer: Any
    names: tuple[EdgeType, ...]


class Division(NamedTuple):
    """The division of the edge types that a call names into ``groups`` and those ``alone``, with
    their layers. ``seen``: the groups' layers as they were; ``settled``: nothing that may change
    with the next call keeps a layer alone."""

    groups: tuple[Group, ...]
    alone: dict[EdgeType, Any]
    seen: tuple[Together, ...]
    settled: bool
    epoch: int | None

    def holds(self) -> bool:
        return (self.settled and self.epoch == inner_convs._epoch()
                and all(together.unchanged() for together in self.seen))

    def __str__(self) -> str:
        return ", ".join(f"{len(group.names)} {together.kind}"
                         for group, together in zip(self.groups, self.seen))


class Call(NamedTuple):
    """A call that is divided."""

    division: Division
    x_dict: Mapping[str, Any]
    edge_index_dict: Mapping[EdgeType, Any]


def inside(native: Callable, forward_of_group: Callable) -> Callable:
    """``native``, the host's own loop over the layers, with groups of them as one where there are
    such groups; ``forward_of_group(layer, x_dict, edge_index_dict)``: the function that calls one,
    whatever a user puts in the place of the class's ``forward``."""

    @functools.wraps(native)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        config = current()
        allowed = (config is not None and rules.verdict(layer, config).inside
                   and guards.context_reason() is None and not state.each_layer())
        call = divided(layer, args, kwargs) if allowed and not guards.made_here(layer) else None
        return (native(layer, *args, **kwargs)
                if call is None else _run(layer, call, forward_of_group))

    forward.host = native  # type: ignore[attr-defined]
    return forward


def divided(layer: Any, args: tuple, kwargs: dict) -> Call | None:
    """The division of a call; None where there is no group, or nothing but one."""
    bound = calls.bind(args, kwargs, ("x_dict", "edge_index_dict"), ())
    if (bound is None or not _known_aggr(layer.aggr)
        or not all(isinstance(argument, Mapping) for argument in bound)):
        return None
    x_dict, edge_index_dict = bound
    # results of a subclass of tensors would be put together by its functions
    if guards.subclass_reason((*x_dict.values(), *edge_index_dict.values())) is not None:
        return None
    memo = inner_convs.memo_of(layer)
    if type(memo) is not inner_convs.Memo:
        return None
    present = tuple(map(edge_index_dict.__contains__, memo.names))
    added = layer.aggr in dicts.ADDED_UP
    key = (layer.training, added, *present)
    division = memo.divisions.get(key)
    if division is None or not division.holds():
        division = _divide(memo, present, added, division)
        if len(memo.divisions) >= inner_convs.MOST:
            memo.divisions.clear()
        memo.divisions[key] = division
    if not division.groups:
        return None
    names = [name for name, named in zip(memo.names, present) if named]
    has_features = all(name[0] in x_dict and name[-1] in x_dict and name not in x_dict
                       for name in names)
    return Call(division, x_dict, edge_index_dict) if has_features else None


def _known_aggr(aggr: Any) -> bool:
    return aggr in dicts.GROUPINGS or aggr in dicts.IN_PAIRS


def _ids(convs: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(id, convs))


def _divide(memo: inner_convs.Memo, present: tuple[bool, ...], added: bool,
            before: Division | None) -> Division:
    """The division of the layers of a memo. ``before``: the last one, whose groups' layers are
    taken again where the same layers are in them."""
    layers = ({}
              if before is None
              else {_ids(t.convs): group.layer for group, t in zip(before.groups, before.seen)})
    kinds: dict[Any, list[tuple[EdgeType, Any]]] = {}
    settled = True
    for name, conv, named in zip(memo.names, memo.convs, present):
        if named:
            key, combinable = inner_convs.key_of(conv, added)
            settled = settled and (key is not None or not combinable)
            kinds.setdefault(object() if key is None else key, []).append((name, conv))
    alone: dict[EdgeType, Any]
    groups, states, alone = [], [], {}
    for members in kinds.values():
        if len(members) == 1 or len(kinds) == 1:
            alone.update(members)
        else:
            together = inner_convs.together(*zip(*members))
            group = (layers.get(_ids(together.convs))
                     or layer_of(together.names, together.convs, None))
            inner_convs.remember(group, together)
            groups.append(Group(group, together.names))
            states.append(together)
    return Division(tuple(groups), alone, tuple(states), settled, inner_convs._epoch())


def layer_of(names: tuple[EdgeType, ...], convs: tuple[Any, ...], aggr: Any) -> Any:
    """A HeteroConv of these layers, without the checks and warnings of its constructor, which were
    made for the whole."""
    from torch_geometric.nn import HeteroConv
    from torch_geometric.nn.module_dict import ModuleDict

    layer = HeteroConv.__new__(HeteroConv)
    torch.nn.Module.__init__(layer)
    layer.convs, layer.aggr = ModuleDict(dict(zip(names, convs))), aggr
    return layer


def _run(layer: Any, call: Call, forward: Callable) -> dict[str, Any]:
    division, x_dict, edge_index_dict = call
    added = layer.aggr in dicts.ADDED_UP
    # first edge type of a group -> (its result, number of relations in it)
    results: dict[EdgeType, tuple[Any, int]] = {}
    for group in division.groups:
        group.layer.aggr, group.layer.training = layer.aggr if added else None, layer.training
        out = forward(group.layer, x_dict, {name: edge_index_dict[name] for name in group.names})
        for target, part in out.items():
            members = [name for name in group.names if name[-1] == target]
            if added:
                results[members[0]] = part, len(members)
            else:
                results.update((name, (part.select(1, at), 1)) for at, name in enumerate(members))
    for name, conv in division.alone.items():
        src, _, dst = name
        x = x_dict[src] if src == dst else (x_dict[src], x_dict[dst])
        results[name] = conv(x, edge_index_dict[name]), 1
    return _put_together(layer, results)


def _put_together(layer: Any, found: dict[EdgeType, tuple[Any, int]]) -> dict[str, Any]:
    """Results by destination type, in the layer's order of relations."""
    parts: dict[str, list[tuple[Any, int]]] = {}
    for name in layer.convs.keys():
        if name in found:
            parts.setdefault(name[-1], []).append(found[name])
    if layer.aggr in dicts.ADDED_UP:
        return {target: _added(of_target, layer.aggr) for target, of_target in parts.items()}
    return {target: dicts.grouped([part for part, _ in of_target], layer.aggr)
            for target, of_target in parts.items()}


def _added(parts: list[tuple[Tensor, int]], aggr: Any) -> Tensor:
    """The sum, or the mean of as many relations as there are in the parts."""
    (out, count), *others = parts
    if not others:
        return out
    if aggr is not torch.add and any(part.shape != out.shape for part, _ in others):
        # raises: this does not stretch a width of 1 over others
        return dicts.grouped([part for part, _ in parts], aggr)
    if aggr != "mean":
        if aggr == "sum":
            # torch knows no autocast of some devices, such as "meta"
            autocast = out.is_cuda and torch.is_autocast_enabled("cuda")
            out = out.to(dicts.summed(out.dtype, autocast, out.device))
        return functools.reduce(torch.add, [part for part, _ in others], out)
    relations = sum(n for _, n in parts)
    out = out * (count / relations)
    for part, n in others:
        out = torch.add(out, part, alpha=n / relations)
    return out
