"""Layers that run the calls of compiled models, on the route of any other call.

An operator knows a layer by text and tensors alone. A layer made from the text, with the tensors as
its parameters, stands in for the user's. Equal parameters give the same layer again, since gnnaccel
remembers calls by layer.
"""
from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.policy.names import IdentityMap


class Call(NamedTuple):
    """A call's text, read. ``name``: the layer's class; ``options``: (name, value) of the
    constructor's arguments; ``inputs``: how many of the tensors are arguments, the others being
    parameters; ``names``: of the tensors, as in `described.Described`; ``lent``: which of
    them lie in memory that the compiler may use again; ``random``: whether it draws random
    numbers."""

    name: str
    training: bool
    options: tuple[tuple[str, Any], ...]
    inputs: int
    names: tuple[Any, ...]
    lent: tuple[bool, ...]
    random: bool


@functools.lru_cache(maxsize=4096)
def call_of(text: str) -> Call:
    """The call that ``text`` describes."""
    call = Call(*ast.literal_eval(text))
    return call._replace(random=call.random != 0)


def run(text: str, tensors: list[Tensor], users: list[Tensor] | None = None) -> Tensor:
    """The call's result; autograd records it where it records. ``users``: the user's tensors, where
    these are from `without_gradients` or `leaves`."""
    call = call_of(text)
    layer = (_made_of(call, tensors) if users is None or any(call.lent[call.inputs:])
             else _standin(text, call, tensors, users))
    counters.compiled(call.name)
    out = type(layer).forward(layer, *_arguments(call, tensors))
    return torch.cat(list(out.values())) if type(out) is dict else out


def _arguments(call: Call, tensors: list[Tensor]) -> Iterable[Any]:
    """Arguments of the layer's ``forward``, in its order."""
    arguments: dict[str, Any] = {}
    for name, tensor, lent in zip(call.names[:call.inputs], tensors, call.lent):
        # edges and their types that the compiler may write over are copied: structures of them are
        # kept
        own = tensor.clone() if lent and not tensor.is_floating_point() else tensor
        if type(name) is tuple:
            arguments.setdefault(name[0], {})[name[1]] = own
        elif name in ("x0", "x1"):
            arguments["x"] = *arguments.get("x", ()), own
        else:
            arguments[name] = own
    return arguments.values()


# --- tensors --------------------------------------------------------------------------------------

class Shadow:
    """Kept objects of one of the user's parameters, which was ``data``: ``parameters`` over its
    memory, without and with gradients; ``layers`` whose first parameter they are, by text and
    parameters."""

    __slots__ = ("data", "parameters", "layers")

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.parameters: list[Parameter | None] = [None, None]
        self.layers: dict[tuple, Any] = {}


_shadows: IdentityMap[Shadow] = IdentityMap()


def _shadow(tensor: Tensor) -> Shadow:
    shadow = _shadows.get(tensor)
    if shadow is None or not shadow.data.is_set_to(tensor):  # `.data` may be replaced
        shadow = Shadow(tensor.detach())
        _shadows.set(tensor, shadow)
    return shadow


def _parameter(tensor: Tensor, needed: bool) -> Parameter:
    shadow = _shadow(tensor)
    parameter = shadow.parameters[needed]
    if parameter is None:
        parameter = shadow.parameters[needed] = Parameter(tensor.detach(), requires_grad=needed)
    return parameter


def without_gradients(text: str, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, parameters by others over their memory: always the same for the same."""
    call = call_of(text)
    return [t if i < call.inputs or call.lent[i] else _parameter(t, False)
            for i, t in enumerate(tensors)]


def leaves(text: str, tensors: list[Tensor], needed: list[bool]) -> list[Tensor]:
    """The tensors as leaves of autograd, which keeps some of them: in memory of their own where the
    compiler may use theirs again. Tensors that are the same give the same leaf, and parameters do
    in every call."""
    call, by_id = call_of(text), dict[int, Tensor]()
    for i, t in enumerate(tensors):
        if id(t) in by_id or not t.is_floating_point():
            continue
        if i >= call.inputs and not call.lent[i]:
            by_id[id(t)] = _parameter(t, needed[i])
        else:
            own = t.detach().clone() if call.lent[i] else t.detach()
            by_id[id(t)] = own.requires_grad_(needed[i])
    return [by_id.get(id(t), t) for t in tensors]


# --- layers ---------------------------------------------------------------------------------------

def _standin(text: str, call: Call, tensors: list[Tensor], users: list[Tensor]) -> Any:
    """The layer of these parameters, which a shadow of the user's first one has."""
    if len(tensors) == call.inputs:
        return _without_parameters(text, tensors[0].shape[1])
    layers = _shadow(users[call.inputs]).layers
    key = (text, *map(id, tensors[call.inputs:]))
    layer = layers.get(key)
    if layer is None:  # which keeps its parameters, so no others have their ids
        layer = layers[key] = _made_of(call, tensors)
    return layer


@functools.lru_cache(maxsize=64)
def _without_parameters(text: str, width: int) -> Any:
    """The layer of a call without parameters, one for each ``width`` of features, since a layer
    remembers one call over each graph."""
    return _made_of(call_of(text), [])


def _made_of(call: Call, tensors: list[Tensor]) -> Any:
    """A layer with these parameters."""
    layer = _copied(_blank(call.name, call.options), {}).train(call.training)
    for name, tensor in zip(call.names[call.inputs:], tensors[call.inputs:]):
        path, _, last = name.rpartition(".")
        module = layer.get_submodule(path)
        (module._buffers if last in module._buffers else module._parameters)[last] = tensor
    return layer


def _copied(module: Any, known: dict[int, Any]) -> Any:
    """A module like this one, in which other parameters can be put."""
    copy = known.get(id(module))
    if copy is None:
        cls: Any = type(module)
        copy = known[id(module)] = cls.__new__(cls)
        copy.__dict__.update(module.__dict__)
        own = copy.__dict__
        for name in ("_parameters", "_buffers"):
            own[name] = dict(own[name])
        own["_modules"] = {name: None if inner is None else _copied(inner, known)
                           for name, inner in own["_modules"].items()}
    return copy


@functools.lru_cache(maxsize=1024)
def _blank(name: str, options: tuple) -> Any:
    """A layer of these options, without numbers."""
    from torch_geometric import nn

    arguments = dict(options)
    if name in _MADE:
        arguments |= _MADE[name](arguments)
    with torch.device("meta"):
        return getattr(nn, name)(**arguments)


def _gin(given: dict) -> dict:
    after = torch.nn.Identity()
    after.in_channels = 1  # type: ignore[assignment]  # which GINEConv asks for
    return {"nn": after}


def _pna(given: dict) -> dict:
    # degrees only give the first values of the scalers' weights
    return {"aggregators": list(given["aggregators"]), "scalers": list(given["scalers"]),
            "deg": torch.tensor([0, 1], device="cpu")}


#: class name -> options that are no plain values
_MADE: dict[str, Callable[[dict], dict]] = {
    "GINConv": _gin, "GINEConv": _gin, "PNAConv": _pna,
    "HGTConv": lambda given: {"in_channels": dict.fromkeys(given["in_channels"], 1)},
}
