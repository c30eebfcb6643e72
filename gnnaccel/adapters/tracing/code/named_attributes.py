"""Attributes that the code of a user's function names, checked before it runs on stand-ins: methods
of tensors, what the layer has, and what is read of modules and of objects that hold numbers.
"""
from __future__ import annotations

import dis
import types
from typing import Any

from torch import Tensor, nn

from gnnaccel.adapters import own
from gnnaccel.adapters.tracing.code import members, naming
from gnnaccel.adapters.tracing.message import codes
from gnnaccel.adapters.tracing.rows.standins import Unseen

_NAMING = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"))


def names_known(code: types.CodeType, layer: Any, names: frozenset[str],
                method: bool = True, known: dict[str, Any] | None = None,
                inside: bool = False) -> bool:
    """Whether all attributes that are named are known, and methods of tensors torch's own. Those of
    the layer, the first argument of a ``method``, need not be there: a branch that is not taken may
    name others. Only the layer's may be set. What any object has, as ``__dict__``, a stand-in has
    of its own: of such names only those may be named that a layer alone has, as ``__alpha__``.
    ``known``: global values; attributes of modules of the user's own among them may have any
    name, and so may those of a `naming.is_record`. ``inside``: it is defined in a method, and its
    first argument is no layer."""
    if not all(names_known(one, layer, names, method, known, True) for one in codes(code)[1:]):
        return False
    return _Code(code, layer, names, known or {}, method, method and not inside).is_known()


class _Code:
    """The steps of one function. ``of_layer``: whether its first argument is the layer; all else as
    of `names_known`."""

    def __init__(self, code: types.CodeType, layer: Any, names: frozenset[str],
                 known: dict[str, Any], method: bool, of_layer: bool):
        self.steps = naming.steps_of(code)
        self.layer, self.names, self.known, self.method = layer, names, known, method
        self.first = code.co_varnames[0] if code.co_argcount and of_layer else None

    def is_known(self) -> bool:
        """Whether all attributes that it names are."""
        return all(self._may_name(at) for at, step in enumerate(self.steps)
                   if step.opname in _NAMING)

    def _may_name(self, at: int) -> bool:
        step, of_layer = self.steps[at], self._is_layer(at - 1)
        name = step.argval
        if name.startswith("__") and (not of_layer or hasattr(nn.Module, name)):
            return False
        if step.opname == "STORE_ATTR":
            return of_layer
        return (of_layer or name in self.names and _is_torchs(name)
                or self.method and naming.attribute(self.layer, name) is not Unseen
                or self._of_module(at) or self._of_held(at) or self._of_enum(at))

    def _is_layer(self, at: int) -> bool:
        """Whether the step gives the first argument of a method, which is the layer."""
        if self.first is None or at < 0:
            return False
        step = self.steps[at]
        names = step.argval if type(step.argval) is tuple else (step.argval,)  # some load two
        return step.opname.startswith("LOAD_FAST") and names[-1] == self.first

    def _path(self, at: int) -> tuple[int, list[str]]:
        """Where the object is loaded that the step reads an attribute of, and the names that lead
        from it to what has that."""
        path: list[str] = []
        while at > 0 and self.steps[at - 1].opname == "LOAD_ATTR":
            at -= 1
            path.insert(0, self.steps[at].argval)
        return at - 1, path

    def _global(self, step: dis.Instruction) -> Any:
        return self.known.get(step.argval) if step.opname == "LOAD_GLOBAL" else None

    def _of_module(self, at: int) -> bool:
        """Whether the step reads an attribute of a module, or of one in what stands for torch,
        such as ``torch.fft``, which that refuses to give."""
        first, path = self._path(at)
        value = self._global(self.steps[max(first, 0)])
        if naming.is_package(value):
            return True
        if len(path) > 1 or path and path[0] in self.names:
            return False
        return any(value is one for one in naming.STOOD_FOR) or (
            naming.is_users_module(value) and not path)

    def _of_held(self, at: int) -> bool:
        """Whether the step reads an attribute of a module or a record that the layer holds, of one
        in that, or of a record that is a global value of this module or another."""
        first, path = self._path(at)
        if first < 0:
            return False
        held = self.layer if self._is_layer(first) else self._global(self.steps[first])
        if naming.is_users_module(held) and path:
            held = vars(held).get(path.pop(0))
        if held is None or held is self.layer and not path or (
            held is not self.layer and not naming.is_record(held)):
            return False
        for name in path:
            held = naming.attribute(held, name)
            if not (isinstance(held, nn.Module) or naming.is_record(held)):
                return False
        return True


    def _of_enum(self, at: int) -> bool:
        """Whether the step names a member of an `Enum`, or what such a member may be asked for."""
        first, path = self._path(at)
        path, layers = [*path, self.steps[at].argval], first >= 0 and self._is_layer(first)
        held = self.layer if layers else self._global(self.steps[max(first, 0)])
        if naming.is_users_module(held) and path:
            held = vars(held).get(path.pop(0))
        if members.is_class(held) and path:
            held = held.__members__.get(path.pop(0))
            if not path:
                return held is not None
        while path[1:] and not members.is_member(held):
            held = naming.attribute(held, path.pop(0))
        # None and others in its place do not have it: a branch that is not taken may ask
        return path[:1] == path and path[0] in members.ASKED and (
            members.is_member(held) or type(held) in (type(None), str, int))


def _is_torchs(name: str) -> bool:
    """Whether nobody has put a function of their own in the place of a tensor's method."""
    method = vars(Tensor).get(name)
    return type(method) is not types.FunctionType or own.home(method) == "torch"
