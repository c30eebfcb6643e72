"""Hashes of the source of the host functions that gnnaccel stands in for, which tell whether one
has changed since it was tested.

Adapters redo what these functions do, so in a host version where one reads otherwise it may do
something else. ``seams.json`` holds the hashes of each tested version (``python -m
tests.record_seams`` writes it).
"""
from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.resources
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gnnaccel import adapters
from gnnaccel.adapters import own
from gnnaccel.adapters.patching import PatchSet

_SHOWN = 4  # names in one sentence
# functions that PyG generates for each class: which of them exist depends on the process
_GENERATED = (".propagate", ".edge_updater")


@dataclass(frozen=True)
class Drift:
    """The difference of a host's code from a tested version. ``version``: the installed one;
    ``tested``: the one that it is compared with, itself if that was tested; ``changed`` and
    ``gone``: dotted names of functions that read otherwise or are not there; ``count``: how many
    were compared."""

    version: str
    tested: str
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    count: int

    @property
    def known(self) -> bool:
        return self.version == self.tested


@functools.lru_cache(maxsize=1)
def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """The recorded hashes: {host: {version: {function: hash}}}."""
    return json.loads(
        importlib.resources.files("gnnaccel.adapters").joinpath("seams.json").read_text(
            encoding="utf-8"))


def version_of(host: str) -> str:
    """The version of an imported host, without the name of its build."""
    return sys.modules[adapters.HOSTS[host][0].partition(".")[0]].__version__.partition("+")[0]


def collect(host: str) -> dict[str, str]:
    """{function: hash} of the installed host, which is imported. gnnaccel must not be enabled:
    PatchError then."""
    from gnnaccel.adapters.contract import read_host  # here: the doctor runs without torch too

    module, package = adapters.HOSTS[host]
    importlib.import_module(module)
    patches = PatchSet()
    adapter, contract = importlib.import_module(package), read_host(package)
    try:
        contract.install(patches)
        contract.on_demand(patches)
        functions = dict(named for patch in patches for named in _functions(patch, adapter))
        functions.update((f"{f.__module__}.{f.__qualname__}", f) for f in contract.redone())
    finally:
        patches.restore()
    own = module.partition(".")[0] + "."  # some of torch's are replaced as well
    return {name: digest(function) for name, function in sorted(functions.items())
            if name.startswith(own)}


def compare(host: str) -> Drift:
    """The installed host against the recorded version that is next to its own."""
    hashes, version = collect(host), version_of(host)
    tested = nearest(version, recorded()[host])
    reference = recorded()[host][tested]
    return Drift(version, tested,
                 tuple(n for n in reference if n in hashes and hashes[n] != reference[n]),
                 tuple(n for n in reference if n not in hashes), len(reference))


def untested(host: str) -> Drift | None:
    """The changes in an imported host whose version was not tested; None for a tested version, and
    for a module that tells none.

    The functions are found by their recorded names, so nothing has to be patched. Functions that a
    user has replaced are no drift: layers that use them run natively.
    """
    module = sys.modules[adapters.HOSTS[host][0].partition(".")[0]]
    versions = recorded().get(host, {})
    if not versions or not hasattr(module, "__version__") or version_of(host) in versions:
        return None
    version = version_of(host)
    tested = nearest(version, versions)
    functions = {name: _by_name(name) for name in versions[tested]}
    top = adapters.HOSTS[host][0].partition(".")[0]
    changed = (name for name, function in functions.items() if own.home(function) == top
               and digest(function) != versions[tested][name])
    return Drift(version, tested, tuple(changed),
                 tuple(name for name, function in functions.items() if function is None),
                 len(functions))


def _by_name(name: str) -> Any:
    """The host's own function with this dotted name, without ours around it; None if missing."""
    module, rest = name, list[str]()
    while module not in sys.modules and "." in module:
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    value: Any = sys.modules.get(module)
    for part in rest:
        value = getattr(value, part, None)
    return None if value is None else own.original(value)


def sentence(host: str, found: Drift) -> str:
    """The warning for a host whose code differs from the nearest tested version, else ""."""
    wrong = [*found.changed, *found.gone]
    if not wrong:
        return ""
    top = adapters.HOSTS[host][0].partition(".")[0]
    return (f"{top} {found.version} is not among the tested versions "
            f"({', '.join(recorded()[host])}) and differs from {found.tested} "
            f"in {len(wrong)} of {found.count} functions that gnnaccel stands in for: "
            f"{listed(wrong, top)}. "
            "Check results by gnnaccel.compare; python -m gnnaccel doctor says more")


def listed(names: Sequence[str], top: str) -> str:
    """The first of these names, without the name of their package ``top``."""
    return (", ".join(name.removeprefix(top + ".") for name in names[:_SHOWN])
            + (" and more" if len(names) > _SHOWN else ""))


def nearest(version: str, tested: Any) -> str:
    """The tested version nearest to ``version``: itself, else the latest of the same minor release,
    else the latest before it, else the earliest."""
    from packaging.version import Version

    own, ordered = Version(version), sorted(tested, key=Version)
    if version in tested:
        return version
    near = ([v for v in ordered if Version(v).release[:2] == own.release[:2]]
            or [v for v in ordered if Version(v) < own])
    return near[-1] if near else ordered[0]


def digest(function: Any) -> str:
    """The hash of a function's source text, indentation of the whole and empty lines left aside; ""
    where there is no source."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    lines = "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _functions(patch: Any, adapter: ModuleType) -> Iterator[tuple[str, Any]]:
    """The function that was replaced, by its qualified name.

    For a layer also its ``__init__`` and all functions on its path.
    """
    if patch.name == "propagate":
        return
    original = inspect.unwrap(patch.original) if callable(patch.original) else None
    if inspect.isfunction(original):
        yield f"{original.__module__}.{original.__qualname__}", original
    if isinstance(patch.owner, type) and patch.name == "forward":
        path = adapter.path_of(patch.owner)
        constructor = vars(patch.owner).get("__init__")
        for function in (*(() if path is None else path.functions.values()),
                         *([constructor] if inspect.isfunction(constructor) else ())):
            if (not function.__qualname__.endswith(_GENERATED)
                and "." + function.__qualname__ not in _GENERATED):
                yield f"{function.__module__}.{function.__qualname__}", function
