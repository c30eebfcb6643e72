"""`Status`: what ``gnnaccel.status()`` gives, a dictionary that reads well when it is printed."""
from __future__ import annotations

from typing import Any

_OPTIONS = ("when", "on_fallback", "include", "exclude", "log", "records", "compile", "capture")


class Status(dict[str, Any]):
    """Fields as in `gnnaccel.status`; ``str()`` and ``repr()`` are for people."""

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"gnnaccel {self['version']}, {'enabled' if self['enabled'] else 'disabled'} here"]
        config, counts, made = self["config"] or {}, self["counts"], self["compiled"]
        rows = {
            "backend": f"{self['backend']} ({self['backend_text']})" if self["enabled"] else "",
            "options": ", ".join(f"{name}={config[name]}" for name in _OPTIONS
                                 if config.get(name)),
            "hosts": "; ".join(f"{name} {_host(host)}" for name, host in self["hosts"].items()),
            "bridge": self["bridge"]["text"] if self["bridge"]["active"] else "",
            "calls": (f"{counts['calls']}: " + ", ".join(
                f"{n} {route}" for route, n in counts["routes"].items())
                if counts["calls"] else "none yet"),
            "compiled": (f"{made['kernels']} kernels compiled or loaded, in {made['seconds']:.1f} s"
                         if made["kernels"] else ""),
            "captured": _captured(self["captured"]),
            "versions": ", ".join(f"{name} {version or '-'}"
                                  for name, version in self["versions"].items())}
        return "\n".join(lines + [f"  {name:<9} {text}" for name, text in rows.items() if text])


def _captured(found: dict[str, Any]) -> str:
    return "; ".join([*[f"{name}: {n} calls replayed" for name, n in found["replays"].items()],
                      *[f"{name}: not replayed, as {why}"
                        for name, reasons in found["refused"].items() for why in reasons]])


def _host(host: dict[str, Any]) -> str:
    if host["error"]:
        return f"not patched ({host['error']})"
    if host["pending"]:
        return "waiting for its import"
    patched = len(host["patched"])
    return f"{patched} function{'' if patched == 1 else 's'} replaced" if patched else "untouched"
