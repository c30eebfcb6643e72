"""Switching gnnaccel on and off: patches in and out, the configuration, the sinks.

Patches are of the process: they are in while it is enabled or any ``enabled()`` block is open
anywhere. Whether they do anything is a matter of ``dispatch.config.current()`` at each call.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.util
import json as _json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal, overload

from gnnaccel import adapters, env
from gnnaccel._version import __version__
from gnnaccel.cuda.runtime import probe
from gnnaccel.dispatch.observe import counters, records as dispatch_records
from gnnaccel.dispatch.policy import config as configs, rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.errors import OffloadError, UnknownLayerError
from gnnaccel.profile.sinks import JsonlSink, LoggerSink, RingSink
from gnnaccel.profile.status_text import Status

_log = logging.getLogger("gnnaccel")
_lock = threading.RLock()
_blocks: list[Config] = []  # of the open enabled() blocks, in every thread
_ring = RingSink(0)  # outlives the session, so that records can be read after a block
_sinks: dict[Any, Any] = {}  # by what asks for them: ("log", True), ("log", path), ("ring",)

PACKAGES = {"torch": ("torch",), "torch_geometric": ("torch-geometric",), "dgl": ("dgl",),
            "cupy": probe.CUPY_NAMES}


def enable(*, backend: str | None = None, when: str | None = None, on_fallback: str | None = None,
           include: Any = None, exclude: Any = None, records: int | None = None, log: Any = None,
           passes: Any = None, backward: str | None = None, first_use: str | None = None,
           decisions: Any = None, compile: bool | None = None, capture: bool | None = None,
           offload: bool | int | str | None = None) -> None:
    """Take over the known layers of PyG and DGL in this process, from now on and also when they are
    imported later.

    - ``backend``: "auto", "cuda" or "torch"
    - ``when``: "profitable" (only when estimated to be faster) or "supported"
    - ``on_fallback``: what to do when a call runs natively: "native" (nothing), "warn" (once per
      cause) or "raise"
    - ``include``, ``exclude``: class names, dotted paths, given layer names, ``re:`` patterns or
      classes; a non-empty ``include`` means only those
    - ``records``: how many records `records` keeps
    - ``log``: True for a line per distinct decision through the logger ``gnnaccel``, with counts at
      the end; or the path of a JSONL file, with a record per decision; False for neither
    - ``passes``: which rewritings the Programs of relational layers go through, out of
      "compaction" and "reordering" (default: both); for measuring what each brings
    - ``backward``: "caller": where a process uses one GPU, backward runs in the thread that asked
      for it, which spares every step of training a change of threads; "workers": in autograd's
      own threads, as without gnnaccel
    - ``first_use``: "background": calls run natively while kernels are compiled that this machine
      has not compiled before (GA408); "wait": they wait
    - ``decisions``: the path of a file with decisions to keep to (``python -m gnnaccel log
      --export``); True: those that `autotune` kept; False: none
    - ``compile``: True: layers inside ``torch.compile`` take the same ways as elsewhere, as
      operators that the compiler carries (docs/compile.md); False: it gets the host's own code
    - ``capture``: True: calls of whole modules that repeat are replayed as CUDA graphs
      (docs/compile.md); False: none are
    - ``offload``: "auto": PyG's layers run over features in the host's memory in bands on the GPU,
      as in an `offload` block that this thread keeps open; a number: with so many bytes of the GPU
      for a layer's call; False: they do not (docs/offload.md)

    Called again it changes the options given and leaves the others. What is never given comes from
    the environment (see `gnnaccel.env`), then from the defaults. ``GNNACCEL=0`` makes the call do
    nothing. Raises ValueError for a wrong value, UnknownLayerError for a name that is no layer,
    OffloadError where ``offload`` cannot be; then everything is as before.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    with _lock:
        if _switched_off():
            return
        before = configs.active()
        config = _configured(given, before)
        with _checked(config) as doubts:
            configs.set_active(config)
            _sync()
            for doubt in doubts:
                warnings.warn(f"gnnaccel: {doubt}", RuntimeWarning, stacklevel=2)
        if before is None:
            _log.info("%s", _greeting(config))


def disable() -> None:
    """Put the hosts back exactly as they were and close logs. Open ``enabled()`` blocks go on until
    they end.

    Rules, names, counters and kept records stay.
    """
    with _lock:
        configs.set_active(None)
        _sync()


def again(config: Config) -> None:
    """Make ``config``, which `enable` made before, the process's again."""
    with _lock:
        configs.set_active(config)
        _sync()


