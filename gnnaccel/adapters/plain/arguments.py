"""The arguments of one call of a plain module: which is the list of edges, which have a row for
each node and which for each edge."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.guards import ORDINARY, context_reason
from gnnaccel.adapters.plain import pairs
from gnnaccel.adapters.plain.signature import Signature
from gnnaccel.adapters.tracing.layer.guarded import PLAIN
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: whether a tensor is one of functorch's
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
NO_EDGES = reason("GA204", "no argument is a list of edges")
#: kinds of arguments: a row for each node, or for each edge; one number for all; how many nodes
NODES, EDGES, ONE, COUNT = "nodes", "edges", "one", "count"


class Given(NamedTuple):
    """The arguments of a call, understood. ``values``: by name; ``kinds``: of the tensors that are
    no part of the list of edges, and of numbers of nodes; ``ends``: the names of the arguments that
    are that list: one, or two of its ends; ``turned``: whether it has a row for each edge;
    ``edge_index``: the list as a tensor [2, E]; ``nodes``: how many there are; ``key``: all that a
    trace depends on of them; ``others``: the names of other lists, whose edges are others."""

    values: dict[str, Any]
    kinds: dict[str, str]
    ends: tuple[str, ...]
    turned: bool
    edge_index: Tensor
    nodes: int
    key: tuple
    others: tuple[str, ...] = ()


def given(values: dict[str, Any]) -> Given | Reason:
    """The arguments understood, or why they are not."""
    found = _edges(values)
    if type(found) is Reason:
        return found
    edge_index, ends, turned, others = found
    edges, rows = edge_index.shape[1], set()
    lengths = {edges, *[values[name].shape[1] for name in others]}
    kinds: dict[str, str] = {}
    form: list[tuple] = []
    for name, value in values.items():
        if name in ends:
            form.append((name, type(value)))
            continue
        if type(value) in PLAIN:
            continue
        if name in others:
            kinds[name] = EDGES
            form.append((name, "list"))
            continue
        if (type(value) not in ORDINARY or value.layout is not torch.strided or value.is_meta
            or value.is_nested):
            return reason("GA206", f"{name} is a {type(value).__name__}")
        if value.device != edge_index.device:
            return reason("GA206", f"{name} and the edges are on several devices")
        kinds[name] = kind = (ONE if not value.dim() else EDGES if value.shape[0] in lengths
                              else NODES)
        if kind is NODES:
            rows.add(value.shape[0])
        form.append((name, kind, value.shape[kind is not ONE:], value.dtype))
    if len(rows) != 1 or 1 in rows or edges < 2:
        return reason("GA206", "the arguments do not tell nodes from edges")
    nodes = rows.pop()
    for name, value in values.items():
        if type(value) in PLAIN:
            if type(value) is int and value == nodes:
                kinds[name], value = COUNT, None
            form.append((name, type(value), value))
    return Given(values, kinds, ends, turned, edge_index, nodes, (ends, turned, *form),
                 others)


def _edges(values: dict[str, Any]) -> (
    tuple[Tensor, tuple[str, ...], bool, tuple[str, ...]] | Reason):
    """The list of edges as a tensor [2, E], the arguments that it is, whether it is turned, and
    others that are such lists:
    such a tensor, a pair of tensors [E], two arguments that are such tensors, or a tensor [E, 2].
    Not of int32, over which gradients of torch's own ``scatter_add_`` are others."""
    tensors, lists, ends, rows = [], [], [], []
    for name, value in values.items():
        kind = type(value)
        if kind is Tensor:
            if value.dtype is torch.int64 and _is_ids(value):
                if value.dim() == 1:
                    ends.append(name)
                elif value.dim() == 2:
                    if value.shape[0] == 2:
                        tensors.append(name)
                    elif value.shape[1] == 2:
                        rows.append(name)
        elif (kind is list or kind is tuple) and len(value) == 2 and all(map(_is_end, value)):
            lists.append(name)
    if len(lists) > 1 or lists and tensors:
        return reason("GA204", "several arguments may be the list of edges")
    if tensors:
        return values[tensors[0]], (tensors[0],), False, tuple(tensors[1:])
    if lists:
        pair, names = values[lists[0]], tuple(lists)
    elif len(ends) == 2:
        pair, names = [values[name] for name in ends], tuple(ends)
    else:
        return (pairs.turned(values[rows[0]]), (rows[0],), True, ()) if len(rows) == 1 else (
            NO_EDGES)
    if (pair[0].shape, pair[0].dtype, pair[0].device) != (
        pair[1].shape, pair[1].dtype, pair[1].device):
        return reason("GA204", "the ends of the edges are of several lengths or kinds")
    return pairs.stacked(*pair), names, False, ()


def _is_end(value: Any) -> bool:
    return type(value) is Tensor and value.dim() == 1 and _is_ids(value)


def _is_ids(value: Tensor) -> bool:
    """Whether it is a plain tensor of ids."""
    return (value.dtype is torch.int64 and value.layout is torch.strided and not value.is_nested
            and not value.is_meta and not _wrapped(value))


def understood(signature: Signature, args: tuple, kwargs: dict) -> Given | Reason:
    """The arguments of a call, understood, or why they are not."""
    why = context_reason()  # in a transform tensors may have no memory to look at
    if why is not None:
        return why
    values = signature.bound(args, kwargs)
    if values is None:
        return reason("GA206", "the arguments do not fit its forward")
    return given(values)
