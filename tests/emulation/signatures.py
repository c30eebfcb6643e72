"""Kernel signatures in preprocessed CUDA text, and the C++ that lets Python call them."""
from __future__ import annotations

import dataclasses
import re

import numpy

# What __global__ and __launch_bounds__ of cuda_emulation.h leave behind.
_GLOBAL = "__attribute__((used, noinline))"
_BOUNDS = "emulated_launch_bounds("
_NO_BOUND = "1024"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """``kind``: "p" pointer, "f" floating, "i" integer or bool, "?" neither; ``size`` in bytes."""
    name: str
    kind: str
    size: int

    def describe(self) -> str:
        return {"p": "a pointer", "f": f"a {self.size}-byte float",
                "i": f"a {self.size}-byte integer"}.get(
            self.kind, f"a {self.size}-byte struct")

    def mismatch(self, value) -> str:
        """Why ``value`` cannot be passed, or "" when it can."""
        if self.kind == "p":
            if type(value) is not int:
                return f"pass data_ptr() as int, not {type(value).__name__}"
            return "" if 0 <= value < 2**64 else f"{value} is not an address"
        if self.kind == "?":
            return "parameters are pointers and scalars only"
        if not isinstance(value, numpy.generic):
            return f"pass a numpy scalar, not {type(value).__name__}"
        kinds = "f" if self.kind == "f" else "iub"
        if value.dtype.kind not in kinds or value.dtype.itemsize != self.size:
            return f"numpy.{value.dtype.name} does not fit"
        return ""


@dataclasses.dataclass(frozen=True)
class Signature:
    """An entry point: its name, its parameters' names, and the expressions given to
    ``__launch_bounds__``."""
    entry: str
    names: tuple
    bounds: str


def find(text: str) -> list[Signature]:
    """Every ``extern "C" __global__ void name(...)`` of a preprocessed text, in order, each name
    once."""
    # line markers, which may stand inside a signature
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    found: dict = {}
    for match in re.finditer(r'extern\s+"C"\s+([^{};]*)[{;]', text):
        head = " ".join(match.group(1).split())
        if _GLOBAL in head:
            signature = _signature(head)
            found.setdefault(signature.entry, signature)
    return list(found.values())


def _signature(head: str) -> Signature:
    bounds, start = _NO_BOUND, head.find(_BOUNDS)
    if start >= 0:
        bounds = _balanced(head, start + len(_BOUNDS) - 1)
    head = head.rstrip()
    opening = _opening(head)
    entry = re.search(r"(\w+)\s*$", head[:opening]).group(1)
    names = [re.search(r"(\w+)\s*$", p) for p in _split(head[opening + 1:-1])]
    return Signature(entry, tuple(n.group(1) if n else "unnamed" for n in names), bounds)


def _balanced(text: str, opening: int) -> str:
    """What stands between the parenthesis at ``opening`` and the one that closes it."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return text[opening + 1:i]
    raise ValueError(f"unbalanced parentheses: {text}")


def _opening(text: str) -> int:
    """The position of the parenthesis that the last one of ``text`` closes."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[i], 0)
        if depth == 0 and text[i] == "(":
            return i
    raise ValueError(f"unbalanced parentheses: {text}")


def _split(parameters: str) -> list[str]:
    """The parameters, split at the commas outside any bracket; none for an empty list or
    ``void``."""
    parts, depth, begin = [], 0, 0
    for i, char in enumerate(parameters):
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(parameters[begin:i])
            begin = i + 1
    parts.append(parameters[begin:])
    return [] if parameters.strip() in ("", "void") else parts


def trampolines(text: str) -> str:
    """C++ to append to the preprocessed ``text``: for each kernel a ``void**`` entry and what
    Python asks about it."""
    kernels = find(text)
    exported = 'extern "C" __attribute__((visibility("default")))'
    lines = ['\n# 1 "trampolines"',
             f'{exported} const char* emu_entries = "{",".join(k.entry for k in kernels)}";']
    for k in kernels:
        lines += [f"{exported} void emu_call_{k.entry}(void** a) {{ emu::call({k.entry}, a); }}",
                  f"{exported} int emu_describe_{k.entry}(char* kinds, int* sizes) "
                  f"{{ return decltype(emu::signature({k.entry}))::describe(kinds, sizes); }}",
                  f'{exported} const char* emu_names_{k.entry} = "{",".join(k.names)}";',
                  f"{exported} int emu_bound_{k.entry} = emu::first({k.bounds});"]
    return "\n".join(lines) + "\n"
