"""The hosts, each of which is patched as soon as it is imported.

An adapter package offers ``install(patches: PatchSet) -> list[str]``: it replaces functions of its
host through ``patches``, registers its layer classes with ``dispatch.rules.register_class``, and
returns the names of the replaced. It may offer ``update_on_demand(patches)``, which puts in or out
the patches that only quantized or compiled models or large graphs need, and ``on_demand(patches)``,
which puts in all of these.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gnnaccel.adapters.importhook import Handle, poll, when_imported
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.reasons import Reason

if TYPE_CHECKING:
    from gnnaccel.adapters.contract import Host

#: host -> (module to wait for, adapter package)
HOSTS: dict[str, tuple[str, str]] = {
    "pyg": ("torch_geometric.nn", "gnnaccel.adapters.pyg"),
    "dgl": ("dgl", "gnnaccel.adapters.dgl"),
    "torch": ("torch", "gnnaccel.adapters.autograd"),
}


@dataclass
class _Host:
    """One host while gnnaccel is enabled."""

    patches: PatchSet = field(default_factory=PatchSet)
    handle: Handle | None = None
    patched: list[str] = field(default_factory=list)
    waiting: bool = False  # it was not imported yet when gnnaccel was enabled
    installed: bool = False
    error: str | None = None


_lock = threading.RLock()
_hosts: dict[str, _Host] = {}
_late: Callable[[str], None] | None = None
# by host: the warning for a version that was not tested; "" for none
_told: dict[str, str] = {}


def install(late: Callable[[str], None] | None = None) -> None:
    """Patch the hosts that are imported, and each of the others when it is. A second call has no
    effect.

    An adapter's error for a host that is imported already comes through, with nothing left patched.
    For a host imported later it becomes a warning, and the host runs natively: an ``import`` of the
    user's must not fail. ``late`` is called with the host's key after a later import was patched.
    """
    global _late
    with _lock:
        if _hosts:
            poll()
            return
        _late = late
        try:
            for key, (module, _) in HOSTS.items():
                _hosts[key] = host = _Host()
                host.handle = when_imported(module, functools.partial(_patch, key, host), _lock)
                host.waiting = not host.installed
        except BaseException:
            uninstall()
            raise
        _update_awaited()


def uninstall() -> None:
    """Put every host back as it was, and wait for none."""
    with _lock:
        while _hosts:
            _, host = _hosts.popitem()
            if host.handle is not None:
                host.handle.cancel()
            host.patches.restore()
        captured = sys.modules.get("gnnaccel.adapters.captured.modules")
        if captured is not None:
            captured.let_go()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """A block in which every host is as it was before it was patched. Structures kept for graphs,
    and captured calls, stay."""
    with contextlib.ExitStack() as stack:
        with _lock:
            for host in _hosts.values():
                stack.enter_context(host.patches.aside())
        yield


def state() -> dict[str, dict[str, Any]]:
    """Per host: ``patched`` (names), ``pending`` (awaiting its import), ``error`` (why a late one
    stayed native)."""
    idle = _Host()
    with _lock:
        return {key: {"patched": list(host.patched), "error": host.error,
                      "pending": host.waiting and not host.installed and host.error is None}
                for key, host in ((key, _hosts.get(key, idle)) for key in HOSTS)}


def _contract(package: str) -> Host:
    """The contract of a host's package. Imported here, since `import gnnaccel.adapters` is to cost
    nothing."""
    from gnnaccel.adapters.contract import read_host

    return read_host(package)


def adapter_of(layer: Any) -> Any | None:
    """The adapter that states calls of this layer, whether or not gnnaccel is enabled; None for a
    layer that none knows."""
    return _first("adapter_of", layer)


def storable(layer: Any) -> Reason | Literal[True] | None:
    """Whether the rows that this layer gathers may be stored in fewer bytes: True, or why not; None
    for a module that is no layer of a graph."""
    return _first("storable", layer)


def _first(ask: str, layer: Any) -> Any:
    """The first answer that is not None of a function of the hosts that are imported."""
    answers = (getattr(_contract(adapter), ask)(layer) for module, adapter in HOSTS.values()
               if module in sys.modules)
    return next((answer for answer in answers if answer is not None), None)


def linear_maps(layer: Any) -> list[tuple[str, Any]]:
    """(name inside the layer, module) of the linear maps of a storable layer that may run in
    int8."""
    return [linear_map for module, adapter in HOSTS.values() if module in sys.modules
            for linear_map in _contract(adapter).linear_maps(layer)]


def update_on_demand() -> None:
    """Put patches that only quantized or compiled models or large graphs need in or out, after
    other layers were quantized, the configuration, which may ask for operators in compiled models,
    has changed, or the first large graph came."""
    with _lock:
        for key, host in _hosts.items():
            if host.installed:
                _put_on_demand(key, host)


def update_on_demand_unless_busy() -> bool:
    """`update_on_demand`, unless another thread puts patches in or out: then nothing, and False."""
    if not _lock.acquire(blocking=False):
        return False
    try:
        update_on_demand()
    finally:
        _lock.release()
    return True


def known_layers() -> list[str]:
    """Class names of the layers that the adapters know."""
    return sorted(name for _, adapter in HOSTS.values() for name in _contract(adapter).LAYERS)


def _patch(key: str, host: _Host) -> None:
    with _lock:  # so an import in another thread waits here until install() is through
        if _hosts.get(key) is not host:  # uninstalled while the import was going on
            return
        try:
            host.patched = list(_contract(HOSTS[key][1]).install(host.patches))
            _put_on_demand(key, host)
        except Exception as error:
            host.patches.restore()
            if not host.waiting:
                raise
            host.error = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"gnnaccel could not take over {HOSTS[key][0]}, which runs natively: {host.error}",
                          RuntimeWarning, stacklevel=2)
        else:
            host.installed = True
            if host.patched:
                _tell_drift(key)
        _update_awaited()
        if host.waiting and host.installed and _late is not None:
            _late(key)


def drifts() -> list[str]:
    """The warnings of hosts whose code differs from the tested one."""
    with _lock:
        return [text for text in _told.values() if text]


def _tell_drift(key: str) -> None:
    """Tell once in a process that the code of a host whose version was not tested is different.

    Versions of torch are left to the doctor: only one function of torch is replaced by an adapter
    that does its work.
    """
    if key == "torch" or key in _told:
        return
    from gnnaccel.adapters import seams

    drift = seams.untested(key)
    _told[key] = "" if drift is None else seams.sentence(key, drift)
    if _told[key]:
        warnings.warn(f"gnnaccel: {_told[key]}", RuntimeWarning, stacklevel=2)


def _put_on_demand(key: str, host: _Host) -> None:
    _contract(HOSTS[key][1]).update_on_demand(host.patches)


def _update_awaited() -> None:
    """Tell the rules which hosts may still bring layer classes: those that can be imported and are
    not patched."""
    tops = {key: HOSTS[key][0].partition(".")[0] for key, host in _hosts.items()
            if not host.installed and _exists(HOSTS[key][0])}
    rules.await_hosts({key: functools.partial(_classes_in_files, top) for key, top in tops.items()})


@functools.cache
def _classes_in_files(package: str) -> frozenset[str]:
    """Names of the classes that the package's folder ``nn`` defines, read without an import."""
    loaded = sys.modules.get(package)
    spec = (getattr(loaded, "__spec__", None) if loaded is not None
            else importlib.util.find_spec(package))
    folders = getattr(spec, "submodule_search_locations", None) or ()
    return frozenset(name for folder in folders for file in Path(folder, "nn").rglob("*.py")
                     for name in re.findall(
                         r"^class (\w+)", file.read_text(encoding="utf-8", errors="replace"),
                         re.MULTILINE))


def _exists(module: str) -> bool:
    """Whether the module's top package can be imported. Imports nothing. A mere folder of that name
    does not count."""
    top = module.partition(".")[0]
    if top in sys.modules:
        return sys.modules[top] is not None
    spec = importlib.util.find_spec(top)
    return spec is not None and spec.origin is not None
