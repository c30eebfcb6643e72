"""Form of a ``message`` function, found out by running it once on stand-ins: a copy of the
source's features, or those times something that belongs to the edge; sums of features of both ends
and of the edge, weighted, rectified or as a gate.

Only functions that cannot do anything else are run: their code may name the methods of `METHODS`,
and global names of torch's own modules and functions, those of `message_standins.FUNCTIONS`. So
nothing is missed by not running it again, as long as these names (`watch`) mean what they did.
"""
from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Set
from operator import attrgetter, itemgetter
from typing import Any

import torch

from gnnaccel.adapters.own import Path
from gnnaccel.adapters.tracing.rows.standins import (Edge, FUNCTIONS, Form as Form, METHODS,
                                                     Refuses, Rows, Source, Target, Unseen)

_ATTRIBUTES = METHODS | {"nn", "functional", "multiply", "add", "sub", "Tensor"}
_GLOBALS = (torch, torch.nn, torch.nn.functional, torch.Tensor, *FUNCTIONS)
#: arguments that message passing passes by itself; a message that reads one is none of these forms
SPECIAL = frozenset(("edge_index", "adj_t", "size", "size_i", "size_j", "edge_index_i",
                     "edge_index_j", "ptr", "index", "dim_size"))


def form(function: Any, kinds: dict[str, str]) -> Form | None:
    """Form of ``function``, the ``message`` of a class, when ``propagate`` is called with
    arguments of these ``kinds``: "tensor" (or a pair of them), "none" or "other"; None where that
    is no form of ours."""
    if type(function) is not types.FunctionType or not _followed(function):
        return None
    arguments: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        value = _stand_in(parameter, kinds)
        if value is Unseen:
            return None
        arguments[parameter.name] = value
    ends = [(name[:-2], name[-1]) for name, value in arguments.items()
            if type(value) in (Source, Target)]
    try:
        out = function(Refuses(), **arguments)
        result = out.form() if isinstance(out, Rows) else None
    except (Unseen, AttributeError, TypeError, ValueError, AssertionError):
        return None
    if result is None:
        return None
    return result._replace(ends=tuple(end for end in ends if end != (result.source, "j")))


def watch(path: Path, function: Any) -> None:
    """Add to ``path`` all on which `form` of the function depends: its global names, torch's
    functions and methods that it calls."""
    if type(function) is not types.FunctionType:
        return
    named = [one for code in codes(function.__code__) for one in _named(code)]
    global_names = dict.fromkeys(name for kind, name in named if kind == "LOAD_GLOBAL")
    path.watch(itemgetter, function.__globals__,
               tuple(filter(function.__globals__.__contains__, global_names)))
    path.torch_functions(function)
    path.watch(attrgetter, torch.Tensor,
               tuple(dict.fromkeys(name for _, name in named if hasattr(torch.Tensor, name))))


def _followed(function: types.FunctionType) -> bool:
    """Whether it can do nothing but return something of its arguments by way of what the stand-ins
    know."""
    code = function.__code__
    return (not code.co_freevars and not code.co_cellvars and not reads_special(code)
            and all(_is_known(kind, name, function.__globals__) for kind, name in _named(code))
            and not any(isinstance(c, types.CodeType) for c in code.co_consts)
            and not code.co_flags
            & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def reads_special(code: types.CodeType) -> bool:
    """Whether the function does anything with what message passing passes by itself. Stand-ins do
    not see all of it: whether ``ptr is None`` they cannot answer."""
    return any(special_read(step) for step in dis.get_instructions(code))


def special_read(step: dis.Instruction, special: Set[str] = SPECIAL) -> bool:
    """Whether an instruction reads an argument that message passing passes by itself, under one of
    these names."""
    if "LOAD_FAST" not in step.opname and step.opname != "LOAD_DEREF":
        return False
    names = step.argval if type(step.argval) is tuple else (step.argval,)  # some read two
    if step.opname.startswith("STORE"):  # and some write one before
        names = names[1:]
    return not special.isdisjoint(names)


def codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function, and of what is defined in it."""
    return [code, *(one for inner in code.co_consts if isinstance(inner, types.CodeType)
                    for one in codes(inner))]


def _named(code: types.CodeType) -> list[tuple[str, str]]:
    """(instruction, name) of all instructions that name something global or an attribute."""
    return [(step.opname, step.argval) for step in dis.get_instructions(code)
            if step.opcode in dis.hasname]


def _is_known(kind: str, name: str, known: dict[str, Any]) -> bool:
    if kind == "LOAD_GLOBAL":
        return any(known.get(name) is value for value in _GLOBALS)
    if kind == "IMPORT_NAME":
        return name == "torch"
    # torch writes none of these methods in Python: what stands there is a user's
    return (kind in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and name in _ATTRIBUTES
            and not (name in METHODS and name in vars(torch.Tensor)))


def _stand_in(parameter: inspect.Parameter, kinds: dict[str, str]) -> Any:
    """Stand-in for a parameter of the message; `Unseen` where there is none."""
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return Unseen
    if name in SPECIAL:
        return Unseen if name == "adj_t" else Refuses()  # which the host does not give
    if name[-2:] == "_j" and kinds.get(name[:-2]) == "tensor":
        return Source(name[:-2])
    if name[-2:] == "_i" and kinds.get(name[:-2]) == "tensor":
        return Target(name[:-2])
    if name[-2:] in ("_i", "_j"):
        return Unseen
    kind = kinds.get(name)
    if kind == "tensor":
        return Edge(itemgetter(name))
    if kind == "none" or (kind is None and parameter.default is None):
        return None
    return Unseen
