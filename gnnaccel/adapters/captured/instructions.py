"""What code names, read from its instructions."""
from __future__ import annotations

import dis
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from gnnaccel.adapters.captured.values import Unknown


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and that of the functions and classes defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def globals_of(code: types.CodeType) -> Iterator[str]:
    """The names that the code reads as globals. Raises Unknown where it sets one."""
    for inner in codes(code):
        for step in _steps(inner):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Unknown(f"{inner.co_name} sets the global {step.argval}")
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield step.argval


def handed_on(code: types.CodeType) -> set[str]:
    """Globals that the code does more with than to take their attributes, or to ask whether they
    are there."""
    found = set()
    for inner in codes(code):
        steps = _steps(inner)
        for step, then in zip(steps, steps[1:]):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and (then.argval == "__dict__" or not (
                    then.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "TO_BOOL", "POP_JUMP")))):
                found.add(step.argval)
    return found


#: attributes of tensors that are others of the stand-ins in a capture, and of copies
_OF_STANDINS = ("grad", "grad_fn", "is_leaf", "_version")
_OF_COPIES = ("_base", "_is_view", "_cdata", "data_ptr", "storage_offset", "untyped_storage",
              "is_set_to", "is_pinned", "is_shared")
_GETTING = ("LOAD_ATTR", "LOAD_METHOD")


def read_of_tensors(code: types.CodeType) -> str | None:
    """An attribute that the code reads, and that a capture's stand-ins for parameters and arguments
    have otherwise, such as ``grad``: not the function of that name. None where there is none."""
    return next((then.argval for inner in codes(code) for steps in [_steps(inner)]
                 for step, then in zip(steps, steps[1:])
                 if then.opname == "LOAD_ATTR" and then.argval in _OF_STANDINS
                 and step.argval not in ("autograd", "func")
                 or then.opname in _GETTING and then.argval in _OF_COPIES), None)


def compares_identities(code: types.CodeType) -> bool:
    """Whether the code may ask whether a tensor is another one. ``x is None`` does not."""
    return any(step.opname == "IS_OP" and before.opname != "LOAD_CONST"
               for inner in codes(code) for steps in [_steps(inner)]
               for before, step in zip(steps, steps[1:])) or any(
        not {"is_", "is_not"}.isdisjoint(inner.co_names) for inner in codes(code))


def writes_to_data(code: types.CodeType) -> bool:
    """Whether the code writes to the ``data`` of an argument, by a method: such a write is not
    counted, and one that changes nothing now is not seen."""
    for inner in codes(code):
        given = inner.co_varnames[:inner.co_argcount + inner.co_kwonlyargcount]
        steps = _steps(inner)
        for step, then, last in zip(steps, steps[1:], steps[2:]):
            if (step.opname.startswith("LOAD_FAST") and step.argval in given
                and then.opname in _GETTING and then.argval == "data"
                and last.opname in _GETTING and str(last.argval).endswith("_")):
                return True
    return False


def moves_without_waiting(code: types.CodeType) -> bool:
    """Whether the code may copy from memory of the host that it lets go of: a replay would read
    what lies there by then. Copies that wait are seen by `state.waits`."""
    return any("pin_memory" in inner.co_names or any(
        isinstance(one, tuple) and "non_blocking" in one for one in inner.co_consts)
        for inner in codes(code))


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]


def imported(code: types.CodeType, given: dict[str, Any]) -> Iterator[types.ModuleType]:
    """The modules that are imported in the code, of those that are there."""
    package = given.get("__package__", str(given.get("__name__")).rpartition(".")[0]) or ""
    for inner in codes(code):
        steps = _steps(inner)
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[number - 2].argval
                if level > len(package.split(".")) or (level and not package):
                    continue  # Python raises there, as in a script that is no part of a package
                name = importlib.util.resolve_name("." * level + step.argval, package)
                for one in dict.fromkeys((name.partition(".")[0], name)):
                    if one in sys.modules:
                        yield sys.modules[one]
