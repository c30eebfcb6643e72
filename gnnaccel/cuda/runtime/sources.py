"""The text of the kernel files, with their headers inlined, and its hash.

NVRTC gets one string and no include path, so ``#include "x.cuh"`` is resolved here. The same text
goes to the CPU emulation of the tests. Nothing in this module needs CuPy or torch.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[ \t]*(?://.*)?$', re.MULTILINE)


_WRITTEN = re.compile(r"[a-z_]+_[0-9a-f]{16}")
#: texts of families that are no files, by name
_written: dict[str, str] = {}


def write(text: str, name: str) -> str:
    """The family whose source is ``text``: ``name`` and a hash of the text, so that the same text
    is the same family. It may include the headers of ``cuda/src``."""
    family = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _written.setdefault(family, text)
    return family


def is_written(family: str) -> bool:
    """Whether ``family`` is a name that `write` gives, in this process or another."""
    return _WRITTEN.fullmatch(family) is not None


@functools.cache
def source(family: str) -> str:
    """The full text of ``cuda/src/<family>.cu``, or of a family of `write`: every
    ``#include "..."`` replaced by that header, each header once.

    ``#include <...>`` lines stay as they are. Raises FileNotFoundError, naming the family, when the
    file or one of its headers is not there.
    """
    try:
        text = _written.get(family) or _read(family + ".cu")
    except FileNotFoundError:
        names = ", ".join(families()) or "none"
        raise FileNotFoundError(f"no kernel family {family!r}: no {family}.cu in gnnaccel/cuda/src "
                                f"(there are: {names})") from None
    return inline(text, family)


def inline(text: str, family: str = "text") -> str:
    """``text`` with its ``#include "x.cuh"`` lines, and those of the headers, replaced by files of
    ``cuda/src``.

    A header that has already been inlined is left out the second time, so a cycle of headers ends.
    ``family`` is for the message of the FileNotFoundError that a missing header raises.
    """
    seen: set[str] = set()

    def expand(body: str, parent: str) -> str:
        def replace(match: re.Match) -> str:
            header = match.group(1)
            if header in seen:
                return f"// {header}: inlined above"
            seen.add(header)
            try:
                content = _read(header)
            except FileNotFoundError:
                raise FileNotFoundError(f"kernel family {family!r}: {parent} includes {header!r}, "
                                        "which is not in gnnaccel/cuda/src") from None
            # #line lets compiler messages name the header's own lines, then the including file's
            # again
            line = match.string.count("\n", 0, match.start()) + 2
            return f'#line 1 "{header}"\n{expand(content, header)}\n#line {line} "{parent}"'

        return _INCLUDE.sub(replace, body)

    return expand(text, family + ".cu")


def defined(family: str, defines: tuple) -> str:
    """`source` behind a ``#define`` per pair of ``defines``.

    Options ``-D`` would cost time at each start: CuPy gives NVRTC an empty text once per set of
    options, before it looks into its cache. As text they are part of the cache's key all the same.
    """
    lines = "".join(f"#define {name} {value}\n" for name, value in defines)
    return f'{lines}#line 1 "{family}.cu"\n{source(family)}'


def options(defines: tuple) -> tuple[str, ...]:
    """Further options of NVRTC: the same for almost all kernels, which is fastest with CuPy's
    cache. ``FMAD`` 0 among ``defines`` asks for products that are rounded before they are added."""
    return ("--std=c++17", *(("--fmad=false",) if ("FMAD", "0") in defines else ()))


@functools.cache
def _names() -> tuple:
    folder = importlib.resources.files("gnnaccel.cuda").joinpath("src")
    return tuple(sorted(entry.name for entry in folder.iterdir()))


def families() -> list[str]:
    """The names of all kernel families, sorted: the ``.cu`` files of ``cuda/src`` without their
    ending."""
    return [name[:-3] for name in _names() if name.endswith(".cu")]


@functools.cache
def _read(name: str) -> str:
    # only plain names: a family such as "../x" must not reach outside the folder
    if name not in _names():
        raise FileNotFoundError(name)
    folder = importlib.resources.files("gnnaccel.cuda").joinpath("src")
    return folder.joinpath(name).read_text(encoding="utf-8")