@contextlib.contextmanager
def enabled(*, backend: str | None = None, when: str | None = None, on_fallback: str | None = None,
            include: Any = None, exclude: Any = None, records: int | None = None, log: Any = None,
            passes: Any = None, backward: str | None = None, first_use: str | None = None,
            decisions: Any = None, compile: bool | None = None, capture: bool | None = None,
            offload: bool | int | str | None = None) -> Iterator[None]:
    """A block in which gnnaccel is enabled in this thread or task, with the options of `enable`.

    Options not given come from the surrounding block, else from the process's configuration, else
    as in `enable`. Threads started inside do not inherit the block. Afterwards everything is as
    before, "not enabled" included. Raises as `enable`, on entering. Put it around a loop rather
    than inside: the outermost block patches and restores.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    if _switched_off():
        yield
        return
    config = _configured(given, configs.current() or configs.active())
    with contextlib.ExitStack() as stack:
        with _lock, _checked(config) as doubts:
            stack.enter_context(_block(config))
        for doubt in doubts:
            warnings.warn(f"gnnaccel: {doubt}", RuntimeWarning, stacklevel=3)
        with _offload_blocks().option(config.offload) if "offload" in given else _NOTHING:
            yield


@contextlib.contextmanager
def _block(config: Config) -> Iterator[None]:
    """A block in which patches are in, and ``config`` holds in this thread or task."""
    with _lock:
        _blocks.append(config)
    try:
        with _lock:
            _sync()
        with configs.override(config):
            yield
    finally:
        with _lock:
            _blocks.remove(config)
            _sync()


configs.block = _block


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """A block in which, in this thread or task, every layer runs natively. Patches stay in; nothing
    else changes."""
    with configs.override(None):
        yield


def records() -> list[dict[str, Any]]:
    """The records kept, oldest first; see `gnnaccel.dispatch.observe.records` for their fields.
    Needs ``records=n``."""
    return _ring.records()


def clear_records() -> None:
    """Forget the records kept."""
    _ring.clear()


@overload
def status(*, json: Literal[False] = False) -> Status: ...


@overload
def status(*, json: Literal[True]) -> str: ...


def status(*, json: bool = False) -> Status | str:
    """What is going on, for a reader or a bug report: a dictionary that reads well when it is
    printed; with ``json``, as JSON text for programs. Imports no host.

    ``enabled`` and ``config`` are about the calling thread; ``backend`` is what a call here would
    use ("cuda" or "torch"; None when disabled) and ``backend_text`` says why; ``versions`` holds
    None for what is not installed; ``hosts``: per host ``patched``, ``pending``, ``error``;
    ``bridge``: whether a DGL without CUDA is bridged to the GPU (``active``, ``text``); ``counts``:
    calls by route since `reset_stats`; ``compiled``: ``kernels`` that this process compiled or
    loaded from CuPy's cache, in how many ``seconds``, and how many sets of kernels are ``pending``
    in the background; ``captured``: with ``capture=True``, ``replays`` by the class of a module,
    and why calls were ``refused``.
    """
    from gnnaccel.adapters.dgl import bridge
    from gnnaccel.cuda.runtime import background, driver

    seconds, kernels = driver.compile_seconds()
    with _lock:
        config = configs.current()
        backend, text = _backend(config)
        found = Status({
            "version": __version__,
            "enabled": config is not None,
            "config": None if config is None else asdict(config),
            "backend": backend,
            "backend_text": text,
            "versions": {name: probe.version_of(*names) for name, names in PACKAGES.items()},
            "hosts": adapters.state(),
            "bridge": bridge.state(),
            "counts": _totals(),
            "compiled": {"kernels": kernels, "seconds": seconds,
                         "pending": background.pending()},
            "captured": _captured(),
        })
    return _json.dumps(found, default=str) if json else found


def _captured() -> dict[str, Any]:
    counts = sys.modules.get("gnnaccel.adapters.captured.counts")
    return {"replays": {}, "refused": {}} if counts is None else counts.summary()


# --- options --------------------------------------------------------------------------------------

def _switched_off() -> bool:
    if env.switch() is not False:
        return False
    _log.info("gnnaccel stays off: the environment variable GNNACCEL says so")
    return True


def _configured(given: dict[str, Any], base: Config | None) -> Config:
    if base is None:
        env.warn_unknown()
        base = configs.make(env.options())
    return configs.make(given, base)


@contextlib.contextmanager
def _checked(config: Config) -> Iterator[list[str]]:
    """Patch, check the names in the lists, run the body; on any error put process and patches back.
    Gives what the user is to be warned about."""
    before, blocks = configs.active(), list(_blocks)
    try:
        adapters.install(_on_late_host)
        for option in ("include", "exclude"):
            for target in getattr(config, option):
                if isinstance(target, str):
                    rules.check(target, f"enable({option}=[{target!r}])")
        unknown = rules.take_unknown()
        if unknown and rules.complete():
            raise UnknownLayerError("\n".join(unknown))
        yield [*unknown, *_doubts(config)]
    except BaseException:
        configs.set_active(before)
        _blocks[:] = blocks
        _sync()
        raise


def _doubts(config: Config) -> Iterator[str]:
    """Why ``config`` may have no effect here, or less than it could. Imports nothing but CuPy,
    where ``backend="cuda"`` was asked for and torch has a GPU."""
    if "torch" not in sys.modules:
        if importlib.util.find_spec("torch") is None:
            yield "torch is not installed, so there are no layers to take over; pip install torch"
        return
    if config.backend != "torch":
        built = getattr(getattr(sys.modules["torch"], "version", None), "cuda", None)
        # asked only where torch is built for CUDA: reading what is installed takes a moment
        wrong = probe.mismatch(built, probe.cupy_installed()) if built else None
        if wrong is not None:
            yield f"{wrong[0]}, so kernels may not run: {wrong[1]}"
    if config.backend == "cuda":
        from gnnaccel.cuda.runtime import driver

        possible, why = driver.available()
        if not possible and not driver.placed():
            yield (f"backend='cuda' was asked for, and no kernel can run here: {why}. Every layer "
                   "runs natively; leave backend out to take what there is, or run python -m "
                   "gnnaccel doctor")


def _on_late_host(key: str) -> None:
    """A host was imported after ``enable()``: what could not be checked then can be now."""
    doubts = rules.take_unknown()
    if key == "torch":
        doubts += dict.fromkeys(doubt for config in _live() for doubt in _doubts(config))
    for doubt in doubts:
        warnings.warn(f"gnnaccel: {doubt}", RuntimeWarning, stacklevel=2)


# --- keeping patches and sinks as the live configurations want them -------------------------------

_NOTHING = contextlib.nullcontext()


def _offload_blocks() -> Any:
    """The module whose blocks the option stands for. OffloadError without PyG."""
    if importlib.util.find_spec("torch_geometric") is None:
        raise OffloadError("offload= is for PyG's layers, and PyG is not installed")
    from gnnaccel.adapters.pyg.offload import running

    return running


def _sync_offload() -> None:
    active = configs.active()
    wanted = None if active is None else active.offload
    running = sys.modules.get("gnnaccel.adapters.pyg.offload.running")
    if wanted is not None or running is not None:
        (running or _offload_blocks()).hold(wanted)


def _live() -> list[Config]:
    """The configurations that hold anywhere in the process."""
    active = configs.active()
    return [*([] if active is None else [active]), *_blocks]


def _sync() -> None:
    live = _live()
    configs.compiling = any(config.compile for config in live)
    configs.capturing = any(config.capture for config in live)
    if live:
        adapters.install(_on_late_host)
        adapters.update_on_demand()
    else:
        adapters.uninstall()
    _sync_offload()
    _sync_sinks(live)


def _sync_sinks(live: list[Config]) -> None:
    wanted: dict[Any, Callable[[], Any]] = {}
    for config in live:
        if config.log is True:
            wanted["log", True] = LoggerSink
        elif isinstance(config.log, str):
            wanted["log", config.log] = functools.partial(JsonlSink, config.log)
    if live and _asked_through_logging() and ("log", True) not in wanted:
        wanted["log", None] = lambda: LoggerSink(show=False)
    size = max((config.records for config in live), default=0)
    if size:
        _ring.resize(size)
        wanted["ring",] = lambda: _ring
    # opening a file may raise: before anything is changed (and at most one file is new at a time)
    opened = {key: make() for key, make in wanted.items() if key not in _sinks}
    for key in [key for key in _sinks if key not in wanted]:
        sink = _sinks.pop(key)
        dispatch_records.unsubscribe(sink)
        sink.close()
    for key, sink in opened.items():
        _sinks[key] = dispatch_records.subscribe(sink)


def _asked_through_logging() -> bool:
    """Did the user set the logger ``gnnaccel`` itself to INFO? A root logger at INFO asks for no
    lines about calls."""
    ours = ("log", True) in _sinks  # then the level may be ours
    return not ours and _log.level != logging.NOTSET and _log.isEnabledFor(logging.INFO)


# --- status ---------------------------------------------------------------------------------------

def _backend(config: Config | None) -> tuple[str | None, str]:
    if config is None:
        return None, "gnnaccel is disabled here"
    if config.backend == "torch":
        return "torch", "chosen by the user"
    from gnnaccel.cuda.runtime import driver

    available, text = driver.available()
    return ("cuda" if available else "torch"), text


def _totals() -> dict[str, Any]:
    totals: dict[str, Any] = {"calls": 0, "routes": {}}
    for entry in counters.stats().values():
        totals["calls"] += entry["calls"]
        for route, n in entry["routes"].items():
            totals["routes"][route] = totals["routes"].get(route, 0) + n
    return totals


def _greeting(config: Config) -> str:
    hosts = []
    for key, host in adapters.state().items():
        hosts.append(f"{key} waiting for its import" if host["pending"]
                     else f"{key} {len(host['patched'])} functions replaced")
    how = f"backend={config.backend}, when={config.when}"
    return f"enabled, version {__version__}: {how}; {'; '.join(hosts)}"
