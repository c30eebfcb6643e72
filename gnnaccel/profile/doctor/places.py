"""Folders that gnnaccel writes, variables that it reads, and whether the hosts' functions are those
that were tested."""
from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from gnnaccel import adapters, autostart, env, session, store
from gnnaccel.adapters import seams
from gnnaccel.cuda.runtime import probe
from gnnaccel.dispatch.policy.calibration import NAME
from gnnaccel.errors import GnnaccelError
from gnnaccel.profile.doctor.show import Finding
from gnnaccel.suggest import did_you_mean

_SHOWN = 4  # names of functions


def caches() -> Iterator[Finding]:
    """Our folder, and CuPy's of compiled kernels."""
    try:
        yield _folder("gnnaccel", store.folder(),
                      "set GNNACCEL_CACHE_DIR to a folder that can be written")
    except GnnaccelError as problem:
        yield Finding("caches", "gnnaccel", "warn", str(problem),
                      "pip install platformdirs, or set GNNACCEL_CACHE_DIR")
    yield _folder("kernels", probe.kernel_cache(),
                  "set CUPY_CACHE_DIR to a folder that can be written")
    yield _calibration()


def _calibration() -> Finding:
    from gnnaccel.profile import calibrate

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = store.read(NAME)
    if caught:
        return Finding("caches", "calibration", "warn", str(caught[0].message),
                       "python -m gnnaccel cache clear")
    devices = (held or {}).get("devices", {})
    if not devices:
        return Finding("caches", "calibration", "note",
                       "none; with a GPU, python -m gnnaccel calibrate measures it for the cost "
                       "model")
    now = calibrate.versions()
    old = [name for name, about in devices.items() if about.get("versions") != now]
    if old:
        return Finding("caches", "calibration", "note",
                       f"of {', '.join(old)}, by other versions than today's; python -m gnnaccel "
                       "calibrate measures anew")
    return Finding("caches", "calibration", "ok", ", ".join(f"{name}, {about.get('date')}"
                                                            for name, about in devices.items()))


def _folder(name: str, where: Path, remedy: str) -> Finding:
    nearest = where
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("caches", name, "warn", f"{short(where)} cannot be written", remedy)
    if nearest != where:
        return Finding("caches", name, "ok", f"{short(where)}: nothing yet")
    files, total = store.size(where)
    return Finding("caches", name, "ok", f"{short(where)}: {files} files, {total / 2**20:.1f} MiB")


def short(path: Path) -> str:
    """Without the user's name, as reports are pasted in public."""
    text, home = str(path), str(Path.home())
    return "~" + text[len(home):] if text.startswith(home + os.sep) else text


def environment() -> Iterator[Finding]:
    """The variables that are set, and whether they mean anything."""
    given = env.given()
    for name in given:
        if name not in env.VARIABLES:
            yield Finding("settings", name, "warn",
                          "is no variable that gnnaccel knows" + did_you_mean(name, env.VARIABLES),
                          f"unset {name}")
    for ask in (env.switch, env.options, env.cache_bytes):
        try:
            ask()
        except ValueError as problem:
            yield Finding("settings", "environment", "fail", str(problem),
                          "correct or unset the variable")
    known = ", ".join(f"{name}={value}" for name, value in given.items() if name in env.VARIABLES)
    yield Finding("settings", "environment", "ok", known or "no variable is set")
    yield _autostart()


def _autostart() -> Finding:
    where, state = autostart.folder(), autostart.state(autostart.folder())
    if state == "outdated":
        return Finding("settings", "autostart", "warn", f"{autostart.NAME} is not of this version",
                       "python -m gnnaccel autostart install")
    if state == "not installed" and env.safe_switch():
        return Finding("settings", "autostart", "warn",
                       "the variable GNNACCEL is on, but nothing in this Python looks at it when "
                       "it starts",
                       "python -m gnnaccel autostart install, or run scripts by python -m gnnaccel")
    return Finding("settings", "autostart", "ok",
                   f"{state} in {short(where)}" if state == "installed" else state)


def hosts() -> Iterator[Finding]:
    """Of each host that can be imported: can it be patched, and does it read as when it was
    tested?"""
    session.disable()
    for host, (module, _) in adapters.HOSTS.items():
        top = module.partition(".")[0]
        if top not in sys.modules:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield _drift(host, top, seams.compare(host))
        except Exception as problem:  # noqa: BLE001 - a seam that it lacks, say
            yield Finding("hosts", top, "fail",
                          f"cannot be taken over: {type(problem).__name__}: {problem}",
                          f"install a tested version: pip install {_tested(host, top)}")


def _drift(host: str, top: str, found: seams.Drift) -> Finding:
    wrong = [*found.changed, *found.gone]
    tested = ", ".join(seams.recorded()[host])
    if not wrong:
        text = "as tested" if found.known else f"reads as {found.tested}, which was tested"
        return Finding("hosts", top, "ok", f"{found.version}: {found.count} functions {text}")
    layers = sorted({name.split(".")[-2] for name in wrong if name.split(".")[-2][:1].isupper()})
    remedy = f"pip install {_tested(host, top)} (tested: {tested})"
    if layers:
        some = ", ".join(map(repr, layers[:_SHOWN]))
        remedy += f", or gnnaccel.exclude({some}), or check results by gnnaccel.compare"
    what = "was changed by hand" if found.known else f"differs from {found.tested}"
    return Finding("hosts", top, "warn",
                   f"{found.version} {what} in {len(wrong)} of {found.count} functions that "
                   f"gnnaccel stands in for: {seams.listed(wrong, top)}", remedy)


def _tested(host: str, top: str) -> str:
    return f"{top.replace('_', '-')}=={list(seams.recorded()[host])[-1]}"
