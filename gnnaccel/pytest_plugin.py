"""``pytest --gnnaccel``: any test suite with gnnaccel enabled.

A line at the end says what was taken over. With ``--gnnaccel-strict`` a call that runs natively
fails its test (``on_fallback="raise"``). Other options come from the environment
(``GNNACCEL_WHEN=supported`` takes over small graphs too). Works under pytest-xdist.

pytest finds this plugin by the entry point of the installed package. Without these options it does
nothing, and imports neither torch nor a host.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

_KEY = pytest.StashKey[Counter]()


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("gnnaccel")
    group.addoption("--gnnaccel", action="store_const", const="on", default=None,
                    help="enable gnnaccel for the whole run")
    group.addoption("--gnnaccel-strict", action="store_const", const="strict", dest="gnnaccel",
                    help="likewise, and a call that runs natively is an error")


def pytest_configure(config: Any) -> None:
    mode = config.getoption("gnnaccel")
    if mode is None:
        return
    from gnnaccel import session

    config.stash[_KEY] = Counter()
    session.enable(on_fallback="raise" if mode == "strict" else None)


def pytest_unconfigure(config: Any) -> None:
    if _KEY in config.stash:
        from gnnaccel import session

        session.disable()


def pytest_sessionfinish(session: Any) -> None:
    config = session.config
    if _KEY not in config.stash:
        return
    config.stash[_KEY].update(_counts())
    # of a worker of pytest-xdist; goes to `pytest_testnodedown`
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output["gnnaccel"] = [[*key, n] for key, n in config.stash[_KEY].items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    if _KEY in node.config.stash:
        for layer, route, code, n in getattr(node, "workeroutput", {}).get("gnnaccel", ()):
            node.config.stash[_KEY][layer, route, code] += n


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if _KEY in config.stash:
        terminalreporter.write_sep("-", "gnnaccel")
        for line in summary(config.stash[_KEY]):
            terminalreporter.write_line(line)


def _counts() -> dict[tuple[str, str, str], int]:
    """{(layer, "route" or "reason", route or code): calls} of this process."""
    from gnnaccel.dispatch.observe import counters

    return {(layer, kind, name): n for layer, entry in counters.stats().items()
            for kind in ("route", "reason") for name, n in entry[f"{kind}s"].items()}


def summary(counts: Counter) -> list[str]:
    """What was taken over, in a line, and the reasons of what was not, the most frequent first."""
    routes: Counter = Counter()
    for (_, kind, name), n in counts.items():
        if kind == "route":
            routes[name] += n
    taken = sum(routes.values()) - routes["native"]
    if not routes:
        return ["no call of a layer that gnnaccel knows"]
    by_route = ", ".join(f"{name} {n}" for name, n in sorted(routes.items()) if name != "native")
    first = f"{taken} of {sum(routes.values())} calls taken over" + (
        f" ({by_route})" if by_route else "")
    reasons = Counter({(layer, name): n for (layer, kind, name), n in counts.items()
                       if kind == "reason"})
    native = ", ".join(f"{layer} {code} x{n}" for (layer, code), n in reasons.most_common())
    return [first, *([f"native: {native}"] if native else [])]
